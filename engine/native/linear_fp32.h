// Linears in fp32, in vectors of eight lanes (AVX2, or what the compiler makes of them). See linear.h.
#pragma once
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace loramux {

typedef float Number;
constexpr int64_t FP32_TERMS = 1;

// The one term of v.
INLINE void split(f32x16 v, float* all, float*) { store(all, v); }

#if defined(__F16C__)
INLINE f32x16 of_halves(const uint8_t* p) {
    return {(f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            (f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 16)))};
}
#else
INLINE float of_half(const uint8_t* p, int64_t index) {
    uint16_t h;
    memcpy(&h, p + 2 * index, 2);
    uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023u;
    float value;
    if (exponent == 0) {
        value = mantissa * 5.9604644775390625e-8f;
        uint32_t bits;
        memcpy(&bits, &value, 4);
        bits |= sign;
        memcpy(&value, &bits, 4);
        return value;
    }
    uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
    memcpy(&value, &bits, 4);
    return value;
}

INLINE f32x16 of_halves(const uint8_t* p) {
    float v[16];
    for (int i = 0; i < 16; i++) v[i] = of_half(p, i);
    return load(v);
}
#endif

// A number of each output for both inputs of its pairs: four vectors of a row of a group.
struct Doubled {
    f32x8 of[4];

    explicit Doubled(f32x16 v) {
        of[0] = __builtin_shufflevector(v.low, v.low, 0, 0, 1, 1, 2, 2, 3, 3);
        of[1] = __builtin_shufflevector(v.low, v.low, 4, 4, 5, 5, 6, 6, 7, 7);
        of[2] = __builtin_shufflevector(v.high, v.high, 0, 0, 1, 1, 2, 2, 3, 3);
        of[3] = __builtin_shufflevector(v.high, v.high, 4, 4, 5, 5, 6, 6, 7, 7);
    }
};

// Keeps a vector in its register, where the compiler would read it again for each use.
#if defined(__AVX__)
#define KEEP(v) asm("" : "+x"(v))
#else
#define KEEP(v)
#endif

// Both inputs of a pair, for four outputs.
INLINE f32x8 pair_of(const float* x) {
    typedef double f64x4 __attribute__((vector_size(32)));
    double both;
    memcpy(&both, x, 8);
    return (f32x8)(f64x4{both, both, both, both});
}

// The weights of a group of a panel: visit(row, v, 8 numbers).
template <int64_t KIND, typename Visit>
INLINE void each_vector(const uint8_t* p, Visit visit) {
    if (KIND == BF16) {
#pragma GCC unroll 8
        for (int64_t row = 0; row < GROUP / 2; row++)
#pragma GCC unroll 4
            for (int64_t v = 0; v < 4; v++)
                visit(row, v, load_eight((const uint16_t*)(p + 64 * row + 16 * v)));
        return;
    }
    constexpr int64_t SCALES = KIND == INT4 ? 64 : 32, ROWS = KIND == INT4 ? 8 : 4;  // of a word
    const Doubled scale(of_halves(p)), minimum(KIND == INT4 ? of_halves(p + 32) : f32x16{});
    for (int64_t first = 0; first < GROUP / 2; first += ROWS) {
        u32x8 codes[4];
#pragma GCC unroll 4
        for (int64_t v = 0; v < 4; v++) codes[v] = from_memory<u32x8>(p + SCALES + 128 * (first / ROWS) + 32 * v);
#pragma GCC unroll 8
        for (int64_t i = 0; i < ROWS; i++)
#pragma GCC unroll 4
            for (int64_t v = 0; v < 4; v++) {
                i32x8 q = KIND == INT4 ? (i32x8)((codes[v] >> (4 * i)) & 15) : (i32x8)(codes[v] << (24 - 8 * i)) >> 24;
                f32x8 of = __builtin_convertvector(q, f32x8);
                visit(first + i, v, KIND == INT4 ? of * scale.of[v] + minimum.of[v] : of * scale.of[v]);
            }
    }
}

template <int64_t KIND>
INLINE void expand(const uint8_t* p, float* w) {
    each_vector<KIND>(p, [&](int64_t row, int64_t v, f32x8 of) { to_memory(w + PAIR * row + 8 * v, of); });
}

