"""Log-probabilities of given tokens straight from hidden states, without ever holding the logits of a whole row.

It knows nothing of losses. Shapes: T tokens, D hidden features, V vocabulary, C tokens per chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.errors import StateError
from slipstream.ops.native import check, native_for

WIDE_TOKENS = 8192
"""Tokens of a vocabulary whose head is in fp32 at one time in `wide_logits`."""


def token_logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, temperature_T: Tensor, chunk_tokens: int = 256
) -> tuple[Tensor, Tensor]:
    """(log p(target), entropy in nats) of softmax(hidden · weightᵀ / temperature), both [T], fp32 (fp64 for fp64 input).

    A temperature of 0 (greedy sampling) stands for 1: the logprobs of greedy tokens are those of the untempered distribution.
    At most `chunk_tokens` rows of logits exist at a time; the backward pass recomputes them, only for tokens whose gradient is
    not 0. Differentiable in `hidden` and `weight` through the logprobs; the entropy is a metric and carries no gradient.
    """
    if chunk_tokens < 1:
        raise StateError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    if not len(hidden_TD) == len(targets_T) == len(temperature_T):
        raise StateError(f"{len(hidden_TD)} hidden states, {len(targets_T)} targets and {len(temperature_T)} temperatures: need one each")
    wide = hidden_TD.dtype if hidden_TD.dtype is torch.float64 else torch.float32
    inverse_T = torch.where(temperature_T > 0, 1.0 / temperature_T, 1.0).to(wide).contiguous()
    return _TokenLogprobs.apply(hidden_TD, weight_VD, targets_T.long().contiguous(), inverse_T, chunk_tokens)  # pyright: ignore[reportReturnType]


def chunk_logits(hidden_CD: Tensor, weight_VD: Tensor) -> Tensor:
    """Logits [C, V] of one chunk, in fp32 or wider: the only place where logits come to exist."""
    logits_CV = hidden_CD @ weight_VD.T
    return logits_CV.float() if logits_CV.dtype in (torch.bfloat16, torch.float16) else logits_CV


def wide_logits(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """[T, V] in fp32 whatever the dtype of the inputs: no rounding of logits. Of the head, a part at a time is widened. No gradient."""
    hidden_TD = hidden_TD.float()
    return torch.cat([hidden_TD @ part_VD.float().T for part_VD in weight_VD.split(WIDE_TOKENS)], 1)


def _statistics(logits_CV: Tensor, targets_C: Tensor, inverse_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), entropy and log-sum-exp of the tempered logits."""
    kernels = native_for(logits_CV, inverse_C)
    if kernels is None:
        logits_CV = logits_CV * inverse_C.unsqueeze(1)
        lse_C = logits_CV.logsumexp(-1)
        entropy_C = lse_C - (logits_CV.softmax(-1) * logits_CV).sum(-1)
        return logits_CV.gather(1, targets_C.unsqueeze(1)).squeeze(1) - lse_C, entropy_C, lse_C
    out = inverse_C.new_empty(3, len(inverse_C)).unbind()
    pointers = [x.data_ptr() for x in (logits_CV, targets_C, inverse_C, *out)]
    check(kernels.logit_statistics(*pointers, *logits_CV.shape), "token_logprobs")
    return out[0], out[1], out[2]


def _slopes(logits_CV: Tensor, targets_C: Tensor, inverse_C: Tensor, lse_C: Tensor, grad_C: Tensor) -> Tensor:
    """dL/dlogits = grad / temperature · (onehot(target) - p), in place of the logits."""
    factor_C = grad_C * inverse_C
    kernels = native_for(logits_CV, inverse_C, lse_C, factor_C)
    if kernels is None:
        p_CV = logits_CV.mul_(inverse_C.unsqueeze(1)).sub_(lse_C.unsqueeze(1)).exp_()
        return p_CV.mul_(-factor_C.unsqueeze(1)).scatter_add_(1, targets_C.unsqueeze(1), factor_C.unsqueeze(1))
    kernels.logit_slopes(*[x.data_ptr() for x in (logits_CV, targets_C, inverse_C, lse_C, factor_C)], *logits_CV.shape)
    return logits_CV


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, inverse_T: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        parts = zip(hidden_TD.split(chunk), targets_T.split(chunk), inverse_T.split(chunk), strict=True)
        results = [_statistics(chunk_logits(h_CD, weight_VD), t_C, i_C) for h_CD, t_C, i_C in parts]
        logprobs_T, entropy_T, lse_T = (torch.cat(column) for column in zip(*results, strict=True))
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, inverse_T, lse_T)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_TD, weight_VD, targets_T, inverse_T, lse_T = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden_TD) if need_hidden else None
        grad_weight = torch.zeros_like(weight_VD) if need_weight else None
        for rows in grads[0].nonzero().squeeze(1).split(ctx.chunk):
            h_CD = hidden_TD[rows]
            logits_CV = chunk_logits(h_CD, weight_VD)
            d_CV = _slopes(logits_CV, targets_T[rows], inverse_T[rows], lse_T[rows], grads[0][rows]).to(h_CD.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = d_CV @ weight_VD
            if grad_weight is not None:
                grad_weight.addmm_(d_CV.T, h_CD)
        return grad_hidden, grad_weight, None, None, None
