// Sixteen fp32 lanes in the compiler's own vector types, so that one source serves every processor.
#pragma once
#include <cstdint>
#include <cstring>

namespace loramux {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

#define INLINE static inline __attribute__((always_inline))

// Starts to read what will be wanted soon; any address will do.
INLINE void ask_for(const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i);
}

INLINE f32x16 load(const float* p) {
    f32x16 v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float* p, f32x16 v) { memcpy(p, &v, sizeof v); }

INLINE f32x16 all(float value) { return f32x16{} + value; }

// fp32 of sixteen bf16 bit patterns.
INLINE f32x16 load(const uint16_t* p) {
    u16x16 bits;
    memcpy(&bits, p, sizeof bits);
    return (f32x16)(__builtin_convertvector(bits, u32x16) << 16);
}

// Rounded to the nearest bf16; what is no number stays none.
INLINE void store(uint16_t* p, f32x16 v) {
    u32x16 bits = (u32x16)v;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    i32x16 nan = v != v;
    rounded = (u32x16)(((i32x16)rounded & ~nan) | (nan & 0x7fc0));
    u16x16 half = __builtin_convertvector(rounded, u16x16);
    memcpy(p, &half, sizeof half);
}

INLINE f32x16 larger(f32x16 a, f32x16 b) { return a > b ? a : b; }

// Steps on the way to sums: lanes 1, 2, 4 or 8 apart are added, a's and b's take turns in the result.
INLINE f32x16 fold_1(f32x16 a, f32x16 b) {
    return __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
INLINE f32x16 fold_2(f32x16 a, f32x16 b) {
    return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
INLINE f32x16 fold_4(f32x16 a, f32x16 b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}
INLINE f32x16 fold_8(f32x16 a, f32x16 b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

// The sums of eight vectors' halves: eight lower halves, then eight upper ones.
INLINE f32x16 sums_of_halves(const f32x16* v) {
    return fold_4(fold_2(fold_1(v[0], v[1]), fold_1(v[2], v[3])), fold_2(fold_1(v[4], v[5]), fold_1(v[6], v[7])));
}

// The sums of sixteen vectors' lanes, as one vector.
INLINE f32x16 sums(const f32x16* v) { return fold_8(sums_of_halves(v), sums_of_halves(v + 8)); }

INLINE f32x16 folded(f32x16 v, f32x16 (*with)(f32x16, f32x16)) {
    v = with(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = with(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = with(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return with(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
}

INLINE f32x16 added(f32x16 a, f32x16 b) { return a + b; }

INLINE float sum(f32x16 v) { return folded(v, added)[0]; }
INLINE float maximum(f32x16 v) { return folded(v, larger)[0]; }

// e^x for x <= 88, within two units in the last place; 0 below -87. What is no number stays none.
INLINE f32x16 exponential(f32x16 x) {
    f32x16 clamped = x < -87.f ? all(-87.f) : x;
    f32x16 turns = clamped * 1.44269504f;
    i32x16 whole = __builtin_convertvector(turns + (turns < 0 ? all(-0.5f) : all(0.5f)), i32x16);
    f32x16 n = __builtin_convertvector(whole, f32x16);
    f32x16 r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    f32x16 p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    f32x16 power = (f32x16)((whole + 127) << 23);
    f32x16 result = p * power;
    result = x < -87.f ? f32x16{} : result;
    return x != x ? x : result;
}

}  // namespace loramux
