// Common parts of grouped products: tiles of rows that belong to one expert, and what happens with the sums.
#pragma once
#include "activation.cuh"
#include "expert_list.cuh"

constexpr int MAX_GROUPS = 512;

// What follows the product. The gated ones have N / 2 outputs; rows 16 b + i of w are gate row 8 b + i for i < 8 and up row
// 8 b + i - 8 for i >= 8. PLAIN more than the gated one is its activation alone, of N outputs.
enum GroupedEpilogue : u32 { STORE_ROWS = 0, GATE_SILU = 1, GATE_GELU_TANH = 2, GATE_GELU = 3, GATE_RELU = 4, GATE_RELU_SQUARED = 5, GATE_CLAMPED = 6 };
constexpr u32 PLAIN = 6;

template <u32 VALUE>
struct Constant {
    static constexpr u32 value = VALUE;
};

struct Grouped {
    bf16* y;             // [R, N] or [R, N / 2]
    const bf16* bias;    // [L, N] or null
    const u32* offsets;  // [L + 1]: the rows of expert l are offsets[l] .. offsets[l + 1]
    u32 groups;          // L
    u32 n, k;
    u32 epilogue;
    float alpha, limit;  // of GATE_CLAMPED
    const ListedExpert* list;  // in place of `offsets`, if it is not null
    u32 listed_tokens;         // T, if x has the rows of tokens [T, K]; 0 if it has those of experts
    u32 most_listed;           // experts for which the list has room
};

__device__ constexpr bool is_gated(u32 epilogue) { return epilogue >= GATE_SILU && epilogue <= GATE_CLAMPED; }

// The activation of an epilogue that is known when the kernel is compiled.
template <u32 EPILOGUE>
__device__ __forceinline__ float activate_by(float x) {
    if constexpr (EPILOGUE == GATE_SILU) return silu(x);
    if constexpr (EPILOGUE == GATE_GELU_TANH) return gelu_tanh(x);
    if constexpr (EPILOGUE == GATE_GELU) return gelu(x);
    if constexpr (EPILOGUE == GATE_RELU) return relu(x);
    return relu_squared(x);
}

// act(gate) * up. GATE_CLAMPED is g * sigmoid(alpha g) * (u + 1) with g = min(gate, limit) and u = clamp(up, -limit, limit).
template <u32 EPILOGUE>
__device__ __forceinline__ float gate_by(const Grouped& p, float gate, float up) {
    if constexpr (EPILOGUE == GATE_CLAMPED) {
        const float g = fminf(gate, p.limit), u = fminf(fmaxf(up, -p.limit), p.limit);
        return __fdividef(g, 1.0f + __expf(-p.alpha * g)) * (u + 1.0f);
    }
    return activate_by<EPILOGUE>(gate) * up;
}

// act(x), or x if there is no activation.
template <u32 EPILOGUE>
__device__ __forceinline__ float plain_by(float x) {
    if constexpr (EPILOGUE == STORE_ROWS) return x;
    return activate_by<EPILOGUE - PLAIN>(x);
}

// Calls `f` with the epilogue as a constant, so that loops inside it have no branch.
template <class F>
__device__ __forceinline__ void with_epilogue(u32 epilogue, const F& f) {
    switch (epilogue) {
        case STORE_ROWS: f(Constant<STORE_ROWS>()); break;
        case GATE_SILU: f(Constant<GATE_SILU>()); break;
        case GATE_GELU_TANH: f(Constant<GATE_GELU_TANH>()); break;
        case GATE_GELU: f(Constant<GATE_GELU>()); break;
        case GATE_RELU: f(Constant<GATE_RELU>()); break;
        case GATE_CLAMPED: f(Constant<GATE_CLAMPED>()); break;
        case PLAIN + GATE_SILU: f(Constant<PLAIN + GATE_SILU>()); break;
        case PLAIN + GATE_GELU_TANH: f(Constant<PLAIN + GATE_GELU_TANH>()); break;
        case PLAIN + GATE_GELU: f(Constant<PLAIN + GATE_GELU>()); break;
        case PLAIN + GATE_RELU: f(Constant<PLAIN + GATE_RELU>()); break;
        case PLAIN + GATE_RELU_SQUARED: f(Constant<PLAIN + GATE_RELU_SQUARED>()); break;
        default: f(Constant<GATE_RELU_SQUARED>()); break;
    }
}

