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
