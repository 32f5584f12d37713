/* Expert feed-forward networks: y = sum_k gate_k · down(silu(gate(x)) · up(x)), forward and backward. */
#include "product.h"

enum { CHUNK = 96 }; /* rows of one expert in flight: their activations stay in the L2 cache */

/* The (token, expert) pairs sorted by expert: pairs of expert e are order[start[e]] .. order[start[e + 1]]. start has E + 2 places. */
static void sort_pairs(const int64_t *ids, int64_t pairs, int64_t num_experts, int64_t *start, int64_t *order) {
    memset(start, 0, (size_t)(num_experts + 2) * sizeof *start);
    for (int64_t i = 0; i < pairs; i++) start[ids[i] + 2]++;
    for (int64_t e = 0; e < num_experts; e++) start[e + 2] += start[e + 1];
    for (int64_t i = 0; i < pairs; i++) order[start[ids[i] + 1]++] = i;
}

INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exp_wide(-x)); }

/* A result of the model's own operations: in bf16 every one of them rounds. */
INLINE vec kept(const int kind, vec x) { return kind == BF16 ? rounded(x) : x; }

/* act = silu(gate) · up of one row [gate | up]. */
INLINE void activate(const int kind, const float *row, int64_t inner, float *act) {
    for (int64_t i = 0; i < inner; i += WIDE) {
        vec gate = kept(kind, load_next(row + i, inner - i)), up = kept(kind, load_next(row + inner + i, inner - i));
        store_next(act + i, inner - i, kept(kind, kept(kind, gate * sigmoid(gate)) * up));
    }
}

/* to += factor · row, a sum of floats in bf16 as well. The rows of a product are added to those of their tokens here: a token may have the
 * same expert twice. */
INLINE void add_row(const int kind, const float *row, float factor, int64_t dim, float *to) {
    vec by = kept(kind, splat_wide(factor));
    for (int64_t i = 0; i < dim; i += WIDE) {
        vec part = kept(kind, by * kept(kind, load_next(row + i, dim - i)));
        store_next(to + i, dim - i, load_next(to + i, dim - i) + part);
    }
}

/* Rows times one of a stack of matrices; see product.h. */
INLINE void times(const int kind, int64_t n, const float *const *a, const void *b, int64_t depth, int64_t columns, float *const *c,
                  const void *next) {
    if (kind == BF16) rows_times_bf16(n, a, b, depth, columns, c, next);
    else rows_times(n, a, 1, b, depth, columns, c, 0, next);
}

/* `kind` of the weights. With BF16, x is rounded and y is. */
INLINE int forward(const int kind, const float *x, const int64_t *ids, const float *gates, const void *gate_up, const void *down, float *y,
                   float *hidden, const void *after, int64_t tokens, int64_t top_k, int64_t num_experts, int64_t dim, int64_t inner) {
    int64_t pairs = tokens * top_k, wide = 2 * inner, matrix = size_of(kind) * inner * dim;
    const char *ups = gate_up, *downs = down;
    for (int64_t i = 0; i < pairs; i++)
        if (ids[i] < 0 || ids[i] >= num_experts) return BAD_INDEX;
    int64_t *start = malloc((size_t)(num_experts + 2 + pairs) * sizeof *start), *order = start + num_experts + 2;
    float *scratch = malloc((size_t)(CHUNK * (3 * inner + dim)) * sizeof *scratch);
    if (start == NULL || scratch == NULL) {
        free(start), free(scratch);
        return NO_MEMORY;
    }
    sort_pairs(ids, pairs, num_experts, start, order);
    memset(y, 0, (size_t)(tokens * dim) * sizeof *y);
    for (int64_t e = 0; e < num_experts; e++)
        for (int64_t at = start[e]; at < start[e + 1]; at += CHUNK) {
            int64_t n = least(start[e + 1] - at, CHUNK), next = e;
            while (next < num_experts && start[next + 1] <= at + n) next++; /* whose pairs follow */
            const float *in[CHUNK], *act[CHUNK];
            float *mid[CHUNK], *out[CHUNK];
            for (int64_t r = 0; r < n; r++) {
                in[r] = x + order[at + r] / top_k * dim;
                mid[r] = hidden ? hidden + (at + r) * wide : scratch + r * wide;
                act[r] = scratch + CHUNK * wide + r * inner, out[r] = scratch + CHUNK * 3 * inner + r * dim;
            }
            times(kind, n, in, ups + 2 * e * matrix, dim, wide, mid, downs + e * matrix);
            for (int64_t r = 0; r < n; r++) activate(kind, mid[r], inner, scratch + CHUNK * wide + r * inner);
            times(kind, n, act, downs + e * matrix, inner, dim, out, next < num_experts ? ups + 2 * next * matrix : after);
            for (int64_t r = 0; r < n; r++) add_row(kind, out[r], gates[order[at + r]], dim, y + order[at + r] / top_k * dim);
        }
    if (kind == BF16) round_all(y, tokens * dim);
    free(start), free(scratch);
    return OK;
}

