"""Log-probabilities of given tokens straight from hidden states, without ever holding the logits of a whole row.

It knows nothing of losses. Shapes: T tokens, D hidden features, V vocabulary, C tokens per chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.errors import StateError


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
    inverse_T = torch.where(temperature_T > 0, 1.0 / temperature_T, 1.0)
    return _TokenLogprobs.apply(hidden_TD, weight_VD, targets_T.long(), inverse_T, chunk_tokens)  # pyright: ignore[reportReturnType]


def chunk_logits(hidden_CD: Tensor, weight_VD: Tensor, inverse_C: Tensor) -> Tensor:
    """Tempered logits [C, V] of one chunk, in fp32 or wider."""
    logits_CV = hidden_CD @ weight_VD.T
    if logits_CV.dtype in (torch.bfloat16, torch.float16):
        logits_CV = logits_CV.float()
    return logits_CV.mul_(inverse_C.to(logits_CV.dtype).unsqueeze(1))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, inverse_T: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        chosen, entropy, lse = [], [], []
        for h_CD, t_C, i_C in zip(hidden_TD.split(chunk), targets_T.split(chunk), inverse_T.split(chunk), strict=True):
            logits_CV = chunk_logits(h_CD, weight_VD, i_C)
            lse_C = logits_CV.logsumexp(-1)
            chosen.append(logits_CV.gather(1, t_C.unsqueeze(1)).squeeze(1) - lse_C)
            entropy.append(lse_C - (logits_CV.softmax(-1) * logits_CV).sum(-1))
            lse.append(lse_C)
        logprobs_T, entropy_T, lse_T = torch.cat(chosen), torch.cat(entropy), torch.cat(lse)
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, inverse_T, lse_T)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, targets_T, inverse_T, lse_T = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden_TD) if need_hidden else None
        grad_weight = torch.zeros_like(weight_VD) if need_weight else None
        for rows in grads[0].nonzero().squeeze(1).split(ctx.chunk):
            h_CD, i_C = hidden_TD[rows], inverse_T[rows]
            p_CV = chunk_logits(h_CD, weight_VD, i_C).sub_(lse_T[rows].unsqueeze(1)).exp_()
            factor_C1 = (grads[0][rows] * i_C).unsqueeze(1).to(p_CV.dtype)
            d_CV = p_CV.mul_(-factor_C1).scatter_add_(1, targets_T[rows].unsqueeze(1), factor_C1).to(h_CD.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = d_CV @ weight_VD
            if grad_weight is not None:
                grad_weight.addmm_(d_CV.T, h_CD)
        return grad_hidden, grad_weight, None, None, None
