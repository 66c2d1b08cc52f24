// y = x W^T for a panel pair of W: 32 output columns, any number of rows.
//
// W lies in panels of 16 outputs. In a panel, each group of 32 inputs is what its kind says, and
// becomes 16 rows of 32 numbers: row p, entry 2 j + e is W[output j, input 2 p + e]. As bf16 that is
// what a matrix unit (AMX) and the bf16 dot product (AVX512_BF16) read (linear_bf16.h); as fp32, what
// vectors of pairs multiply where bf16 products are missing (linear_fp32.h). Either file has
//
//   Number, FP32_TERMS     what is multiplied, and how many terms of it make an fp32 activation
//   SUMS, sum_of           how a row's sums over a panel pair lie in c
//   multiply               c (+)= x times two panels of Numbers
//   expand_and_multiply    c = x times two panels of codes
//   panel_of               a panel from rows of bf16
//   Tiles                  what a thread has to set up before and give back after
#pragma once
#include "simd.h"

namespace loramux {

constexpr int64_t PANEL = 16, GROUP = 32, PAIR = 2 * PANEL, TILE_ROWS = 32;
constexpr int64_t GROUP_ELEMENTS = PANEL * GROUP;

// The forms of a group of a panel.
//
// INT4: 16 fp16 scales, 16 fp16 minima, then in two halves of 8 input pairs: outputs 0 .. 7 and
// 8 .. 15, a word for (output, even or odd input) with a nibble a pair. w = scale q + minimum.
// INT8: 16 fp16 scales, then in four quarters of 4 input pairs the same with a byte a pair. w = scale q.
// BF16: the 16 rows of 32 bf16.
enum Kind : int64_t { BF16 = 0, INT4 = 1, INT8 = 2 };

struct Linear {
    int64_t kind;
    const uint8_t* data;
    int64_t inputs, outputs;
    const float* bias;  // [outputs], or none

    int64_t panels() const { return outputs / PANEL; }
    int64_t group_bytes() const { return kind == BF16 ? 1024 : kind == INT4 ? 320 : 544; }
    const uint8_t* panel(int64_t index) const { return data + index * (inputs / GROUP) * group_bytes(); }
};

// Two panels of codes, side by side in memory.
struct Pair {
    const uint8_t* codes[2];
    const uint8_t* next[2];  // the panels that this thread probably reads after these
    int64_t inputs, group_bytes;
};

}  // namespace loramux

#if defined(HAS_BF16)
#include "linear_bf16.h"
#else
#include "linear_fp32.h"
#endif