template <int64_t KIND>
INLINE void expand_group(const Pair& pair, int64_t g, float* w0, float* w1) {
    int64_t at = g * pair.group_bytes;
    ask_for(pair.next[0] + at, pair.group_bytes);
    ask_for(pair.next[1] + at, pair.group_bytes);
    expand<KIND>(pair.codes[0] + at, w0);
    expand<KIND>(pair.codes[1] + at, w1);
}

// Sums of a row of c: as the vectors of `add_part` hold them, even and odd inputs apart.
constexpr int64_t SUMS = 2 * PAIR, VECTORS = 4;
constexpr int64_t PART = 4 * GROUP;  // inputs at a time: what both panels have of them fits the first cache

INLINE f32x16 sum_of(const float* c, int64_t row, int64_t panel) {
    const float* from = c + row * SUMS + panel * PAIR;
    f32x8 eights[2];
    for (int half = 0; half < 2; half++, from += 16) {
        f32x8 s = fold(from_memory<f32x8>(from), from_memory<f32x8>(from + 8));
        eights[half] = __builtin_shufflevector(s, s, 0, 1, 4, 5, 2, 3, 6, 7);
    }
    return {eights[0], eights[1]};
}

// c (+)= ROWS rows of x times PANELS panels, over `inputs` inputs.
template <int ROWS, int PANELS>
INLINE void add_part(const float* x, int64_t stride, int64_t inputs, const float* const* w, float* c, bool onto) {
    f32x8 total[PANELS][ROWS][VECTORS] = {};
    if (onto)
        for (int panel = 0; panel < PANELS; panel++)
            for (int row = 0; row < ROWS; row++)
                for (int v = 0; v < VECTORS; v++) total[panel][row][v] = from_memory<f32x8>(c + row * SUMS + panel * PAIR + 8 * v);
    for (int64_t p = 0; p < inputs / 2; p++) {
        f32x8 two[ROWS];
#pragma GCC unroll 3
        for (int row = 0; row < ROWS; row++) two[row] = pair_of(x + row * stride + 2 * p);
#pragma GCC unroll 2
        for (int panel = 0; panel < PANELS; panel++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                f32x8 of = from_memory<f32x8>(w[panel] + p * PAIR + 8 * v);
                if (ROWS > 1) KEEP(of);
#pragma GCC unroll 3
                for (int row = 0; row < ROWS; row++) total[panel][row][v] += two[row] * of;
            }
    }
    for (int panel = 0; panel < PANELS; panel++)
        for (int row = 0; row < ROWS; row++)
            for (int v = 0; v < VECTORS; v++) to_memory(c + row * SUMS + panel * PAIR + 8 * v, total[panel][row][v]);
}

// The same for any number of rows and both panels, or the first alone where w1 is none.
static __attribute__((noinline)) void add_rows(const float* x, int64_t stride, int64_t rows, int64_t inputs, const float* w0,
                                               const float* w1, float* c, bool onto) {
    const float* w[2] = {w0, w1};
    if (rows == 1 && w1) return add_part<1, 2>(x, stride, inputs, w, c, onto);
    for (int panel = 0; panel < (w1 ? 2 : 1); panel++) {
        int64_t row = 0;
        for (; row + 3 <= rows; row += 3) {
            for (int64_t next = row + 3; panel == 0 && next < row + 6 && next < rows; next++)
                ask_for(x + next * stride, inputs * sizeof(float));
            add_part<3, 1>(x + row * stride, stride, inputs, w + panel, c + row * SUMS + panel * PAIR, onto);
        }
        if (row + 2 == rows) add_part<2, 1>(x + row * stride, stride, inputs, w + panel, c + row * SUMS + panel * PAIR, onto);
        if (row + 1 == rows) add_part<1, 1>(x + row * stride, stride, inputs, w + panel, c + row * SUMS + panel * PAIR, onto);
    }
}

