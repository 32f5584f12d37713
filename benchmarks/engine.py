"""Generated tokens per second of the embedded engine, of transformers' `generate` and of vLLM, one thread each, on one checkpoint.

Requests have 16 to 256 prompt tokens and 16 to 96 output tokens (options), drawn once from a seed; every engine gets the same. Each engine
runs in its own process, and they take turns: round by round, at each number of concurrent requests. Time runs from the first request to the
last token and includes prefill. A ratio is slipstream / other, median over the rounds.

The checkpoint has random weights and no end-of-sequence token, so each request runs to its length. Prompts are fresh in each round: no
prefix cache helps anybody. vLLM lives in benchmarks/.venv-vllm, made on first use; where it cannot run, `vs_vllm` is null and
`vs_vllm_reason` says why.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._process import PeerError, Process
from benchmarks._venvs import InstallError, vllm_python
from benchmarks.harness import finish, median, spread
from slipstream.models.maker import make_model

ROOT = Path(__file__).resolve().parents[1]
REQUESTS: Mapping[int, int] = {1: 3, 8: 16, 32: 64, 128: 256}
"""Requests of one measurement, by how many are in flight: whole batches for transformers (but for one in flight)."""
COLUMNS = ("engine", "concurrency", "tokens_per_s", "spread", "ours_over_this", "tokens_per_cpu_s", "on_cpu_time", "requests", "experts")
PRELOADS = ("libiomp5.so", "libtcmalloc_minimal.so.4")
"""What vLLM's documentation for CPUs asks to preload; those that this machine has are."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small-moe", help="model of slipstream.models.maker: small-moe (16M parameters) or tiny-moe")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", choices=list(REQUESTS), default=list(REQUESTS))
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(16, 256), metavar=("LEAST", "MOST"))
    parser.add_argument("--output-tokens", type=int, nargs=2, default=(16, 96), metavar=("LEAST", "MOST"))
    parser.add_argument("--install-vllm", action="store_true", help="only make the environment of vLLM")
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM out")
    parser.add_argument("--quick", action="store_true", help="one round, a third of the requests, up to 32 in flight")
    args = parser.parse_args()
    if args.install_vllm:
        print(vllm_python())
        return
    rounds, levels = (1, [c for c in args.concurrency if c <= 32]) if args.quick else (args.rounds, args.concurrency)
    counts = {c: max(c, REQUESTS[c] // 3) if args.quick else REQUESTS[c] for c in levels}
    model = checkpoint(args.preset)
    peers, missing = start(model, args.dtype, with_vllm=not args.no_vllm)
    try:
        mix = Mix(json.loads((model / "config.json").read_text())["vocab_size"], tuple(args.prompt_tokens), tuple(args.output_tokens))
        measured = measure(peers, counts, rounds, mix)
    finally:
        for peer in peers:
            peer.close()
    report(args, peers, measured, counts, rounds, missing)


def checkpoint(preset: str) -> Path:
    """models/bench-engine-PRESET: seeded random weights. Nothing in it names an end-of-sequence token, and it has no tokenizer."""
    folder = ROOT / "models" / f"bench-engine-{preset}"
    if not (folder / "config.json").exists():
        corpus = [file.read_text() for file in [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "src").rglob("*.py"))]]
        make_model(folder, preset, corpus, seed=0, split="words")
        for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            (folder / file).unlink()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}, indent=2) + "\n")
    return folder


def start(model: Path, dtype: str, with_vllm: bool) -> tuple[list[Process], str]:
    """The engines that run here, slipstream's first, and why vLLM is not among them ('' when it is)."""
    peers = [Process(name, sys.executable, command(name, model, dtype)) for name in ("slipstream", "transformers")]
    if not with_vllm:
        return peers, "left out by --no-vllm"
    try:
        python = vllm_python()
        return [*peers, Process("vllm", python, command("vllm", model, dtype), vllm_environment(python))], ""
    except (InstallError, PeerError) as error:
        return peers, str(error)


def command(name: str, model: Path, dtype: str) -> list[str]:
    return ["benchmarks._engine_peers", name, str(model), dtype]


def vllm_environment(python: Path) -> dict[str, str]:
    """One process, one thread, not pinned to a core (the others are not either)."""
    folders = [python.parents[1] / "lib", Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64")]
    found = [next((str(folder / name) for folder in folders if (folder / name).exists()), None) for name in PRELOADS]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(path for path in found if path),
    }


