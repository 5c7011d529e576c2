// guess_follow: once a step has chosen its tokens, the tokens that follow those of the step, and where each row's guesses begin
// guess_advance: after a pass of guesses, reports them and makes the inputs of the next pass, one token for each row; with `index` before
//                the first guess, whose token is the one that the step has chosen
// guess_pair:    the inputs of a pass that has two tokens of each row: the last one of the step that is right, and the new one
// guess_keep:    the tokens of a step, with those that only the GPU knows, before the step chooses others
// guess_spread:  logits of all tokens from those of an output head that lacks some
//
// rows      [R] FollowRow; a row without tokens is padding
// token_ids, positions [T] u32 of the step; chosen tokens lie in `outputs`, at the slot that `slot` names, as sample.cu writes them
// followed  [T] u32: the token behind each one; behind a rejected draft it is 0
// index     [G] u32: the token of the step from which the row's first guess is made
// wanted    [G, 2] u32: the number of guesses, 0 for padding, and the positions for which the row has KV blocks
// made      [G] u32: the number of guesses so far
// results   slots of [G_max, 1 + most] u32 in host memory: of each row the number of its guesses, then the guesses
// next      token_ids, positions, context_lens, num_generated [G] u32, slots [groups, stride] u32 of the next pass. A row that
//           makes no further guess becomes padding. Before the first pass, positions has that of the token at `index`
// kept      [T] u32; token_ids of guess_keep may be NOTHING, then it is the last token of the row
// logits    [S, stride] f32, of which the first V are written; outputs [S, N] f32; columns [V] u32: the column of a token in `outputs`,
//           or NOTHING, then its logit is -infinity
// pair      as next, of [2 G]: first the last tokens of the step, then those of `next`
// launch    guess_follow: grid R, block 128; guess_advance, guess_pair, guess_keep: grid ceil(G or T / 128), block 128;
//           guess_spread: grid (ceil(V / 256), S), block 256
// needs     at most 128 samples of a row, indices within their arrays: checked when the step is packed
// bound     latency; `outputs` and `results` are read and written across the bus
// test      tests/cuda_guess.rs
// archs: 80 90a 100a ptx
#include "common.cuh"

constexpr u32 NOTHING = 0xffffffffu;

struct FollowRow {
    u32 first, end;                 // tokens of the step
    u32 first_sample, num_samples;  // the last tokens of the row have them
    u32 next_token;                 // behind the row if it has no samples
    u32 num_generated;              // of its first sample
    u32 guess;                      // the row's place among those that guess, or NOTHING
    u32 reserved;
};

struct FollowArgs {
    const FollowRow* rows;
    const u32* token_ids;
    const u32* positions;
    const u32* outputs;
    const u32* slot;
    u64 slot_words;
    u32 *followed, *index, *made, *guess_positions, *num_generated;
};

extern "C" __global__ void __launch_bounds__(128) guess_follow(FollowArgs a) {
    __shared__ u32 right;  // samples before the first one that is not the next token of the step
    pdl_launch();
    const FollowRow row = a.rows[blockIdx.x];
    if (row.first >= row.end) return;
    const u32 i = threadIdx.x, base = row.end - row.num_samples;
    if (i == 0) right = row.num_samples == 0 ? 0 : row.num_samples - 1;
    pdl_wait();
    __syncthreads();
    u32 token = row.next_token;
    if (i < row.num_samples) {
        token = a.outputs[*a.slot * a.slot_words + row.first_sample + i];
        if (i + 1 < row.num_samples && a.token_ids[base + i + 1] != token) atomicMin(&right, i);
    }
    __syncthreads();
    const u32 last = row.num_samples == 0 ? row.end - 1 : base + right;
    for (u32 t = row.first + i; t < row.end; t += blockDim.x) {
        if (t != last) a.followed[t] = t < last ? a.token_ids[t + 1] : 0;
    }
    if (i != right) return;
    a.followed[last] = token;
    if (row.guess == NOTHING) return;
    a.index[row.guess] = last;
    a.made[row.guess] = 0;
    a.guess_positions[row.guess] = a.positions[last];
    a.num_generated[row.guess] = row.num_generated + right + 1;
}

struct AdvanceArgs {
    const u32* guessed;  // [G]; with `index`, [T] tokens that follow those of the step
    const u32* index;
    const u32* wanted;
    const u32* block_tables;  // [groups, table_stride], of which a row has max_blocks
    const u32* slot;
    u32 *made, *token_ids, *positions, *slots, *context_lens, *num_generated, *results;
    u32 num_rows, num_groups, slot_stride, table_stride, max_blocks, block_size, most, max_rows;
};

