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

/* ---- small matrix product -------------------------------------------------------------------------------------------- */

/* A tile of sums fills the registers and leaves room for a row of b: 6 x 4 vecs of the 32 registers of AVX-512, 6 x 2 of the 16 of AVX2.
 * STRIP columns of DEPTH rows of b stay in the L1 cache while all rows of a pass, and all columns of them in the L2 cache. */
enum { TILE_ROWS = 6, FULL = WIDE == 16 ? 4 : 2, STRIP = WIDE == 16 ? 64 : 32, DEPTH = 64 };

/* Memory that is wanted soon: up to `end` it comes into the L2 cache while a tile is computed, as evenly as possible, since what waits for
 * memory takes the places that reading from the L2 cache needs. `tiles` of a strip share what the strip is wide. */
typedef struct {
    const float *at, *end;
    int64_t tiles;
} Ahead;

/* c[r] (+)= a[r] · b for `m` rows and `nv` vecs of columns (`half`: the only one is half); b is [depth, ...] with row length `ldb`.
 * Element i of row r is a[r][i · step]: a step above 1 walks down a column, which makes aᵀ · b. `add`: the sums start from c.
 * Every element is one chain of multiply-adds in the order of `depth`, whatever the tile: results do not depend on the batch. */
INLINE void tile(const int m, const int nv, const int half, const float *const *a, int64_t step, const float *b, int64_t ldb,
                 int64_t depth, float *const *c, int64_t column, int add, Ahead *ahead) {
    const float *wanted = ahead->at, *end = ahead->end;
    const int64_t lines = (nv * (WIDE / 8) + 2 * ahead->tiles - 1) / (2 * ahead->tiles);
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
        if (wanted < end)
            for (int64_t j = 0; j < lines; j++, wanted += LINE) __builtin_prefetch(wanted, 0, 2);
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
    ahead->at = wanted;
}

/* Columns [from, to) of up to TILE_ROWS rows: wide tiles for few rows, so that there are always enough independent chains. */
static inline void tile_rows(int m, const float *const *a, int64_t step, const float *b, int64_t ldb, int64_t depth, float *const *c,
                             int64_t from, int64_t to, int add, Ahead *ahead) {
    int64_t at = from;
#define TILE(M, NV, HALF) tile(M, NV, HALF, a, step, b + at, ldb, depth, c, at, add, ahead)
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
    int64_t piece = next == NULL && tiles > 4 ? 2 * DEPTH : DEPTH; /* many rows do not wait for memory */
    const float *row[TILE_ROWS];
    for (int64_t d = 0; d < depth; d += piece) {
        int64_t rows = least(piece, depth - d);
        const float *here = b + d * columns, *wanted = d + rows < depth ? here + rows * columns : next;
        Ahead ahead = {wanted, wanted, tiles};
        for (int64_t from = 0; from < columns; from += strip)
            for (int64_t i = 0; i < tiles; i++) {
                int64_t begin = n * i / tiles, end = n * (i + 1) / tiles, to = least(from + strip, columns);
                for (int64_t r = begin; r < end; r++) row[r - begin] = a[r] + d * step;
                if (wanted != NULL) ahead.end = wanted + rows * (from + (to - from) * (i + 1) / tiles);
                tile_rows((int)(end - begin), row, step, here, columns, rows, c + begin, from, to, add || d > 0, &ahead);
            }
    }
}
