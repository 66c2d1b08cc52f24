// Linears where the processor multiplies bf16: in its matrix unit (AMX), or by bf16 dot products
// (AVX512_BF16). See linear.h.
#pragma once
#include <immintrin.h>

namespace loramux {

typedef uint16_t Number;
constexpr int64_t FP32_TERMS = 2;

// The terms of v: bf16, and bf16 of what that lacks.
INLINE void split(f32x16 v, uint16_t* high, uint16_t* low) {
    store(high, v);
    store(low, v - load(high));
}

static void expand_int4(const uint8_t* p, uint16_t* w) {
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const __m512 digits = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
    __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(p + 32)));
    __m512 scale_low = _mm512_permutexvar_ps(low, scale), scale_high = _mm512_permutexvar_ps(high, scale);
    __m512 min_low = _mm512_permutexvar_ps(low, minimum), min_high = _mm512_permutexvar_ps(high, minimum);
    for (int half = 0; half < 2; half++) {
        __m512i a = _mm512_loadu_si512(p + 64 + 128 * half), b = _mm512_loadu_si512(p + 128 + 128 * half);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            __m512 x = _mm512_permutexvar_ps(_mm512_srli_epi32(a, 4 * i), digits);
            __m512 y = _mm512_permutexvar_ps(_mm512_srli_epi32(b, 4 * i), digits);
            x = _mm512_fmadd_ps(x, scale_low, min_low);
            y = _mm512_fmadd_ps(y, scale_high, min_high);
            _mm512_store_si512(w + 32 * (8 * half + i), (__m512i)_mm512_cvtne2ps_pbh(y, x));
        }
    }
}

// A byte q + 128 in the middle of 32768's fraction makes 32896 + q, so one fma gives scale q exactly.
static void expand_int8(const uint8_t* p, uint16_t* w) {
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const __m512i byte = _mm512_set1_epi32(0xff00), shifted = _mm512_set1_epi32(0x47008000);
    __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
    __m512 offset = _mm512_mul_ps(scale, _mm512_set1_ps(-32896.f));
    __m512 scale_low = _mm512_permutexvar_ps(low, scale), scale_high = _mm512_permutexvar_ps(high, scale);
    __m512 offset_low = _mm512_permutexvar_ps(low, offset), offset_high = _mm512_permutexvar_ps(high, offset);
    auto put = [&](int pair, __m512i a, __m512i b) {
        constexpr int AND_THEN_XOR = 0x6a;
        __m512 x = (__m512)_mm512_ternarylogic_epi32(a, byte, shifted, AND_THEN_XOR);
        __m512 y = (__m512)_mm512_ternarylogic_epi32(b, byte, shifted, AND_THEN_XOR);
        x = _mm512_fmadd_ps(x, scale_low, offset_low);
        y = _mm512_fmadd_ps(y, scale_high, offset_high);
        _mm512_store_si512(w + 32 * pair, (__m512i)_mm512_cvtne2ps_pbh(y, x));
    };
#pragma GCC unroll 4
    for (int quarter = 0; quarter < 4; quarter++) {
        __m512i a = _mm512_loadu_si512(p + 32 + 128 * quarter), b = _mm512_loadu_si512(p + 96 + 128 * quarter);
        put(4 * quarter, _mm512_slli_epi32(a, 8), _mm512_slli_epi32(b, 8));
        put(4 * quarter + 1, a, b);
        put(4 * quarter + 2, _mm512_srli_epi32(a, 8), _mm512_srli_epi32(b, 8));
        put(4 * quarter + 3, _mm512_srli_epi32(a, 16), _mm512_srli_epi32(b, 16));
    }
}

template <int64_t KIND>
INLINE void expand(const uint8_t* p, uint16_t* w) {
    if (KIND == INT4) expand_int4(p, w);
    else expand_int8(p, w);
}

template <int64_t KIND>
INLINE void expand_group(const Pair& pair, int64_t g, uint16_t* w0, uint16_t* w1) {
    int64_t at = g * pair.group_bytes;
    ask_for(pair.next[0] + at, pair.group_bytes);
    ask_for(pair.next[1] + at, pair.group_bytes);
    expand<KIND>(pair.codes[0] + at, w0);
    expand<KIND>(pair.codes[1] + at, w1);
}

