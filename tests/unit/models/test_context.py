"""Packed documents and router replay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.errors import StateError
from slipstream.models.context import FullContext
from slipstream.models.decoder import Decoder
from slipstream.models.load import build_model
from slipstream.models.spec import ModelSpec

LENGTHS = (5, 1, 11, 8)
STARTS = [0, 5, 6, 17, 25]
TOKENS = STARTS[-1]


@pytest.fixture
def ids_T() -> Tensor:
    return torch.randint(0, 37, (TOKENS,), generator=torch.Generator().manual_seed(1))


def positions() -> Tensor:
    return torch.cat([torch.arange(n) for n in LENGTHS])


def test_packed_documents_equal_separate_passes(model: Decoder, ids_T: Tensor) -> None:
    packed = model(ids_T, positions(), FullContext(STARTS))
    for start, length in zip(STARTS, LENGTHS, strict=False):
        alone = model(ids_T[start : start + length], torch.arange(length), FullContext([0, length]))
        torch.testing.assert_close(packed[start : start + length], alone, atol=1e-5, rtol=1e-5)


def test_a_token_sees_no_later_token_and_no_other_document(model: Decoder, ids_T: Tensor) -> None:
    before = model(ids_T, positions(), FullContext(STARTS))
    changed = ids_T.clone()
    changed[10] = (changed[10] + 1) % 37
    difference = (model(changed, positions(), FullContext(STARTS)) - before).detach().abs().amax(-1)
    assert float(difference[10:17].min()) > 30 * max(float(difference[:10].max()), float(difference[17:].max()))


def test_int32_ids_and_positions_do(model: Decoder, ids_T: Tensor) -> None:
    wide = model(ids_T, positions(), FullContext(STARTS))
    assert torch.equal(model(ids_T.int(), positions().int(), FullContext(STARTS)), wide)


def test_forcing_the_native_ids_changes_nothing(model: Decoder, ids_T: Tensor) -> None:
    recorder = FullContext(STARTS, record=True)
    native = model(ids_T, positions(), recorder)
    assert recorder.ids_TLK.shape == (TOKENS, 2, 2)
    assert torch.equal(recorder.ids_TLK, recorder.native_ids_TLK)
    for forced in (recorder.ids_TLK, recorder.ids_TLK.to(torch.uint8)):
        assert torch.equal(model(ids_T, positions(), FullContext(STARTS, forced)), native)


def test_rows_without_a_valid_routing_route_natively(model: Decoder, ids_T: Tensor) -> None:
    forced = torch.stack([torch.arange(2).expand(TOKENS, 2)] * 2, dim=1)
    valid = torch.arange(TOKENS) % 3 != 0
    context = FullContext(STARTS, forced, valid, record=True)
    model(ids_T, positions(), context)
    assert torch.equal(context.ids_TLK[valid], forced[valid])
    assert torch.equal(context.ids_TLK[~valid], context.native_ids_TLK[~valid])
    assert not torch.equal(context.ids_TLK, context.native_ids_TLK)
    nothing = model(ids_T, positions(), FullContext(STARTS, forced, torch.zeros(TOKENS, dtype=torch.bool)))
    assert torch.equal(nothing, model(ids_T, positions(), FullContext(STARTS)))


@pytest.mark.parametrize("recorded", [False, True])
def test_a_fully_valid_mask_is_the_same_as_none(model: Decoder, ids_T: Tensor, recorded: bool) -> None:
    forced = torch.stack([torch.tensor([3, 1]).expand(TOKENS, 2)] * 2, dim=1)
    every = FullContext(STARTS, forced, torch.ones(TOKENS, dtype=torch.bool), record=recorded)
    assert torch.equal(model(ids_T, positions(), every), model(ids_T, positions(), FullContext(STARTS, forced)))
    if recorded:
        assert torch.equal(every.ids_TLK, forced)


def test_the_router_keeps_its_gradient_under_forced_ids(model: Decoder, ids_T: Tensor) -> None:
    """Finite differences of the loss in one router weight, with the ids held fixed."""
    forced = torch.stack([torch.tensor([4, 0]).expand(TOKENS, 2)] * 2, dim=1)
    direction = torch.randn(TOKENS, 16, generator=torch.Generator().manual_seed(3))
    router = model.get_parameter("layers.0.ffn.router")

    def loss() -> Tensor:
        return (model(ids_T, positions(), FullContext(STARTS, forced)) * direction).sum()

    loss().backward()
    assert router.grad is not None
    assert float(router.grad[:, [4, 0]].abs().min()) > 0
    assert float(router.grad[:, [1, 2, 3]].abs().max()) == 0
    step = 3e-2  # wide, because fp32 rounding would drown a small difference
    with torch.no_grad():
        router[2, 4] += step
        up = float(loss())
        router[2, 4] -= 2 * step
        down = float(loss())
    assert (up - down) / (2 * step) == pytest.approx(float(router.grad[2, 4]), rel=2e-2)


def test_reading_a_routing_that_was_not_recorded_says_what_to_do() -> None:
    with pytest.raises(StateError, match="record=True"):
        _ = FullContext([0, 3]).ids_TLK


def test_a_model_first_used_for_serving_can_still_be_trained(model: Decoder, ids_T: Tensor) -> None:
    with torch.inference_mode():
        model(ids_T, positions(), FullContext(STARTS))
    model(ids_T, positions(), FullContext(STARTS)).square().sum().backward()
    assert model.embed.grad is not None


def test_a_model_converted_after_its_first_pass_is_the_model_that_was_loaded_so(model: Decoder, ids_T: Tensor) -> None:
    narrow = model.bfloat16()
    fresh = copy.deepcopy(narrow).float()
    narrow(ids_T, positions(), FullContext(STARTS))
    converted = narrow.float()(ids_T, positions(), FullContext(STARTS))
    assert torch.equal(converted, fresh(ids_T, positions(), FullContext(STARTS)))
    assert converted.dtype == torch.float32


SPARSE = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 16,
    "index_head_dim": 8,
    "index_topk": 3,
    "indexer_types": ["full", "shared", "full", "shared"],
}


def test_layers_that_share_a_choice_find_the_same_one_when_they_are_computed_again(ids_T: Tensor) -> None:
    """Backward passes recompute the last layer first, when a later layer's choice is the latest."""
    model = build_model(ModelSpec.from_config(SPARSE), seed=1)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model.logits(model(ids_T, positions(), FullContext(STARTS))).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    kept = gradients()
    for layer in model.layers:
        layer.forward = lambda *args, _forward=layer.forward: checkpoint(_forward, *args, use_reentrant=False)  # type: ignore[method-assign]
    assert all(torch.equal(a, b) for a, b in zip(kept, gradients(), strict=True))


def test_packed_documents_of_a_sparse_model_equal_separate_passes(ids_T: Tensor) -> None:
    model = build_model(ModelSpec.from_config(SPARSE), seed=1)
    packed = model(ids_T, positions(), FullContext(STARTS))
    for start, length in zip(STARTS, LENGTHS, strict=False):
        alone = model(ids_T[start : start + length], torch.arange(length), FullContext([0, length]))
        torch.testing.assert_close(packed[start : start + length], alone, atol=1e-5, rtol=1e-5)
