/* Attention over a paged KV cache, and writing to it. */
#include "shared.h"

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

enum { TOKENS = 64 }; /* per pass of the online softmax: their keys and values stay in the L2 cache while all heads pass */

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

/* query · k[at[j]] for WIDE tokens. */
INLINE vec scores_of(const float *query, const float *k, const int64_t *at, int64_t dim) {
    vec dots[WIDE];
    int64_t i = 0;
#pragma GCC unroll 16
    for (int j = 0; j < WIDE; j++) dots[j] = splat_wide(0);
    for (; i + WIDE <= dim; i += WIDE) {
        vec part = load_wide(query + i);
#pragma GCC unroll 16
        for (int j = 0; j < WIDE; j++) dots[j] += part * load_wide(k + at[j] + i);
    }
    if (i < dim) {
        vec part = load_half(query + i);
#pragma GCC unroll 16
        for (int j = 0; j < WIDE; j++) dots[j] += part * load_half(k + at[j] + i);
    }
    return sum_each(dots);
}

/* to[r] = to[r] · shrink[r] + sum_j p[r][j] · v[at[j]] for `m` rows and `nv` vecs of features (`half`: the only one is half); n is even.
 * Two chains hide the latency of an addition. */
INLINE void add_values(const int m, const int nv, const int half, float *to, int64_t to_stride, const float *shrink, const float *p,
                       const float *v, const int64_t *at, int64_t n) {
    vec even[2][4], odd[2][4];
#pragma GCC unroll 8
    for (int r = 0; r < m; r++)
#pragma GCC unroll 8
        for (int i = 0; i < nv; i++) {
            float *from = to + r * to_stride + WIDE * i;
            even[r][i] = (half ? load_half(from) : load_wide(from)) * shrink[r], odd[r][i] = splat_wide(0);
        }
    for (int64_t j = 0; j < n; j += 2)
#pragma GCC unroll 8
        for (int i = 0; i < nv; i++) {
            const float *one = v + at[j] + WIDE * i, *two = v + at[j + 1] + WIDE * i;
            vec first = half ? load_half(one) : load_wide(one), second = half ? load_half(two) : load_wide(two);
#pragma GCC unroll 8
            for (int r = 0; r < m; r++) {
                even[r][i] += p[r * TOKENS + j] * first;
                odd[r][i] += p[r * TOKENS + j + 1] * second;
            }
        }
#pragma GCC unroll 8
    for (int r = 0; r < m; r++)
#pragma GCC unroll 8
        for (int i = 0; i < nv; i++) {
            float *into = to + r * to_stride + WIDE * i;
            if (half) store_half(into, even[r][i] + odd[r][i]);
            else store_wide(into, even[r][i] + odd[r][i]);
        }
}

/* What the online softmax (Milakov and Gimelshein, 2018) knows of a query head after some of its tokens. */
typedef struct {
    float top, weight;
} Seen;

/* `m` query heads (1 or 2) that share a key head meet `left` more tokens. `k` and `v` point at the head's features in slot 0 of the
 * cache; at[j] is the offset of token j's slot, repeated behind the last so that a whole vec can be read. */
INLINE void attend(const int m, const float *q, const float *k, const float *v, const int64_t *at, int64_t left, int64_t dim, float scale,
                   Seen *state, float *out) {
    float p[2 * TOKENS], shrink[2];
    int64_t n = round_up(left, WIDE);
    for (int r = 0; r < m; r++) {
        float *row = p + r * TOKENS;
        vec best = splat_wide(-INFINITY), sums = splat_wide(0);
        for (int64_t j = 0; j < n; j += WIDE) {
            vec scores = scores_of(q + r * dim, k, at + j, dim) * scale;
            if (j + WIDE > left) scores = pick_wide(first_lanes(left - j), scores, splat_wide(-INFINITY));
            best = larger(best, scores);
            store_wide(row + j, scores);
        }
        float here = max_of_wide(best);
        shrink[r] = 1;
        if (here > state[r].top) shrink[r] = expf(state[r].top - here), state[r].top = here;
        for (int64_t j = 0; j < n; j += WIDE) {
            vec e = exp_wide(load_wide(row + j) - state[r].top);
            if (j + WIDE > left) e = pick_wide(first_lanes(left - j), e, splat_wide(0));
            sums += e;
            store_wide(row + j, e);
        }
        state[r].weight = state[r].weight * shrink[r] + sum_wide(sums);
    }
    int64_t i = 0;
    n = round_up(left, 2);
    for (; i + 2 * WIDE <= dim; i += 2 * WIDE) add_values(m, 2, 0, out + i, dim, shrink, p, v + i, at, n);
    for (; i + WIDE <= dim; i += WIDE) add_values(m, 1, 0, out + i, dim, shrink, p, v + i, at, n);
    if (i < dim) add_values(m, 1, 1, out + i, dim, shrink, p, v + i, at, n);
}

