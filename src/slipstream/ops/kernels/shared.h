/* What all kernels share: vectors, exp, sums in a fixed order, bf16.
 *
 * Vectors are GCC/Clang vector extensions: the compiler maps them to AVX2, AVX-512 or NEON. `v8` has 8 floats everywhere, `vec` as many
 * as fill the machine's arithmetic units (WIDE: 16 with AVX-512, else 8). Feature counts are multiples of 8, so that a row ends with a
 * whole vec or with half of one. No -ffast-math: every sum has a fixed order, so a token's result never depends on which other tokens
 * are in the batch. native.py checks shapes, dtypes and strides; the kernels refuse indices that would leave an array before they
 * write anything.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
enum { WIDE = 16 };
#else
enum { WIDE = 8 };
#endif

typedef float v8 __attribute__((vector_size(32)));
typedef float v8u __attribute__((vector_size(32), aligned(4), may_alias)); /* for loads from any float address */
typedef int32_t v8i __attribute__((vector_size(32)));
typedef float vec __attribute__((vector_size(4 * WIDE)));
typedef float vecu __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
typedef int32_t veci __attribute__((vector_size(4 * WIDE)));
typedef uint32_t vecb __attribute__((vector_size(4 * WIDE)));
typedef uint32_t bits __attribute__((may_alias)); /* those of a float */
enum { LINE = 16 }; /* floats in a line of the cache */
enum { OK = 0, NO_MEMORY = -1, BAD_INDEX = -2 };
#define INLINE static inline __attribute__((always_inline))

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

INLINE v8 load(const float *p) { return *(const v8u *)p; }
INLINE void store(float *p, v8 x) { *(v8u *)p = x; }
INLINE v8 splat(float x) { return (v8){x, x, x, x, x, x, x, x}; }
INLINE v8 pick(v8i mask, v8 yes, v8 no) { return (v8)(((v8i)yes & mask) | ((v8i)no & ~mask)); }

INLINE vec load_wide(const float *p) { return *(const vecu *)p; }
INLINE void store_wide(float *p, vec x) { *(vecu *)p = x; }
INLINE vec splat_wide(float x) { return x - (vec){0}; }
INLINE vec pick_wide(veci mask, vec yes, vec no) { return (vec)(((veci)yes & mask) | ((veci)no & ~mask)); }
INLINE vec larger(vec a, vec b) { return pick_wide(b > a, b, a); }

/* Half a vec, zeros behind it. Where WIDE is 8 there is no such half, and nobody asks for it. */
#ifdef __AVX512F__
INLINE vec load_half(const float *p) {
    return __builtin_shufflevector(load(p), splat(0), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
INLINE void store_half(float *p, vec x) { store(p, __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7)); }
#else
INLINE vec load_half(const float *p) { return load(p); }
INLINE void store_half(float *p, vec x) { store(p, x); }
#endif

/* The next vec of a row of which `left` floats are left: a whole one or a half. */
INLINE vec load_next(const float *p, int64_t left) { return left < WIDE ? load_half(p) : load_wide(p); }
INLINE void store_next(float *p, int64_t left, vec x) {
    if (left < WIDE) store_half(p, x);
    else store_wide(p, x);
}

/* [0, 1, 2, ...] < n: the lanes that exist when n are left. */
INLINE veci first_lanes(int64_t n) {
    veci lane;
    for (int i = 0; i < WIDE; i++) lane[i] = i;
    return lane < (int32_t)n;
}

/* exp with a relative error below 2e-7. Cody-Waite range reduction and the polynomial of Cephes' expf (Moshier, 1989). Adding 1.5 * 2^23
 * leaves the nearest integer in the low bits. */
#define DEFINE_EXP(NAME, VECTOR, INTEGERS, PICK)                                  \
    INLINE VECTOR NAME(VECTOR x) {                                                \
        const VECTOR zero = {0}, round = zero + 12582912.0f;                      \
        x = PICK(x < -87.0f, zero - 87.0f, x);                                    \
        x = PICK(x > 88.0f, zero + 88.0f, x);                                     \
        VECTOR shifted = x * 1.44269504f + round, n = shifted - round;            \
        VECTOR r = x - n * 0.693359375f + n * 2.12194440e-4f;                     \
        VECTOR y = zero + 1.9875691500e-4f;                                       \
        y = y * r + 1.3981999507e-3f;                                             \
        y = y * r + 8.3334519073e-3f;                                             \
        y = y * r + 4.1665795894e-2f;                                             \
        y = y * r + 1.6666665459e-1f;                                             \
        y = y * r + 5.0000001201e-1f;                                             \
        y = y * r * r + r + 1.0f;                                                 \
        INTEGERS power = ((INTEGERS)shifted - (INTEGERS)round + 127) << 23;       \
        return y * (VECTOR)power;                                                 \
    }
DEFINE_EXP(exp8, v8, v8i, pick)
DEFINE_EXP(exp_wide, vec, veci, pick_wide)
#undef DEFINE_EXP

INLINE float sum(v8 a) {
    a += __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3);
    a += __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5);
    return a[0] + a[1];
}

