"""Which experts a token takes and how much of each: one place for all families; what they differ in are fields of `ModelSpec`.

Two pure functions, with the seam `Context.route` between them:

    logits -> choice_scores -> top-k, or ids forced from outside -> gate_weights

Gate weights come from the logits alone, at whatever ids were taken. The routing bias and the groups only choose.
Everything is float32. Shapes: T tokens, E experts, K experts per token, G groups, S experts in a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.models.spec import ModelSpec


@torch.no_grad()
def choice_scores(logits_TE: Tensor, bias_E: Tensor | None, spec: ModelSpec) -> Tensor:
    """Scores [T, E] whose `top_k` highest are the model's own choice; experts of groups that are out have -inf.

    Sigmoid scores plus bias (Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024); with softmax the
    logits themselves, which have the same order.
    """
    scores_TE = logits_TE.sigmoid() if spec.router_score == "sigmoid" else logits_TE
    if bias_E is not None:
        scores_TE = scores_TE + bias_E
    return scores_TE if spec.top_groups == spec.num_groups else _within_best_groups(scores_TE, spec)


def _within_best_groups(scores_TE: Tensor, spec: ModelSpec) -> Tensor:
    """A group counts as much as its two best experts together (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2)."""
    scores_TGS = scores_TE.unflatten(1, (spec.num_groups, -1))
    best_TG = scores_TGS.topk(2, dim=-1).values.sum(-1).topk(spec.top_groups, dim=-1).indices
    out_TG = torch.ones_like(scores_TGS[..., 0], dtype=torch.bool).scatter_(1, best_TG, False)
    return scores_TGS.masked_fill(out_TG.unsqueeze(-1), -torch.inf).flatten(1)


def gate_weights(logits_TE: Tensor, ids_TK: Tensor, spec: ModelSpec) -> Tensor:
    """Weights [T, K] of the experts `ids`, differentiable in the logits."""
    if spec.router_score == "sigmoid":
        gates_TK = logits_TE.gather(1, ids_TK).sigmoid()
        if spec.norm_top_k:
            gates_TK = gates_TK / (gates_TK.sum(-1, keepdim=True) + 1e-20)
    elif spec.norm_top_k:
        # a softmax over the chosen logits is the softmax over all of them divided by the sum of the chosen
        gates_TK = logits_TE.gather(1, ids_TK).softmax(-1)
    else:
        gates_TK = logits_TE.softmax(-1).gather(1, ids_TK)
    return gates_TK if spec.gate_scale == 1 else gates_TK * spec.gate_scale
