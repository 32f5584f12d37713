"""What the checks run on: rollouts of two turns by an embedded engine, with its logprobs and expert choices, packed in several ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from slipstream.config.serve import EngineConfig
from slipstream.engine.engine import EmbeddedEngine
from slipstream.orchestrator.pack import make_batch
from slipstream.orchestrator.samples import rollout_samples
from slipstream.types import Batch, Completion, GenerateRequest, IntArray, Outcome, Rollout, Sample, Sampling, Task, Turn

SEQ_LEN, ROW_TOKENS, ROLLOUTS = 64, 96, 10
_TASK = Task("doctor/train/0", "doctor", 0)


def make_engine(folder: Path, config: EngineConfig, seed: int) -> EmbeddedEngine:
    """The user's engine in float32 and one thread, with room for what the checks ask of it."""
    small = {"dtype": "float32", "kv_memory_mib": 8, "max_running": 4, "max_step_tokens": 16, "threads": 1}
    return EmbeddedEngine(folder, config.replace(**small, capture_routing=True), SEQ_LEN, seed=seed)


def play(engine: EmbeddedEngine, vocab: int, seed: int) -> list[Sample]:
    """ROLLOUTS rollouts of two turns, of different lengths, as samples with random advantages."""
    rng = np.random.default_rng(seed)
    first = [rng.integers(0, vocab - 1, int(n)).astype(np.int32) for n in rng.integers(2, 12, ROLLOUTS)]
    opening = _ask(engine, "a", first, [0] * ROLLOUTS, rng)
    said = [np.concatenate([p, turn.completion.tokens_N]) for p, turn in zip(first, opening, strict=True)]
    second = [
        np.concatenate([s, rng.integers(0, vocab - 1, int(n))]).astype(np.int32)
        for s, n in zip(said, rng.integers(1, 5, ROLLOUTS), strict=True)
    ]
    closing = _ask(engine, "b", second, [len(s) - 1 for s in said], rng)
    samples: list[Sample] = []
    for i, turns in enumerate(zip(opening, closing, strict=True)):
        rollout = Rollout(f"r{i}", _TASK, f"g{i // 2}", Outcome.completed, turns=turns, reward=1.0)
        samples += rollout_samples(rollout, float(rng.standard_normal()))
    return samples


def _ask(engine: EmbeddedEngine, name: str, prompts: Sequence[IntArray], known: Sequence[int], rng: np.random.Generator) -> list[Turn]:
    requests = []
    for i, (prompt_T, routing_from) in enumerate(zip(prompts, known, strict=True)):
        sampling = Sampling(temperature=0.9, max_tokens=int(rng.integers(4, 16)), seed=i)
        requests.append(GenerateRequest(f"{name}{i}", prompt_T, sampling, routing_from=routing_from))
    for request in requests:
        engine.add(request)
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= {completion.id: completion for completion in engine.step().finished}
    return [Turn(request.prompt_T, done[request.id], request.sampling) for request in requests]


def batches(samples: Sequence[Sample], num_experts: int) -> Mapping[str, Batch]:
    """The same samples as batches of step 1, by how they are cut up; `forced` has other experts in its routing rows."""
    longest = max(sample.num_tokens for sample in samples)
    everything = sum(sample.num_tokens for sample in samples)
    moved = [
        replace(s, routing=tuple(replace(part, ids_TLK=(part.ids_TLK + 1) % max(1, num_experts)) for part in s.routing)) for s in samples
    ]
    return {
        "packed": make_batch(1, samples, ROW_TOKENS, {}),
        "alone": make_batch(1, samples, longest, {}),
        "together": make_batch(1, samples, everything, {}),
        "reversed": make_batch(1, samples[::-1], ROW_TOKENS, {}),
        "forced": make_batch(1, moved, ROW_TOKENS, {}),
    }