// The slot of a position of row g in the KV blocks of a group.
template <class Args>
__device__ __forceinline__ u32 slot_of(const Args& a, u32 group, u32 g, u32 position) {
    const u32* table = a.block_tables + (u64)group * a.table_stride + (u64)g * a.max_blocks;
    return table[position / a.block_size] * a.block_size + position % a.block_size;
}

extern "C" __global__ void __launch_bounds__(128) guess_advance(AdvanceArgs a) {
    pdl_launch();
    const u32 g = blockIdx.x * blockDim.x + threadIdx.x;
    pdl_wait();
    if (g >= a.num_rows) return;
    const u32 wanted = a.wanted[2 * g], reach = a.wanted[2 * g + 1];
    const bool is_guess = a.index == nullptr;
    const u32 token = a.guessed[is_guess ? g : a.index[g]];
    const u32 before = wanted == 0 ? 0 : a.made[g], made = before + is_guess, position = a.positions[g] + 1;
    const bool is_active = before < wanted;
    if (is_active) {
        u32* result = a.results + ((u64)*a.slot * a.max_rows + g) * (1 + a.most);
        result[0] = made;
        if (is_guess) result[made] = token;
    }
    const bool goes_on = is_active && made < wanted && position < reach;
    if (wanted != 0) a.made[g] = goes_on ? made : wanted;
    a.token_ids[g] = goes_on ? token : 0;
    a.positions[g] = goes_on ? position : 0;
    a.context_lens[g] = goes_on ? position + 1 : 0;
    if (goes_on) a.num_generated[g] += is_guess;
    for (u32 group = 0; group < a.num_groups; ++group) {
        a.slots[group * a.slot_stride + g] = goes_on ? slot_of(a, group, g, position) : NOTHING;
    }
}

struct PairArgs {
    const u32 *index, *wanted, *kept, *positions;  // the last two of the step
    const u32 *next_tokens, *next_positions, *next_contexts, *next_slots;
    const u32* block_tables;
    u32 *token_ids, *pair_positions, *context_lens, *slots;
    u32 num_rows, num_groups, next_stride, slot_stride, table_stride, max_blocks, block_size, reserved;
};

extern "C" __global__ void __launch_bounds__(128) guess_pair(PairArgs a) {
    pdl_launch();
    const u32 g = blockIdx.x * blockDim.x + threadIdx.x;
    pdl_wait();
    if (g >= a.num_rows) return;
    const bool is_row = a.wanted[2 * g] != 0;
    const u32 last = a.index[g], position = a.positions[last], newest = a.num_rows + g;
    a.token_ids[g] = is_row ? a.kept[last] : 0;
    a.pair_positions[g] = is_row ? position : 0;
    a.context_lens[g] = is_row ? position + 1 : 0;
    a.token_ids[newest] = a.next_tokens[g];
    a.pair_positions[newest] = a.next_positions[g];
    a.context_lens[newest] = a.next_contexts[g];
    for (u32 group = 0; group < a.num_groups; ++group) {
        a.slots[group * a.slot_stride + g] = is_row ? slot_of(a, group, g, position) : NOTHING;
        a.slots[group * a.slot_stride + newest] = a.next_slots[group * a.next_stride + g];
    }
}

extern "C" __global__ void __launch_bounds__(128)
guess_keep(u32* kept, const u32* token_ids, const u32* token_rows, const u32* last_tokens, u32 num_tokens) {
    pdl_launch();
    pdl_wait();
    const u32 t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= num_tokens) return;
    const u32 id = token_ids[t];
    kept[t] = id == NOTHING ? last_tokens[token_rows[t]] : id;
}

extern "C" __global__ void __launch_bounds__(256)
guess_spread(float* logits, const float* outputs, const u32* columns, u32 num_tokens, u32 stride, u32 num_outputs) {
    pdl_launch();
    const u32 v = blockIdx.x * blockDim.x + threadIdx.x;
    pdl_wait();
    if (v >= num_tokens) return;
    const u32 column = columns[v];
    logits[(u64)blockIdx.y * stride + v] = column == NOTHING ? -INFINITY_F : outputs[(u64)blockIdx.y * num_outputs + column];
}
