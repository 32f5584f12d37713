"""What it saves to keep KV that the device has no room for: in RAM, on the local disk, in a folder that engines share.

Prefix: a prompt whose first 8192 tokens are known. Its time to first token when all of it is computed, and when its KV comes from each tier
(of an engine of its own, so that no nearer tier helps; from the shared folder another engine wrote it). Every path is measured beside a
computation of the same prompt under a fresh salt, in turn; medians and the ratio of medians.

    disk, shared            the files are written out and their pages dropped (fdatasync, posix_fadvise DONTNEED) before they are read
    disk_cached, ...        the same again, served by the page cache
    identical               tokens, logprobs and routing rows are bit for bit those of the computation, on every path
    replay_coverage         share of processed tokens with a valid routing row, over every path and the trace

Trace: agent sessions of several turns with a common system prompt, in seeded order, on a device that holds a fraction of them; hit rate per
tier, and output tokens per second with tiers and without, in turn.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._texts import repository_texts
from benchmarks.harness import finish, median
from slipstream.config.serve import EngineConfig
from slipstream.config.tiers import TiersConfig
from slipstream.engine.engine import EmbeddedEngine
from slipstream.models.maker import make_model
from slipstream.types import Completion, GenerateRequest, Sampling

BLOCK_TOKENS, NEW_TOKENS, REPLY = 16, 16, 8
PATHS = ("ram", "disk", "shared")
TARGETS = {"ram": 0.1, "disk": 0.25}
COLUMNS = ("what", "path", "ttft_s", "computed_s", "ratio", "cached_tokens", "mib", "tokens_per_s", "hit_rate", "by_tier")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefix", type=int, default=8192)
    parser.add_argument("--folder", type=Path, help="where disk and shared folder are made (default: the system's temporary folder)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and short prompts: to see that it works")
    args = parser.parse_args()
    rounds, prefix, preset = (1, 512, "tiny-moe") if args.quick else (args.rounds, args.prefix, "small-moe")
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        folder = Path(scratch)
        make_model(folder / "model", preset, repository_texts(), seed=0, split="words", max_position_embeddings=max(2 * prefix, 4096))
        runs, answers, identical = measure_prefix(folder, prefix, rounds)
        trace, played = measure_trace(folder, 4 if args.quick else 12, 3 if args.quick else 5, max(1, rounds // 2))
    ratios = {run["path"]: run["ratio"] for run in runs}
    headline = {f"{path}_ratio": round(ratios[path], 4) for path in PATHS}
    headline |= {"identical": identical, "replay_coverage": coverage([*answers, *played])}
    met = {path: ratios[path] <= target for path, target in TARGETS.items()}
    finish(
        "kv_tiers",
        headline,
        [*runs, *trace],
        {"preset": preset, "prefix": prefix, "rounds": rounds, "block_tokens": BLOCK_TOKENS, "targets": TARGETS, "met": met},
        COLUMNS,
        notes="Pages of disk and shared files are dropped before they are read; *_cached rows leave them to the page cache. "
        "What lies below the file system (a virtual disk's host) may cache as well.",
    )


def measure_prefix(folder: Path, prefix: int, rounds: int) -> tuple[list[dict[str, Any]], list[Completion], bool]:
    """(one row a path, all completions, whether each was what computing gives)."""
    prompt_T = np.random.default_rng(0).integers(3, 250, prefix + NEW_TOKENS).astype(np.int32)
    room = 2 * prefix * 8 // 1024 + 64
    tiers = {
        "ram": {"ram_mib": room},
        "disk": {"disk_path": folder / "disk", "disk_mib": room * rounds},
        "shared": {"shared_path": folder / "shared", "shared_mib": room * rounds, "scan_s": 3600},
    }
    times: dict[str, list[float]] = {}
    cached: dict[str, tuple[int, float]] = {}
    answers: list[Completion] = []
    identical = True
    with ExitStack() as stack:
        writers = {path: stack.enter_context(closing(engine(folder, prefix, values))) for path, values in tiers.items()}
        readers = writers | {"shared": stack.enter_context(closing(engine(folder, prefix, tiers["shared"])))}
        for salt in range(rounds):
            for path in PATHS:
                computed, seconds = first_token(writers[path], prompt_T, salt)
                times.setdefault(f"{path}/computed", []).append(seconds)
                answers.append(computed)
                spill(writers[path])
                for kind in (path,) if path == "ram" else (path, f"{path}_cached"):
                    if kind != "ram" and not kind.endswith("_cached"):
                        drop_pages(folder / path)
                    reader = readers[path]
                    assert reader.tiers is not None
                    if path == "shared":
                        reader.tiers.writer.look()
                    before = reader.block_values()[f"engine/tiers/{path}/read_mib"]
                    answer, seconds = first_token(reader, prompt_T, salt)
                    mib = reader.block_values()[f"engine/tiers/{path}/read_mib"] - before
                    times.setdefault(kind, []).append(seconds)
                    cached[kind] = (answer.cached_by_tier.get(path, 0), mib)
                    answers.append(answer)
                    identical &= same(answer, computed) and cached[kind][0] == prefix
                    spill(reader)
    rows = []
    for kind in cached:
        base = median(times[f"{kind.removesuffix('_cached')}/computed"])
        row = {"what": "prefix", "path": kind, "ttft_s": median(times[kind]), "computed_s": base, "ratio": median(times[kind]) / base}
        rows.append(row | {"cached_tokens": cached[kind][0], "mib": cached[kind][1], "all_s": times[kind]})
    return rows, answers, identical


def engine(folder: Path, prefix: int, tiers: dict[str, Any], kv_mib: int | None = None, **options: Any) -> EmbeddedEngine:
    kv_mib = kv_mib if kv_mib is not None else prefix * 6 // 1024 + 16
    config = EngineConfig(
        block_tokens=BLOCK_TOKENS, kv_memory_mib=kv_mib, tiers=TiersConfig(queue_mib=1024, fetch_timeout_s=120, **tiers), **options
    )
    return EmbeddedEngine(folder / "model", config, seq_len=prefix + 256)


def first_token(engine: EmbeddedEngine, prompt_T: np.ndarray, salt: int) -> tuple[Completion, float]:
    """Its completion, and the seconds from the request to its first token."""
    started, first, done = time.perf_counter(), 0.0, None
    engine.add(GenerateRequest("r", prompt_T, Sampling(max_tokens=REPLY, seed=1), salt))
    while engine.wait():
        result = engine.step()
        if len(result.tokens_S) and not first:
            first = time.perf_counter() - started
        done = result.finished[0] if result.finished else done
    assert done is not None
    return done, first


def spill(engine: EmbeddedEngine) -> None:
    """Make the device give up all that it holds, as a request that needs every block would."""
    pool = engine._scheduler.pool
    pool.release(pool.allocate(pool.available))
    assert engine.tiers is not None and engine.tiers.flush(120)


def drop_pages(folder: Path) -> None:
    """Write every file out and drop it from the page cache."""
    for file in folder.rglob("*.kv"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def same(one: Completion, other: Completion) -> bool:
    assert one.routing is not None and other.routing is not None
    return (
        np.array_equal(one.tokens_N, other.tokens_N)
        and np.array_equal(one.logprobs_N, other.logprobs_N)
        and np.array_equal(one.routing.ids_TLK, other.routing.ids_TLK)
    )


def coverage(answers: list[Completion]) -> float:
    """Share of tokens that were processed (all but the last) with a valid routing row."""
    return float(np.concatenate([answer.routing.valid_T for answer in answers if answer.routing is not None]).mean())


def measure_trace(folder: Path, sessions: int, turns: int, rounds: int) -> tuple[list[dict[str, Any]], list[Completion]]:
    """One row with tiers and one without: hit rate by tier, output tokens per second; and all completions."""
    kinds = {
        "device only": {},
        "tiers": {
            "ram_mib": 16,
            "disk_path": folder / "trace-disk",
            "disk_mib": 24,
            "shared_path": folder / "trace-shared",
            "shared_mib": 256,
        },
    }
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    rows: dict[str, dict[str, Any]] = {}
    played: dict[str, list[Completion]] = {}
    for number in range(rounds):
        for kind in [*kinds] if number % 2 == 0 else [*kinds][::-1]:
            with closing(engine(folder, 2048, kinds[kind], kv_mib=24, max_running=4)) as one:
                started = time.perf_counter()
                answers, prompt_tokens = play(one, sessions, turns, salt=number)
                speeds[kind].append(sum(len(a.tokens_N) for a in answers) / (time.perf_counter() - started))
                played.setdefault(kind, []).extend(answers)
                by_tier = {tier: sum(a.cached_by_tier.get(tier, 0) for a in answers) for tier in ("device", *PATHS)}
                rows[kind] = {
                    "what": "trace",
                    "path": kind,
                    "hit_rate": sum(by_tier.values()) / prompt_tokens,
                    "by_tier": {tier: round(tokens / prompt_tokens, 3) for tier, tokens in by_tier.items()},
                    "values": one.block_values(),
                }
    agree = float(np.mean([np.array_equal(a.tokens_N, b.tokens_N) for a, b in zip(*played.values(), strict=True)]))
    for kind, row in rows.items():
        row |= {"tokens_per_s": median(speeds[kind]), "all_tokens_per_s": speeds[kind], "same_tokens": agree}
    return [*rows.values()], [answer for answers in played.values() for answer in answers]


def play(one: EmbeddedEngine, sessions: int, turns: int, salt: int) -> tuple[list[Completion], int]:
    """Every session takes a turn, in seeded order and four at a time, then the next; returns completions and prompt tokens."""
    random = np.random.default_rng(salt)
    system_T = random.integers(3, 250, 256)
    known = [np.concatenate([system_T, random.integers(3, 250, random.integers(64, 512))]) for _ in range(sessions)]
    answers, prompt_tokens = [], 0
    for turn in range(turns):
        order = random.permutation(sessions)
        for four in np.split(order, range(4, sessions, 4)):
            for session in four.tolist():
                prompt_T = known[session].astype(np.int32)
                prompt_tokens += len(prompt_T)
                sampling = Sampling(max_tokens=16, seed=1000 * turn + session)
                one.add(GenerateRequest(f"{session}/{turn}", prompt_T, sampling, salt))
            done = {}
            while one.wait():
                done |= {completion.id: completion for completion in one.step().finished}
            for session in four.tolist():
                answer = done[f"{session}/{turn}"]
                answers.append(answer)
                known[session] = np.concatenate([known[session], answer.tokens_N, random.integers(3, 250, random.integers(32, 128))])
    return answers, prompt_tokens


if __name__ == "__main__":
    main()