INLINE float max_of(v8 a) {
    v8 b = __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3);
    a = pick(a > b, a, b);
    b = __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5);
    a = pick(a > b, a, b);
    return a[0] > a[1] ? a[0] : a[1];
}

#ifdef __AVX512F__
INLINE v8 lower(vec a) { return __builtin_shufflevector(a, a, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE v8 upper(vec a) { return __builtin_shufflevector(a, a, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE float sum_wide(vec a) { return sum(lower(a) + upper(a)); }
INLINE float max_of_wide(vec a) {
    v8 low = lower(a), high = upper(a);
    return max_of(pick(low > high, low, high));
}
#else
INLINE float sum_wide(vec a) { return sum(a); }
INLINE float max_of_wide(vec a) { return max_of(a); }
#endif

#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

/* Lane j of the result is the sum of the lanes of a[j]: in each step half of the lanes of two vectors are added to the other half. */
#ifdef __AVX512F__
INLINE vec add_pairs(vec a, vec b) {
    return SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
INLINE vec add_fours(vec a, vec b) {
    return SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
INLINE vec add_eights(vec a, vec b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
INLINE vec sum_four(const vec *a) { return add_fours(add_pairs(a[0], a[1]), add_pairs(a[2], a[3])); }
INLINE vec sum_each(const vec *a) {
    return add_eights(add_eights(sum_four(a), sum_four(a + 4)), add_eights(sum_four(a + 8), sum_four(a + 12)));
}
#else
INLINE vec add_pairs(vec a, vec b) { return SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15); }
INLINE vec add_fours(vec a, vec b) { return SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15); }
INLINE vec sum_four(const vec *a) { return add_fours(add_pairs(a[0], a[1]), add_pairs(a[2], a[3])); }
INLINE vec sum_each(const vec *a) {
    vec low = sum_four(a), high = sum_four(a + 4);
    return SHUFFLE(low, high, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
}
#endif

/* Rows are interleaved in pairs, pairs in fours, and the halves of fours exchanged. */
INLINE void transpose_8x8(const float *b, int64_t ldb, float *out, int64_t ldo) {
    v8 pair[8], four[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
        v8 x = load(b + i * ldb), y = load(b + (i + 1) * ldb);
        pair[i] = __builtin_shufflevector(x, y, 0, 8, 1, 9, 4, 12, 5, 13);
        pair[i + 1] = __builtin_shufflevector(x, y, 2, 10, 3, 11, 6, 14, 7, 15);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 8
        for (int j = 0; j < 2; j++) {
            four[i + 2 * j] = __builtin_shufflevector(pair[i + j], pair[i + 2 + j], 0, 1, 8, 9, 4, 5, 12, 13);
            four[i + 2 * j + 1] = __builtin_shufflevector(pair[i + j], pair[i + 2 + j], 2, 3, 10, 11, 6, 7, 14, 15);
        }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        store(out + i * ldo, __builtin_shufflevector(four[i], four[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
        store(out + (i + 4) * ldo, __builtin_shufflevector(four[i], four[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
    }
}

/* b [rows, columns] with row length `ldb` -> out [columns, rows] with row length `ldo`. A block of 8 x 8 has its lines in the L1 cache. */
static inline void transpose(const float *b, int64_t ldb, int64_t rows, int64_t columns, float *out, int64_t ldo) {
    for (int64_t i = 0; i < rows; i += 8)
        for (int64_t j = 0; j < columns; j += 8) {
            if (i + 8 <= rows && j + 8 <= columns) {
                transpose_8x8(b + i * ldb + j, ldb, out + j * ldo + i, ldo);
                continue;
            }
            for (int64_t y = i; y < least(i + 8, rows); y++)
                for (int64_t x = j; x < least(j + 8, columns); x++) out[x * ldo + y] = b[y * ldb + x];
        }
}

/* ---- bf16: the upper half of a float ---------------------------------------------------------------------------------- */

/* The nearest bf16, ties to even. */
INLINE vec rounded(vec x) {
    vecb b = (vecb)x;
    return (vec)((b + 0x7fff + ((b >> 16) & 1)) & 0xffff0000);
}

/* Every element of x, in place. */
static inline void round_all(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += WIDE) store_next(x + i, n - i, rounded(load_next(x + i, n - i)));
}

static inline void from_bf16(const uint16_t *x, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i++) ((bits *)out)[i] = (bits)x[i] << 16;
}

/* Of floats that are rounded. */
static inline void to_bf16(const float *x, int64_t n, uint16_t *out) {
    for (int64_t i = 0; i < n; i++) out[i] = (uint16_t)(((const bits *)x)[i] >> 16);
}
