"""How evenly engines decode while long prompts arrive in bursts: two that do both, against one that prefills and one that decodes.

    whole      two mixed engines, a prompt in one step (max_step_tokens above the longest prompt)
    chunked    two mixed engines, prompts in chunks (max_step_tokens = --chunk)
    split      one prefill engine, one decode engine; long prompts go through the first

Two processes each, one thread a process, the embedded engine with a small MoE. The same seeded trace for each, open loop: short prompts
with many tokens to sample arrive all the time, and every few seconds a burst of long ones with few. The mixed engines get every second
request. The three take turns, so that each round met the same machine; figures are medians over the rounds.

    itl        time between two tokens of a request, over all tokens of all requests
    throughput sampled tokens / time from the first arrival to the last token

The fused step decodes a token in half a millisecond, and a long prompt takes over a hundred. So a stall of `whole` meets one gap in some
hundreds, and its 99th percentile does not see it; the 99.9th and the longest gap do. In `chunked` one gap in twelve has a part of a prompt.

p99_ratio is that of `split` over the better of the two mixed set-ups. Target: at most 0.5, with a throughput_ratio within 10% of 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._process import Process
from benchmarks.harness import finish, median
from slipstream.jobs.make_model import make

TOKEN = "benchmark"
WHOLE, PREFILL_STEP = 4096, 256
LEAD_S = 0.5
"""From handing out the trace to its start."""
COLUMNS = (
    "setup",
    "round",
    "itl_p50_ms",
    "itl_p99_ms",
    "itl_p999_ms",
    "itl_max_ms",
    "ttft_p50_ms",
    "throughput",
    "tokens",
    "handed",
    "load",
)


@dataclass(frozen=True)
class Trace:
    """What arrives. Rates a second, lengths in tokens."""

    seconds: float
    chats: float
    burst_every_s: float
    burst: int
    long_tokens: int
    vocab: int = 256
    chat_tokens: int = 32
    chat_answer: int = 64
    long_answer: int = 8

    def requests(self, round_: int) -> list[dict[str, Any]]:
        """In order of arrival: the same times in every round, other tokens."""
        rng = np.random.default_rng(0)
        chats = [(at, self.chat_tokens, self.chat_answer) for at in rng.uniform(0, self.seconds, round(self.chats * self.seconds))]
        bursts = np.arange(self.burst_every_s / 2, self.seconds, self.burst_every_s)
        longs = [(at + 0.01 * i, self.long_tokens, self.long_answer) for at in bursts for i in range(self.burst)]
        rng = np.random.default_rng((1, round_))
        return [
            {"at": float(at), "prompt": rng.integers(0, self.vocab, size).tolist(), "tokens": answer, "prefill_at": ""}
            for at, size, answer in sorted([*chats, *longs])
        ]


class Pair:
    """Two engine processes."""

    def __init__(self, name: str, folder: Path, dtype: str, roles: tuple[tuple[str, int], tuple[str, int]]) -> None:
        self.name = name
        self.engines = [
            Process(name, sys.executable, ["benchmarks._pd_engine", str(folder), role, str(step), dtype, TOKEN]) for role, step in roles
        ]
        self.handoff = self.engines[1].about["handoff"]

    def play(self, trace: Trace, round_: int) -> dict[str, Any]:
        """The figures of one round."""
        requests = trace.requests(round_)
        if self.handoff:
            shares = [[{**r, "prefill_at": self.handoff if len(r["prompt"]) > trace.chat_tokens else ""} for r in requests]]
        else:
            shares = [requests[0::2], requests[1::2]]
        start, answers = time.time() + LEAD_S, [{} for _ in shares]

        def ask(i: int) -> None:
            answers[i] = self.engines[i].ask({"start": start, "requests": shares[i]})

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(shares))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._figures(answers, start + requests[0]["at"], round_)

    def _figures(self, answers: list[dict[str, Any]], began: float, round_: int) -> dict[str, Any]:
        gaps_ms = 1000 * np.concatenate([answer["gaps_s"] for answer in answers])
        tokens = sum(answer["tokens"] for answer in answers)
        p50, p99, p999 = np.percentile(gaps_ms, [50, 99, 99.9])
        return {
            "setup": self.name,
            "round": round_,
            "itl_p50_ms": float(p50),
            "itl_p99_ms": float(p99),
            "itl_p999_ms": float(p999),
            "itl_max_ms": float(gaps_ms.max()),
            "ttft_p50_ms": 1000 * float(np.median(np.concatenate([answer["ttft_s"] for answer in answers]))),
            "throughput": tokens / (max(answer["end"] for answer in answers) - began),
            "tokens": tokens,
            "handed": sum(answer["handed"] for answer in answers),
            "load": os.getloadavg()[0],
        }

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def headline(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds of ratios within a round."""
    rounds = sorted({run["round"] for run in runs})
    by = {(run["setup"], run["round"]): run for run in runs}

    def ratio(key: str, other: str) -> float:
        return median([by["split", r][key] / by[other, r][key] for r in rounds])

    p99 = {other: ratio("itl_p99_ms", other) for other in ("whole", "chunked")}
    best = max(p99, key=p99.__getitem__)
    return {
        "p99_ratio": round(p99[best], 3),
        "throughput_ratio": round(ratio("throughput", best), 3),
        "against": best,
        "p99_ratio_by_setup": {name: round(value, 3) for name, value in p99.items()},
        "p999_ratio_by_setup": {name: round(ratio("itl_p999_ms", name), 3) for name in p99},
        "p50_ratio_by_setup": {name: round(ratio("itl_p50_ms", name), 3) for name in p99},
    }


def measure(trace: Trace, rounds: int, chunk: int, preset: str, dtype: str) -> list[dict[str, Any]]:
    """Round 0 only warms up."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make(model, preset, ["calculator"], seed=0)
        pairs: list[Pair] = []
        try:
            pairs.append(Pair("whole", model, dtype, (("mixed", WHOLE), ("mixed", WHOLE))))
            pairs.append(Pair("chunked", model, dtype, (("mixed", chunk), ("mixed", chunk))))
            pairs.append(Pair("split", model, dtype, (("decode", PREFILL_STEP), ("prefill", PREFILL_STEP))))
            runs = []
            for round_ in range(rounds + 1):
                for pair in pairs:
                    run = pair.play(trace, round_)
                    print({key: round(value, 1) if isinstance(value, float) else value for key, value in run.items()}, flush=True)
                    runs.append(run)
            return [run for run in runs if run["round"]]
        finally:
            for pair in pairs:
                pair.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--preset", default="small-moe")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float32 or float8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=64, help="max_step_tokens of the chunked engines")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--chats", type=float, default=3.0, help="short prompts a second")
    parser.add_argument("--burst", type=int, default=4, help="long prompts in a burst")
    parser.add_argument("--every", type=float, default=1.5, help="seconds between bursts")
    parser.add_argument("--long", type=int, default=1024, help="tokens of a long prompt")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 1, 8.0
    trace = Trace(args.seconds, args.chats, args.every, args.burst, args.long)
    runs = measure(trace, args.rounds, args.chunk, args.preset, args.dtype)
    notes = f"Load when it ended: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores. Two processes that compute at once share them."
    finish("pd_disagg", headline(runs), runs, vars(args), COLUMNS, notes)


if __name__ == "__main__":
    main()
