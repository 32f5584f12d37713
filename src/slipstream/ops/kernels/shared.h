/* What all kernels share: vectors of 8 floats, exp, sums in a fixed order, and a small matrix product.
 *
 * Vectors are GCC/Clang vector extensions: the compiler maps them to AVX2, AVX-512 or NEON. No -ffast-math: every sum has a fixed
 * order, so a token's result never depends on which other tokens are in the batch. native.py checks shapes, dtypes and strides;
 * the kernels refuse indices that would leave an array before they write anything.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float v8 __attribute__((vector_size(32)));
typedef float v8u __attribute__((vector_size(32), aligned(4), may_alias)); /* for loads from any float address */
typedef int32_t v8i __attribute__((vector_size(32)));
enum { OK = 0, NO_MEMORY = -1, BAD_INDEX = -2 };
#define INLINE static inline __attribute__((always_inline))

INLINE v8 load(const float *p) { return *(const v8u *)p; }
INLINE void store(float *p, v8 x) { *(v8u *)p = x; }
INLINE v8 splat(float x) { return (v8){x, x, x, x, x, x, x, x}; }
INLINE v8 pick(v8i mask, v8 yes, v8 no) { return (v8)(((v8i)yes & mask) | ((v8i)no & ~mask)); }

/* exp with a relative error below 2e-7. Cody-Waite range reduction and the polynomial of Cephes' expf (Moshier, 1989). */
INLINE v8 exp8(v8 x) {
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    x = pick(x < -87.0f, splat(-87.0f), x);
    x = pick(x > 88.0f, splat(88.0f), x);
    v8 shifted = x * 1.44269504f + round;
    v8 n = shifted - round;
    v8 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    v8 y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    v8i power = ((v8i)shifted - (v8i)splat(round) + 127) << 23;
    return y * (v8)power;
}

INLINE v8 pair_sum(v8 a, v8 b) {
    return __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
}

INLINE v8 quad_sum(v8 a, v8 b) {
    return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}

/* Lane j of the result is the sum of the lanes of a[j]. */
INLINE v8 sum_each(const v8 *a) {
    v8 low = quad_sum(pair_sum(a[0], a[1]), pair_sum(a[2], a[3])), high = quad_sum(pair_sum(a[4], a[5]), pair_sum(a[6], a[7]));
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
}

INLINE float sum(v8 a) { return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7])); }

INLINE float max_of(v8 a) {
    v8 b = __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3);
    a = pick(a > b, a, b);
    b = __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5);
    a = pick(a > b, a, b);
    return a[0] > a[1] ? a[0] : a[1];
}

/* ---- small matrix product -------------------------------------------------------------------------------------------- */

enum { TILE_ROWS = 6, STRIP = 32 }; /* 6 x 16 sums fill the 16 registers of AVX2; a strip of columns stays in the L1 cache */

/* c[r] = a[r] · b, or c[r] += factor[r] · (a[r] · b), for `m` rows and 8 `nv` columns; b is [depth, ...] with row length `ldb`.
 * Element i of row r is a[r][i · step]: a step above 1 walks down a column, which makes aᵀ · b.
 * Every element is one chain of multiply-adds in the order of `depth`, whatever the tile: results do not depend on the batch. */
INLINE void tile(const int m, const int nv, const float *const *a, int64_t step, const float *b, int64_t ldb, int64_t depth,
                 float *const *c, int64_t column, const float *factor) {
    v8 acc[TILE_ROWS][8];
#pragma GCC unroll 8
    for (int r = 0; r < m; r++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) acc[r][j] = splat(0);
    for (int64_t i = 0; i < depth * step; i += step, b += ldb) {
        v8 row[8];
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) row[j] = load(b + 8 * j);
#pragma GCC unroll 8
        for (int r = 0; r < m; r++) {
            v8 x = splat(a[r][i]);
#pragma GCC unroll 8
            for (int j = 0; j < nv; j++) acc[r][j] += x * row[j];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < m; r++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) {
            float *to = c[r] + column + 8 * j;
            store(to, factor ? load(to) + factor[r] * acc[r][j] : acc[r][j]);
        }
}

/* Columns [from, to) of up to TILE_ROWS rows: wide tiles for few rows, so that there are always enough independent chains. */
static inline void tile_rows(int m, const float *const *a, int64_t step, const float *b, int64_t ldb, int64_t depth, float *const *c,
                             int64_t from, int64_t to, const float *factor) {
    int64_t at = from;
#define TILES(M, NV) \
    for (; at + 8 * NV <= to; at += 8 * NV) tile(M, NV, a, step, b + at, ldb, depth, c, at, factor)
    switch (m) {
        case 1: TILES(1, 8); TILES(1, 4); TILES(1, 2); TILES(1, 1); break;
        case 2: TILES(2, 4); TILES(2, 2); TILES(2, 1); break;
        case 3: TILES(3, 2); TILES(3, 1); break;
        case 4: TILES(4, 2); TILES(4, 1); break;
        case 5: TILES(5, 2); TILES(5, 1); break;
        case 6: TILES(6, 2); TILES(6, 1); break;
    }
#undef TILES
}

/* n rows: c[r] (+)= a[r] · b. Rows are spread evenly over the tiles; a strip of b serves all of them. */
static inline void rows_times(int64_t n, const float *const *a, int64_t step, const float *b, int64_t ldb, int64_t depth, int64_t columns,
                              float *const *c, const float *factor) {
    int64_t tiles = (n + TILE_ROWS - 1) / TILE_ROWS, strip = tiles == 1 ? columns : STRIP;
    for (int64_t from = 0; from < columns; from += strip)
        for (int64_t i = 0; i < tiles; i++) {
            int64_t begin = n * i / tiles, end = n * (i + 1) / tiles, to = from + strip < columns ? from + strip : columns;
            tile_rows((int)(end - begin), a + begin, step, b, ldb, depth, c + begin, from, to, factor ? factor + begin : NULL);
        }
}
