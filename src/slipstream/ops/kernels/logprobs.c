/* Softmax statistics of rows of logits, and their gradient, without a second copy of the row. */
#include "shared.h"

/* A vec of values from column j, those behind the row replaced by `fill`. */
INLINE vec load_row(const float *row, int64_t j, int64_t columns, float fill) {
    if (j + WIDE <= columns) return load_wide(row + j);
    vec x = splat_wide(fill);
    for (int64_t i = j; i < columns; i++) x[i - j] = row[i];
    return x;
}

/* Per row with scale s: log p(target), entropy and log-sum-exp of softmax(s · logits). */
int logit_statistics(const float *logits, const int64_t *targets, const float *scale, float *logprobs, float *entropy, float *lse,
                     int64_t rows, int64_t vocab) {
    for (int64_t r = 0; r < rows; r++)
        if (targets[r] < 0 || targets[r] >= vocab) return BAD_INDEX;
    for (int64_t r = 0; r < rows; r++, logits += vocab) {
        vec best = splat_wide(-INFINITY), total = splat_wide(0), weighted = splat_wide(0);
        for (int64_t j = 0; j < vocab; j += WIDE) best = larger(best, load_row(logits, j, vocab, -INFINITY));
        float top = max_of_wide(best), s = scale[r];
        for (int64_t j = 0; j < vocab; j += WIDE) {
            vec x = (load_row(logits, j, vocab, top) - top) * s, e = exp_wide(x);
            if (j + WIDE > vocab) e = pick_wide(first_lanes(vocab - j), e, splat_wide(0));
            total += e;
            weighted += e * x;
        }
        float norm = logf(sum_wide(total));
        logprobs[r] = (logits[targets[r]] - top) * s - norm;
        entropy[r] = norm - sum_wide(weighted) / sum_wide(total);
        lse[r] = top * s + norm;
    }
    return OK;
}

/* logits <- factor · (onehot(target) - softmax(s · logits)), in place. */
void logit_slopes(float *logits, const int64_t *targets, const float *scale, const float *lse, const float *factor, int64_t rows,
                  int64_t vocab) {
    for (int64_t r = 0; r < rows; r++, logits += vocab) {
        int64_t j = 0;
        for (; j + WIDE <= vocab; j += WIDE) store_wide(logits + j, -factor[r] * exp_wide(load_wide(logits + j) * scale[r] - lse[r]));
        for (; j < vocab; j++) logits[j] = -factor[r] * expf(logits[j] * scale[r] - lse[r]);
        logits[targets[r]] += factor[r];
    }
}
