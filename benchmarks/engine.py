"""Generated tokens per second of the embedded engine, of transformers' `generate`, of vLLM and of llama.cpp, one thread each, on one
checkpoint.

Requests have exactly 64 or exactly 1,024 prompt tokens and 16 to 96 output tokens (options), drawn once from a seed; every engine gets the
same. Each engine runs in its own process, and they take turns: round by round, at each number of concurrent requests. Time runs from the
first request to the last token and includes prefill. A ratio is slipstream / other, median over the rounds.

The checkpoint has random weights and no end-of-sequence token, so each request runs to its length. Prompts are fresh in each round: no
prefix cache helps anybody. llama.cpp has bfloat16 weights whatever --dtype says (--llama-dtype): its fastest on a CPU. It is compared with
slipstream in the same type (`vs_llama_cpp`), and with slipstream in --dtype (`vs_llama_cpp_mixed`). vLLM and llama.cpp live in
benchmarks/.venv-vllm and .venv-llama, made on first use; where one cannot run, its figure is null and `..._reason` says why.
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
from benchmarks._venvs import InstallError, llama_python, vllm_python
from benchmarks.harness import finish, median, spread
from slipstream.models.maker import make_model

ROOT = Path(__file__).resolve().parents[1]
REQUESTS: Mapping[int, int] = {1: 6, 8: 16, 32: 64, 128: 128}
"""Requests of one measurement, by how many are in flight: whole batches for transformers (but for one in flight)."""
LONG_PROMPT = 512
"""Tokens from which a measurement has half the requests."""
COLUMNS = (
    "engine",
    "prompt",
    "concurrency",
    "tokens_per_s",
    "spread",
    "ours_over_this",
    "tokens_per_cpu_s",
    "on_cpu_time",
    "requests",
    "experts",
)
LLAMA_MATCH = "slipstream, llama's type"
"""The second slipstream, where --llama-dtype is not --dtype."""
PRELOADS = ("libiomp5.so", "libtcmalloc_minimal.so.4")
"""What vLLM's documentation for CPUs asks to preload; those that this machine has are."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small-moe", help="model of slipstream.models.maker: small-moe (16M parameters) or tiny-moe")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--llama-dtype", choices=("float32", "bfloat16"), default="bfloat16", help="weights of llama.cpp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", choices=list(REQUESTS), default=list(REQUESTS))
    parser.add_argument(
        "--prompt-tokens", type=int, nargs="+", default=[64, 1024], help="a measurement with prompts of each of these sizes"
    )
    parser.add_argument("--output-tokens", type=int, nargs=2, default=(16, 96), metavar=("LEAST", "MOST"))
    parser.add_argument("--install", action="store_true", help="only make the environments of vLLM and llama.cpp")
    parser.add_argument("--without", nargs="+", default=[], choices=("transformers", "vllm", "llama.cpp"), help="leave these out")
    parser.add_argument("--quick", action="store_true", help="one round, a third of the requests, 64 tokens, up to 32 in flight")
    args = parser.parse_args()
    if args.install:
        print(vllm_python(), llama_python())
        return
    rounds, levels = (1, [c for c in args.concurrency if c <= 32]) if args.quick else (args.rounds, args.concurrency)
    sizes = args.prompt_tokens[:1] if args.quick else args.prompt_tokens
    cells = {(size, c): requests_of(size, c, args.quick) for size in sizes for c in levels}
    model = checkpoint(args.preset)
    peers, missing = start(model, args.dtype, args.llama_dtype, args.without)
    try:
        mix = Mix(json.loads((model / "config.json").read_text())["vocab_size"], tuple(args.output_tokens))
        measured = measure(peers, cells, rounds, mix)
    finally:
        for peer in peers:
            peer.close()
    report(args, peers, measured, cells, rounds, missing)


