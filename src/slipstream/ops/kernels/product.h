/* Products of a few rows with a small matrix of floats or of bf16. Rows and sums are floats in both. */
#pragma once
#include "shared.h"

/* What b is made of. Of bf16, the rows hold values that are bf16 as well; where the processor multiplies pairs of them, two rows of b make
 * one step of the depth, which is why it must be even. */
enum { FLOAT, BF16 };

#if defined(__AVX512F__) && defined(__AVX512BF16__)
#include <immintrin.h>
#define PAIRS 1
#else
#define PAIRS 0
#endif

typedef uint16_t h8u __attribute__((vector_size(16), aligned(2), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * WIDE)));
typedef uint16_t hvecu __attribute__((vector_size(2 * WIDE), aligned(2), may_alias));

/* A tile of sums fills the registers and leaves room for a row of b: 6 x 4 vecs of the 32 registers of AVX-512, 6 x 2 of the 16 of AVX2.
 * STRIP columns of DEPTH rows of b stay in the L1 cache while all rows of a pass, and all columns of them in the L2 cache. */
enum { TILE_ROWS = 6, FULL = WIDE == 16 ? 4 : 2, STRIP = WIDE == 16 ? 64 : 32, DEPTH = 64 };

/* Memory that is wanted soon: up to `end` it comes into the L2 cache while a tile is computed, as evenly as possible, since what waits for
 * memory takes the places that reading from the L2 cache needs. `tiles` of a strip share what the strip is wide. */
typedef struct {
    const char *at, *end;
    int64_t tiles;
} Ahead;

INLINE int64_t size_of(const int kind) { return kind == BF16 ? 2 : 4; }
INLINE int64_t rows_of_step(const int kind) { return kind == BF16 && PAIRS ? 2 : 1; }

/* One step of the depth: row[j] are `nv` vecs of a row of b (`half`: the only one is half), or of pairs from two rows. */
#if PAIRS
typedef uint16_t pairs __attribute__((vector_size(64)));
typedef uint16_t pairsu __attribute__((vector_size(64), aligned(2), may_alias));

