/* CPU kernels for inference in fp32 without gradient. Called through native.py, which checks every argument.
 *
 * Vectors are GCC/Clang vector extensions of 8 floats: the compiler maps them to AVX2, AVX-512 or NEON.
 * No -ffast-math: sums have a fixed order, so a token's result never depends on which other tokens are in the batch.
 * Functions return 0 or one of the errors below; indices that would leave an array are refused before anything is written.
 */
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

/* ---- norm: `rows` tokens of `heads` vectors each; x has a stride between tokens, out is dense ------------------------------- */

void rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t heads, int64_t stride, int64_t dim, float eps) {
    for (int64_t t = 0; t < rows; t++)
        for (int64_t h = 0; h < heads; h++) {
            const float *in = x + t * stride + h * dim;
            v8 squares = splat(0);
            for (int64_t i = 0; i < dim; i += 8) squares += load(in + i) * load(in + i);
            float inverse = 1.0f / sqrtf(sum(squares) / (float)dim + eps);
            for (int64_t i = 0; i < dim; i += 8) store(out + i, load(in + i) * inverse * load(weight + i));
            out += dim;
        }
}

/* ---- rope: rotate the first `rotary` features of every head, copy the rest -------------------------------------------------- */

static void rotate(const float *restrict x, const float *restrict cosine, const float *restrict sine, float *restrict out,
                   int64_t heads, int64_t dim, int64_t rotary) {
    int64_t half = rotary / 2;
    for (int64_t h = 0; h < heads; h++, x += dim, out += dim) {
        for (int64_t i = 0; i < half; i++) {
            out[i] = x[i] * cosine[i] - x[i + half] * sine[i];
            out[i + half] = x[i + half] * cosine[i + half] + x[i] * sine[i + half];
        }
        for (int64_t i = rotary; i < dim; i++) out[i] = x[i];
    }
}

void rope(const float *q, const float *k, const float *cosine, const float *sine, float *q_out, float *k_out, int64_t tokens,
          int64_t heads, int64_t kv_heads, int64_t q_stride, int64_t k_stride, int64_t dim, int64_t rotary) {
    for (int64_t t = 0; t < tokens; t++, cosine += rotary, sine += rotary) {
        rotate(q + t * q_stride, cosine, sine, q_out + t * heads * dim, heads, dim, rotary);
        rotate(k + t * k_stride, cosine, sine, k_out + t * kv_heads * dim, kv_heads, dim, rotary);
    }
}

/* ---- paged attention ------------------------------------------------------------------------------------------------------- */

int write_kv(const float *k, const float *v, float *k_cache, float *v_cache, const int64_t *slots, int64_t tokens, int64_t k_stride,
             int64_t v_stride, int64_t width, int64_t num_slots) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] < 0 || slots[t] >= num_slots) return BAD_INDEX;
    for (int64_t t = 0; t < tokens; t++) {
        memcpy(k_cache + slots[t] * width, k + t * k_stride, width * sizeof(float));
        memcpy(v_cache + slots[t] * width, v + t * v_stride, width * sizeof(float));
    }
    return OK;
}

enum { MAX_HEAD = 512, TOKENS = 64 }; /* features of a head (native.py checks it); tokens per pass of the online softmax */

/* scores[j] = query · k[at[j]] for 8 tokens. */
INLINE v8 scores_of(const float *query, const float *k, const int64_t *at, int64_t dim) {
    v8 dots[8] = {0};
    for (int64_t i = 0; i < dim; i += 8) {
        v8 part = load(query + i);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) dots[j] += part * load(k + at[j] + i);
    }
    return sum_each(dots);
}

