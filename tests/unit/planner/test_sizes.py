"""Sizes of published models, and what one layer keeps of a token."""

import numpy as np
import pytest
import torch

from slipstream.models.context import FullContext
from slipstream.models.load import build_model
from slipstream.models.maker import PRESETS
from slipstream.models.spec import ModelSpec
from slipstream.planner.activations import kept_bytes
from slipstream.planner.plan import model_figures
from tests.unit.planner.published import PUBLISHED

REPORTED = {  # parameters, active ones and routed experts in 10^9; expert ids a token
    "GLM-5": (743.9, 40.8, 724.8, 600),
    "GLM-5.2": (743.4, 40.3, 724.8, 600),
    "DeepSeek-V3": (671.0, 36.6, 653.9, 464),
    "DeepSeek-V3.2": (671.9, 37.5, 653.9, 464),
    "Kimi K2": (1026, 31.7, 1014.7, 480),
    "Qwen3-235B-A22B": (235.1, 21.6, 227.1, 752),
    "Qwen3-30B-A3B": (30.5, 3.04, 29.0, 384),
    "GLM-4.5-Air": (106.9, 12.8, 99.7, 360),
    "gpt-oss-120b": (116.8, 5.13, 114.7, 144),
    "MiniMax-M2": (228.7, 10.4, 224.7, 496),
}


@pytest.mark.parametrize("name", REPORTED)
def test_a_published_model_has_the_size_that_is_reported(name):
    """The active parameters of model cards leave out the embedding, or round; these are the sums over published dimensions."""
    spec = ModelSpec.from_config(PUBLISHED[name])
    figures = {figure.name: figure.value / 1e9 for figure in model_figures(spec)}
    total, active, routed, ids = REPORTED[name]
    assert figures["parameters"] == pytest.approx(total, rel=0.002)
    assert figures["active parameters"] == pytest.approx(active, rel=0.005)
    assert figures["of that, routed experts"] == pytest.approx(routed, rel=0.001)
    assert len(spec.moe_layers) * spec.top_k == ids


def kept_by_autograd(spec: ModelSpec, dtype: torch.dtype, tokens: int) -> float:
    """Bytes a token of all tensors that the backward pass needs, weights aside; each storage once."""
    model = build_model(spec, seed=0).to(dtype)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model(torch.randint(0, 100, (tokens,)), torch.arange(tokens), FullContext(np.array([0, tokens])))
    assert out.requires_grad
    return sum(x.untyped_storage().nbytes() for x in kept.values()) / tokens


@pytest.mark.parametrize("preset", ["tiny-moe", "tiny-glm", "tiny-minimax", "tiny-deepseek", "tiny-dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_layer_keeps_is_what_autograd_keeps(preset, dtype):
    """Within 3% in float32, where everything is counted, and 8% in bfloat16, where small things are not (copies of the router's)."""
    spec = ModelSpec.from_config(PRESETS[preset])
    lean = dtype is torch.float32
    counted = sum(kept_bytes(spec, layer, dtype.itemsize, lean) for layer in range(spec.num_layers))
    counted += 2 * spec.hidden * dtype.itemsize if lean else spec.hidden * 4  # the last norm
    assert counted == pytest.approx(kept_by_autograd(spec, dtype, 1024), rel=0.03 if lean else 0.08)


@pytest.mark.parametrize("change", [{"v_head_dim": 32}, {"q_lora_rank": None}])
def test_what_latent_attention_keeps_depends_on_its_options(change):
    spec = ModelSpec.from_config({**PRESETS["tiny-deepseek"], **change})
    counted = sum(kept_bytes(spec, layer, 4, True) for layer in range(spec.num_layers)) + 2 * spec.hidden * 4
    assert counted == pytest.approx(kept_by_autograd(spec, torch.float32, 1024), rel=0.03)
