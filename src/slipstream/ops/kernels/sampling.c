/* One token per row of logits: softmax with temperature, then the inverse of its cumulative distribution at a given uniform number. */
#include "shared.h"

enum { GROUP = 64 }; /* probabilities that are summed together: a draw walks over groups, then within one */

static float row_max(const float *x, int64_t n) {
    vec best = splat_wide(-INFINITY);
    int64_t i = 0;
    for (; i + WIDE <= n; i += WIDE) best = larger(best, load_wide(x + i));
    float top = max_of_wide(best);
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

/* The first of the largest; the last place when there is none, which NaN causes. */
static int64_t first_of(const float *x, int64_t n, float top) {
    int64_t i = 0;
    while (i < n - 1 && x[i] != top) i++;
    return i;
}

/* x[i] = exp((x[i] - top) · inverse), 0 where that would underflow; sums[g] over groups. Returns the total. */
static double weigh(float *x, int64_t n, float top, float inverse, double *sums) {
    double total = 0;
    for (int64_t from = 0, g = 0; from < n; from += GROUP, g++) {
        int64_t to = from + GROUP < n ? from + GROUP : n, i = from;
        vec parts = splat_wide(0);
        for (; i + WIDE <= to; i += WIDE) {
            vec score = (load_wide(x + i) - top) * inverse, e = pick_wide(score < -87.0f, splat_wide(0), exp_wide(score));
            store_wide(x + i, e);
            parts += e;
        }
        float rest = 0;
        for (; i < to; i++) {
            float score = (x[i] - top) * inverse;
            x[i] = score < -87.0f ? 0 : exp8(splat(score))[0];
            rest += x[i];
        }
        sums[g] = (double)sum_wide(parts) + rest;
        total += sums[g];
    }
    return total;
}

/* First index whose cumulative weight exceeds `target`; in case of rounding the last one with a weight. */
static int64_t find(const float *weights, int64_t n, const double *sums, double target) {
    int64_t groups = (n + GROUP - 1) / GROUP, g = 0, last = 0;
    for (int64_t i = 0; i < groups; i++)
        if (sums[i] > 0) last = i;
    while (g < last && target >= sums[g]) target -= sums[g++];
    int64_t to = (g + 1) * GROUP < n ? (g + 1) * GROUP : n, found = g * GROUP;
    for (int64_t i = g * GROUP; i < to; i++) {
        if (weights[i] > 0) found = i;
        if (weights[i] > 0 && target < weights[i]) break;
        target -= weights[i];
    }
    return found;
}

/* Overwrites `logits` [rows, vocab]; NaN among them makes the row's logprob NaN. Temperature 0: the largest logit (the first of equals), with the logprob at temperature 1. */
int draw(float *logits, const float *temperature, const double *uniform, int64_t rows, int64_t vocab, int64_t *tokens, float *logprobs) {
    double *sums = malloc((size_t)(vocab / GROUP + 1) * sizeof *sums);
    if (sums == NULL) return NO_MEMORY;
    for (int64_t r = 0; r < rows; r++) {
        float *x = logits + r * vocab;
        float top = row_max(x, vocab), inverse = temperature[r] > 0 ? 1.0f / temperature[r] : 1.0f;
        int64_t token = temperature[r] > 0 ? -1 : first_of(x, vocab, top);
        double total = weigh(x, vocab, top, inverse, sums);
        if (token < 0) token = find(x, vocab, sums, uniform[r] * total);
        tokens[r] = token;
        logprobs[r] = (float)(log(x[token]) - log(total));
    }
    free(sums);
    return OK;
}
