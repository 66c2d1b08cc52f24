// y[row, slice] += scale (x[row] A^T) B^T: the adapters of many rows, for a group of slices a call.
//
// A unit of work is a chunk of rows with one adapter and (a part of) one slice. It turns A and B into
// panels as it reads them, once for all rows of the chunk, and multiplies them like every other weight
// (linear.h). x and x A^T go in as fp32, or as two bf16 terms each: sums are those of fp32 activations. A row's
// bits depend on nothing but the row. A few rows take less work as fp32 dot products, in another order
// of sums; a call that wants invariant rows does without.
#pragma once
#include <atomic>
#include <cstdlib>

#include "linear.h"

namespace loramux {

// The arguments of one call; see Call in engine/kernels/lora_numba.py.
struct AdapterCall {
    std::atomic<int64_t> next_unit;
    int64_t units;
    const float* x;  // [T, in_features]
    int64_t x_stride, in_features;
    const int64_t* tokens;  // [T] for an embedding, whose A is looked up; else none
    float* y;               // [T, columns]
    int64_t y_stride;
    const uint16_t* weights;  // the arena
    int64_t elements;
    const int64_t *a, *b;  // [slots, modules]: where A [rank, in] and B [out, rank] begin in it
    const int32_t* rank;   // 0: the adapter does not change the module
    const float* scale;
    int64_t modules;
    const int64_t* slices;  // [3, slice_count]: module, column, width
    int64_t slice_count, parts;
    const int32_t* batch;  // LoraBatch.buffer: count, then [4, capacity] rows, starts, lengths, slots
    int64_t capacity, chunks;
    int64_t invariant;  // no bit of a row may depend on the rows beside it
    int64_t max_rank;   // of any adapter
};

// Memory of one thread that is kept for its next call.
class Room {
public:
    ~Room() { free(bytes_); }

    // At least so many bytes; what was there before is lost when it grows.
    uint8_t* of(size_t bytes) {
        if (bytes > size_) {
            free(bytes_);
            size_ = (bytes + 4095) & ~size_t{4095};
            bytes_ = (uint8_t*)aligned_alloc(64, size_);
        }
        return bytes_;
    }

private:
    uint8_t* bytes_ = nullptr;
    size_t size_ = 0;
};

// So many inputs in whole groups.
INLINE int64_t whole(int64_t inputs) { return (inputs + GROUP - 1) / GROUP * GROUP; }

// The terms of a row, with zeros to the end of its last group.
static void split_row(const float* x, int64_t count, Number* high, Number* low) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) split(load(x + i), high + i, low + i);
    for (; i < whole(count); i += 16) {
        float rest[16] = {};
        if (i < count) memcpy(rest, x + i, (count - i < 16 ? count - i : 16) * sizeof(float));
        split(load(rest), high + i, low + i);
    }
}

