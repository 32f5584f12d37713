/* Softmax statistics of rows of logits, and their gradient, without a second copy of the row. */
#include "shared.h"

/* 8 values from column j, those behind the row replaced by `fill`. */
INLINE v8 load_row(const float *row, int64_t j, int64_t columns, float fill) {
    if (j + 8 <= columns) return load(row + j);
    v8 x = splat(fill);
    for (int64_t i = j; i < columns; i++) x[i - j] = row[i];
    return x;
}

/* Per row with scale s: log p(target), entropy and log-sum-exp of softmax(s · logits). */
int logit_statistics(const float *logits, const int64_t *targets, const float *scale, float *logprobs, float *entropy, float *lse,
                     int64_t rows, int64_t vocab) {
    for (int64_t r = 0; r < rows; r++)
        if (targets[r] < 0 || targets[r] >= vocab) return BAD_INDEX;
    for (int64_t r = 0; r < rows; r++, logits += vocab) {
        v8 best = splat(-INFINITY), total = splat(0), weighted = splat(0);
        for (int64_t j = 0; j < vocab; j += 8) {
            v8 x = load_row(logits, j, vocab, -INFINITY);
            best = pick(x > best, x, best);
        }
        float top = max_of(best), s = scale[r];
        for (int64_t j = 0; j < vocab; j += 8) {
            v8 x = (load_row(logits, j, vocab, top) - top) * s, e = exp8(x);
            if (j + 8 > vocab) e = pick((v8i){0, 1, 2, 3, 4, 5, 6, 7} < (int32_t)(vocab - j), e, splat(0));
            total += e;
            weighted += e * x;
        }
        float norm = logf(sum(total));
        logprobs[r] = (logits[targets[r]] - top) * s - norm;
        entropy[r] = norm - sum(weighted) / sum(total);
        lse[r] = top * s + norm;
    }
    return OK;
}

/* logits <- factor · (onehot(target) - softmax(s · logits)), in place. */
void logit_slopes(float *logits, const int64_t *targets, const float *scale, const float *lse, const float *factor, int64_t rows,
                  int64_t vocab) {
    for (int64_t r = 0; r < rows; r++, logits += vocab) {
        int64_t j = 0;
        for (; j + 8 <= vocab; j += 8) store(logits + j, -factor[r] * exp8(load(logits + j) * scale[r] - lse[r]));
        for (; j < vocab; j++) logits[j] = -factor[r] * expf(logits[j] * scale[r] - lse[r]);
        logits[targets[r]] += factor[r];
    }
}
