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

/* Rounded floats into a bf16 cache. */
int write_kv_bf16(const float *k, const float *v, uint16_t *k_cache, uint16_t *v_cache, const int64_t *slots, int64_t tokens,
                  int64_t k_stride, int64_t v_stride, int64_t width, int64_t num_slots) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] < 0 || slots[t] >= num_slots) return BAD_INDEX;
    for (int64_t t = 0; t < tokens; t++) {
        to_bf16(k + t * k_stride, width, k_cache + slots[t] * width);
        to_bf16(v + t * v_stride, width, v_cache + slots[t] * width);
    }
    return OK;
}

enum { TOKENS = 64 }; /* per pass of the online softmax: their keys and values stay in the L2 cache while all heads pass */

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

/* TOKENS tokens of one sequence, from token `from` on: the offsets of their slots, the last one repeated behind the context. */
typedef struct {
    int64_t sequence, from, at[TOKENS];
} Chunk;

/* Tokens [token, end) of a chunk whose keys and values are wanted soon. */
typedef struct {
    const Chunk *chunk;
    const float *k_cache, *v_cache;
    int64_t width, token, end;
} Wanted;

/* A few of them come into the L2 cache. Little by little: what waits for memory takes the places that reading from the L2 cache needs. */
INLINE void fetch(Wanted *w, int64_t tokens) {
    for (int64_t end = least(w->token + tokens, w->end); w->token < end; w->token++)
        for (int64_t c = w->chunk->at[w->token], row = c + w->width; c < row; c += LINE) {
            __builtin_prefetch(w->k_cache + c, 0, 2);
            __builtin_prefetch(w->v_cache + c, 0, 2);
        }
}

/* What the online softmax (Milakov and Gimelshein, 2018) knows of a query head after some of its tokens. */
typedef struct {
    float top, weight;
} Seen;

/* `m` query heads (1 or 2) that share a key head meet `left` more tokens. `k` and `v` point at the head's features in slot 0 of the
 * cache; at[j] is the offset of token j's slot, repeated behind the last so that a whole vec can be read. */
INLINE void attend(const int m, const float *q, const float *k, const float *v, const int64_t *at, int64_t left, int64_t dim, float scale,
                   Seen *state, float *out, Wanted *wanted) {
    float p[2 * TOKENS], shrink[2];
    int64_t n = round_up(left, WIDE), steps = 2 * m * (n / WIDE), share = (wanted->end - wanted->token + steps - 1) / steps;
    for (int r = 0; r < m; r++) {
        float *row = p + r * TOKENS;
        vec best = splat_wide(-INFINITY), sums = splat_wide(0);
        for (int64_t j = 0; j < n; j += WIDE) {
            vec scores = scores_of(q + r * dim, k, at + j, dim) * scale;
            if (j + WIDE > left) scores = pick_wide(first_lanes(left - j), scores, splat_wide(-INFINITY));
            best = larger(best, scores);
            store_wide(row + j, scores);
            fetch(wanted, share);
        }
        float here = max_of_wide(best);
        shrink[r] = 1;
        if (here > state[r].top) shrink[r] = expf(state[r].top - here), state[r].top = here;
        for (int64_t j = 0; j < n; j += WIDE) {
            vec e = exp_wide(load_wide(row + j) - state[r].top);
            if (j + WIDE > left) e = pick_wide(first_lanes(left - j), e, splat_wide(0));
            sums += e;
            store_wide(row + j, e);
            fetch(wanted, share);
        }
        state[r].weight = state[r].weight * shrink[r] + sum_wide(sums);
    }
    int64_t i = 0;
    n = round_up(left, 2);
    for (; i + 2 * WIDE <= dim; i += 2 * WIDE) add_values(m, 2, 0, out + i, dim, shrink, p, v + i, at, n);
    for (; i + WIDE <= dim; i += WIDE) add_values(m, 1, 0, out + i, dim, shrink, p, v + i, at, n);
    if (i < dim) add_values(m, 1, 1, out + i, dim, shrink, p, v + i, at, n);
}

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

/* Keys or values of one head and `count` tokens of a chunk, from bf16 to rows of floats. */
static void widen(const uint16_t *cache, const int64_t *at, int64_t count, int64_t dim, float *out) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t c = 0; c < dim; c++) {
            uint32_t bits = (uint32_t)cache[at[j] + c] << 16;
            memcpy(out + j * dim + c, &bits, sizeof bits);
        }
}