// Rows first .. first + rows of one expert, and the columns that start at column tile `column`.
struct Tile {
    u32 expert, first, rows, column;
    u32 first_x;  // the first row of x
    u32 tokens;   // if rows of x are those of tokens, a bit for each one of the expert; otherwise 0

    // Whether row `row` of the tile belongs to the expert, and where its result goes.
    __device__ bool has(u32 row) const { return row < rows && (tokens == 0 || tokens >> row & 1u); }
    __device__ u32 place(u32 row) const { return first + (tokens ? __popc(tokens & ((1u << row) - 1)) : row); }
};

// The tiles of all experts, or of the listed ones, each of which has one tile of rows: at most `tile_rows` rows of an expert by one of
// `columns` parts of its outputs. Tiles with the same weights follow each other, so that weights are read from memory once. `ends` is
// shared memory.
struct Tiles {
    u32* ends;  // [L]: number of row tiles up to and including an expert's
    const Grouped& p;
    u32 tile_rows, columns;
    u32 listed = 0;           // number of listed experts
    ListedExpert of_first;    // that of the block's first tile

    // By all threads of the block. They wait for each other, as they must before they use barriers that one of them has initialized.
    __device__ void count() {
        if (p.list) {
            const ListedExpert head = load_listed(p.list, 0);
            of_first = load_listed(p.list, 1 + min(blockIdx.x / columns, p.most_listed - 1));
            listed = head.expert;
            __syncthreads();
            return;
        }
        const u32 groups = p.groups, *offsets = p.offsets;
        if (threadIdx.x < 32) {
            constexpr int AHEAD = 4;  // loads that do not wait for each other
            u32 before = 0;
            for (u32 base = threadIdx.x; base < groups + threadIdx.x; base += 32 * AHEAD) {
                u32 rows[AHEAD];
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    const u32 group = base + 32 * i;
                    rows[i] = group < groups ? offsets[group + 1] - offsets[group] : 0;
                }
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    const u32 group = base + 32 * i;
                    u32 tiles = (rows[i] + tile_rows - 1) / tile_rows;
#pragma unroll
                    for (int d = 1; d < 32; d <<= 1) {
                        const u32 other = __shfl_up_sync(FULL_WARP, tiles, d);
                        if (threadIdx.x >= d) tiles += other;
                    }
                    if (group < groups) ends[group] = before + tiles;
                    before += __shfl_sync(FULL_WARP, tiles, 31);
                }
            }
        }
        __syncthreads();
    }

    __device__ u32 total() const { return (p.list ? listed : ends[p.groups - 1]) * columns; }

    __device__ Tile tile(u32 index) const {
        if (p.list) {
            const ListedExpert of = index == blockIdx.x ? of_first : load_listed(p.list, 1 + index / columns);
            if (p.listed_tokens) return Tile{of.expert, of.first, p.listed_tokens, index % columns, 0, of.tokens};
            return Tile{of.expert, of.first, (u32)__popc(of.tokens), index % columns, of.first, 0};
        }
        const u32* offsets = p.offsets;
        u32 low = 0, high = p.groups - 1;  // the first expert whose end is above `index`
        while (low < high) {
            const u32 middle = (low + high) / 2;
            if (ends[middle] * columns > index) high = middle;
            else low = middle + 1;
        }
        const u32 before = low ? ends[low - 1] : 0, row_tiles = ends[low] - before, own = index - before * columns;
        const u32 first = offsets[low] + own % row_tiles * tile_rows;
        return Tile{low, first, min(tile_rows, offsets[low + 1] - first), own / row_tiles, first, 0};
    }
};
