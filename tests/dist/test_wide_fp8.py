"""Experts in FP8 that are shared by processes: codes and scales of one process, and what it says, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.engine.engine import EmbeddedEngine
from slipstream.models.fp8 import stream_in_fp8
from slipstream.models.hf import read_tensors, write_stream
from slipstream.models.tensor_file import TensorStream
from tests.dist.conftest import finish, start
from tests.dist.test_wide import same
from tests.dist.wide_cases import SEQ_LEN, plain, run, settings, write_all
from tests.dist.wide_fp8_worker import MODELS, VERSIONS, asked_twice, own

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide-fp8")
    write_all(folder)
    published = folder / "next-float8"
    published.mkdir()
    (published / "config.json").write_bytes((folder / "next" / "config.json").read_bytes())
    write_stream(published, stream_in_fp8(TensorStream.of(read_tensors(folder / "next")), power_of_two=False))
    return folder


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, folder: Path) -> Ranks:
    world = request.param
    finish(start(world, "-m", "tests.dist.wide_fp8_worker", str(folder), str(world)), timeout=600)
    return [torch.load(folder / f"rank{rank}-of-{world}.pt", weights_only=False) for rank in range(world)]


def alone(folder: Path, scales: str = "float32") -> EmbeddedEngine:
    return EmbeddedEngine(folder, settings("float8", ranks=1).replace(fp8_scales=scales), SEQ_LEN)


@pytest.mark.parametrize("model", MODELS)
def test_each_rank_says_bit_for_bit_what_one_process_says(ranks: Ranks, folder: Path, model: str):
    for rank, found in enumerate(ranks):
        assert same(found[model], plain(run(alone(folder / model), own(rank, len(ranks))))), rank
    assert any(found[model] for found in ranks)


def test_scales_that_are_powers_of_two_too(ranks: Ranks, folder: Path):
    expected = plain(run(alone(folder / "qwen3_moe", "power_of_two"), own(0, len(ranks))))
    assert same(ranks[0]["power of two"], expected) and not same(ranks[0]["qwen3_moe"], expected)


@pytest.mark.parametrize("number", range(len(VERSIONS)), ids=VERSIONS)
def test_a_version_that_comes_later_is_that_of_a_fresh_engine(ranks: Ranks, folder: Path, number: int):
    """Whether it is quantised when it is loaded, or comes in FP8; into a new model and into one that was live before."""
    for rank, found in enumerate(ranks):
        expected = plain(run(alone(folder / "next"), own(rank, len(ranks))))
        assert all(same(each, expected) for each in found["versions"][number]["rounds"]), rank


def test_experts_move_as_codes_and_change_no_bit(ranks: Ranks, folder: Path):
    assert sum(found["moved"]["moved"] for found in ranks) > 0
    for rank, found in enumerate(ranks):
        assert (found["moved"]["first"] != found["moved"]["last"]).any()
        first, *others = found["moved"]["rounds"]
        assert all(same(other, first) for other in others)
        engine = EmbeddedEngine(folder / "skewed", settings("float8", prefix_cache=False, ranks=1), SEQ_LEN)
        assert same(first, plain(run(engine, asked_twice(rank, len(ranks)))))


def test_no_rank_holds_the_codes_of_other_experts(ranks: Ranks, folder: Path):
    """Two versions of them at most, however many came."""
    whole = alone(folder / "qwen3_moe")
    experts = sum(t.nbytes for name, p in whole._weights.model.named_parameters() if ".experts." in name for t in p.memory)  # type: ignore[attr-defined]
    for found in ranks:
        assert found["qwen3_moe bytes"] == whole.weight_bytes - experts + experts // len(ranks)
        assert {each["bytes"] for each in found["versions"]} == {2 * found["qwen3_moe bytes"]}