/* `hidden` [pairs, 2 inner], in sorted order, keeps what the backward pass needs; NULL when there will be none. `after`: the matrix of the
 * next product, of which the first rows come into the cache; NULL: none. */
int experts(const float *x, const int64_t *ids, const float *gates, const float *gate_up, const float *down, float *y, float *hidden,
            const float *after, int64_t tokens, int64_t top_k, int64_t num_experts, int64_t dim, int64_t inner) {
    return forward(FLOAT, x, ids, gates, gate_up, down, y, hidden, after, tokens, top_k, num_experts, dim, inner);
}

/* The same with bf16 weights, rounded wherever `experts_reference` rounds. No gradient. */
int experts_bf16(const float *x, const int64_t *ids, const float *gates, const uint16_t *gate_up, const uint16_t *down, float *y,
                 const uint16_t *after, int64_t tokens, int64_t top_k, int64_t num_experts, int64_t dim, int64_t inner) {
    return forward(BF16, x, ids, gates, gate_up, down, y, NULL, after, tokens, top_k, num_experts, dim, inner);
}

/* y = sum_k gate_k · rows_k of results that were computed elsewhere, one row a pair: the sums of `experts`, in its order. */
int combine_experts(const float *rows, const int64_t *ids, const float *gates, float *y, int64_t tokens, int64_t top_k, int64_t num_experts,
                    int64_t dim) {
    int64_t pairs = tokens * top_k;
    int64_t *start = malloc((size_t)(num_experts + 2 + pairs) * sizeof *start), *order = start + num_experts + 2;
    if (start == NULL) return NO_MEMORY;
    for (int64_t i = 0; i < pairs; i++)
        if (ids[i] < 0 || ids[i] >= num_experts) {
            free(start);
            return BAD_INDEX;
        }
    sort_pairs(ids, pairs, num_experts, start, order);
    memset(y, 0, (size_t)(tokens * dim) * sizeof *y);
    for (int64_t i = 0; i < pairs; i++) add_row(FLOAT, rows + order[i] * dim, gates[order[i]], dim, y + order[i] / top_k * dim);
    free(start);
    return OK;
}

/* out [rows, columns] (+)= aᵀ · b with a [n, rows] and b [n, columns]. */
static void outer(int64_t n, const float *a, int64_t rows, const float *b, int64_t columns, float *out, int add) {
    for (int64_t at = 0; at < rows; at += CHUNK) {
        int64_t m = least(rows - at, CHUNK);
        const float *from[CHUNK];
        float *to[CHUNK];
        for (int64_t r = 0; r < m; r++) from[r] = a + at + r, to[r] = out + (at + r) * columns;
        rows_times(m, from, rows, b, n, columns, to, add, NULL);
    }
}