/* total[..] = total[..] · shrink + sum_j p[j] · v[at[j]] for 8 `nv` features; n is even. Two chains hide the latency of an addition. */
INLINE void add_values(const int nv, float *total, float shrink, const float *p, const float *v, const int64_t *at, int64_t n) {
    v8 even[4], odd[4];
#pragma GCC unroll 4
    for (int i = 0; i < nv; i++) even[i] = load(total + 8 * i) * shrink, odd[i] = splat(0);
    for (int64_t j = 0; j < n; j += 2) {
        v8 first = splat(p[j]), second = splat(p[j + 1]);
#pragma GCC unroll 4
        for (int i = 0; i < nv; i++) {
            even[i] += first * load(v + at[j] + 8 * i);
            odd[i] += second * load(v + at[j + 1] + 8 * i);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < nv; i++) store(total + 8 * i, even[i] + odd[i]);
}

/* One query head over `seen` tokens: one pass, online softmax (Milakov and Gimelshein, 2018), TOKENS at a time.
 * `k` and `v` point at the head's features in slot 0 of the cache; `at` holds the offset of each token's slot, repeated at the end
 * so that the last 8 can always be read. */
static void attend(const float *q, const float *k, const float *v, const int64_t *at, int64_t seen, int64_t dim, float scale, float *out) {
    float query[MAX_HEAD], p[TOKENS], top = -INFINITY, weight = 0;
    for (int64_t i = 0; i < dim; i += 8) {
        store(query + i, load(q + i) * scale);
        store(out + i, splat(0));
    }
    for (int64_t start = 0; start < seen; start += TOKENS, at += TOKENS) {
        int64_t left = seen - start < TOKENS ? seen - start : TOKENS, n = (left + 7) / 8 * 8;
        v8 best = splat(-INFINITY), sums = splat(0);
        for (int64_t j = 0; j < n; j += 8) {
            v8 scores = scores_of(query, k, at + j, dim);
            if (j + 8 > left) scores = pick((v8i){0, 1, 2, 3, 4, 5, 6, 7} < (int32_t)(left - j), scores, splat(-INFINITY));
            best = pick(scores > best, scores, best);
            store(p + j, scores);
        }
        float here = max_of(best), shrink = 1;
        if (here > top) shrink = expf(top - here), top = here;
        for (int64_t j = 0; j < n; j += 8) {
            v8 scores = load(p + j), e = exp8(scores - top);
            if (j + 8 > left) e = pick(scores == -INFINITY, splat(0), e);
            sums += e;
            store(p + j, e);
        }
        weight = weight * shrink + sum(sums);
        int64_t i = 0;
        for (; i + 32 <= dim; i += 32) add_values(4, out + i, shrink, p, v + i, at, n);
        for (; i < dim; i += 8) add_values(1, out + i, shrink, p, v + i, at, n);
    }
    for (int64_t i = 0; i < dim; i += 8) store(out + i, load(out + i) / weight);
}

int paged_attention(const float *q, const float *k_cache, const float *v_cache, const int32_t *table, const int32_t *starts,
                    const int32_t *context, float *out, int64_t sequences, int64_t table_width, int64_t q_stride, int64_t tokens,
                    int64_t heads, int64_t kv_heads, int64_t dim, int64_t blocks, int64_t block, float scale) {
    int64_t width = kv_heads * dim, group = heads / kv_heads, most = table_width * block;
    if (starts[0] != 0 || starts[sequences] != tokens) return BAD_INDEX;
    int64_t *at = malloc((size_t)(most + 8) * sizeof *at);
    if (at == NULL) return NO_MEMORY;
    for (int64_t s = 0; s < sequences; s++, table += table_width) {
        int64_t queries = starts[s + 1] - starts[s], first = context[s] - queries;
        int bad = queries < 0 || first < 0 || context[s] > most;
        for (int64_t i = 0; !bad && i < context[s]; i += block) bad = table[i / block] < 0 || table[i / block] >= blocks;
        if (bad) {
            free(at);
            return BAD_INDEX;
        }
        for (int64_t i = 0; queries && i < context[s] + 7; i++) {
            int64_t token = i < context[s] ? i : context[s] - 1;
            at[i] = (table[token / block] * block + token % block) * width;
        }
        for (int64_t g = 0; g < kv_heads; g++)
            for (int64_t t = starts[s]; t < starts[s + 1]; t++)
                for (int64_t h = g * group; h < (g + 1) * group; h++)
                    attend(q + t * q_stride + h * dim, k_cache + g * dim, v_cache + g * dim, at, first + (t - starts[s]) + 1, dim, scale,
                           out + (t * heads + h) * dim);
    }
    free(at);
    return OK;
}

/* ---- experts --------------------------------------------------------------------------------------------------------------- */

enum { TILE_ROWS = 6, STRIP = 32, CHUNK = 48 };

/* c[r] = a[r] · b, or c[r] += factor[r] · (a[r] · b), for `m` rows and 8 `nv` columns; b is [depth, ...] with row length `ldb`.
 * Every element is one chain of multiply-adds in the order of `depth`, whatever the tile: results do not depend on the batch. */
INLINE void tile(const int m, const int nv, const float *const *a, const float *b, int64_t ldb, int64_t depth, float *const *c,
                 int64_t column, const float *factor) {
    v8 acc[TILE_ROWS][8];
#pragma GCC unroll 8
    for (int r = 0; r < m; r++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) acc[r][j] = splat(0);
    for (int64_t i = 0; i < depth; i++, b += ldb) {
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
static void tile_rows(int m, const float *const *a, const float *b, int64_t ldb, int64_t depth, float *const *c, int64_t from,
                      int64_t to, const float *factor) {
    int64_t at = from;
#define TILES(M, NV) \
    for (; at + 8 * NV <= to; at += 8 * NV) tile(M, NV, a, b + at, ldb, depth, c, at, factor)
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

/* n rows: c[r] (+)= a[r] · b. Rows are spread evenly over the tiles; a strip of b stays in the L1 cache while they pass. */
static void rows_times(int64_t n, const float *const *a, const float *b, int64_t depth, int64_t columns, float *const *c,
                       const float *factor) {
    int64_t tiles = (n + TILE_ROWS - 1) / TILE_ROWS, step = tiles == 1 ? columns : STRIP;
    for (int64_t from = 0; from < columns; from += step)
        for (int64_t i = 0; i < tiles; i++) {
            int64_t begin = n * i / tiles, end = n * (i + 1) / tiles, to = from + step < columns ? from + step : columns;
            tile_rows((int)(end - begin), a + begin, b, columns, depth, c + begin, from, to, factor ? factor + begin : NULL);
        }
}

/* silu(gate) · up of one row [gate | up], written over the gate half. */
INLINE void silu_times(float *row, int64_t inner) {
    for (int64_t i = 0; i < inner; i += 8) {
        v8 gate = load(row + i);
        store(row + i, gate / (1.0f + exp8(-gate)) * load(row + inner + i));
    }
}

int experts(const float *x, const int64_t *ids, const float *gates, const float *gate_up, const float *down, float *y, int64_t tokens,
            int64_t top_k, int64_t num_experts, int64_t dim, int64_t inner) {
    int64_t pairs = tokens * top_k, wide = 2 * inner;
    for (int64_t i = 0; i < pairs; i++)
        if (ids[i] < 0 || ids[i] >= num_experts) return BAD_INDEX;
    int64_t *start = calloc((size_t)num_experts + 2, sizeof *start), *order = malloc((size_t)(pairs + 1) * sizeof *order);
    float *hidden = malloc((size_t)(CHUNK * wide) * sizeof *hidden);
    if (start == NULL || order == NULL || hidden == NULL) {
        free(start), free(order), free(hidden);
        return NO_MEMORY;
    }
    for (int64_t i = 0; i < pairs; i++) start[ids[i] + 2]++;
    for (int64_t e = 0; e < num_experts; e++) start[e + 2] += start[e + 1];
    for (int64_t i = 0; i < pairs; i++) order[start[ids[i] + 1]++] = i;
    memset(y, 0, (size_t)(tokens * dim) * sizeof *y);
    for (int64_t e = 0; e < num_experts; e++) {
        const float *up = gate_up + e * dim * wide, *dn = down + e * inner * dim;
        for (int64_t at = start[e]; at < start[e + 1]; at += CHUNK) {
            int64_t n = start[e + 1] - at < CHUNK ? start[e + 1] - at : CHUNK;
            const float *in[CHUNK], *act[CHUNK];
            float *mid[CHUNK], *to[CHUNK], factor[CHUNK];
            for (int64_t r = 0; r < n; r++) {
                int64_t pair = order[at + r], token = pair / top_k;
                in[r] = x + token * dim, to[r] = y + token * dim, factor[r] = gates[pair];
                act[r] = mid[r] = hidden + r * wide;
            }
            rows_times(n, in, up, dim, wide, mid, NULL);
            for (int64_t r = 0; r < n; r++) silu_times(mid[r], inner);
            rows_times(n, act, dn, inner, dim, to, factor);
        }
    }
    free(start), free(order), free(hidden);
    return OK;
}
