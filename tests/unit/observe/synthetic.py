"""A run folder as the roles would leave it, with numbers simple enough to check a summary by hand. No model, no processes.

Time: the run starts at T0. Step n (1-based): the trainer waits 1 s, steps 2 s, publishes 0.5 s and is then idle for 0.5 s, so a step
takes 4 s. The engine is busy for the first 3 s of each of these.
"""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np

from slipstream.config import RunConfig, to_toml, validate
from slipstream.observe import metrics
from slipstream.observe.metrics import MetricsWriter
from slipstream.observe.rollouts import RolloutWriter
from slipstream.types import Completion, Outcome, Rollout, Sampling, Task, Timings, Turn

T0 = 1_700_000_000.0
STEP_S = 4.0
ENV = "calculator"


class FakeClock:
    """Stands in for the time module in observe.metrics."""

    def __init__(self):
        self.now = T0

    def time(self) -> float:
        return self.now


def make_run(folder: Path, monkeypatch, steps: int = 5, *, ledger: bool = True, rollouts: bool = True) -> Path:
    """Metrics, ledger, rollouts and config of a run of `steps` steps with an evaluation before and after."""
    folder.mkdir(parents=True, exist_ok=True)
    config = validate(
        RunConfig,
        {"name": folder.name, "max_steps": steps, "model": {"path": "models/tiny"}, "envs": [{"id": ENV, "sampling": {"max_tokens": 64}}]},
    )
    (folder / "config.toml").write_text(to_toml(config))
    (folder / "manifest.json").write_text(json.dumps({"config_fingerprint": config.fingerprint(), "starts": [{"cpu": "test"}]}))
    clock = FakeClock()
    monkeypatch.setattr(metrics, "time", clock)
    write_metrics(folder, clock, steps)
    if ledger:
        write_ledger(folder, steps)
    if rollouts:
        write_rollouts(folder, steps)
    return folder


def write_metrics(folder: Path, clock: FakeClock, steps: int) -> None:
    trainer, orchestrator, engine = (MetricsWriter(folder, role) for role in ("trainer", "orchestrator", "engine-0"))
    orchestrator.event("eval", version=0, env=ENV, avg_at_k=0.25, pass_at_k=0.25, reward_mean=0.3, samples=16)
    orchestrator.log(0, eval_values(0.25))
    engine.log(-1, engine_values(0, 0.0, 0.0))
    for step in range(1, steps + 1):
        start = T0 + STEP_S * (step - 1)
        clock.now = start + 1
        trainer.span("wait_batch", start, start + 1, step)
        orchestrator.log(step, orchestrator_values(step))
        orchestrator.event("lag_histogram", counts={"0": 60, "1": 40})
        trainer.span("step", start + 1, start + 3, step)
        engine.span("busy", start, start + 3)
        clock.now = start + 3.5
        trainer.span("publish", start + 3, start + 3.5, step)
        trainer.log(step, trainer_values(step))
        trainer.event("expert_load", load=np.full((2, 4), 0.25))
        orchestrator.event("published", version=step, seconds=0.2)
        clock.now = start + STEP_S
        engine.log(-1, engine_values(step * 1000, step * 3.0, step * STEP_S))
    last = 0.25 + 0.1 * steps
    orchestrator.event("eval", version=steps, env=ENV, avg_at_k=last, pass_at_k=last, reward_mean=last, samples=16)
    orchestrator.log(steps, eval_values(last))


def trainer_values(step: int) -> dict[str, float]:
    return {
        "trainer/loss/mean": 0.01 * step,
        "trainer/grad/norm": 0.5,
        "trainer/optim/lr": 1e-4,
        "trainer/time/step_s": 2.0,
        "trainer/time/wait_batch_s": 1.0,
        "trainer/time/publish_s": 0.5,
        "trainer/time/checkpoint_s": 0.0,
        "trainer/tokens/trained": 800,
        "trainer/tokens/loss": 100,
        "trainer/samples/trained": 8,
        "trainer/mismatch_kl/mean": 0.001 * step,
        "trainer/mismatch_kl/fresh": 1e-6,
        "trainer/mismatch_kl/stale": 0.002 * step,
        "trainer/ratio/extreme_frac": 0.0,
        "trainer/ratio/masked_frac": 0.01,
        "trainer/entropy/mean": 1.0 / step,
        "trainer/lag/mean": 0.4,
        "trainer/lag/max": 1 + step % 2,
        "trainer/replay/coverage_frac": 0.98,
        "trainer/replay/flip_frac": 0.02,
        "trainer/step/skipped": 0,
    }


