"""The name tables: views that cover every parameter once."""

from __future__ import annotations

import pytest
import torch

from slipstream.errors import StateError
from slipstream.models import hf
from slipstream.models.decoder import Decoder
from slipstream.models.load import build_model


def test_the_views_cover_every_element_of_every_parameter_exactly_once(model: Decoder) -> None:
    counts = {name: torch.zeros_like(p, dtype=torch.int32) for name, p in model.named_parameters()}
    views = hf.hf_views(model, counts)
    for view in views.values():
        view += 1
    assert all(bool((count == 1).all()) for count in counts.values())
    assert sum(view.numel() for view in views.values()) == model.spec.num_params


def test_writing_into_a_view_writes_into_the_model(model: Decoder) -> None:
    hf.hf_views(model)["model.layers.2.mlp.experts.3.up_proj.weight"].fill_(7.0)
    gate_up = model.get_parameter("layers.2.ffn.experts.gate_up")
    assert bool((gate_up[3, :, 8:] == 7).all())
    assert not bool((gate_up[3, :, :8] == 7).any())


def test_a_tensor_that_is_in_no_entry_is_a_bug_that_is_named(model: Decoder) -> None:
    with pytest.raises(StateError, match="surprise"):
        hf.hf_views(model, {"surprise": torch.zeros(1)})


def test_a_model_on_the_meta_device_has_the_same_names_and_shapes(model: Decoder) -> None:
    shapes = {name: view.shape for name, view in hf.hf_views(build_model(model.spec, device="meta")).items()}
    assert shapes == {name: view.shape for name, view in hf.hf_views(model).items()}


def test_the_same_seed_gives_the_same_weights_in_every_dtype(model: Decoder) -> None:
    wide, narrow = build_model(model.spec, seed=4), build_model(model.spec, torch.bfloat16, seed=4)
    for p, q in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(p.bfloat16(), q)
    other = build_model(model.spec, seed=5)
    assert not torch.equal(wide.embed, other.embed)
