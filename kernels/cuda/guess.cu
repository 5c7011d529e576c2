// guess_follow: once a step has chosen its tokens, the tokens that follow those of the step, and where each row's guesses begin
// guess_advance: after a pass of guesses, reports them and makes the inputs of the next pass, one token for each row
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
// launch    guess_follow: grid R, block 128; guess_advance: grid ceil(G / 128), block 128
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
    const u32* guessed;  // [G]
    const u32* wanted;
    const u32* block_tables;  // [groups, table_stride], of which a row has max_blocks
    const u32* slot;
    u32 *made, *token_ids, *positions, *slots, *context_lens, *num_generated, *results;
    u32 num_rows, num_groups, slot_stride, table_stride, max_blocks, block_size, most, max_rows;
};

extern "C" __global__ void __launch_bounds__(128) guess_advance(AdvanceArgs a) {
    pdl_launch();
    const u32 g = blockIdx.x * blockDim.x + threadIdx.x;
    pdl_wait();
    if (g >= a.num_rows) return;
    const u32 wanted = a.wanted[2 * g], reach = a.wanted[2 * g + 1];
    const u32 made = wanted == 0 ? 0 : a.made[g], position = a.positions[g] + 1, token = a.guessed[g];
    const bool is_active = made < wanted;
    if (is_active) {
        u32* result = a.results + ((u64)*a.slot * a.max_rows + g) * (1 + a.most);
        result[0] = made + 1;
        result[1 + made] = token;
    }
    const bool goes_on = is_active && made + 1 < wanted && position < reach;
    if (wanted != 0) a.made[g] = goes_on ? made + 1 : wanted;
    a.token_ids[g] = goes_on ? token : 0;
    a.positions[g] = goes_on ? position : 0;
    a.context_lens[g] = goes_on ? position + 1 : 0;
    if (goes_on) a.num_generated[g] += 1;
    for (u32 group = 0; group < a.num_groups; ++group) {
        const u32* table = a.block_tables + (u64)group * a.table_stride + (u64)g * a.max_blocks;
        const u32 place = goes_on ? table[position / a.block_size] * a.block_size + position % a.block_size : NOTHING;
        a.slots[group * a.slot_stride + g] = place;
    }
}
