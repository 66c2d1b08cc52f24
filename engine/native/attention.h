// Causal attention of one query row over its paged context, for the heads that share a KV head.
//
// Blocks come in the order of their positions and each is folded in before the next, so a row's bits
// do not depend on how its prompt was cut or who else is in the step.
#pragma once
#include "simd.h"

namespace loramux {

constexpr int64_t BLOCK = 16;

// Keys and values of one layer and KV head, of E (bf16 bits or fp32).
template <typename E>
struct Context {
    const E* keys;    // of block 0, token 0
    const E* values;  // the same
    int64_t block_stride, token_stride;  // in elements
    const int32_t* table;
    int64_t first, last;  // positions that the query sees
};

// q: [heads, 16 V] fp32, scaled. out: [heads, 16 V]. `V`: vectors a head.
template <typename E, int HEADS, int V>
__attribute__((noinline)) void attend(const Context<E>& context, const float* q, float* out) {
    constexpr int64_t DIM = 16 * V;
    constexpr int TOGETHER = WIDE_REGISTERS ? V : 1;  // of V, for as many sums as there are registers for
    f32x16 total[HEADS][V] = {};
    float largest[HEADS], weight[HEADS];
    for (int h = 0; h < HEADS; h++) largest[h] = -__builtin_inff(), weight[h] = 0;
    for (int64_t block = context.first / BLOCK; block <= context.last / BLOCK; block++) {
        int64_t low = context.first - block * BLOCK, high = context.last - block * BLOCK;
        int from = low > 0 ? low : 0, to = high < BLOCK - 1 ? high + 1 : BLOCK;
        const E* keys = context.keys + context.table[block] * context.block_stride;
        const E* values = context.values + context.table[block] * context.block_stride;
        const int64_t after = context.table[block < context.last / BLOCK ? block + 1 : block] * context.block_stride;
        f32x16 part[HEADS][BLOCK];
        for (int t = 0; t < BLOCK; t++) {
            const E* key = keys + t * context.token_stride;
            ask_for(context.keys + after + t * context.token_stride, DIM * sizeof(E));
            f32x16 dots[HEADS] = {};
            if (t >= from && t < to)
                for (int v = 0; v < V; v++) {
                    f32x16 k = load(key + 16 * v);
                    for (int h = 0; h < HEADS; h++) dots[h] += k * load(q + h * DIM + 16 * v);
                }
            for (int h = 0; h < HEADS; h++) part[h][t] = dots[h];
        }
        float weights[HEADS][BLOCK];
        for (int h = 0; h < HEADS; h++) {
            f32x16 scores = within(sums(part[h]), from, to, -__builtin_inff());
            float top = maximum(scores);
            top = top > largest[h] ? top : largest[h];
            f32x16 p = exponential(scores - top);
            float fade = exponential(largest[h] - top);
            largest[h] = top;
            weight[h] = weight[h] * fade + sum(p);
            for (int v = 0; v < V; v++) total[h][v] *= fade;
            store(weights[h], p);
        }
        for (int t = from; t < to; t++) ask_for(context.values + after + t * context.token_stride, DIM * sizeof(E));
        for (int first = 0; first < V; first += TOGETHER)
            for (int t = from; t < to; t++)
#pragma GCC unroll 8
                for (int v = first; v < first + TOGETHER; v++) {
                    f32x16 of = load(values + t * context.token_stride + 16 * v);
#pragma GCC unroll 4
                    for (int h = 0; h < HEADS; h++) total[h][v] += weights[h][t] * of;
                }
    }
    for (int h = 0; h < HEADS; h++)
        for (int v = 0; v < V; v++) store(out + h * DIM + 16 * v, total[h][v] / weight[h]);
}

template <typename E, int V>
void attend_heads(const Context<E>& context, int64_t heads, const float* q, float* out) {
    constexpr int64_t DIM = 16 * V;
    for (; heads >= 4; heads -= 4, q += 4 * DIM, out += 4 * DIM) attend<E, 4, V>(context, q, out);
    if (heads == 3) attend<E, 3, V>(context, q, out);
    if (heads == 2) attend<E, 2, V>(context, q, out);
    if (heads == 1) attend<E, 1, V>(context, q, out);
}

// False where heads of this size are not compiled in.
template <typename E>
bool attend_any(const Context<E>& context, int64_t heads, int64_t dim, const float* q, float* out) {
    switch (dim) {
        case 16: return attend_heads<E, 1>(context, heads, q, out), true;
        case 32: return attend_heads<E, 2>(context, heads, q, out), true;
        case 64: return attend_heads<E, 4>(context, heads, q, out), true;
        case 128: return attend_heads<E, 8>(context, heads, q, out), true;
    }
    return false;
}

}  // namespace loramux