#if defined(HAS_AMX)
// The matrix unit: tiles 0 and 1 sum rows 0 .. 15 of two panels' outputs, 2 and 3 those of rows 16 .. 31.
template <bool LOWER>
INLINE void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if (LOWER) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

template <bool LOWER>
INLINE void load_sums(const float* c) {
    _tile_loadd(0, c, PAIR * 4);
    _tile_loadd(1, c + PANEL, PAIR * 4);
    if (LOWER) {
        _tile_loadd(2, c + 16 * PAIR, PAIR * 4);
        _tile_loadd(3, c + 16 * PAIR + PANEL, PAIR * 4);
    }
}

template <bool LOWER>
INLINE void store_sums(float* c) {
    _tile_stored(0, c, PAIR * 4);
    _tile_stored(1, c + PANEL, PAIR * 4);
    if (LOWER) {
        _tile_stored(2, c + 16 * PAIR, PAIR * 4);
        _tile_stored(3, c + 16 * PAIR + PANEL, PAIR * 4);
    }
    asm volatile("" ::: "memory");
}

// 32 inputs of x with those of both panels.
template <bool LOWER>
INLINE void add_group(const uint16_t* x, int64_t stride, const uint16_t* w0, const uint16_t* w1) {
    asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
    _tile_loadd(4, x, stride * 2);
    _tile_loadd(6, w0, 64);
    _tile_loadd(7, w1, 64);
    if (LOWER) _tile_loadd(5, x + 16 * stride, stride * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (LOWER) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

template <bool LOWER>
INLINE void multiply_tiles(const uint16_t* x, int64_t stride, int64_t inputs, const uint16_t* w0, const uint16_t* w1,
                           float* c, bool onto) {
    if (onto) load_sums<LOWER>(c);
    else clear_sums<LOWER>();
    for (int64_t k = 0; k < inputs; k += GROUP) add_group<LOWER>(x + k, stride, w0 + k * PANEL, w1 + k * PANEL);
    store_sums<LOWER>(c);
}

#endif

// Sums of a row of c: those of the first panel, then those of the second.
constexpr int64_t SUMS = PAIR;

INLINE f32x16 sum_of(const float* c, int64_t row, int64_t panel) { return load(c + row * SUMS + panel * PANEL); }

#if !defined(HAS_AMX)
// The bf16 dot products of all rows, sixteen sums at once in registers.
template <int PANELS>
INLINE void multiply_rows(const uint16_t* x, int64_t stride, int64_t rows, int64_t inputs, const uint16_t* const* w, float* c,
                          bool onto) {
    constexpr int AT_ONCE = 16 / PANELS;
    for (int64_t first = 0; first < rows; first += AT_ONCE) {
        float* out = c + first * SUMS;
        const uint16_t* from = x + first * stride;
        __m512 total[PANELS][AT_ONCE];
        for (int panel = 0; panel < PANELS; panel++)
            for (int r = 0; r < AT_ONCE; r++)
                total[panel][r] = onto ? _mm512_loadu_ps(out + r * SUMS + panel * PANEL) : _mm512_setzero_ps();
        for (int64_t p = 0; p < inputs / 2; p++) {
            __m512bh of[PANELS];
#pragma GCC unroll 2
            for (int panel = 0; panel < PANELS; panel++) of[panel] = (__m512bh)_mm512_loadu_si512(w[panel] + p * PAIR);
#pragma GCC unroll 16
            for (int r = 0; r < AT_ONCE; r++) {
                int32_t two;
                memcpy(&two, from + r * stride + 2 * p, 4);
                __m512bh both = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 2
                for (int panel = 0; panel < PANELS; panel++) total[panel][r] = _mm512_dpbf16_ps(total[panel][r], both, of[panel]);
            }
        }
        for (int panel = 0; panel < PANELS; panel++)
            for (int r = 0; r < AT_ONCE; r++) _mm512_storeu_ps(out + r * SUMS + panel * PANEL, total[panel][r]);
    }
}
#endif

// c [32, SUMS] (+)= x [32, inputs] times two panels, or one where w1 is none; `rows` of them matter, the others may be anything.
static __attribute__((noinline)) void multiply(const uint16_t* x, int64_t stride, int64_t rows, int64_t inputs,
                                               const uint16_t* w0, const uint16_t* w1, float* c, bool onto) {
#if defined(HAS_AMX)
    if (!w1) w1 = w0;
    if (rows > 16) multiply_tiles<true>(x, stride, inputs, w0, w1, c, onto);
    else multiply_tiles<false>(x, stride, inputs, w0, w1, c, onto);
#else
    const uint16_t* w[] = {w0, w1};
    if (w1) multiply_rows<2>(x, stride, rows, inputs, w, c, onto);
    else multiply_rows<1>(x, stride, rows, inputs, w, c, onto);
#endif
}

#if defined(HAS_AMX)
// `expand_and_multiply` in step: what was widened two groups before is multiplied while the vector
// unit widens. Unless told to `keep`, only the last four groups stay.
template <int64_t KIND, bool LOWER>
static __attribute__((noinline)) void expand_beside(const Pair& pair, const uint16_t* x, int64_t stride, uint16_t* w0,
                                                    uint16_t* w1, bool keep, float* c) {
    constexpr int64_t LAG = 2, RING = 4;
    const int64_t groups = pair.inputs / GROUP, mask = keep ? -1 : RING - 1;
    clear_sums<LOWER>();
    for (int64_t g = 0; g < groups + LAG; g++) {
        if (g < groups) {
            int64_t to = (g & mask) * GROUP_ELEMENTS;
            expand_group<KIND>(pair, g, w0 + to, w1 + to);
        }
        if (g >= LAG) {
            int64_t from = ((g - LAG) & mask) * GROUP_ELEMENTS;
            add_group<LOWER>(x + (g - LAG) * GROUP, stride, w0 + from, w1 + from);
        }
    }
    store_sums<LOWER>(c);
}
#endif

// `multiply` for codes that are widened on the way. They stay in w0 and w1 [inputs * 16] if told to `keep`.
template <int64_t KIND>
INLINE void expand_and_multiply(const Pair& pair, const uint16_t* x, int64_t stride, int64_t rows, uint16_t* w0, uint16_t* w1,
                                bool keep, float* c) {
#if defined(HAS_AMX)
    if (rows > 16) expand_beside<KIND, true>(pair, x, stride, w0, w1, keep, c);
    else expand_beside<KIND, false>(pair, x, stride, w0, w1, keep, c);
#else
    for (int64_t g = 0; g < pair.inputs / GROUP; g++)
        expand_group<KIND>(pair, g, w0 + g * GROUP_ELEMENTS, w1 + g * GROUP_ELEMENTS);
    multiply(x, stride, rows, pair.inputs, w0, w1, c, false);
#endif
}

// Sixteen rows of sixteen words become sixteen columns.
INLINE void transpose(__m512i* r) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

// A panel of up to 16 rows of w [outputs, inputs], zero where there are none, in whole groups of inputs.
static void panel_of(const uint16_t* w, int64_t outputs, int64_t inputs, uint16_t* panel) {
    if (outputs > PANEL) outputs = PANEL;
    for (int64_t g = 0; g < inputs; g += GROUP, panel += GROUP_ELEMENTS) {
        int64_t width = inputs - g < GROUP ? inputs - g : GROUP;
        __mmask32 there = width == GROUP ? ~__mmask32{0} : (__mmask32{1} << width) - 1;
        __m512i r[16];
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++)
            r[j] = _mm512_maskz_loadu_epi16(j < outputs ? there : 0, w + j * inputs + g);
        transpose(r);
#pragma GCC unroll 16
        for (int p = 0; p < 16; p++) _mm512_store_si512(panel + PAIR * p, r[p]);
    }
}

// The matrix unit's registers, for as long as this thread uses them here: for `rows` rows of x.
// Other libraries find them as they left them.
class Tiles {
public:
#ifdef HAS_AMX
    explicit Tiles(int64_t rows) {
        _tile_storeconfig(before_);
        alignas(64) uint8_t config[64] = {};
        config[0] = 1;
        for (int tile = 0; tile < 8; tile++) {
            config[16 + 2 * tile] = 64;
            config[48 + tile] = 16;
        }
        const int of_first_rows[] = {0, 1, 4};
        for (int tile : of_first_rows) config[48 + tile] = rows < 16 ? rows : 16;
        _tile_loadconfig(config);
    }
    ~Tiles() {
        if (before_[0]) _tile_loadconfig(before_);
        else _tile_release();
    }

private:
    alignas(64) uint8_t before_[64];
#else
    explicit Tiles(int64_t) {}
#endif
};

}  // namespace loramux