@dataclass(frozen=True)
class Mix:
    """Which requests there are; ranges are (least, most) tokens."""

    vocab_size: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    def requests(self, count: int, round_: int) -> tuple[list[list[int]], list[int]]:
        """(prompts, output lengths): the same lengths in every round, other tokens."""
        rng = np.random.default_rng(0)
        sizes, lengths = (rng.integers(low, high + 1, count).tolist() for low, high in (self.prompt_tokens, self.output_tokens))
        rng = np.random.default_rng((count, round_))
        return [rng.integers(0, self.vocab_size, size).tolist() for size in sizes], lengths


def measure(peers: Sequence[Process], counts: Mapping[int, int], rounds: int, mix: Mix) -> dict[tuple[str, int], list[dict]]:
    """Answers by (engine, concurrency), one a round. Round 0 is short and only warms up."""
    measured: dict[tuple[str, int], list[dict]] = {(peer.name, c): [] for peer in peers for c in counts}
    for round_ in range(rounds + 1):
        for concurrency, count in counts.items():
            prompts, lengths = mix.requests(count, round_)
            for peer in peers:
                if round_ == 0:
                    peer.ask({"prompts": prompts[:concurrency], "lengths": [2] * concurrency, "concurrency": concurrency})
                    continue
                answer = peer.ask({"prompts": prompts, "lengths": lengths, "concurrency": concurrency})
                if answer["tokens"] != sum(lengths) or answer["cached"]:
                    raise PeerError(f"{peer.name} at {concurrency}: {answer}, but {sum(lengths)} tokens were asked for, none cached")
                measured[peer.name, concurrency].append(answer)
                rate = answer["tokens"] / answer["seconds"]
                print(f"round {round_}  {peer.name:12s} {concurrency:4d} in flight  {rate:8.1f} tokens/s", flush=True)
    return measured


def report(
    args: argparse.Namespace,
    peers: Sequence[Process],
    measured: Mapping[tuple[str, int], list[dict]],
    counts: Mapping[int, int],
    rounds: int,
    missing: str,
) -> None:
    rates, cpu_rates = (per_second(measured, clock) for clock in ("seconds", "cpu_s"))
    ratios, cpu_ratios = (against_ours(r) for r in (rates, cpu_rates))
    runs = [
        {
            "engine": name,
            "concurrency": c,
            "tokens_per_s": median(rates[name, c]),
            "spread": spread(rates[name, c]),
            "ours_over_this": median(ratios[name, c]),
            "tokens_per_cpu_s": median(cpu_rates[name, c]),
            "on_cpu_time": median(cpu_ratios[name, c]),
            "requests": counts[c],
            "tokens": measured[name, c][0]["tokens"],
            "experts": measured[name, c][0].get("experts"),
            "rounds_tokens_per_s": rates[name, c],
        }
        for name, c in rates
    ]
    by_level = {peer.name: {str(c): round(median(ratios[peer.name, c]), 3) for c in counts} for peer in peers}
    headline: dict[str, Any] = {"vs_transformers": by_level["transformers"], "vs_vllm": by_level.get("vllm")}
    if missing:
        headline["vs_vllm_reason"] = missing
    settings = vars(args) | {"counts": dict(counts), "rounds": rounds, "engines": {peer.name: peer.about for peer in peers}}
    notes = (
        f"Load when it ended: {os.getloadavg()[0]:.1f}. Where others use the machine, CPU time is the better clock (one thread each, "
        "nobody waits): tokens_per_cpu_s and on_cpu_time. vLLM and transformers return no logprobs here; slipstream returns them "
        "and the routing."
    )
    finish("engine", headline, runs, settings, COLUMNS, notes)


def per_second(measured: Mapping[tuple[str, int], list[dict]], clock: str) -> dict[tuple[str, int], list[float]]:
    """Tokens per second of each round, on the wall clock (seconds) or on the process's CPU time (cpu_s)."""
    return {key: [answer["tokens"] / answer[clock] for answer in answers] for key, answers in measured.items()}


def against_ours(rates: Mapping[tuple[str, int], list[float]]) -> dict[tuple[str, int], list[float]]:
    """slipstream / each, round by round: engines of the same round met the same machine."""
    return {(name, c): [ours / other for ours, other in zip(rates["slipstream", c], rates[name, c], strict=True)] for name, c in rates}


if __name__ == "__main__":
    main()
