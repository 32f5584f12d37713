"""Engine ranks that share the experts say what one engine says: tokens, logprobs and routing rows; whoever asks, fails, commits or dies."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import slipstream.engine.runner as runner
from slipstream.engine.engine import EmbeddedEngine
from slipstream.transport.weights import fingerprint_file
from slipstream.types import PolicyVersion
from tests.dist.conftest import start
from tests.dist.wide_cases import SEQ_LEN, SERVED, WORLD, one_by_one, plain, request, requests, run, settings, write_all

CASES = {**{name: (name, "float32") for name in SERVED}, "bfloat16": ("qwen3_moe", "bfloat16"), "copies": ("qwen3_moe", "float32")}
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    write_all(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    """What each rank has written. The last one kills itself in the end."""
    processes = start(WORLD, "-m", "tests.dist.wide_worker", str(folder))
    errors = [process.communicate(timeout=900)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [0] * (WORLD - 1) + [-signal.SIGKILL], "\n".join(errors)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.fixture
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process takes the model's own forward pass, as ranks do, and not the fused kernel, which adds up in another order."""
    monkeypatch.setattr(runner, "bind", lambda *args: None)


def alone(folder: Path, dtype: str = "float32") -> EmbeddedEngine:
    return EmbeddedEngine(folder, settings(dtype, ranks=1), SEQ_LEN)


def same(found: dict, expected: dict) -> bool:
    """Bit for bit."""
    return found.keys() == expected.keys() and all(
        torch.equal(a, b) for name in found for a, b in zip(found[name], expected[name], strict=True)
    )


@pytest.mark.parametrize("case", [case for case in CASES if case != "gpt_oss"])
def test_each_rank_gives_bit_for_bit_what_one_process_gives_for_its_requests(ranks: Ranks, folder: Path, torch_path, case: str):
    model, dtype = CASES[case]
    for rank in range(WORLD):
        assert same(ranks[rank][case]["done"], plain(run(alone(folder / model, dtype), requests(rank)))), rank


@pytest.mark.parametrize("case", CASES)
def test_four_ranks_together_are_one_process_with_all_requests(ranks: Ranks, folder: Path, case: str):
    """The same tokens and routing rows; logprobs to 5e-6 in float32: one process runs a fused kernel, or other sizes of batches, for which
    matrix products are added up in another order (as `tests/parity` has it for engine and full pass). So it is with the experts of gpt-oss,
    which torch multiplies."""
    model, dtype = CASES[case]
    found = {name: values for rank in ranks for name, values in rank[case]["done"].items()}
    expected = plain(run(alone(folder / model, dtype), requests()))
    assert found.keys() == expected.keys()
    for name, (tokens_N, logprobs_N, ids_TLK) in expected.items():
        assert torch.equal(found[name][0], tokens_N) and torch.equal(found[name][2], ids_TLK), name
        torch.testing.assert_close(found[name][1], logprobs_N, rtol=0, atol=5e-6)


def test_guesses_tiers_and_a_cache_in_fp8_change_nothing_of_what_a_rank_says(ranks: Ranks, folder: Path, torch_path):
    """Guesses change the sizes of batches: the same tokens and routing rows, and logprobs to 5e-6."""
    for number, rank in enumerate(ranks):
        plainly = EmbeddedEngine(folder / "qwen3_moe", settings(ranks=1).replace(kv_dtype="float8"), SEQ_LEN)
        expected = plain(one_by_one(plainly, number))
        found = rank["at once"]
        assert found["accepted"] > 0 and "ram" in found["tiers"] and found["done"].keys() == expected.keys()
        for name, (tokens_N, logprobs_N, ids_TLK) in expected.items():
            assert torch.equal(found["done"][name][0], tokens_N) and torch.equal(found["done"][name][2], ids_TLK), name
            torch.testing.assert_close(found["done"][name][1], logprobs_N, rtol=0, atol=5e-6)


