"""Choosing experts and weighing them, against loops that follow the papers' text; the bias chooses only."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.models.context import FullContext, native_route
from slipstream.models.load import build_model
from slipstream.models.router import choice_scores, gate_weights
from slipstream.models.spec import ModelSpec

GLM: dict[str, Any] = {
    "model_type": "glm4_moe",
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 8,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
SPEC = ModelSpec.from_config(GLM)
TOKENS = 50


def logits_and_bias() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(TOKENS, 12, generator=generator), 0.3 * torch.randn(12, generator=generator)


def test_experts_come_from_the_groups_whose_two_best_are_best() -> None:
    logits_TE, bias_E = logits_and_bias()
    ids_TK = native_route(choice_scores(logits_TE, bias_E, SPEC), 4)
    limited = 0
    for logits, ids in zip(logits_TE.tolist(), ids_TK.tolist(), strict=True):
        scores = [1 / (1 + 2.718281828459045**-x) + b for x, b in zip(logits, bias_E.tolist(), strict=True)]
        worth = {group: sum(sorted(scores[3 * group : 3 * group + 3])[1:]) for group in range(4)}
        groups = sorted(worth, key=lambda group: worth[group])[2:]
        ranked = sorted(range(12), key=lambda expert: -scores[expert])
        assert ids == [expert for expert in ranked if expert // 3 in groups][:4]
        limited += ids != ranked[:4]
    assert limited > TOKENS / 4, "the groups must matter in this data"


def test_all_groups_are_no_limit_and_a_bias_of_zero_is_none() -> None:
    logits_TE, bias_E = logits_and_bias()
    every = replace(SPEC, top_groups=4)
    assert torch.equal(choice_scores(logits_TE, bias_E, every), logits_TE.sigmoid() + bias_E)
    assert torch.equal(choice_scores(logits_TE, 0 * bias_E, SPEC), choice_scores(logits_TE, None, SPEC))


@pytest.mark.parametrize("normalised", [False, True])
def test_sigmoid_gates_are_the_scores_without_the_bias(normalised: bool) -> None:
    logits_TE, bias_E = logits_and_bias()
    ids_TK = native_route(choice_scores(logits_TE, bias_E, SPEC), 4)
    gates_TK = gate_weights(logits_TE, ids_TK, replace(SPEC, norm_top_k=normalised))
    expected_TK = logits_TE.sigmoid().gather(1, ids_TK)
    if normalised:
        expected_TK = expected_TK / expected_TK.sum(-1, keepdim=True)
    torch.testing.assert_close(gates_TK, 2.5 * expected_TK)


def test_softmax_chooses_by_logits() -> None:
    logits_TE, _ = logits_and_bias()
    softmax = replace(SPEC, router_score="softmax", num_groups=1, top_groups=1)
    assert torch.equal(choice_scores(logits_TE, None, softmax), logits_TE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_bias_is_float32_bit_for_bit_in_a_model_of_any_dtype(dtype: torch.dtype) -> None:
    model = build_model(SPEC, seed=1)
    values_E = torch.linspace(-1, 1, 12) + 1e-4
    with torch.no_grad():
        model.get_parameter("layers.2.ffn.router_bias").copy_(values_E)
    for narrow in (model.to(dtype), copy.deepcopy(model), build_model(SPEC, dtype), model.float()):
        assert narrow.get_parameter("layers.2.ffn.router_bias").dtype == torch.float32
    assert torch.equal(model.get_parameter("layers.2.ffn.router_bias"), values_E)
    assert build_model(SPEC, dtype, "meta").to_empty(device="cpu").get_parameter("layers.1.ffn.router_bias").dtype == torch.float32


def test_no_gradient_reaches_the_bias_and_the_router_has_one() -> None:
    model = build_model(SPEC, seed=1)
    context = FullContext([0, 9], record=True)
    model.logits(model(torch.arange(9), torch.arange(9), context)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.endswith("router_bias") == (not parameter.requires_grad), name
    assert context.ids_TLK.shape == (9, 2, 4), "the first layer is dense"