// A row of c = a row of x times both panels, whose weights never leave the registers.
template <int64_t KIND>
static __attribute__((noinline)) void multiply_row(const Pair& pair, const float* x, float* c) {
    for (int panel = 0; panel < 2; panel++) {
        f32x8 total[VECTORS] = {};
        const uint8_t *p = pair.codes[panel], *next = pair.next[panel];
        for (int64_t k = 0; k < pair.inputs; k += GROUP, p += pair.group_bytes, next += pair.group_bytes) {
            ask_for(next, pair.group_bytes);
            each_vector<KIND>(p, [&](int64_t row, int64_t v, f32x8 of) { total[v] += pair_of(x + k + 2 * row) * of; });
        }
        for (int64_t v = 0; v < VECTORS; v++) to_memory(c + panel * PAIR + 8 * v, total[v]);
    }
}

// c [32, SUMS] (+)= x [32, inputs] times two panels, or one where w1 is none.
static void multiply(const float* x, int64_t stride, int64_t rows, int64_t inputs, const float* w0, const float* w1, float* c,
                     bool onto) {
    for (int64_t from = 0; from < inputs; from += PART) {
        int64_t count = inputs - from < PART ? inputs - from : PART;
        add_rows(x + from, stride, rows, count, w0 + from * PANEL, w1 ? w1 + from * PANEL : w1, c, onto || from > 0);
    }
}

// `multiply` for codes that are widened on the way. They stay in w0 and w1 [inputs * 16] if told to `keep`.
template <int64_t KIND>
INLINE void expand_and_multiply(const Pair& pair, const float* x, int64_t stride, int64_t rows, float* w0, float* w1,
                                bool keep, float* c) {
    if (rows == 1 && !keep) return multiply_row<KIND>(pair, x, c);
    for (int64_t from = 0; from < pair.inputs; from += PART) {
        int64_t count = pair.inputs - from < PART ? pair.inputs - from : PART, to = keep ? from * PANEL : 0;
        for (int64_t i = 0; i < count; i += GROUP)
            expand_group<KIND>(pair, (from + i) / GROUP, w0 + to + i * PANEL, w1 + to + i * PANEL);
        add_rows(x + from, stride, rows, count, w0 + to, w1 + to, c, from > 0);
    }
}

// Eight rows of eight words become eight columns.
INLINE void transpose(u32x8* r) {
    u32x8 t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        r[i] = __builtin_shufflevector(t[i], t[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        r[i + 1] = __builtin_shufflevector(t[i], t[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        r[i + 2] = __builtin_shufflevector(t[i + 1], t[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
        r[i + 3] = __builtin_shufflevector(t[i + 1], t[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = __builtin_shufflevector(r[i], r[4 + i], 0, 1, 2, 3, 8, 9, 10, 11);
        t[4 + i] = __builtin_shufflevector(r[i], r[4 + i], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int i = 0; i < 8; i++) r[i] = t[i];
}

// The even and odd inputs of eight outputs, from words that hold a bf16 pair each, in pairs again.
INLINE void put_pairs(float* to, u32x8 pairs) {
    u32x8 even = pairs << 16, odd = pairs & 0xffff0000u;
    to_memory(to, (f32x8)__builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11));
    to_memory(to + 8, (f32x8)__builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15));
}

// A panel of up to 16 rows of w [outputs, inputs], zero where there are none, in whole groups of inputs.
static void panel_of(const uint16_t* w, int64_t outputs, int64_t inputs, float* panel) {
    if (outputs > PANEL) outputs = PANEL;
    for (int64_t g = 0; g < inputs; g += GROUP, panel += GROUP_ELEMENTS) {
        int64_t width = inputs - g < GROUP ? inputs - g : GROUP;
        for (int64_t eight_rows = 0; eight_rows < PANEL; eight_rows += 8)
            for (int64_t half = 0; half < GROUP; half += 16) {
                int64_t bytes = 2 * (width - half < 16 ? width - half : 16);
                u32x8 r[8] = {};
                for (int64_t j = 0; j < 8; j++)
                    if (eight_rows + j < outputs && bytes > 0) memcpy(&r[j], w + (eight_rows + j) * inputs + g + half, bytes);
                transpose(r);
                for (int64_t p = 0; p < 8; p++) put_pairs(panel + PAIR * (half / 2 + p) + 2 * eight_rows, r[p]);
            }
    }
}

// Nothing to set up here.
struct Tiles {
    explicit Tiles(int64_t) {}
};

}  // namespace loramux