/* One row backwards: from d = dL/d(act) / gate to dL/d[gate | up] and gate · act; returns dL/d(gate weight). */
static float activate_backward(const float *row, const float *d, float weight, int64_t inner, float *d_row, float *weighted) {
    vec total = splat_wide(0);
    for (int64_t i = 0; i < inner; i += WIDE) {
        int64_t left = inner - i;
        vec gate = load_next(row + i, left), up = load_next(row + inner + i, left), slope = load_next(d + i, left);
        vec s = sigmoid(gate), silu = gate * s;
        total += slope * silu * up;
        store_next(weighted + i, left, weight * silu * up);
        store_next(d_row + i, left, weight * slope * up * s * (1.0f + gate * (1.0f - s)));
        store_next(d_row + inner + i, left, weight * slope * silu);
    }
    return sum_wide(total);
}

int experts_backward(const float *x, const int64_t *ids, const float *gates, const float *gate_up, const float *down,
                     const float *hidden, const float *dy, float *dx, float *d_gates, float *d_gate_up, float *d_down, int64_t tokens,
                     int64_t top_k, int64_t num_experts, int64_t dim, int64_t inner) {
    int64_t pairs = tokens * top_k, wide = 2 * inner;
    int64_t *start = malloc((size_t)(num_experts + 2 + pairs) * sizeof *start), *order = start + num_experts + 2;
    float *up_t = malloc((size_t)(3 * inner * dim + CHUNK * (3 * dim + 4 * inner)) * sizeof *up_t);
    if (start == NULL || up_t == NULL) {
        free(start), free(up_t);
        return NO_MEMORY;
    }
    float *down_t = up_t + wide * dim, *xs = down_t + dim * inner, *dys = xs + CHUNK * dim, *d_act = dys + CHUNK * dim;
    float *d_hidden = d_act + CHUNK * inner, *weighted = d_hidden + CHUNK * wide, *d_xs = weighted + CHUNK * inner;
    sort_pairs(ids, pairs, num_experts, start, order);
    memset(dx, 0, (size_t)(tokens * dim) * sizeof *dx);
    for (int64_t e = 0; e < num_experts; e++) {
        if (start[e] == start[e + 1]) {
            memset(d_gate_up + e * dim * wide, 0, (size_t)(dim * wide) * sizeof *d_gate_up);
            memset(d_down + e * inner * dim, 0, (size_t)(inner * dim) * sizeof *d_down);
            continue;
        }
        transpose(gate_up + e * dim * wide, wide, dim, wide, up_t, dim);
        transpose(down + e * inner * dim, dim, inner, dim, down_t, inner);
        for (int64_t at = start[e]; at < start[e + 1]; at += CHUNK) {
            int64_t n = least(start[e + 1] - at, CHUNK);
            const float *in[CHUNK], *back[CHUNK];
            float *mid[CHUNK], *to[CHUNK];
            for (int64_t r = 0; r < n; r++) {
                int64_t token = order[at + r] / top_k;
                memcpy(xs + r * dim, x + token * dim, (size_t)dim * sizeof *x);
                memcpy(dys + r * dim, dy + token * dim, (size_t)dim * sizeof *dy);
                in[r] = dys + r * dim, mid[r] = d_act + r * inner, back[r] = d_hidden + r * wide, to[r] = d_xs + r * dim;
            }
            rows_times(n, in, 1, down_t, dim, inner, mid, 0, NULL);
            for (int64_t r = 0; r < n; r++) {
                int64_t pair = order[at + r];
                d_gates[pair] = activate_backward(hidden + (at + r) * wide, mid[r], gates[pair], inner, d_hidden + r * wide, weighted + r * inner);
            }
            rows_times(n, back, 1, up_t, wide, dim, to, 0, NULL);
            for (int64_t r = 0; r < n; r++) add_row(FLOAT, to[r], 1, dim, dx + order[at + r] / top_k * dim);
            outer(n, xs, dim, d_hidden, wide, d_gate_up + e * dim * wide, at > start[e]);
            outer(n, weighted, inner, dys, dim, d_down + e * inner * dim, at > start[e]);
        }
    }
    free(start), free(up_t);
    return OK;
}
