/* What all kernels share: vectors, exp, sums in a fixed order, and a small matrix product.
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

/* ---- small matrix product -------------------------------------------------------------------------------------------- */

/* A tile of sums fills the registers and leaves room for a row of b: 6 x 4 vecs of the 32 registers of AVX-512, 6 x 2 of the 16 of AVX2.
 * STRIP columns of DEPTH rows of b stay in the L1 cache while all rows of a pass, and all columns of them in the L2 cache. */
enum { TILE_ROWS = 6, FULL = WIDE == 16 ? 4 : 2, STRIP = FULL * WIDE, DEPTH = 64 };

/* c[r] (+)= a[r] · b for `m` rows and `nv` vecs of columns (`half`: the only one is half); b is [depth, ...] with row length `ldb`.
 * Element i of row r is a[r][i · step]: a step above 1 walks down a column, which makes aᵀ · b. `add`: the sums start from c.
 * The first `fetched` rows of `ahead`, memory that is wanted soon, come into the L2 cache meanwhile: as much in a row as the tile is wide.
 * Every element is one chain of multiply-adds in the order of `depth`, whatever the tile: results do not depend on the batch. */
INLINE void tile(const int m, const int nv, const int half, const float *const *a, int64_t step, const float *b, int64_t ldb,
                 int64_t depth, float *const *c, int64_t column, int add, const float *ahead, int64_t fetched) {
    vec acc[TILE_ROWS][8];
#pragma GCC unroll 8
    for (int r = 0; r < m; r++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) {
            const float *from = c[r] + column + WIDE * j;
            acc[r][j] = !add ? splat_wide(0) : half ? load_half(from) : load_wide(from);
        }
    for (int64_t i = 0; i < depth * step; i += step, b += ldb) {
        vec row[8];
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) row[j] = half ? load_half(b) : load_wide(b + WIDE * j);
        if (fetched-- > 0) {
#pragma GCC unroll 8
            for (int j = 0; j < nv * WIDE; j += LINE) __builtin_prefetch(ahead + j, 0, 2);
            ahead += nv * WIDE;
        }
#pragma GCC unroll 8
        for (int r = 0; r < m; r++) {
            vec x = splat_wide(a[r][i]);
#pragma GCC unroll 8
            for (int j = 0; j < nv; j++) acc[r][j] += x * row[j];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < m; r++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) {
            float *to = c[r] + column + WIDE * j;
            if (half) store_half(to, acc[r][j]);
            else store_wide(to, acc[r][j]);
        }
}

/* Columns [from, to) of up to TILE_ROWS rows: wide tiles for few rows, so that there are always enough independent chains. */
static inline void tile_rows(int m, const float *const *a, int64_t step, const float *b, int64_t ldb, int64_t depth, float *const *c,
                             int64_t from, int64_t to, int add, const float *ahead, int64_t fetched) {
    int64_t at = from;
#define TILE(M, NV, HALF) tile(M, NV, HALF, a, step, b + at, ldb, depth, c, at, add, ahead + (at - from) * fetched, fetched)
#define TILES(M, NV) \
    for (; at + WIDE * NV <= to; at += WIDE * NV) TILE(M, NV, 0)
#define REST(M)                  \
    if (FULL > 2) TILES(M, 2);   \
    TILES(M, 1);                 \
    if (at < to) TILE(M, 1, 1);  \
    break
    switch (m) {
        case 1: TILES(1, 8); TILES(1, 4); TILES(1, 2); REST(1);
        case 2: if (WIDE == 16) TILES(2, 8); TILES(2, 4); TILES(2, 2); REST(2);
        case 3: TILES(3, FULL); REST(3);
        case 4: TILES(4, FULL); REST(4);
        case 5: TILES(5, FULL); REST(5);
        case 6: TILES(6, FULL); REST(6);
    }
#undef TILE
#undef TILES
#undef REST
}

/* n rows: c[r] (+)= a[r] · b with b dense, [depth, columns]. Rows are spread evenly over the tiles. While DEPTH rows of b are in use, the
 * next ones come into the L2 cache, in the order of memory; behind the last ones those of `next` (NULL: none), the matrix of the next
 * product: the weights of a layer are larger than that cache, and few rows leave no time to wait for them. */
static inline void rows_times(int64_t n, const float *const *a, int64_t step, const float *b, int64_t depth, int64_t columns,
                              float *const *c, int add, const float *next) {
    int64_t tiles = (n + TILE_ROWS - 1) / TILE_ROWS, strip = tiles == 1 ? columns : STRIP;
    const float *row[TILE_ROWS];
    for (int64_t d = 0; d < depth; d += DEPTH) {
        int64_t rows = least(DEPTH, depth - d);
        const float *here = b + d * columns, *ahead = d + rows < depth ? here + rows * columns : next;
        for (int64_t from = 0; from < columns; from += strip)
            for (int64_t i = 0; i < tiles; i++) {
                int64_t begin = n * i / tiles, end = n * (i + 1) / tiles, to = least(from + strip, columns);
                int64_t done = rows * i / tiles, fetched = ahead == NULL ? 0 : rows * (i + 1) / tiles - done;
                for (int64_t r = begin; r < end; r++) row[r - begin] = a[r] + d * step;
                tile_rows((int)(end - begin), row, step, here, columns, rows, c + begin, from, to, add || d > 0,
                          ahead == NULL ? here : ahead + from * rows + (to - from) * done, fetched);
            }
    }
}