def requests_of(size: int, concurrency: int, quick: bool) -> int:
    """How many requests a measurement has: never fewer than are in flight."""
    return max(concurrency, REQUESTS[concurrency] // (3 if quick else 2 if size >= LONG_PROMPT else 1))


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


def start(model: Path, dtype: str, llama_dtype: str, without: Sequence[str]) -> tuple[list[Process], dict[str, str]]:
    """The engines that run here, slipstream's first, and why another is not among them."""
    peers = [Process("slipstream", sys.executable, command("slipstream", model, dtype))]
    if llama_dtype != dtype and "llama.cpp" not in without:
        peers.append(Process(LLAMA_MATCH, sys.executable, command("slipstream", model, llama_dtype)))
    missing = dict.fromkeys(without, "left out by --without")
    for name in ("transformers", "vllm", "llama.cpp"):
        try:
            if name not in missing:
                peers.append(start_peer(name, model, llama_dtype if name == "llama.cpp" else dtype))
        except (InstallError, PeerError) as error:
            missing[name] = str(error)
    return peers, missing


def start_peer(name: str, model: Path, dtype: str) -> Process:
    if name == "vllm":
        return Process(name, python := vllm_python(), command(name, model, dtype), vllm_environment(python))
    if name == "llama.cpp":
        return Process(name, llama_python(), command(name, model, dtype))
    return Process(name, sys.executable, command(name, model, dtype))


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
    """Which requests there are; the range is (least, most) tokens."""

    vocab_size: int
    output_tokens: tuple[int, int]

    def requests(self, size: int, count: int, round_: int) -> tuple[list[list[int]], list[int]]:
        """(prompts of `size` tokens, output lengths): the same lengths in every round, other tokens."""
        low, high = self.output_tokens
        lengths = np.random.default_rng(0).integers(low, high + 1, count).tolist()
        return np.random.default_rng((size, count, round_)).integers(0, self.vocab_size, (count, size)).tolist(), lengths


Cell = tuple[int, int]
"""(prompt tokens, requests in flight)."""


def measure(peers: Sequence[Process], cells: Mapping[Cell, int], rounds: int, mix: Mix) -> dict[tuple[str, Cell], list[dict]]:
    """Answers by (engine, cell), one a round. Round 0 is short and only warms up."""
    measured: dict[tuple[str, Cell], list[dict]] = {(peer.name, cell): [] for peer in peers for cell in cells}
    for round_ in range(rounds + 1):
        for (size, concurrency), count in cells.items():
            prompts, lengths = mix.requests(size, count, round_)
            for peer in peers:
                if round_ == 0:
                    peer.ask({"prompts": prompts[: min(concurrency, 8)], "lengths": [2] * min(concurrency, 8), "concurrency": concurrency})
                    continue
                answer = peer.ask({"prompts": prompts, "lengths": lengths, "concurrency": concurrency})
                if answer["tokens"] != sum(lengths) or answer["cached"]:
                    raise PeerError(f"{peer.name} at {concurrency}: {answer}, but {sum(lengths)} tokens were asked for, none cached")
                measured[peer.name, (size, concurrency)].append(answer)
                rate, cpu_rate = answer["tokens"] / answer["seconds"], answer["tokens"] / answer["cpu_s"]
                print(
                    f"round {round_}  {peer.name:12s} {size:5d} tokens {concurrency:4d} in flight  {rate:8.1f} tokens/s, "
                    f"{cpu_rate:8.1f} a CPU second",
                    flush=True,
                )
    return measured


def report(
    args: argparse.Namespace,
    peers: Sequence[Process],
    measured: Mapping[tuple[str, Cell], list[dict]],
    cells: Mapping[Cell, int],
    rounds: int,
    missing: Mapping[str, str],
) -> None:
    rates, cpu_rates = (per_second(measured, clock) for clock in ("seconds", "cpu_s"))
    ratios, cpu_ratios = (against(r, "slipstream") for r in (rates, cpu_rates))
    runs = [
        {
            "engine": name,
            "prompt": cell[0],
            "concurrency": cell[1],
            "tokens_per_s": median(rates[name, cell]),
            "spread": spread(rates[name, cell]),
            "ours_over_this": median(ratios[name, cell]),
            "tokens_per_cpu_s": median(cpu_rates[name, cell]),
            "on_cpu_time": median(cpu_ratios[name, cell]),
            "requests": cells[cell],
            "tokens": measured[name, cell][0]["tokens"],
            "experts": measured[name, cell][0].get("experts"),
            "rounds_tokens_per_s": rates[name, cell],
        }
        for name, cell in rates
    ]
    headline: dict[str, Any] = {}
    for name in ("transformers", "vllm", "llama.cpp"):
        key = f"vs_{name.replace('.', '_')}"
        headline[key] = None if name in missing else by_size(cells, {cell: median(ratios[name, cell]) for cell in cells})
        if name in missing:
            headline[f"{key}_reason"] = missing[name]
        elif name == "llama.cpp" and any(peer.name == LLAMA_MATCH for peer in peers):
            headline["vs_llama_cpp_mixed"] = headline[key]
            matched = against(rates, LLAMA_MATCH)
            headline[key] = by_size(cells, {cell: median(matched[name, cell]) for cell in cells})
    counts = {f"{size} x {c}": count for (size, c), count in cells.items()}
    settings = vars(args) | {"counts": counts, "rounds": rounds, "engines": {peer.name: peer.about for peer in peers}}
    notes = (
        f"Load when it ended: {os.getloadavg()[0]:.1f}. Where others use the machine, CPU time is the better clock (one thread each, "
        "nobody waits): tokens_per_cpu_s and on_cpu_time. The others return no logprobs here; slipstream returns them and the routing."
    )
    finish("engine" if args.dtype == "float32" else f"engine_{args.dtype}", headline, runs, settings, COLUMNS, notes)


def by_size(cells: Mapping[Cell, int], values: Mapping[Cell, float]) -> dict[str, dict[str, float]]:
    """{prompt tokens: {in flight: value}}."""
    return {str(size): {str(c): round(values[size, c], 3) for s, c in cells if s == size} for size in dict.fromkeys(s for s, _ in cells)}


def per_second(measured: Mapping[tuple[str, Cell], list[dict]], clock: str) -> dict[tuple[str, Cell], list[float]]:
    """Tokens per second of each round, on the wall clock (seconds) or on the process's CPU time (cpu_s)."""
    return {key: [answer["tokens"] / answer[clock] for answer in answers] for key, answers in measured.items()}


def against(rates: Mapping[tuple[str, Cell], list[float]], ours: str) -> dict[tuple[str, Cell], list[float]]:
    """`ours` / each, round by round: engines of the same round met the same machine."""
    return {(name, c): [one / other for one, other in zip(rates[ours, c], rates[name, c], strict=True)] for name, c in rates}


if __name__ == "__main__":
    main()
