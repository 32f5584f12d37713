"""The state of a run right now, in numbers: what the live view shows. Pure: History in, Snapshot out."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.observe.history import History

WINDOW_STEPS = 10
"""Steps over which times and waits are averaged."""
WINDOW_SAMPLES = 15
"""Engine reports (about one a second each) over which rates are measured."""
BALANCED = 0.2
"""A side that waits for less than this share of its time is not said to wait."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """None where the run has not said it yet."""

    step: int = 0
    reward: float | None = None
    success: dict[str, float] = field(default_factory=dict)
    """By environment: share of successful rollouts in the last batch."""
    evals: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By environment: last evaluated policy version and its avg@k."""
    lag_mean: float | None = None
    lag_max: float | None = None
    step_s: float | None = None
    """Seconds from one step to the next."""
    trainer_wait_frac: float | None = None
    """Share of its time that the trainer waits for batches."""
    engine_busy_frac: float | None = None
    generated_per_s: float | None = None
    trained_per_s: float | None = None
    in_flight: float | None = None
    ready: float | None = None
    concurrency: float | None = None
    kv_used_frac: float | None = None
    mismatch_kl: float | None = None
    entropy: float | None = None
    outcomes: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, float] = field(default_factory=dict)

    def eta_s(self, max_steps: int) -> float | None:
        """Seconds until the last step at the present pace."""
        return None if self.step_s is None else max(0, max_steps - self.step) * self.step_s

    @property
    def verdict(self) -> str:
        """Who waits for whom."""
        trainer, engine = self.trainer_wait_frac, self.engine_busy_frac
        if trainer is None:
            return "waiting for the first batch"
        if trainer > BALANCED and (engine is None or trainer > 1 - engine):
            return f"the trainer waits for rollouts {trainer:.0%} of the time"
        if engine is not None and 1 - engine > BALANCED:
            return f"the engine is idle {1 - engine:.0%} of the time"
        return "engine and trainer are balanced"


def take_snapshot(history: History) -> Snapshot:
    """What `history` says about now."""
    last = history.last
    steps, _ = history.series("trainer/samples/trained")
    step_s = _mean_interval(history)
    trained = history.recent("trainer/tokens/trained", WINDOW_STEPS)
    return Snapshot(
        step=int(steps[-1]) if len(steps) else 0,
        reward=last("orchestrator/reward/mean"),
        success=_by_env(history, "orchestrator/success/", "/frac"),
        evals={event["env"]: (event["version"], event["avg_at_k"]) for event in history.events["eval"]},
        lag_mean=last("trainer/lag/mean"),
        lag_max=last("trainer/lag/max"),
        step_s=step_s,
        trainer_wait_frac=_wait_frac(history),
        engine_busy_frac=_engine_busy(history),
        generated_per_s=_engine_rate(history, "engine/tokens/generated"),
        trained_per_s=sum(trained) / len(trained) / step_s if trained and step_s else None,
        in_flight=last("orchestrator/in_flight/count"),
        ready=last("orchestrator/ready/samples"),
        concurrency=last("orchestrator/concurrency/limit"),
        kv_used_frac=_engine_mean(history, "engine/kv/used_frac"),
        mismatch_kl=last("trainer/mismatch_kl/mean"),
        entropy=last("trainer/entropy/mean"),
        outcomes=history.by_suffix("orchestrator/rollouts/"),
        dropped=history.by_suffix("orchestrator/dropped/"),
    )


def _by_env(history: History, prefix: str, suffix: str) -> dict[str, float]:
    values = {key.removeprefix(prefix).removesuffix(suffix): history.last(key) for key in history.keys(prefix, suffix)}
    return {env: value for env, value in values.items() if value is not None}


def _mean_interval(history: History) -> float | None:
    """Mean time between the trainer's last reports."""
    times, _ = history.counter("trainer", "trainer/samples/trained", WINDOW_STEPS + 1)
    return float(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def _wait_frac(history: History) -> float | None:
    waited = sum(history.recent("trainer/time/wait_batch_s", WINDOW_STEPS))
    worked = sum(sum(history.recent(f"trainer/time/{name}_s", WINDOW_STEPS)) for name in ("step", "publish", "checkpoint"))
    return waited / (waited + worked) if waited + worked > 0 else None


def _engine_rate(history: History, key: str) -> float | None:
    """Growth of a counter per second, summed over the replicas."""
    rates = []
    for role in history.roles("engine"):
        times, values = history.counter(role, key, WINDOW_SAMPLES)
        if len(times) > 1 and times[-1] > times[0]:
            rates.append(float((values[-1] - values[0]) / (times[-1] - times[0])))
    return sum(rates) if rates else None


def _engine_busy(history: History) -> float | None:
    """Busy seconds per second, mean over the replicas."""
    rate = _engine_rate(history, "engine/time/busy_s")
    return None if rate is None else min(1.0, rate / len(history.roles("engine")))


def _engine_mean(history: History, key: str) -> float | None:
    values = [value for role in history.roles("engine") if (value := history.latest(role, key)) is not None]
    return sum(values) / len(values) if values else None