// The sums of eight vectors' halves, each vector's lower half beside its upper one.
INLINE f32x16 half_sums(const f32x16* v) {
    f32x16 s = sums_of_halves(v);
#ifdef HAS_BF16
    return __builtin_shufflevector(s, s, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return {__builtin_shufflevector(s.low, s.high, 0, 8, 1, 9, 2, 10, 3, 11),
            __builtin_shufflevector(s.low, s.high, 4, 12, 5, 13, 6, 14, 7, 15)};
#endif
}

constexpr int64_t FEW_ROWS_RANK = 256, FEW_ROWS_WIDTH = 4096;  // most that `FewRows` holds

// ROWS rows, each of A's or B's numbers read once for all of them. inputs and rank are of sizes that `few_rows` names.
template <int ROWS>
struct FewRows {
    float hidden[ROWS][FEW_ROWS_RANK];

    // hidden[row] = x[row] A^T
    void shrink(const float* const* x, const uint16_t* a, int64_t rank, int64_t inputs) {
        constexpr int RANKS = ROWS == 4 ? 4 : 8;
        constexpr int TOGETHER = WIDE_REGISTERS ? RANKS : 4 / ROWS;  // as many sums as there are registers for
        for (int64_t r = 0; r < rank; r += RANKS) {
            f32x16 v[16] = {};
            for (int first = 0; first < RANKS; first += TOGETHER) {
                f32x16 total[ROWS][TOGETHER] = {};
                for (int64_t i = 0; i < inputs; i += 16) {
                    f32x16 rows[ROWS];
#pragma GCC unroll 4
                    for (int row = 0; row < ROWS; row++) rows[row] = load(x[row] + i);
#pragma GCC unroll 8
                    for (int j = 0; j < TOGETHER; j++) {
                        f32x16 w = load(a + (r + first + j) * inputs + i);
#pragma GCC unroll 4
                        for (int row = 0; row < ROWS; row++) total[row][j] += rows[row] * w;
                    }
                }
                for (int row = 0; row < ROWS; row++)
                    for (int j = 0; j < TOGETHER; j++) v[row * RANKS + first + j] = total[row][j];
            }
            float s[16];
            store(s, sums(v));
            for (int row = 0; row < ROWS; row++) memcpy(hidden[row] + r, s + row * RANKS, RANKS * sizeof(float));
        }
    }

    // y[row] += scale hidden[row] B^T
    void expand(float* const* y, const uint16_t* b, int64_t rank, int64_t width, float scale) {
        int64_t o = 0;
        if (rank == 8) {
            f32x16 twice[ROWS];
            for (int row = 0; row < ROWS; row++) {
                memcpy(hidden[row] + 8, hidden[row], 8 * sizeof(float));
                twice[row] = load(hidden[row]);
            }
            for (; o + 16 <= width; o += 16) {
                f32x16 w[8], v[8];
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) w[i] = load(b + o * 8 + i * 16);
                for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 8
                    for (int i = 0; i < 8; i++) v[i] = w[i] * twice[row];
                    store(y[row] + o, load(y[row] + o) + scale * half_sums(v));
                }
            }
        } else {
            for (; o + 16 <= width; o += 16) {
                f32x16 v[ROWS][16];
                for (int j = 0; j < 16; j++) {
                    const uint16_t* from = b + (o + j) * rank;
                    f32x16 s[ROWS] = {};
                    for (int64_t r = 0; r < rank; r += 16) {
                        f32x16 w = load(from + r);
#pragma GCC unroll 4
                        for (int row = 0; row < ROWS; row++) s[row] += w * load(hidden[row] + r);
                    }
                    for (int row = 0; row < ROWS; row++) v[row][j] = s[row];
                }
                for (int row = 0; row < ROWS; row++) store(y[row] + o, load(y[row] + o) + scale * sums(v[row]));
            }
        }
        for (; o < width; o++)
            for (int row = 0; row < ROWS; row++) {
                float total = 0;
                for (int64_t r = 0; r < rank; r++) {
                    uint32_t bits = (uint32_t)b[o * rank + r] << 16;
                    float w;
                    memcpy(&w, &bits, 4);
                    total += w * hidden[row][r];
                }
                y[row][o] += scale * total;
            }
    }
};

class AdapterPass {
public:
    AdapterPass(AdapterCall& call, Room& room) : call_(call) {
        int64_t inputs = call.tokens ? 0 : whole(call.in_features), ranks = whole(call.max_rank);
        int64_t deepest = inputs > ranks ? inputs : ranks;
        int64_t elements = 2 * TILE_ROWS * (inputs + ranks) + 2 * PANEL * deepest;
        c_ = (float*)room.of(TILE_ROWS * SUMS * sizeof(float) + elements * sizeof(Number));
        x_[0] = (Number*)(c_ + TILE_ROWS * SUMS), x_[1] = x_[0] + TILE_ROWS * inputs;
        hidden_[0] = x_[1] + TILE_ROWS * inputs, hidden_[1] = hidden_[0] + TILE_ROWS * ranks;
        panel_[0] = hidden_[1] + TILE_ROWS * ranks, panel_[1] = panel_[0] + PANEL * deepest;
    }

    void run() {
        for (int64_t unit; (unit = call_.next_unit.fetch_add(1)) < call_.units;) do_unit(unit);
    }

private:
    static constexpr int64_t MOST_FEW = 4;

    void do_unit(int64_t unit) {
        int64_t part = unit % call_.parts, piece = unit / call_.parts;
        int64_t slice = piece % call_.slice_count, chunk = piece / call_.slice_count;
        const int64_t* of = call_.slices + slice;
        int64_t module = of[0], columns = of[2 * call_.slice_count];
        int64_t first = columns * part / call_.parts, width = columns * (part + 1) / call_.parts - first;
        const int32_t* batch = call_.batch + 1 + chunk;
        int64_t start = batch[call_.capacity], count = batch[2 * call_.capacity];
        int64_t entry = batch[3 * call_.capacity] * call_.modules + module, rank = call_.rank[entry];
        if (rank == 0) return;
        const int32_t* rows = call_.batch + 1 + start;
        const uint16_t *a = call_.weights + call_.a[entry], *b = call_.weights + call_.b[entry] + first * rank;
        float scale = call_.scale[entry];
        int64_t to = of[call_.slice_count] + first;
        if (few_rows(count, rank, width)) {
            fetch(a, rank * call_.in_features);
            fetch(b, rank * width);
            if (count == 1) by_rows<1>(a, b, rank, width, rows, count, scale, to);
            else if (count == 2) by_rows<2>(a, b, rank, width, rows, count, scale, to);
            else by_rows<4>(a, b, rank, width, rows, count, scale, to);
            return;
        }
        if (call_.tokens) look_up(a, rank, rows, count);
        else shrink(a, rank, chunk, rows, count);
        expand(b, rank, width, rows, count, scale, to);
    }