def test_the_rank_without_requests_serves_its_experts_and_all_fall_asleep_after_the_same_vote(ranks: Ranks):
    for case in CASES:
        votes = {rank[case]["votes"] for rank in ranks}
        assert len(votes) == 1 and all(rank[case]["asleep"] for rank in ranks), case
        assert ranks[-1][case]["idle"] == votes.pop() - 1 and ranks[-1][case]["asked"][0] == 0
        assert all(min(rank[case]["served"]) > 0 for rank in ranks)
        asked, served = (np.sum([rank[case][key] for rank in ranks], axis=0) for key in ("asked", "served"))
        assert (asked == served).all() and (asked > 0).all()
        assert all(seconds > 0 for rank in ranks for seconds in rank[case]["seconds"].values())


def test_no_rank_holds_more_than_its_experts(ranks: Ranks):
    slots = {case: {count for rank in ranks for count in rank[case]["held"].values()} for case in CASES}
    assert slots == {"qwen3_moe": {2}, "uneven": {3}, "glm4_moe": {2}, "gpt_oss": {2}, "bfloat16": {2}, "copies": {4}}


def test_a_version_goes_live_in_the_same_step_on_all_ranks_when_the_last_one_was_asked(ranks: Ranks, folder: Path, torch_path):
    live = [rank["commit"]["live"] for rank in ranks]
    assert all(rank == live[0] for rank in live) and live[0][0] == 0 and live[0][-1] == 1
    old_steps = live[0].index(1)
    assert old_steps == 2 * WORLD - 1, "in the vote after the step behind which the last rank was asked"
    version = PolicyVersion(1, fingerprint_file(folder / "next" / "model.safetensors")[0], 0, str(folder / "next"))
    for rank in range(WORLD):
        engine, steps = alone(folder / "qwen3_moe"), 0

        def each_step(engine=engine) -> None:
            nonlocal steps
            steps += 1
            if steps == old_steps:
                engine.prepare(version)
                engine.commit(1)

        assert same(ranks[rank]["commit"]["done"], plain(run(engine, [request(rank, tokens=24)], each_step)))
        engine.prepare(version)  # of a request that ended before
        engine.commit(1)
        assert same(ranks[rank]["commit"]["again"], plain(run(engine, [request(rank + 10, tokens=4)])))
    assert ranks[0]["commit"]["versions"] == [((0, old_steps), (1, 24 - old_steps)), ((1, 4),)]


def test_a_step_that_fails_on_one_rank_costs_its_own_requests_only(ranks: Ranks):
    assert [rank["failed"]["failures"] for rank in ranks] == [0, 1, 0, 0]
    assert ranks[1]["failed"]["lost"] == ["r1", "r4", "r7"]
    for rank in ranks:
        assert same(rank["failed"]["done"], rank["qwen3_moe"]["done"]), "sent again, they end as without the failure"


def test_copies_of_hot_experts_lower_the_imbalance_and_change_no_bit(ranks: Ranks, folder: Path, torch_path):
    found = ranks[0]["moved"]
    before, _, after = found["imbalance"]
    assert before > 1.4 and after < 1.2
    assert found["rebalances"] == 1, "the load stays as it is: nothing moves twice"
    assert found["gauges"][0] > found["gauges"][1]
    assert sum(rank["moved"]["moved"] for rank in ranks) > 0 and (found["first"] != found["last"]).any()
    for rank in ranks:
        first, *others = rank["moved"]["rounds"]
        assert all(same(other, first) for other in others)
        assert (rank["moved"]["last"] == found["last"]).all()
    expected = plain(run(alone(folder / "skewed"), [request(number, tokens=40, temperature=0.0) for number in range(16)]))
    whole = {name: values for rank in ranks for name, values in rank["moved"]["rounds"][0].items()}
    assert whole.keys() == expected.keys() and all(torch.equal(whole[name][0], expected[name][0]) for name in expected)


def test_a_rank_that_dies_ends_the_others_at_once_with_the_reason(ranks: Ranks):
    for rank in ranks[:-1]:
        assert len(rank["lost"]["errors"]) == 3, "the step, recovery, and every step from then on"
        assert all("share experts lost another one" in error for error in rank["lost"]["errors"])
        assert rank["lost"]["seconds"] < 100  # the deadline of an exchange is 120
