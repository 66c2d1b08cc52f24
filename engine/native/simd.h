// Sixteen fp32 lanes in the compiler's own vector types, so that one source serves every processor:
// one register where the processor has bf16 products, and with them 32 registers of 64 bytes; else two.
#pragma once
#include <cstdint>
#include <cstring>

namespace loramux {

#define INLINE static inline __attribute__((always_inline))

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));

#if defined(__AVX512BF16__) && defined(__AVX512VL__)
#define HAS_BF16 1
#endif
#if defined(__AMX_BF16__) && defined(HAS_BF16)
#define HAS_AMX 1
#endif

#if defined(HAS_BF16)
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
constexpr bool WIDE_REGISTERS = true;
#else
// Two registers: compilers take a vector that is wider than these apart lane by lane.
struct f32x16 {
    f32x8 low, high;

    f32x16 operator-() const { return {-low, -high}; }
};
constexpr bool WIDE_REGISTERS = false;

#define LANEWISE(op)                                                                                   \
    INLINE f32x16 operator op(f32x16 a, f32x16 b) { return {a.low op b.low, a.high op b.high}; }       \
    INLINE f32x16 operator op(f32x16 a, float b) { return {a.low op b, a.high op b}; }                 \
    INLINE f32x16 operator op(float a, f32x16 b) { return {a op b.low, a op b.high}; }                 \
    template <typename B>                                                                              \
    INLINE f32x16& operator op##=(f32x16& a, B b) {                                                    \
        return a = a op b;                                                                             \
    }
LANEWISE(+)
LANEWISE(-)
LANEWISE(*)
LANEWISE(/)
#undef LANEWISE
#endif

// Starts to read what will be wanted soon; any address will do.
INLINE void ask_for(const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i);
}

// A vector of numbers that may lie anywhere.
template <typename V>
INLINE V from_memory(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

template <typename V>
INLINE void to_memory(void* p, V v) {
    memcpy(p, &v, sizeof v);
}

#ifdef HAS_BF16
INLINE f32x16 load(const float* p) { return from_memory<f32x16>(p); }
INLINE void store(float* p, f32x16 v) { to_memory(p, v); }
#else
INLINE f32x16 load(const float* p) { return {from_memory<f32x8>(p), from_memory<f32x8>(p + 8)}; }
INLINE void store(float* p, f32x16 v) {
    to_memory(p, v.low);
    to_memory(p + 8, v.high);
}
#endif

INLINE f32x16 all(float value) { return f32x16{} + value; }

#ifdef HAS_BF16
// fp32 of sixteen bf16 bit patterns.
INLINE f32x16 load(const uint16_t* p) {
    return (f32x16)(__builtin_convertvector(from_memory<u16x16>(p), u32x16) << 16);
}

// Rounded to the nearest bf16; what is no number stays none.
INLINE void store(uint16_t* p, f32x16 v) {
    u32x16 bits = (u32x16)v;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    i32x16 nan = v != v;
    rounded = (u32x16)(((i32x16)rounded & ~nan) | (nan & 0x7fc0));
    to_memory(p, __builtin_convertvector(rounded, u16x16));
}
#else
INLINE f32x8 load_eight(const uint16_t* p) {
    return (f32x8)(__builtin_convertvector(from_memory<u16x8>(p), u32x8) << 16);
}

INLINE void store_eight(uint16_t* p, f32x8 v) {
    u32x8 bits = (u32x8)v;
    u32x8 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    i32x8 nan = v != v;
    rounded = (u32x8)(((i32x8)rounded & ~nan) | (nan & 0x7fc0));
    to_memory(p, __builtin_convertvector(rounded, u16x8));
}

// fp32 of sixteen bf16 bit patterns.
INLINE f32x16 load(const uint16_t* p) { return {load_eight(p), load_eight(p + 8)}; }

// Rounded to the nearest bf16; what is no number stays none.
INLINE void store(uint16_t* p, f32x16 v) {
    store_eight(p, v.low);
    store_eight(p + 8, v.high);
}
#endif

#ifdef HAS_BF16
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
#else
// Sums of neighbours: two of a's, two of b's, and so again in the upper lanes.
INLINE f32x8 fold(f32x8 a, f32x8 b) {
    return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}

// The sums of eight vectors' lanes, as one vector.
INLINE f32x8 sums_of_eight(const f32x8* v) {
    f32x8 a = fold(fold(v[0], v[1]), fold(v[2], v[3])), b = fold(fold(v[4], v[5]), fold(v[6], v[7]));
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

// The sums of eight vectors' halves: eight lower halves, then eight upper ones.
INLINE f32x16 sums_of_halves(const f32x16* v) {
    f32x8 low[8], high[8];
    for (int i = 0; i < 8; i++) low[i] = v[i].low, high[i] = v[i].high;
    return {sums_of_eight(low), sums_of_eight(high)};
}

// The sums of sixteen vectors' lanes, as one vector.
INLINE f32x16 sums(const f32x16* v) {
    f32x8 both[16];
    for (int i = 0; i < 16; i++) both[i] = v[i].low + v[i].high;
    return {sums_of_eight(both), sums_of_eight(both + 8)};
}

INLINE float sum(f32x16 v) {
    f32x8 s = v.low + v.high;
    s += __builtin_shufflevector(s, s, 4, 5, 6, 7, 0, 1, 2, 3);
    s += __builtin_shufflevector(s, s, 2, 3, 0, 1, 6, 7, 4, 5);
    return s[0] + s[1];
}

INLINE float maximum(f32x16 v) {
    f32x8 a = v.low > v.high ? v.low : v.high, b;
    b = __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3), a = a > b ? a : b;
    b = __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5), a = a > b ? a : b;
    return a[0] > a[1] ? a[0] : a[1];
}
#endif

// e^x for x <= 88, within two units in the last place; 0 below -87. What is no number stays none.
template <typename F, typename I>
INLINE F exponential_of(F x) {
    F clamped = x < -87.f ? F{} - 87.f : x;
    F turns = clamped * 1.44269504f;
    I whole = __builtin_convertvector(turns + (turns < 0 ? F{} - 0.5f : F{} + 0.5f), I);
    F n = __builtin_convertvector(whole, F);
    F r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    F p = F{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    F power = (F)((whole + 127) << 23);
    F result = p * power;
    result = x < -87.f ? F{} : result;
    return x != x ? x : result;
}

#ifdef HAS_BF16
INLINE f32x16 exponential(f32x16 x) { return exponential_of<f32x16, i32x16>(x); }
#else
INLINE f32x16 exponential(f32x16 x) {
    return {exponential_of<f32x8, i32x8>(x.low), exponential_of<f32x8, i32x8>(x.high)};
}
#endif

// The lanes from .. to - 1 of v, and `other` in the rest.
INLINE f32x16 within(f32x16 v, int from, int to, float other) {
#ifdef HAS_BF16
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (lane >= from) & (lane < to) ? v : all(other);
#else
    const i32x8 lane = {0, 1, 2, 3, 4, 5, 6, 7}, upper = lane + 8;
    f32x8 others = f32x8{} + other;
    return {(lane >= from) & (lane < to) ? v.low : others, (upper >= from) & (upper < to) ? v.high : others};
#endif
}

// e^x of one number, as `exponential` has it.
INLINE float exponential(float x) { return exponential_of<f32x8, i32x8>(f32x8{} + x)[0]; }

}  // namespace loramux