/* TOKENS tokens of one sequence, from token `from` on: the offsets of their slots, the last one repeated behind the context. */
typedef struct {
    int64_t sequence, from, at[TOKENS];
} Chunk;

/* The paged batch, as paged_attention gets it. */
typedef struct {
    const int32_t *table, *starts, *context;
    int64_t sequences, table_width, block, width;
} Batch;

/* The first chunk of the batch at or after (sequence, from); 0: there is none. */
static int find_chunk(const Batch *b, int64_t sequence, int64_t from, Chunk *chunk) {
    for (; sequence < b->sequences; sequence++, from = 0) {
        if (b->starts[sequence + 1] == b->starts[sequence] || from >= b->context[sequence]) continue;
        const int32_t *table = b->table + sequence * b->table_width;
        int64_t number = from / b->block, in_block = from % b->block, left = b->context[sequence] - from;
        chunk->sequence = sequence, chunk->from = from;
        for (int64_t j = 0; j < TOKENS; j++) {
            chunk->at[j] = j < left ? (table[number] * b->block + in_block) * b->width : chunk->at[j - 1];
            if (++in_block == b->block) in_block = 0, number += j + 1 < left;
        }
        return 1;
    }
    return 0;
}

/* Part `i` of `n` of the keys and values of a chunk is wanted soon. */
INLINE void fetch(const float *k_cache, const float *v_cache, const Chunk *chunk, int64_t width, int64_t i, int64_t n) {
    for (int64_t j = TOKENS * i / n; j < TOKENS * (i + 1) / n; j++)
        for (int64_t c = 0; c < width; c += LINE) {
            __builtin_prefetch(k_cache + chunk->at[j] + c, 0, 2);
            __builtin_prefetch(v_cache + chunk->at[j] + c, 0, 2);
        }
}

static int misplaced(const int32_t *table, const int32_t *starts, const int32_t *context, int64_t sequences, int64_t table_width,
                     int64_t tokens, int64_t blocks, int64_t block) {
    if (starts[0] != 0 || starts[sequences] != tokens) return 1;
    for (int64_t s = 0; s < sequences; s++, table += table_width) {
        int64_t queries = starts[s + 1] - starts[s];
        if (queries < 0 || context[s] < queries || context[s] > table_width * block) return 1;
        for (int64_t i = 0; i * block < context[s]; i++)
            if (table[i] < 0 || table[i] >= blocks) return 1;
    }
    return 0;
}

int paged_attention(const float *q, const float *k_cache, const float *v_cache, const int32_t *table, const int32_t *starts,
                    const int32_t *context, float *out, int64_t sequences, int64_t table_width, int64_t q_stride, int64_t tokens,
                    int64_t heads, int64_t kv_heads, int64_t dim, int64_t blocks, int64_t block, float scale) {
    int64_t width = kv_heads * dim, group = heads / kv_heads;
    if (misplaced(table, starts, context, sequences, table_width, tokens, blocks, block)) return BAD_INDEX;
    Seen *states = malloc((size_t)(tokens * heads + 1) * sizeof *states);
    if (states == NULL) return NO_MEMORY;
    for (int64_t i = 0; i < tokens * heads; i++) states[i] = (Seen){-INFINITY, 0};
    memset(out, 0, (size_t)(tokens * heads * dim) * sizeof *out);
    const Batch batch = {table, starts, context, sequences, table_width, block, width};
    Chunk chunks[2], *here = chunks, *next = chunks + 1, *other;
    for (int more = find_chunk(&batch, 0, 0, here); more; other = here, here = next, next = other) {
        int64_t s = here->sequence, from = here->from, queries = starts[s + 1] - starts[s], first = context[s] - queries;
        more = find_chunk(&batch, s, from + TOKENS, next);
        for (int64_t g = 0; g < kv_heads; g++) {
            if (more) fetch(k_cache, v_cache, next, width, g, kv_heads);
            for (int64_t i = from > first ? from - first : 0; i < queries; i++) {
                int64_t left = least(first + i + 1 - from, TOKENS), at = (starts[s] + i) * heads + g * group, end = at + group;
                const float *query = q + (starts[s] + i) * q_stride + g * group * dim, *k = k_cache + g * dim, *v = v_cache + g * dim;
                for (; at + 2 <= end; at += 2, query += 2 * dim) attend(2, query, k, v, here->at, left, dim, scale, states + at, out + at * dim);
                if (at < end) attend(1, query, k, v, here->at, left, dim, scale, states + at, out + at * dim);
            }
        }
    }
    for (int64_t i = 0; i < tokens * heads; i++)
        for (int64_t c = 0; c < dim; c += 8) store(out + i * dim + c, load(out + i * dim + c) / states[i].weight);
    free(states);
    return OK;
}
