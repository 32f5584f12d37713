"""Any part of a parameter finds its part of the checkpoint's tensors, in every family."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

from slipstream.errors import StateError
from slipstream.models import hf
from slipstream.models.fill import fill
from slipstream.models.load import build_model, load_model
from slipstream.models.maker import PRESETS
from slipstream.models.names import Columns, NameTable
from slipstream.models.places import places
from slipstream.models.spec import ModelSpec
from tests.unit.models.test_fp8_checkpoint import fp8_folder


def shapes(model) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("preset", PRESETS)
def test_places_are_the_views_of_the_name_table(preset):
    model = build_model(ModelSpec.from_config({**PRESETS[preset], "vocab_size": 64}), seed=3)
    own, views = dict(model.named_parameters()), hf.hf_views(model)
    table = places(model.names, model.spec, shapes(model))
    assert [place.hf for place in table] == list(views)
    for place in table:
        view = place.of(own[place.ours].detach())
        assert (
            place.shape == tuple(view.shape) and view.data_ptr() == views[place.hf].data_ptr() and view.stride() == views[place.hf].stride()
        )


def boxes(shape: tuple[int, ...], parts: int) -> list[tuple[tuple[int, int], ...]]:
    """The tensor cut along every dimension, unevenly."""
    edges = [[0, *sorted({n * i // parts + (i < parts and n > 7) for i in range(1, parts)} | {n})] for n in shape]
    return list(product(*[[(a, b) for a, b in pairwise(e)] for e in edges]))


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("kind", ["plain", "fp8"])
def test_boxes_of_any_cut_are_filled_with_what_the_whole_model_has_there(tmp_path: Path, folder: Path, kind: str, parts: int):
    source = folder if kind == "plain" else fp8_folder(tmp_path / "fp8")[0]
    model = load_model(source)
    table, tensors = places(model.names, model.spec, shapes(model)), hf.TensorFiles(source)
    for name, parameter in model.named_parameters():
        for box in boxes(tuple(parameter.shape), parts):
            local = torch.full([b - a for a, b in box], float("nan"))
            fill({name: [(local, [a for a, _ in box])]}, table, model.spec, model.tied_names, tensors)
            assert torch.equal(local, parameter.detach()[tuple(slice(a, b) for a, b in box)]), (name, box)


def test_a_view_that_is_no_plain_part_is_an_error():
    class Every(Columns):
        def views(self, tensor, spec):
            yield "x.weight", tensor[:, ::2]

    spec = build_model(ModelSpec.from_config({**PRESETS["tiny-moe"], "vocab_size": 64}), device="meta").spec
    with pytest.raises(StateError, match=r"x\.weight of w is no plain part of it"):
        places(NameTable((Every("w", ()),), ()), spec, {"w": (4, 6)})
