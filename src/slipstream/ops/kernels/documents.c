/* Causal attention within the documents of a packed row, forward and backward.
 *
 * Per document and head: scores of BLOCK queries at a time against the transposed keys, softmax, then values; only keys up to the
 * query's tile are touched. The backward pass recomputes the probabilities from the saved log-sum-exp (Dao et al., FlashAttention,
 * 2022, algorithm 4).
 */
#include "product.h"

enum { BLOCK = 48 };

/* [n, dim] rows with a stride -> [dim, wide], zero behind column n. */
static void transpose_padded(const float *rows, int64_t n, int64_t stride, int64_t dim, int64_t wide, float *out) {
    transpose(rows, stride, n, dim, out, wide);
    for (int64_t i = 0; i < dim; i++)
        for (int64_t j = n; j < wide; j++) out[i * wide + j] = 0;
}

/* row = exp(row · scale - shift) in the first `seen` columns and 0 up to `wide`; returns the sum. */
INLINE float exponentials(float *row, int64_t seen, int64_t wide, float scale, float shift) {
    vec sums = splat_wide(0);
    for (int64_t j = 0; j < wide; j += WIDE) {
        vec e = exp_wide(load_wide(row + j) * scale - shift);
        if (j + WIDE > seen) e = pick_wide(first_lanes(seen - j), e, splat_wide(0));
        sums += e;
        store_wide(row + j, e);
    }
    return sum_wide(sums);
}

/* Of the first `seen` columns; the row is readable up to a multiple of WIDE. */
INLINE float largest(const float *row, int64_t seen) {
    vec top = splat_wide(-INFINITY);
    for (int64_t j = 0; j < seen; j += WIDE) {
        vec next = load_wide(row + j);
        if (j + WIDE > seen) next = pick_wide(first_lanes(seen - j), next, top);
        top = larger(top, next);
    }
    return max_of_wide(top);
}

/* rows[r] = table + (first + r) · stride, for m rows. */
#define POINT(rows, table, first, stride, m) \
    for (int64_t point = 0; point < (m); point++) (rows)[point] = (table) + ((first) + point) * (stride)

/* All strides are in floats between tokens; heads lie dense. out is [T, H, d], lse [T, H]. */
int doc_attention(const float *q, const float *k, const float *v, const int64_t *starts, float *out, float *lse, int64_t docs,
                  int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t heads, int64_t kv_heads, int64_t dim, int64_t longest,
                  float scale) {
    int64_t most = round_up(longest, WIDE), group = heads / kv_heads;
    Ahead nothing = {NULL, NULL, 1}; /* it all fits into the cache */
    float *k_t = malloc((size_t)(most * (dim + TILE_ROWS) + 1) * sizeof *k_t), *scores = k_t + most * dim;
    if (k_t == NULL) return NO_MEMORY;
    for (int64_t doc = 0; doc < docs; doc++) {
        int64_t t0 = starts[doc], n = starts[doc + 1] - t0, wide = round_up(n, WIDE);
        for (int64_t h = 0; h < heads; h++) {
            int64_t g = h / group;
            if (h % group == 0) transpose_padded(k + t0 * k_stride + g * dim, n, k_stride, dim, wide, k_t);
            for (int64_t i = 0; i < n; i += TILE_ROWS) {
                int64_t m = least(TILE_ROWS, n - i), columns = round_up(i + m, WIDE);
                const float *query[TILE_ROWS], *p[TILE_ROWS];
                float *row[TILE_ROWS], *to[TILE_ROWS];
                POINT(query, q + h * dim, t0 + i, q_stride, m);
                POINT(p, scores, 0, most, m);
                POINT(row, scores, 0, most, m);
                POINT(to, out + h * dim, t0 + i, heads * dim, m);
                tile_rows((int)m, query, 1, k_t, wide, dim, row, 0, columns, 0, &nothing);
                float total[TILE_ROWS];
                for (int64_t r = 0; r < m; r++) {
                    float top = largest(row[r], i + r + 1) * scale;
                    total[r] = exponentials(row[r], i + r + 1, columns, scale, top);
                    lse[(t0 + i + r) * heads + h] = top + logf(total[r]);
                }
                tile_rows((int)m, p, 1, v + t0 * v_stride + g * dim, v_stride, i + m, to, 0, dim, 0, &nothing);
                for (int64_t r = 0; r < m; r++)
                    for (int64_t c = 0; c < dim; c += 8) store(to[r] + c, load(to[r] + c) / total[r]);
            }
        }
    }
    free(k_t);
    return OK;
}

/* d_row = p · (d_row - delta) · scale: from dL/dp to dL/d(q · k). */
INLINE void softmax_backward(const float *p, float *d_row, int64_t columns, float delta, float scale) {
    for (int64_t j = 0; j < columns; j += WIDE) store_wide(d_row + j, load_wide(p + j) * (load_wide(d_row + j) - delta) * scale);
}