/* `half`: the cache is bf16, and each chunk of a head is widened once for all queries; else it is float. */
INLINE int paged(const int half, const float *q, const void *k_cache, const void *v_cache, const int32_t *table, const int32_t *starts,
                 const int32_t *context, float *out, int64_t sequences, int64_t table_width, int64_t q_stride, int64_t tokens,
                 int64_t heads, int64_t kv_heads, int64_t dim, int64_t blocks, int64_t block, float scale) {
    int64_t width = kv_heads * dim, group = heads / kv_heads, rows[TOKENS];
    if (misplaced(table, starts, context, sequences, table_width, tokens, blocks, block)) return BAD_INDEX;
    Seen *states = malloc((size_t)(tokens * heads + 1) * sizeof *states);
    float *wide = half ? malloc((size_t)(2 * TOKENS * dim) * sizeof *wide) : NULL;
    if (states == NULL || (half && wide == NULL)) {
        free(states), free(wide);
        return NO_MEMORY;
    }
    for (int64_t i = 0; i < tokens * heads; i++) states[i] = (Seen){-INFINITY, 0};
    for (int64_t j = 0; j < TOKENS; j++) rows[j] = j * dim;
    memset(out, 0, (size_t)(tokens * heads * dim) * sizeof *out);
    const Batch batch = {table, starts, context, sequences, table_width, block, width};
    Chunk chunks[2], *here = chunks, *next = chunks + 1, *other;
    for (int more = find_chunk(&batch, 0, 0, here); more; other = here, here = next, next = other) {
        int64_t s = here->sequence, from = here->from, queries = starts[s + 1] - starts[s], first = context[s] - queries;
        more = find_chunk(&batch, s, from + TOKENS, next);
        for (int64_t g = 0; g < kv_heads; g++) {
            const float *k = wide, *v = wide + TOKENS * dim;
            const int64_t *at = rows;
            Wanted wanted = {next, k_cache, v_cache, width, TOKENS * g / kv_heads, more && !half ? TOKENS * (g + 1) / kv_heads : 0};
            if (half) {
                int64_t count = least(round_up(context[s] - from, WIDE), TOKENS); /* find_chunk repeats the last token to the end */
                widen((const uint16_t *)k_cache + g * dim, here->at, count, dim, wide);
                widen((const uint16_t *)v_cache + g * dim, here->at, count, dim, wide + TOKENS * dim);
            } else {
                k = (const float *)k_cache + g * dim, v = (const float *)v_cache + g * dim, at = here->at;
            }
            for (int64_t i = from > first ? from - first : 0; i < queries; i++) {
                int64_t left = least(first + i + 1 - from, TOKENS), row = (starts[s] + i) * heads + g * group, end = row + group;
                const float *query = q + (starts[s] + i) * q_stride + g * group * dim;
                for (; row + 2 <= end; row += 2, query += 2 * dim)
                    attend(2, query, k, v, at, left, dim, scale, states + row, out + row * dim, &wanted);
                if (row < end) attend(1, query, k, v, at, left, dim, scale, states + row, out + row * dim, &wanted);
            }
        }
    }
    for (int64_t i = 0; i < tokens * heads; i++)
        for (int64_t c = 0; c < dim; c += 8) store(out + i * dim + c, load(out + i * dim + c) / states[i].weight);
    free(states), free(wide);
    return OK;
}

int paged_attention(const float *q, const float *k_cache, const float *v_cache, const int32_t *table, const int32_t *starts,
                    const int32_t *context, float *out, int64_t sequences, int64_t table_width, int64_t q_stride, int64_t tokens,
                    int64_t heads, int64_t kv_heads, int64_t dim, int64_t blocks, int64_t block, float scale) {
    return paged(0, q, k_cache, v_cache, table, starts, context, out, sequences, table_width, q_stride, tokens, heads, kv_heads, dim,
                 blocks, block, scale);
}

/* The same with a bf16 cache; queries and results are floats. */
int paged_attention_bf16(const float *q, const uint16_t *k_cache, const uint16_t *v_cache, const int32_t *table, const int32_t *starts,
                         const int32_t *context, float *out, int64_t sequences, int64_t table_width, int64_t q_stride, int64_t tokens,
                         int64_t heads, int64_t kv_heads, int64_t dim, int64_t blocks, int64_t block, float scale) {
    return paged(1, q, k_cache, v_cache, table, starts, context, out, sequences, table_width, q_stride, tokens, heads, kv_heads, dim,
                 blocks, block, scale);
}