    // Asks for elements that are read soon: the processor itself fetches ahead in long runs alone.
    static void fetch(const uint16_t* first, int64_t count) {
        const uint16_t* end = first + (count < 16384 ? count : 16384);
        for (; first < end; first += 32) __builtin_prefetch(first, 0, 2);
    }

    bool few_rows(int64_t count, int64_t rank, int64_t width) const {
        return count <= MOST_FEW && !call_.invariant && !call_.tokens && call_.in_features % 16 == 0 &&
               (rank == 8 || rank % 16 == 0) && rank <= FEW_ROWS_RANK && width <= FEW_ROWS_WIDTH;
    }

    // `count` is ROWS or one less: the last row is then done twice, and written once.
    template <int ROWS>
    void by_rows(const uint16_t* a, const uint16_t* b, int64_t rank, int64_t width, const int32_t* rows, int64_t count,
                 float scale, int64_t column) {
        const float* x[ROWS];
        float *y[ROWS], unread[FEW_ROWS_WIDTH];
        for (int row = 0; row < ROWS; row++) {
            int64_t of = rows[row < count ? row : count - 1];
            x[row] = call_.x + of * call_.x_stride;
            y[row] = row < count ? call_.y + of * call_.y_stride + column : unread;
        }
        FewRows<ROWS> few;
        few.shrink(x, a, rank, call_.in_features);
        few.expand(y, b, rank, width, scale);
    }

    // c = the terms of the left [count, inputs] times up to two panels' worth of w [outputs, inputs]. What
    // c holds for the second panel is left as it was where there are no outputs for it.
    void multiply_by(Number* const* terms, int64_t stride, int64_t count, const uint16_t* w, int64_t outputs, int64_t inputs) {
        Number* second = outputs > PANEL ? panel_[1] : nullptr;
        panel_of(w, outputs, inputs, panel_[0]);
        if (second) panel_of(w + PANEL * inputs, outputs - PANEL, inputs, second);
        for (int64_t term = 0; term < FP32_TERMS; term++)
            multiply(terms[term], stride, count, inputs + inputs % 2, panel_[0], second, c_, term > 0);
    }

    // hidden = x[rows] A^T; a thread that goes on with the same rows has their terms already.
    void shrink(const uint16_t* a, int64_t rank, int64_t chunk, const int32_t* rows, int64_t count) {
        int64_t inputs = call_.in_features, stride = whole(inputs);
        if (chunk != split_chunk_) {
            for (int64_t row = 0; row < count; row++)
                split_row(call_.x + rows[row] * call_.x_stride, inputs, x_[0] + row * stride, x_[1] + row * stride);
            split_chunk_ = chunk;
        }
        for (int64_t r = 0; r < rank; r += PAIR) {
            multiply_by(x_, stride, count, a + r * inputs, rank - r, inputs);
            for (int64_t row = 0; row < count; row++) {
                int64_t to = row * whole(rank) + r;
                split(sum_of(c_, row, 0), hidden_[0] + to, hidden_[1] + to);
                f32x16 second = rank - r > PANEL ? sum_of(c_, row, 1) : f32x16{};
                split(second, hidden_[0] + to + PANEL, hidden_[1] + to + PANEL);
            }
        }
    }

    // hidden = A[token], as it is.
    void look_up(const uint16_t* a, int64_t rank, const int32_t* rows, int64_t count) {
        for (int64_t row = 0; row < count; row++) {
            Number *high = hidden_[0] + row * whole(rank), *low = hidden_[1] + row * whole(rank);
            const uint16_t* from = a + call_.tokens[rows[row]] * rank;
            for (int64_t i = 0; i < whole(rank); i += 16) {
                uint16_t some[16] = {};
                if (i < rank) memcpy(some, from + i, (rank - i < 16 ? rank - i : 16) * sizeof(uint16_t));
                split(load(some), high + i, low + i);
            }
        }
    }

    // y[rows, column ..] += scale hidden B^T.
    void expand(const uint16_t* b, int64_t rank, int64_t width, const int32_t* rows, int64_t count, float scale, int64_t column) {
        for (int64_t o = 0; o < width; o += PAIR) {
            multiply_by(hidden_, whole(rank), count, b + o * rank, width - o, rank);
            int64_t columns = width - o < PAIR ? width - o : PAIR, i;
            for (int64_t row = 0; row < count; row++) {
                float *to = call_.y + rows[row] * call_.y_stride + column + o, from[PAIR];
                store(from, sum_of(c_, row, 0));
                if (columns > PANEL) store(from + PANEL, sum_of(c_, row, 1));
                for (i = 0; i + 16 <= columns; i += 16) store(to + i, load(to + i) + scale * load(from + i));
                for (; i < columns; i++) to[i] += scale * from[i];
            }
        }
    }

    AdapterCall& call_;
    float* c_;
    Number *x_[2], *hidden_[2], *panel_[2];
    int64_t split_chunk_ = -1;
};

}  // namespace loramux
