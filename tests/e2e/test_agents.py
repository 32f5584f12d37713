"""The main job with somebody else's agent: openai-agents plays, the gateway records, the run trains on what it recorded."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import Job

pytest.importorskip("agents", reason="openai-agents is an optional package (extra `agents`)")
pytestmark = pytest.mark.slow

STEPS, SAMPLES = 6, 32
"""The agent library takes about 10 ms of a processor for each call: enough to see that the books balance, not to see it learn."""


@pytest.fixture(scope="module")
def finished(job: Job) -> Job:
    config = job.config.with_name("agents.toml")
    config.write_text(job.config.read_text().replace('id = "calculator"', 'id = "calculator-agent"\nturn_timeout_s = 600'))
    agents = Job(config, job.runs)
    sets = (f"max_steps={STEPS}", f"orchestrator.batch.samples={SAMPLES}", "orchestrator.concurrency.max=64")
    result = agents.rl("agents", *(part for each in sets for part in ("--set", each)))
    assert result.returncode == 0, result.stderr
    return agents


def test_an_unmodified_agent_library_is_trained_and_the_books_balance(finished):
    summary = finished.summary("agents")
    assert summary["ledger_balanced"] is True and summary["steps"] == STEPS
    assert summary["samples_trained"] == STEPS * SAMPLES
    assert set(summary["rollouts_by_outcome"]) <= {"completed", "truncated", "stale", "cut"}
    assert summary["mismatch_kl_mean"] < 0.05


def test_every_token_of_the_engine_is_recorded_but_for_what_was_in_flight_at_the_end(finished):
    lines = [json.loads(line) for line in (finished.runs / "agents" / "metrics.jsonl").read_text().splitlines()]
    values = [line["values"] for line in lines if "values" in line]
    last = {key: value for line in values for key, value in line.items()}
    assert last["gateway/turns/count"] > STEPS * SAMPLES and last["gateway/forks/rewritten"] == last["gateway/forks/branched"] == 0
    assert last["gateway/sampling/overridden"] == 0 and last["gateway/tokens/lost"] == 0
    assert 0.8 * last["engine/tokens/generated"] < last["gateway/tokens/recorded"] <= last["engine/tokens/generated"]
