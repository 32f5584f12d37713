"""A seeded trace of agents: sessions of 20 to 60 turns that share system prompts and, in groups, a task; they arrive in bursts.

Everything is a function of the seed, tokens included: system prompts and tasks by their number, what a tool returns by session and turn.
What the model says is the engine's. Lengths and pauses are log-normal, as those of tools are: many short, a few very long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

VOCAB = 300


@dataclass(frozen=True)
class TraceShape:
    """Sizes in tokens, times in seconds; `scale` shrinks the lengths for small contexts."""

    sessions: int = 800
    group: int = 8
    """Sessions that share a task and begin together, as the rollouts of one group do."""
    groups_a_burst: int = 8
    bursts_a_second: float = 0.2
    systems: int = 6
    system_tokens: int = 1500
    task_tokens: int = 700
    turns: tuple[int, int] = (20, 60)
    tool_tokens: float = 120.0
    """Median of what a turn adds to the context."""
    output_tokens: float = 40.0
    think_s: float = 1.0
    """Median time that the tool takes."""
    spread: float = 0.8
    """Sigma of the log-normal draws."""


@dataclass
class Session:
    name: str
    start_s: float
    first_T: np.ndarray
    """System prompt and task."""
    outputs: Sequence[int]
    """Tokens to sample, a turn."""
    tools: Sequence[np.ndarray]
    """What is appended after each turn but the last."""
    thinks_s: Sequence[float]

    @property
    def turns(self) -> int:
        return len(self.outputs)


def make_trace(shape: TraceShape, seed: int, max_context: int) -> list[Session]:
    """The sessions in order of their start. One that would outgrow `max_context` ends earlier."""
    rng = np.random.default_rng(seed)
    systems = [rng.integers(1, VOCAB, shape.system_tokens, np.int32) for _ in range(shape.systems)]
    sessions: list[Session] = []
    now = 0.0
    while len(sessions) < shape.sessions:
        for _ in range(shape.groups_a_burst):
            first_T = np.concatenate(
                [systems[rng.integers(shape.systems)], rng.integers(1, VOCAB, _length(rng, shape.task_tokens, 0.5), np.int32)]
            )
            for _ in range(shape.group):
                sessions.append(_session(f"s{len(sessions)}", now + float(rng.uniform(0, 0.2)), first_T, shape, rng, max_context))
        now += float(rng.exponential(1 / shape.bursts_a_second))
    return sorted(sessions[: shape.sessions], key=lambda session: session.start_s)


def _session(name: str, start_s: float, first_T: np.ndarray, shape: TraceShape, rng: np.random.Generator, max_context: int) -> Session:
    turns = int(rng.integers(shape.turns[0], shape.turns[1] + 1))
    outputs, tools, thinks_s, total = [], [], [], len(first_T)
    for _ in range(turns):
        said, tool = _length(rng, shape.output_tokens, shape.spread), _length(rng, shape.tool_tokens, shape.spread)
        if total + said + tool >= max_context:
            break
        total += said + tool
        outputs.append(said)
        tools.append(rng.integers(1, VOCAB, tool, np.int32))
        thinks_s.append(float(min(30.0, rng.lognormal(np.log(shape.think_s), shape.spread))))
    return Session(name, start_s, first_T, outputs, tools, thinks_s)


def _length(rng: np.random.Generator, median: float, sigma: float) -> int:
    return max(2, int(rng.lognormal(np.log(median), sigma)))