INLINE void load_bf16(const int nv, const int half, const uint16_t *b, int64_t ldb, vec *row) {
    if (half) {
        h8u x = *(const h8u *)b, y = *(const h8u *)(b + ldb);
        v8 both = (v8)SHUFFLE(x, y, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
        row[0] = load_half((const float *)&both);
    } else if (nv == 1) {
        hvec x = *(const hvecu *)b, y = *(const hvecu *)(b + ldb);
        row[0] = (vec)SHUFFLE(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29,
                              14, 30, 15, 31);
    } else {
#pragma GCC unroll 8
        for (int j = 0; j + 1 < nv; j += 2) {
            pairs x = *(const pairsu *)(b + WIDE * j), y = *(const pairsu *)(b + ldb + WIDE * j);
            row[j] = (vec)SHUFFLE(x, y, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13,
                                  45, 14, 46, 15, 47);
            row[j + 1] = (vec)SHUFFLE(x, y, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59,
                                      28, 60, 29, 61, 30, 62, 31, 63);
        }
    }
}
INLINE vec add_pairs_of(vec acc, vec x, vec y) { return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)y); }
#else
INLINE vec widened(hvec x) { return (vec)(__builtin_convertvector(x, vecb) << 16); }
#ifdef __AVX512F__
INLINE vec load_half_bf16(const uint16_t *b) {
    return widened(SHUFFLE(*(const h8u *)b, (h8u){0}, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
#else
INLINE vec load_half_bf16(const uint16_t *b) { return widened(*(const hvecu *)b); }
#endif

INLINE void load_bf16(const int nv, const int half, const uint16_t *b, int64_t ldb, vec *row) {
    (void)ldb;
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) row[j] = half ? load_half_bf16(b) : widened(*(const hvecu *)(b + WIDE * j));
}
INLINE vec add_pairs_of(vec acc, vec x, vec y) { return acc + x * y; }
#endif

INLINE void load_step(const int kind, const int nv, const int half, const void *b, int64_t ldb, vec *row) {
    if (kind == BF16) {
        load_bf16(nv, half, b, ldb, row);
        return;
    }
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) row[j] = half ? load_half(b) : load_wide((const float *)b + WIDE * j);
}

/* c[r] (+)= a[r] · b for `m` rows and `nv` vecs of columns (`half`: the only one is half); b is [depth, ...] with row length `ldb`.
 * Element i of row r is a[r][i · step]: a step above 1 walks down a column, which makes aᵀ · b. `add`: the sums start from c.
 * Every element is one chain of multiply-adds in the order of `depth`, whatever the tile: results do not depend on the batch. */
INLINE void tile(const int kind, const int m, const int nv, const int half, const float *const *a, int64_t step, const char *b,
                 int64_t ldb, int64_t depth, float *const *c, int64_t column, int add, Ahead *ahead) {
    const int64_t rows = rows_of_step(kind), next = rows * ldb * size_of(kind), share = 64 * ahead->tiles;
    const int64_t lines = (nv * WIDE * size_of(kind) * rows + share - 1) / share;
    const char *wanted = ahead->at, *end = ahead->end;
    vec acc[TILE_ROWS][8];
#pragma GCC unroll 8
    for (int r = 0; r < m; r++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) {
            const float *from = c[r] + column + WIDE * j;
            acc[r][j] = !add ? splat_wide(0) : half ? load_half(from) : load_wide(from);
        }
    for (int64_t i = 0; i < depth / rows * step; i += step, b += next) {
        vec row[8];
        load_step(kind, nv, half, b, ldb, row);
        if (wanted < end)
            for (int64_t j = 0; j < lines; j++, wanted += 64) __builtin_prefetch(wanted, 0, 2);
#pragma GCC unroll 8
        for (int r = 0; r < m; r++) {
            vec x = kind == BF16 ? (vec)(((const bits *)a[r])[i] + (vecb){0}) : splat_wide(a[r][i]);
#pragma GCC unroll 8
            for (int j = 0; j < nv; j++) acc[r][j] = kind == BF16 ? add_pairs_of(acc[r][j], x, row[j]) : acc[r][j] + x * row[j];
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
INLINE void row_of_tiles(const int kind, int m, const float *const *a, int64_t step, const void *b, int64_t ldb, int64_t depth,
                         float *const *c, int64_t from, int64_t to, int add, Ahead *ahead) {
    int64_t at = from;
#define TILE(M, NV, HALF) tile(kind, M, NV, HALF, a, step, (const char *)b + at * size_of(kind), ldb, depth, c, at, add, ahead)
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

static inline void tile_rows(int m, const float *const *a, int64_t step, const float *b, int64_t ldb, int64_t depth, float *const *c,
                             int64_t from, int64_t to, int add, Ahead *ahead) {
    row_of_tiles(FLOAT, m, a, step, b, ldb, depth, c, from, to, add, ahead);
}

static inline void tile_rows_bf16(int m, const float *const *a, const uint16_t *b, int64_t ldb, int64_t depth, float *const *c,
                                  int64_t from, int64_t to, int add, Ahead *ahead) {
    row_of_tiles(BF16, m, a, 1, b, ldb, depth, c, from, to, add, ahead);
}

/* n rows: c[r] (+)= a[r] · b with b dense, [depth, columns]. Rows are spread evenly over the tiles. While DEPTH rows of b are in use, the
 * next ones come into the L2 cache, in the order of memory; behind the last ones those of `next` (NULL: none), the matrix of the next
 * product: the weights of a layer are larger than that cache, and few rows leave no time to wait for them. */
INLINE void product(const int kind, int64_t n, const float *const *a, int64_t step, const void *b, int64_t depth, int64_t columns,
                    float *const *c, int add, const void *next) {
    const int paired = kind == BF16 && PAIRS;
    const int64_t bytes = columns * size_of(kind);
    int64_t tiles = (n + TILE_ROWS - 1) / TILE_ROWS, strip = tiles == 1 ? columns : STRIP;
    int64_t piece = next == NULL && tiles > 4 ? 2 * DEPTH : DEPTH; /* many rows do not wait for memory */
    uint16_t narrow[TILE_ROWS][2 * DEPTH] __attribute__((aligned(64)));
    const float *row[TILE_ROWS];
    for (int64_t d = 0; d < depth; d += piece) {
        int64_t rows = least(piece, depth - d);
        const char *here = (const char *)b + d * bytes, *wanted = d + rows < depth ? here + rows * bytes : next;
        Ahead ahead = {wanted, wanted, tiles};
        for (int64_t from = 0; from < columns; from += strip)
            for (int64_t i = 0; i < tiles; i++) {
                int64_t begin = n * i / tiles, end = n * (i + 1) / tiles, to = least(from + strip, columns);
                for (int64_t r = begin; r < end; r++) {
                    row[r - begin] = paired ? (const float *)narrow[r - begin] : a[r] + d * step;
                    if (paired) to_bf16(a[r] + d, rows, narrow[r - begin]);
                }
                if (wanted != NULL) ahead.end = wanted + rows * (from + (to - from) * (i + 1) / tiles) * size_of(kind);
                int m = (int)(end - begin), more = add || d > 0;
                if (kind == BF16) tile_rows_bf16(m, row, (const uint16_t *)here, columns, rows, c + begin, from, to, more, &ahead);
                else tile_rows(m, row, step, (const float *)here, columns, rows, c + begin, from, to, more, &ahead);
            }
    }
}

static inline void rows_times(int64_t n, const float *const *a, int64_t step, const float *b, int64_t depth, int64_t columns, float *const *c,
                       int add, const float *next) {
    product(FLOAT, n, a, step, b, depth, columns, c, add, next);
}

/* The same with bf16 b; a[r][i] are rounded to bf16. */
static inline void rows_times_bf16(int64_t n, const float *const *a, const uint16_t *b, int64_t depth, int64_t columns, float *const *c,
                            const uint16_t *next) {
    product(BF16, n, a, 1, b, depth, columns, c, 0, next);
}