INLINE float dot(const float *a, const float *b, int64_t n) {
    v8 total = splat(0);
    for (int64_t i = 0; i < n; i += 8) total += load(a + i) * load(b + i);
    return sum(total);
}

/* to[key] += sum over the block's queries of weight[query, key] · rows[query]; queries before a key's tile have weight 0. */
static void add_to_keys(const float *weight, int64_t most, int64_t first, int64_t m, const float *rows, int64_t stride, float *to,
                        int64_t to_stride, int64_t dim) {
    Ahead nothing = {NULL, NULL, 1};
    for (int64_t key = 0; key < first + m; key += TILE_ROWS) {
        int64_t keys = least(TILE_ROWS, first + m - key), skip = key > first ? key - first : 0;
        const float *column[TILE_ROWS];
        float *target[TILE_ROWS];
        POINT(column, weight + skip * most + key, 0, 1, keys);
        POINT(target, to, key, to_stride, keys);
        tile_rows((int)keys, column, most, rows + skip * stride, stride, m - skip, target, 0, dim, 1, &nothing);
    }
}

/* out, d_out, dq are dense [T, H, d], dk and dv dense [T, G, d]. */
int doc_attention_backward(const float *q, const float *k, const float *v, const int64_t *starts, const float *out, const float *lse,
                           const float *d_out, float *dq, float *dk, float *dv, int64_t docs, int64_t q_stride, int64_t k_stride,
                           int64_t v_stride, int64_t heads, int64_t kv_heads, int64_t dim, int64_t longest, float scale) {
    int64_t most = round_up(longest, WIDE), group = heads / kv_heads, o_stride = heads * dim, kv_stride = kv_heads * dim;
    Ahead nothing = {NULL, NULL, 1};
    float *k_t = malloc((size_t)(2 * most * (dim + BLOCK) + 1) * sizeof *k_t);
    if (k_t == NULL) return NO_MEMORY;
    float *v_t = k_t + most * dim, *p = v_t + most * dim, *ds = p + most * BLOCK;
    memset(dk, 0, (size_t)(starts[docs] * kv_stride) * sizeof *dk);
    memset(dv, 0, (size_t)(starts[docs] * kv_stride) * sizeof *dv);
    for (int64_t doc = 0; doc < docs; doc++) {
        int64_t t0 = starts[doc], n = starts[doc + 1] - t0, wide = round_up(n, WIDE);
        for (int64_t h = 0; h < heads; h++) {
            int64_t g = h / group;
            const float *q_h = q + t0 * q_stride + h * dim, *k_h = k + t0 * k_stride + g * dim, *v_h = v + t0 * v_stride + g * dim;
            const float *o_h = out + t0 * o_stride + h * dim, *do_h = d_out + t0 * o_stride + h * dim;
            float *dq_h = dq + t0 * o_stride + h * dim;
            if (h % group == 0) transpose_padded(k_h, n, k_stride, dim, wide, k_t), transpose_padded(v_h, n, v_stride, dim, wide, v_t);
            for (int64_t first = 0; first < n; first += BLOCK) {
                int64_t block = least(BLOCK, n - first), reach = round_up(first + block, WIDE);
                for (int64_t i = first; i < first + block; i += TILE_ROWS) {
                    int64_t m = least(TILE_ROWS, first + block - i), columns = round_up(i + m, WIDE);
                    const float *query[TILE_ROWS], *slope[TILE_ROWS], *ds_row[TILE_ROWS];
                    float *p_row[TILE_ROWS], *d_row[TILE_ROWS], *to[TILE_ROWS];
                    POINT(query, q_h, i, q_stride, m);
                    POINT(slope, do_h, i, o_stride, m);
                    POINT(p_row, p, i - first, most, m);
                    POINT(d_row, ds, i - first, most, m);
                    POINT(ds_row, ds, i - first, most, m);
                    POINT(to, dq_h, i, o_stride, m);
                    tile_rows((int)m, query, 1, k_t, wide, dim, p_row, 0, columns, 0, &nothing);
                    tile_rows((int)m, slope, 1, v_t, wide, dim, d_row, 0, columns, 0, &nothing);
                    for (int64_t r = 0; r < m; r++) {
                        exponentials(p_row[r], i + r + 1, columns, scale, lse[(t0 + i + r) * heads + h]);
                        softmax_backward(p_row[r], d_row[r], columns, dot(slope[r], o_h + (i + r) * o_stride, dim), scale);
                        for (int64_t j = columns; j < reach; j++) p_row[r][j] = d_row[r][j] = 0;
                    }
                    tile_rows((int)m, ds_row, 1, k_h, k_stride, i + m, to, 0, dim, 0, &nothing);
                }
                add_to_keys(p, most, first, block, do_h + first * o_stride, o_stride, dv + t0 * kv_stride + g * dim, kv_stride, dim);
                add_to_keys(ds, most, first, block, q_h + first * q_stride, q_stride, dk + t0 * kv_stride + g * dim, kv_stride, dim);
            }
        }
    }
    free(k_t);
    return OK;
}
