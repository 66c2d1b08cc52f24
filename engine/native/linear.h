// y = x W^T for a panel pair of W: 32 output columns, any number of rows.
//
// W lies in panels of 16 outputs. In a panel, each group of 32 inputs is what its kind says, and
// becomes 16 rows of 32 bf16: row p, entry 2 j + e is W[output j, input 2 p + e]. That is what a
// matrix unit (AMX) and the bf16 dot product (AVX512_BF16) both read.
#pragma once
#include "simd.h"

#if defined(__AVX512BF16__) && defined(__AVX512VL__)
#define HAS_BF16 1
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(HAS_BF16)
#define HAS_AMX 1
#endif

namespace loramux {

constexpr int64_t PANEL = 16, GROUP = 32, PAIR = 2 * PANEL, TILE_ROWS = 32;
constexpr int64_t GROUP_ELEMENTS = PANEL * GROUP;

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

INLINE uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// INT4: 16 fp16 scales, 16 fp16 minima, then in two halves of 8 input pairs: outputs 0 .. 7 and
// 8 .. 15, a word for (output, even or odd input) with a nibble a pair. w = scale q + minimum.
static void expand_int4(const uint8_t* p, uint16_t* w) {
#ifdef HAS_BF16
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
#else
    for (int half = 0; half < 2; half++)
        for (int lane = 0; lane < 32; lane++) {
            uint32_t word;
            memcpy(&word, p + 64 + 128 * half + 4 * lane, 4);
            float scale = of_half(p, lane / 2), minimum = of_half(p + 32, lane / 2);
            for (int i = 0; i < 8; i++)
                w[32 * (8 * half + i) + lane] = to_bf16(scale * ((word >> (4 * i)) & 15) + minimum);
        }
#endif
}

// INT8: 16 fp16 scales, then in four quarters of 4 input pairs the same with a byte a pair.
static void expand_int8(const uint8_t* p, uint16_t* w) {
#ifdef HAS_BF16
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
    __m512 scale_low = _mm512_permutexvar_ps(low, scale), scale_high = _mm512_permutexvar_ps(high, scale);
    for (int quarter = 0; quarter < 4; quarter++) {
        __m512i a = _mm512_loadu_si512(p + 32 + 128 * quarter), b = _mm512_loadu_si512(p + 96 + 128 * quarter);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m512i x = _mm512_srai_epi32(_mm512_slli_epi32(a, 24 - 8 * i), 24);
            __m512i y = _mm512_srai_epi32(_mm512_slli_epi32(b, 24 - 8 * i), 24);
            _mm512_store_si512(w + 32 * (4 * quarter + i),
                               (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(_mm512_cvtepi32_ps(y), scale_high),
                                                            _mm512_mul_ps(_mm512_cvtepi32_ps(x), scale_low)));
        }
    }
#else
    for (int quarter = 0; quarter < 4; quarter++)
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                int8_t q = (int8_t)p[32 + 128 * quarter + 4 * lane + i];
                w[32 * (4 * quarter + i) + lane] = to_bf16(of_half(p, lane / 2) * q);
            }
#endif
}

// A panel in bf16: the stored one itself, or `room` [inputs * 16] filled.
static __attribute__((noinline)) const uint16_t* expanded(const Linear& linear, int64_t panel, uint16_t* room) {
    const uint8_t* p = linear.panel(panel);
    if (linear.kind == BF16) return (const uint16_t*)p;
    int64_t groups = linear.inputs / GROUP;
    for (int64_t g = 0; g < groups; g++, p += linear.group_bytes()) {
        __builtin_prefetch(p + 4 * linear.group_bytes());
        if (linear.kind == INT4) expand_int4(p, room + g * GROUP_ELEMENTS);
        else expand_int8(p, room + g * GROUP_ELEMENTS);
    }
    return room;
}

