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
