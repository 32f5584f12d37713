/* One serving step of a whole decoder: embedding, every layer, final norm. The same arithmetic as the models' forward pass, composed of
 * the kernels of this folder, without returning to Python between them: for small models that is where the time goes.
 *
 * Matrices and KV cache are floats or bf16; what lies between them are floats. With bf16 these are rounded wherever an operation of the
 * model's forward pass hands on a bf16 tensor, so that both round alike; sums, norms, rotation, attention and router are not.
 *
 * Every product is a chain of multiply-adds in a fixed order, so a token's result does not depend on the rest of the batch. */
#include "product.h"

void rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t heads, int64_t stride, int64_t dim, float eps);
void rope(const float *q, const float *k, const float *cosine, const float *sine, float *q_out, float *k_out, int64_t tokens,
          int64_t heads, int64_t kv_heads, int64_t q_stride, int64_t k_stride, int64_t dim, int64_t rotary);
int write_kv(const float *k, const float *v, float *k_cache, float *v_cache, const int64_t *slots, int64_t tokens, int64_t k_stride,
             int64_t v_stride, int64_t width, int64_t num_slots);
int write_kv_bf16(const float *k, const float *v, uint16_t *k_cache, uint16_t *v_cache, const int64_t *slots, int64_t tokens,
                  int64_t k_stride, int64_t v_stride, int64_t width, int64_t num_slots);
int paged_attention(const float *q, const float *k_cache, const float *v_cache, const int32_t *table, const int32_t *starts,
                    const int32_t *context, float *out, int64_t sequences, int64_t table_width, int64_t q_stride, int64_t tokens,
                    int64_t heads, int64_t kv_heads, int64_t dim, int64_t blocks, int64_t block, float scale);
int paged_attention_bf16(const float *q, const uint16_t *k_cache, const uint16_t *v_cache, const int32_t *table, const int32_t *starts,
                         const int32_t *context, float *out, int64_t sequences, int64_t table_width, int64_t q_stride, int64_t tokens,
                         int64_t heads, int64_t kv_heads, int64_t dim, int64_t blocks, int64_t block, float scale);
int experts(const float *x, const int64_t *ids, const float *gates, const float *gate_up, const float *down, float *y, float *hidden,
            const float *after, int64_t tokens, int64_t top_k, int64_t num_experts, int64_t dim, int64_t inner);

int experts_bf16(const float *x, const int64_t *ids, const float *gates, const uint16_t *gate_up, const uint16_t *down, float *y,
                 const uint16_t *after, int64_t tokens, int64_t top_k, int64_t num_experts, int64_t dim, int64_t inner);

/* The structs are mirrored field by field in fused.py. Pointers that a model does not have are NULL. */
typedef struct {
    const float *attention_norm, *qkv_bias, *q_norm, *k_norm, *out_bias, *ffn_norm;
    const void *qkv, *out, *router; /* no router: dense, which is one expert with gate 1 */
    const void *gate_up, *down;
    void *keys, *values;
    int64_t inner;
} Layer;

typedef struct {
    int64_t num_layers, hidden, heads, kv_heads, head_dim, num_experts, top_k, norm_top_k, vocab, positions, num_blocks, block_tokens;
    int64_t moe_layers, row_bytes, kind; /* FLOAT or BF16: of matrices, embedding and KV cache */
    const Layer *layers;
    const void *embed;
    const float *norm, *cosine, *sine;
    void *routing; /* [slots, moe_layers, top_k], unsigned integers of row_bytes; NULL: not wanted */
    int64_t *load; /* [moe_layers, num_experts] */
    double eps, scale;
} Decoder;

typedef struct {
    const int64_t *tokens, *positions, *slots;
    const int32_t *table, *starts, *context;
    int64_t count, sequences, table_width;
} Step;

enum { ROWS = 96 };

/* c = a · b for `n` dense rows; b is [depth, columns]. */
static void times(const Decoder *m, const float *a, int64_t n, const void *b, int64_t depth, int64_t columns, float *c) {
    const float *from[ROWS];
    float *to[ROWS];
    for (int64_t at = 0; at < n; at += ROWS) {
        int64_t rows = least(n - at, ROWS);
        for (int64_t r = 0; r < rows; r++) from[r] = a + (at + r) * depth, to[r] = c + (at + r) * columns;
        if (m->kind == BF16) rows_times_bf16(rows, from, b, depth, columns, to, NULL);
        else rows_times(rows, from, 1, b, depth, columns, to, 0, NULL);
    }
}

/* x is what an operation of the model hands on. */
static void keep(const Decoder *m, float *x, int64_t n) {
    if (m->kind == BF16) round_all(x, n);
}

/* The residual stream. */
static void add_to(const Decoder *m, float *x, const float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) store(x + i, load(x + i) + load(y + i));
    keep(m, x, n);
}

static void norm(const Decoder *m, const float *x, const float *weight, float *out, int64_t rows, int64_t heads, int64_t stride,
                 int64_t dim) {
    rms_norm(x, weight, out, rows, heads, stride, dim, (float)m->eps);
    keep(m, out, rows * heads * dim);
}

