"""Several processes compute what one computes: loss, gradients, moments, weights, counts and metrics."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.trainer import checkpoint
from tests.dist.cases import LAYOUTS, Case, batch, cases, learner, outcome

PARAMS = [pytest.param(world, number, case, id=f"{world}: {case}") for world in LAYOUTS for number, case in enumerate(cases(world))]
EXACT = [param for param in PARAMS if param.values[2].dtype == "float32"]  # type: ignore[union-attr]
ROUNDED = [param for param in PARAMS if param.values[2].dtype != "float32"]  # type: ignore[union-attr]


@cache
def alone(case: Case) -> dict[str, Tensor]:
    """By one process; the layout does not matter there."""
    return outcome(case)


def single(case: Case) -> dict[str, Tensor]:
    values = {name: getattr(case, name) for name in Case.__dataclass_fields__}
    return alone(Case(**{**values, "layout": "", "recompute": False}))


def difference(a: dict[str, Tensor], b: dict[str, Tensor], kind: str) -> float:
    """Largest difference of the tensors of a kind, relative to the largest value of all of them."""
    names = [name for name in a if name.startswith(f"{kind}/")]
    assert names and set(names) == {name for name in b if name.startswith(f"{kind}/")}
    assert all(a[name].shape == b[name].shape for name in names)
    scale = max(float(b[name].abs().max()) for name in names)
    return max(float((a[name] - b[name]).abs().max()) for name in names) / scale


@pytest.mark.parametrize(("world", "number", "case"), EXACT)
def test_several_processes_compute_what_one_computes(results: dict[int, Path], world: int, number: int, case: Case):
    found, expected = torch.load(results[world] / f"{number}.pt"), single(case)
    assert float(found["metric/loss"]) == pytest.approx(float(expected["metric/loss"]), rel=1e-6)
    assert difference(found, expected, "gradient") < 1e-5
    for name in expected:  # no parameter is small enough to hide behind the others
        if name.startswith("gradient/"):
            assert float((found[name] - expected[name]).norm()) <= 1e-4 * float(expected[name].norm()), name
    assert difference(found, expected, "moment/exp_avg") < 1e-5
    assert difference(found, expected, "moment/exp_avg_sq") < 1e-5
    assert difference(found, expected, "parameter") < 1e-5
    assert difference(found, expected, "published") < 1e-5
    for name in expected:
        if name.startswith("load/"):
            assert torch.equal(found[name], expected[name]), name
        elif name.startswith("metric/"):
            assert float(found[name]) == pytest.approx(float(expected[name]), rel=1e-4, abs=1e-7), name


RESUMED = [(world, layout, lora) for world in LAYOUTS for layout in LAYOUTS[world] for lora in (False, True) if not (lora and "pp" in layout)]


@pytest.mark.parametrize(("world", "layout", "lora"), RESUMED)
def test_a_checkpoint_is_gone_back_to_bit_for_bit_and_fits_any_number_of_processes(
    results: dict[int, Path], world: int, layout: str, lora: bool
):
    case = Case(layout, lora=lora)
    folder = results[world] / str(case)
    outcomes = torch.load(folder / "outcomes.pt")
    straight = {name.removeprefix("straight/"): tensor for name, tensor in outcomes.items() if name.startswith("straight/")}
    assert straight and all(torch.equal(tensor, outcomes[f"resumed/{name}"]) for name, tensor in straight.items())
    found = checkpoint.newest(folder)
    assert found is not None
    subject = learner(case)
    subject.restore(found.model_tensors(), found.optimizer_tensors())
    subject.step(batch(case, 2))
    for name, tensor in subject.published().items():
        torch.testing.assert_close(straight[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(("world", "number", "case"), ROUNDED)
def test_in_bfloat16_they_round_as_one_does_and_train_float32_masters(results: dict[int, Path], world: int, number: int, case: Case):
    found, expected = torch.load(results[world] / f"{number}.pt"), single(case)
    assert float(found["metric/loss"]) == pytest.approx(float(expected["metric/loss"]), rel=0.02)
    assert difference(found, expected, "gradient") < 0.05
    for name in found:
        if name.startswith("parameter/"):
            assert found[name].dtype is torch.float32
            assert case.lora or torch.equal(found[name.replace("parameter/", "published/")], found[name].bfloat16().float())