def orchestrator_values(step: int) -> dict[str, float]:
    return {
        "orchestrator/reward/mean": 0.2 + 0.1 * step,
        f"orchestrator/reward/{ENV}/mean": 0.2 + 0.1 * step,
        f"orchestrator/success/{ENV}/frac": 0.1 * step,
        "orchestrator/lag/mean": 0.4,
        "orchestrator/lag/max": 1 + step % 2,
        "orchestrator/rollouts/completed": 9 * step,
        "orchestrator/rollouts/cut": step,
        "orchestrator/dropped/cut": step,
        "orchestrator/in_flight/count": 16,
        "orchestrator/ready/samples": 4,
        "orchestrator/concurrency/limit": 32,
        "orchestrator/time/wait_ready_s": 1.0,
        "orchestrator/time/wait_version_s": 0.25,
    }


def eval_values(score: float) -> dict[str, float]:
    return {f"orchestrator/eval/{ENV}/{name}": score for name in ("avg_at_k", "pass_at_k", "reward_mean")}


def engine_values(generated: int, busy_s: float, uptime_s: float) -> dict[str, float]:
    return {
        "engine/tokens/generated": generated,
        "engine/tokens/prefilled": generated * 2,
        "engine/tokens/cached": generated,
        "engine/time/busy_s": busy_s,
        "engine/time/uptime_s": uptime_s,
        "engine/requests/running": 8,
        "engine/requests/waiting": 0,
        "engine/kv/used_frac": 0.5,
        "engine/version/live": 1,
    }


def write_ledger(folder: Path, steps: int) -> None:
    """Eight trained and one cut rollout a step, one filtered, and at the end two in flight and one ready."""
    rows = [(f"r{step}-{i}", "trained", "completed", "", step) for step in range(1, steps + 1) for i in range(8)]
    rows += [(f"c{step}", "dropped", "cut", "cut", None) for step in range(1, steps + 1)]
    rows += [
        ("z", "dropped", "completed", "zero_advantage", None),
        ("f1", "in_flight", None, "", None),
        ("f2", "in_flight", None, "", None),
    ]
    rows += [("y", "ready", "completed", "", None)]
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger:
        ledger.execute("pragma journal_mode = wal")
        ledger.execute("create table rollouts (id text primary key, status text, outcome text, reason text, step integer)")
        ledger.execute("create table trained (rollout_id text primary key, step integer)")
        ledger.executemany("insert into rollouts values (?, ?, ?, ?, ?)", rows)
        ledger.execute("insert into trained select id, step from rollouts where status = 'trained'")
        ledger.commit()


def write_rollouts(folder: Path, steps: int) -> None:
    writer = RolloutWriter(folder)
    writer.write_eval(0, [rollout("e0", 0.0, "I guess 7", version=0)])
    for step in range(1, steps + 1):
        good, bad = (
            rollout(f"r{step}-0", 1.0, "The answer is 49", version=step - 1),
            rollout(f"r{step}-1", 0.0, "No idea", version=step - 1),
        )
        cut = rollout(f"c{step}", None, "", version=step - 1, outcome=Outcome.cut)
        writer.write(step, [good, bad, cut], advantages={good.id: 0.5, bad.id: -0.5}, dropped={cut.id: "cut"})
    writer.write_eval(steps, [rollout("e1", 1.0, "The answer is 49", version=steps)])


def rollout(name: str, reward: float | None, text: str, version: int, outcome: Outcome = Outcome.completed) -> Rollout:
    """Two turns: a tool call, sampled by `version`, and an answer, whose last token the next version sampled."""
    call = {"id": "call_1", "type": "function", "function": {"name": "calc", "arguments": '{"a": 7}'}}
    messages = (
        {"role": "user", "content": "What is 7 times 7? <b>&</b>"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "49"},
        {"role": "assistant", "content": text},
    )
    return Rollout(
        id=name,
        task=Task(f"{ENV}/train/3", ENV, 3, {"question": "7*7", "answer": 49}),
        group_id="g1",
        outcome=outcome,
        turns=(turn(f"{name}/0", 5, 3, ((version, 3),)), turn(f"{name}/1", 10, 2, ((version, 1), (version + 1, 1)))),
        messages=messages,
        reward=reward,
        reward_parts={} if reward is None else {"correct": reward},
        version_start=version,
        started_s=T0,
        duration_s=1.5,
    )


def turn(name: str, prompt: int, sampled: int, versions: tuple[tuple[int, int], ...]) -> Turn:
    logprobs = np.linspace(-1, -0.5, sampled, dtype=np.float32)
    tokens = np.arange(sampled, dtype=np.int32)
    completion = Completion(name, tokens, logprobs, versions, "stop", cached_tokens=2, kv_age=1, timings=Timings(0.1, 0.2, 0.3))
    return Turn(np.arange(prompt, dtype=np.int32), completion, Sampling(temperature=0.9))
