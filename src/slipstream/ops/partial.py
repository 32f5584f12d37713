"""Attention to some of the keys at a time: parts of it with their log-sum-exp, which merge into the whole.

For keys that are not in one place at one time (`parallel.crossing`). Plain torch on any device; bf16 is computed in fp32.

    out = Σ_i w_i out_i,  w_i = exp(lse_i - lse),  lse = log Σ_i exp(lse_i)

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; over processes: Liu et al., "Ring Attention with
Blockwise Transformers for Near-Infinite Context", 2023.

Shapes: Q queries, C keys, H query heads, G key/value heads, X = H / G, d head features.
"""

from __future__ import annotations

import torch
from torch import Tensor


def partial_attention(q_QHd: Tensor, k_CGd: Tensor, v_CGd: Tensor, scale: float, seen_QC: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out [Q, H, d], lse [Q, H]), fp32. A query that sees none of these keys has out 0 and lse -inf. `seen` None: it sees all."""
    scores_GXQC = _scores(_by_group(q_QHd, k_CGd.shape[1]), k_CGd, scale, seen_QC)
    lse_GXQ1 = scores_GXQC.logsumexp(-1, keepdim=True)
    weights_GXQC = (scores_GXQC - _finite(lse_GXQ1)).exp_()
    out_GXQd = (weights_GXQC.flatten(1, 2) @ v_CGd.float().transpose(0, 1)).view(*weights_GXQC.shape[:3], -1)
    return _by_query(out_GXQd), _by_query(lse_GXQ1).squeeze(-1)


def partial_attention_backward(
    q_QHd: Tensor,
    k_CGd: Tensor,
    v_CGd: Tensor,
    lse_QH: Tensor,
    grad_QHd: Tensor,
    delta_QH: Tensor,
    scale: float,
    seen_QC: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through these keys, fp32. `lse` and `grad` are of the whole attention, and `delta` is the sum over d of
    its output times `grad`: with them every part has its own gradient."""
    groups = k_CGd.shape[1]
    q_GXQd, grad_GXQd = _by_group(q_QHd, groups), _by_group(grad_QHd, groups)
    lse_GXQ1, delta_GXQ1 = _by_group(lse_QH.unsqueeze(-1), groups), _by_group(delta_QH.unsqueeze(-1), groups)
    weights_GXQC = (_scores(q_GXQd, k_CGd, scale, seen_QC) - lse_GXQ1).exp_()
    flat_GNC, grad_GNd = weights_GXQC.flatten(1, 2), grad_GXQd.flatten(1, 2)
    slopes_GNC = flat_GNC * (grad_GNd @ v_CGd.float().permute(1, 2, 0) - delta_GXQ1.flatten(1, 2)) * scale
    dq_GXQd = (slopes_GNC @ k_CGd.float().transpose(0, 1)).view(q_GXQd.shape)
    dk_GCd, dv_GCd = slopes_GNC.mT @ q_GXQd.flatten(1, 2), flat_GNC.mT @ grad_GNd
    return _by_query(dq_GXQd), dk_GCd.transpose(0, 1), dv_GCd.transpose(0, 1)


def merge(out_QHd: Tensor, lse_QH: Tensor, part_QHd: Tensor, part_lse_QH: Tensor) -> None:
    """Add one part to what has been merged so far (at first out 0, lse -inf), in place."""
    total_QH = torch.logaddexp(lse_QH, part_lse_QH)
    kept_QH, added_QH = (lse_QH - _finite(total_QH)).exp_(), (part_lse_QH - _finite(total_QH)).exp_()
    out_QHd.mul_(kept_QH.unsqueeze(-1)).addcmul_(part_QHd, added_QH.unsqueeze(-1))
    lse_QH.copy_(total_QH)


def _scores(q_GXQd: Tensor, k_CGd: Tensor, scale: float, seen_QC: Tensor | None) -> Tensor:
    scores_GNC = q_GXQd.flatten(1, 2) @ k_CGd.float().permute(1, 2, 0)
    scores_GXQC = scores_GNC.view(*q_GXQd.shape[:3], -1).mul_(scale)
    return scores_GXQC if seen_QC is None else scores_GXQC.masked_fill_(~seen_QC, -torch.inf)


def _by_group(x_QHd: Tensor, groups: int) -> Tensor:
    """[G, X, Q, d], fp32."""
    return x_QHd.float().unflatten(1, (groups, -1)).permute(1, 2, 0, 3)


def _by_query(x_GXQd: Tensor) -> Tensor:
    """The inverse of `_by_group`."""
    return x_GXQd.permute(2, 0, 1, 3).flatten(1, 2)


def _finite(lse: Tensor) -> Tensor:
    """-inf, where nothing is seen, as 0: exp(-inf - 0) is the 0 that exp(-inf + inf) is not."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