// c [32, 32] (+)= x [32, inputs] times two panels; `rows` of them matter, the others may be anything.
// `panels` 1: the second half of c's columns is left alone.
static __attribute__((noinline)) void multiply(const uint16_t* x, int64_t stride, int64_t rows, int64_t inputs, const uint16_t* w0,
                     const uint16_t* w1, float* c, bool onto) {
#if defined(HAS_AMX)
    asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
    float *c1 = c + PANEL, *c2 = c + 16 * PAIR, *c3 = c2 + PANEL;
    if (onto) {
        _tile_loadd(0, c, PAIR * 4);
        _tile_loadd(1, c1, PAIR * 4);
        _tile_loadd(2, c2, PAIR * 4);
        _tile_loadd(3, c3, PAIR * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    if (rows > 16) {
        const uint16_t* lower = x + 16 * stride;
        for (int64_t k = 0; k < inputs; k += GROUP) {
            _tile_loadd(4, x + k, stride * 2);
            _tile_loadd(6, w0 + k * PANEL, 64);
            _tile_loadd(7, w1 + k * PANEL, 64);
            _tile_loadd(5, lower + k, stride * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, c2, PAIR * 4);
        _tile_stored(3, c3, PAIR * 4);
    } else {
        for (int64_t k = 0; k < inputs; k += GROUP) {
            _tile_loadd(4, x + k, stride * 2);
            _tile_loadd(6, w0 + k * PANEL, 64);
            _tile_loadd(7, w1 + k * PANEL, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    }
    _tile_stored(0, c, PAIR * 4);
    _tile_stored(1, c1, PAIR * 4);
    asm volatile("" ::: "memory");
#elif defined(HAS_BF16)
    constexpr int AT_ONCE = 8;
    for (int64_t first = 0; first < rows; first += AT_ONCE) {
        float* out = c + first * PAIR;
        const uint16_t* from = x + first * stride;
        __m512 a[AT_ONCE], b[AT_ONCE];
        for (int r = 0; r < AT_ONCE; r++) {
            a[r] = onto ? _mm512_loadu_ps(out + r * PAIR) : _mm512_setzero_ps();
            b[r] = onto ? _mm512_loadu_ps(out + r * PAIR + PANEL) : _mm512_setzero_ps();
        }
        for (int64_t p = 0; p < inputs / 2; p++) {
            __m512bh u = (__m512bh)_mm512_loadu_si512(w0 + p * PAIR), v = (__m512bh)_mm512_loadu_si512(w1 + p * PAIR);
#pragma GCC unroll 8
            for (int r = 0; r < AT_ONCE; r++) {
                int32_t two;
                memcpy(&two, from + r * stride + 2 * p, 4);
                __m512bh both = (__m512bh)_mm512_set1_epi32(two);
                a[r] = _mm512_dpbf16_ps(a[r], both, u);
                b[r] = _mm512_dpbf16_ps(b[r], both, v);
            }
        }
        for (int r = 0; r < AT_ONCE; r++) {
            _mm512_storeu_ps(out + r * PAIR, a[r]);
            _mm512_storeu_ps(out + r * PAIR + PANEL, b[r]);
        }
    }
#else
    for (int64_t row = 0; row < rows; row++) {
        f32x16 a = onto ? load(c + row * PAIR) : f32x16{}, b = onto ? load(c + row * PAIR + PANEL) : f32x16{};
        for (int64_t p = 0; p < inputs / 2; p++)
            for (int odd = 0; odd < 2; odd++) {
                float value;
                uint32_t bits = (uint32_t)x[row * stride + 2 * p + odd] << 16;
                memcpy(&value, &bits, 4);
                u32x16 u, v;
                memcpy(&u, w0 + p * PAIR, 64);
                memcpy(&v, w1 + p * PAIR, 64);
                a += value * (f32x16)(odd ? u & 0xffff0000u : u << 16);
                b += value * (f32x16)(odd ? v & 0xffff0000u : v << 16);
            }
        store(c + row * PAIR, a);
        store(c + row * PAIR + PANEL, b);
    }
#endif
}

// The matrix unit's registers, for as long as this thread uses them here. Other libraries find them
// as they left them.
class Tiles {
public:
#ifdef HAS_AMX
    Tiles() {
        _tile_storeconfig(before_);
        alignas(64) uint8_t config[64] = {};
        config[0] = 1;
        for (int tile = 0; tile < 8; tile++) {
            config[16 + 2 * tile] = 64;
            config[48 + tile] = 16;
        }
        _tile_loadconfig(config);
    }
    ~Tiles() {
        if (before_[0]) _tile_loadconfig(before_);
        else _tile_release();
    }

private:
    alignas(64) uint8_t before_[64];
#else
    Tiles() {}
#endif
};

}  // namespace loramux