static void add_bias(float *x, const float *bias, int64_t rows, int64_t columns) {
    for (int64_t r = 0; bias != NULL && r < rows; r++)
        for (int64_t i = 0; i < columns; i++) x[r * columns + i] += bias[i];
}

/* The top_k best of `scores`, best first, and their softmax weights (over the chosen, or over all). */
static void choose(const float *scores, const Decoder *m, int64_t *ids, float *gates) {
    for (int64_t k = 0; k < m->top_k; k++) {
        int64_t best = -1;
        for (int64_t e = 0; e < m->num_experts; e++) {
            int taken = 0;
            for (int64_t j = 0; j < k; j++) taken |= ids[j] == e;
            if (!taken && (best < 0 || scores[e] > scores[best])) best = e;
        }
        ids[k] = best;
    }
    float total = 0, top = scores[ids[0]];
    for (int64_t k = 0; k < m->top_k; k++) gates[k] = expf(scores[ids[k]] - top);
    if (m->norm_top_k)
        for (int64_t k = 0; k < m->top_k; k++) total += gates[k];
    else
        for (int64_t e = 0; e < m->num_experts; e++) total += expf(scores[e] - top);
    for (int64_t k = 0; k < m->top_k; k++) gates[k] /= total;
}

static void record(const Decoder *m, const Step *s, int64_t moe_layer, const int64_t *ids) {
    if (m->routing == NULL) return;
    for (int64_t t = 0; t < s->count; t++)
        for (int64_t k = 0; k < m->top_k; k++) {
            int64_t id = ids[t * m->top_k + k], at = (s->slots[t] * m->moe_layers + moe_layer) * m->top_k + k;
            if (m->row_bytes == 1) ((uint8_t *)m->routing)[at] = (uint8_t)id;
            else ((uint16_t *)m->routing)[at] = (uint16_t)id;
            m->load[moe_layer * m->num_experts + id]++;
        }
}

int64_t decoder_scratch(const Decoder *m, int64_t tokens) {
    int64_t experts = m->num_experts > 0 ? m->num_experts : 1, top_k = m->top_k > 0 ? m->top_k : 1;
    int64_t heads = 3 * m->heads + 4 * m->kv_heads;
    return tokens * (3 * m->hidden + heads * m->head_dim + experts + 3 * top_k) + 64;
}

/* Keys and values go into the cache, and the queries meet it. */
static int attend(const Decoder *m, const Layer *l, const Step *s, const float *q, const float *k, const float *v, int64_t v_stride,
                  float *out) {
    int64_t n = s->count, d = m->head_dim, width = m->kv_heads * d, slots = m->num_blocks * m->block_tokens;
#define ATTEND(WRITE, READ)                                                                                                       \
    code = WRITE(k, v, l->keys, l->values, s->slots, n, width, v_stride, width, slots);                                           \
    if (code == OK)                                                                                                               \
    code = READ(q, l->keys, l->values, s->table, s->starts, s->context, out, s->sequences, s->table_width, m->heads * d, n, m->heads, \
                m->kv_heads, d, m->num_blocks, m->block_tokens, (float)m->scale)
    int code;
    if (m->kind == BF16) {
        ATTEND(write_kv_bf16, paged_attention_bf16);
    } else {
        ATTEND(write_kv, paged_attention);
    }
#undef ATTEND
    return code;
}

static int attention(const Decoder *m, const Layer *l, const Step *s, float *x, const float *normed, float *y, float *qkv, float *q,
                     float *k, float *out) {
    int64_t n = s->count, d = m->head_dim, columns = (m->heads + 2 * m->kv_heads) * d, width = m->kv_heads * d;
    int64_t q_stride = columns, k_stride = columns;
    times(m, normed, n, l->qkv, m->hidden, columns, qkv);
    add_bias(qkv, l->qkv_bias, n, columns);
    keep(m, qkv, n * columns);
    const float *q_in = qkv, *k_in = qkv + m->heads * d, *v = k_in + width;
    float *q_rope = q + n * m->heads * d, *k_rope = k + n * width;
    if (l->q_norm != NULL) {
        norm(m, q_in, l->q_norm, q, n, m->heads, columns, d);
        norm(m, k_in, l->k_norm, k, n, m->kv_heads, columns, d);
        q_in = q, k_in = k, q_stride = m->heads * d, k_stride = width;
    }
    for (int64_t t = 0; t < n; t++)
        rope(q_in + t * q_stride, k_in + t * k_stride, m->cosine + s->positions[t] * d, m->sine + s->positions[t] * d,
             q_rope + t * m->heads * d, k_rope + t * width, 1, m->heads, m->kv_heads, q_stride, k_stride, d, d);
    keep(m, q_rope, n * m->heads * d), keep(m, k_rope, n * width);
    int code = attend(m, l, s, q_rope, k_rope, v, columns, out);
    if (code != OK) return code;
    keep(m, out, n * m->heads * d);
    times(m, out, n, l->out, m->heads * d, m->hidden, y);
    add_bias(y, l->out_bias, n, m->hidden);
    keep(m, y, n * m->hidden);
    add_to(m, x, y, n * m->hidden);
    return OK;
}

