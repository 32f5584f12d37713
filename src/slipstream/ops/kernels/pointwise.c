/* RMS norm and rotary embedding. */
#include "shared.h"

/* `rows` tokens of `heads` vectors each; x has a stride between tokens, out is dense ------------------------------- */

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

/* With n = x / rms(x): dx = (w · dy - n · mean(w · dy · n)) / rms(x), d_weight = sum of dy · n. dy and dx are dense. Partial sums of
 * PART vectors keep the rounding error of d_weight small. */
int rms_norm_backward(const float *x, const float *weight, const float *dy, float *dx, float *d_weight, int64_t rows, int64_t heads,
                      int64_t stride, int64_t dim, float eps) {
    enum { PART = 64 };
    float *part = calloc((size_t)dim + 1, sizeof *part);
    if (part == NULL) return NO_MEMORY;
    memset(d_weight, 0, (size_t)dim * sizeof *d_weight);
    for (int64_t v = 0; v < rows * heads; v++, dy += dim, dx += dim) {
        const float *in = x + v / heads * stride + v % heads * dim;
        v8 squares = splat(0), along = splat(0);
        for (int64_t i = 0; i < dim; i += 8) {
            squares += load(in + i) * load(in + i);
            along += load(weight + i) * load(dy + i) * load(in + i);
        }
        float inverse = 1.0f / sqrtf(sum(squares) / (float)dim + eps), back = inverse * inverse * sum(along) / (float)dim;
        for (int64_t i = 0; i < dim; i += 8) {
            store(dx + i, inverse * (load(weight + i) * load(dy + i) - load(in + i) * back));
            store(part + i, load(part + i) + load(dy + i) * load(in + i) * inverse);
        }
        if (v % PART != PART - 1 && v != rows * heads - 1) continue;
        for (int64_t i = 0; i < dim; i += 8) {
            store(d_weight + i, load(d_weight + i) + load(part + i));
            store(part + i, splat(0));
        }
    }
    free(part);
    return OK;
}

static void rotate_back(const float *restrict d, const float *restrict cosine, const float *restrict sine, float *restrict out,
                        int64_t heads, int64_t dim, int64_t rotary) {
    int64_t half = rotary / 2;
    for (int64_t h = 0; h < heads; h++, d += dim, out += dim) {
        for (int64_t i = 0; i < half; i++) {
            out[i] = d[i] * cosine[i] + d[i + half] * sine[i + half];
            out[i + half] = d[i + half] * cosine[i + half] - d[i] * sine[i];
        }
        for (int64_t i = rotary; i < dim; i++) out[i] = d[i];
    }
}

/* The transposed rotation: from the gradients of the rotated heads (dense) to those of the heads. */
void rope_backward(const float *dq, const float *dk, const float *cosine, const float *sine, float *q_out, float *k_out, int64_t tokens,
                   int64_t heads, int64_t kv_heads, int64_t dim, int64_t rotary) {
    for (int64_t t = 0; t < tokens; t++, cosine += rotary, sine += rotary) {
        rotate_back(dq + t * heads * dim, cosine, sine, q_out + t * heads * dim, heads, dim, rotary);
        rotate_back(dk + t * kv_heads * dim, cosine, sine, k_out + t * kv_heads * dim, kv_heads, dim, rotary);
    }
}