static int feed_forward(const Decoder *m, const Layer *l, const Step *s, int64_t moe_layer, float *x, const float *normed, float *y,
                        float *scores, float *gates, int64_t *ids, const void *after) {
    int64_t n = s->count, num_experts = 1, top_k = 1;
    int code;
    if (l->router != NULL) {
        num_experts = m->num_experts, top_k = m->top_k;
        times(m, normed, n, l->router, m->hidden, num_experts, scores);
        for (int64_t t = 0; t < n; t++) choose(scores + t * num_experts, m, ids + t * top_k, gates + t * top_k);
        record(m, s, moe_layer, ids);
    } else {
        for (int64_t t = 0; t < n; t++) ids[t] = 0, gates[t] = 1;
    }
    if (m->kind == BF16)
        code = experts_bf16(normed, ids, gates, l->gate_up, l->down, y, after, n, top_k, num_experts, m->hidden, l->inner);
    else code = experts(normed, ids, gates, l->gate_up, l->down, y, NULL, after, n, top_k, num_experts, m->hidden, l->inner);
    if (code == OK) add_to(m, x, y, n * m->hidden);
    return code;
}

/* `scratch`: decoder_scratch(m, count) floats. `out` [count, hidden]: hidden states after the final norm. */
int decoder_forward(const Decoder *m, const Step *s, float *scratch, float *out) {
    int64_t n = s->count, d = m->head_dim, moe_layer = 0, top_k = m->top_k > 0 ? m->top_k : 1;
    for (int64_t t = 0; t < n; t++)
        if (s->tokens[t] < 0 || s->tokens[t] >= m->vocab || s->positions[t] < 0 || s->positions[t] >= m->positions) return BAD_INDEX;
    int64_t *ids = (int64_t *)scratch;
    float *x = scratch + 2 * n * top_k + 8, *normed = x + n * m->hidden, *y = normed + n * m->hidden;
    float *qkv = y + n * m->hidden, *q = qkv + n * (m->heads + 2 * m->kv_heads) * d, *k = q + 2 * n * m->heads * d;
    float *scores = k + 2 * n * m->kv_heads * d, *gates = scores + n * (m->num_experts > 0 ? m->num_experts : 1);
    for (int64_t t = 0; t < n; t++) {
        int64_t at = s->tokens[t] * m->hidden;
        if (m->kind == BF16) from_bf16((const uint16_t *)m->embed + at, m->hidden, x + t * m->hidden);
        else memcpy(x + t * m->hidden, (const float *)m->embed + at, (size_t)m->hidden * sizeof *x);
    }
    for (int64_t i = 0; i < m->num_layers; i++) {
        const Layer *l = m->layers + i;
        norm(m, x, l->attention_norm, normed, n, 1, m->hidden, m->hidden);
        int code = attention(m, l, s, x, normed, y, qkv, q, k, q); /* the attention output overwrites the queries before rotation */
        if (code != OK) return code;
        norm(m, x, l->ffn_norm, normed, n, 1, m->hidden, m->hidden);
        code = feed_forward(m, l, s, moe_layer, x, normed, y, scores, gates, ids, i + 1 < m->num_layers ? l[1].qkv : NULL);
        if (code != OK) return code;
        moe_layer += l->router != NULL;
    }
    norm(m, x, m->norm, out, n, 1, m->hidden, m->hidden);
    return OK;
}

/* out [n, vocab] = hidden [n, dim] · headᵀ. `head`, floats or bf16 as `kind` says, lies in panels of HEAD_COLUMNS tokens (fewer in the last),
 * each [dim, tokens]. `rounding`: logits are rounded to bf16. */
void logits(const float *hidden, const void *head, float *out, int64_t n, int64_t dim, int64_t vocab, int64_t kind, int64_t rounding) {
    enum { HEAD_COLUMNS = 256, MOST = 256 };
    const float *from[MOST];
    float *to[MOST];
    for (int64_t at = 0; at < n; at += MOST)
        for (int64_t v = 0; v < vocab; v += HEAD_COLUMNS) {
            int64_t rows = least(MOST, n - at), columns = least(HEAD_COLUMNS, vocab - v), next = v + columns;
            for (int64_t r = 0; r < rows; r++) from[r] = hidden + (at + r) * dim, to[r] = out + (at + r) * vocab + v;
            const char *panel = (const char *)head + v * dim * size_of((int)kind);
            const void *after = next < vocab ? panel + columns * dim * size_of((int)kind) : NULL;
            if (kind == BF16) rows_times_bf16(rows, from, (const uint16_t *)panel, dim, columns, to, after);
            else rows_times(rows, from, 1, (const float *)panel, dim, columns, to, 0, after);
            for (int64_t r = 0; rounding && r < rows; r++) round_all(to[r], columns);
        }
}
