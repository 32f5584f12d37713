"""What prompt lookup brings: tokens per second of the embedded engine with `engine.speculation.type = "prompt_lookup"` and with "off".

The engine does all of its work (model, KV, sampling, routing), but the token that it keeps is that of a transcript: a model with random
weights writes nothing that an agent would, and the two settings must write the same. Three kinds of transcripts, all drawn from seeds:

    repeating   an agent's turn: it has read a piece of a file, and writes it back with a name changed, a line dropped and a line added
    plain       a piece of this repository's text goes on: ordinary text, whose words come again, but not its sentences
    random      tokens without any pattern

Time runs from the first decode step, so that prefill, which is the same in both, does not count. The two engines take turns, and a ratio
is the median over rounds. CPU time of the process, which has one thread: on an idle machine that is the wall clock.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._process import ROOT
from benchmarks._texts import make, repository_texts
from benchmarks.harness import finish, median, spread
from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config.serve import EngineConfig
from slipstream.engine import postprocess
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.sampler import SampleParams, mix_seed, sample
from slipstream.models.spec import ModelSpec
from slipstream.types import GenerateRequest, Sampling

KINDS = ("repeating", "plain", "random")
PROMPT, REPLY = 512, 256
"""Tokens. Everything is cut to these sizes."""
COLUMNS = ("text", "concurrency", "speedup", "spread", "tokens_per_s_off", "tokens_per_s_on", "acceptance", "tokens_per_step")
_CALL = '<tool_call>\n{"name": "write_file", "arguments": {"path": "src/module.py", "content": "'


class Transcripts:
    """Token ids [PROMPT + REPLY] of each kind."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = ChatTokenizer.load(folder)
        self._vocab = ModelSpec.from_folder(folder).vocab_size
        self._lines = [line for text in repository_texts() for line in text.splitlines()]
        self._text_T = np.concatenate([self._tokenizer.encode(text) for text in repository_texts()])

    def draw(self, kind: str, seed: int) -> np.ndarray:
        """Without the tokens that end a reply."""
        rng = np.random.default_rng((KINDS.index(kind), seed))
        if kind == "repeating":
            drawn_T = self._edit(rng)
        elif kind == "plain":
            at = rng.integers(0, len(self._text_T) - PROMPT - REPLY)
            drawn_T = self._text_T[at : at + PROMPT + REPLY]
        else:
            drawn_T = rng.integers(0, self._vocab, PROMPT + REPLY)
        return np.where(np.isin(drawn_T, list(self._tokenizer.eos_ids)), self._vocab - 1, drawn_T).astype(np.int32)

    def _edit(self, rng: np.random.Generator) -> np.ndarray:
        """Something before, the file, then the call that writes it back changed."""
        at = int(rng.integers(0, len(self._lines) - 200))
        lines = self._lines[at : at + 200]
        changed = [line for i, line in enumerate(lines) if i % 12 != int(rng.integers(0, 12))]
        changed.insert(int(rng.integers(1, 6)), "    # checked again: the caller may be wrong")
        names = re.findall(r"\b[a-z_]{5,}\b", "\n".join(lines))
        name = names[int(rng.integers(0, len(names)))] if names else "value"
        text = re.sub(rf"\b{name}\b", f"new_{name}", "\n".join(changed))
        read_T = self._tokenizer.encode("\n".join(lines))[: PROMPT - 64]
        call_T = self._tokenizer.encode(_CALL)
        filler_T = self._text_T[: PROMPT - len(read_T) - len(call_T)]
        reply_T = self._tokenizer.encode(text)[:REPLY]
        return np.concatenate([filler_T, read_T, call_T, reply_T])


class Scripted:
    """Stands in for the engine's `sample`: the same work, then the tokens of the transcripts, known by the seeds of the requests."""

    def __init__(self) -> None:
        self.tokens_NT = np.zeros((0, 0), np.int32)
        self._keys_N = np.zeros(0, np.uint64)

    def load(self, transcripts: Sequence[np.ndarray]) -> None:
        keys = np.array([mix_seed(i) for i in range(len(transcripts))], np.uint64)
        order = np.argsort(keys)
        self._keys_N, self.tokens_NT = keys[order], np.stack(transcripts)[order]

    def __call__(self, logits_SV: Any, params: SampleParams) -> tuple[np.ndarray, np.ndarray]:
        _, logprobs_S = sample(logits_SV, params)
        return self.tokens_NT[np.searchsorted(self._keys_N, params.seed_S), params.position_S], logprobs_S


def decode(engine: EmbeddedEngine, transcripts: Sequence[np.ndarray]) -> dict[str, float]:
    """All of them together. Raises where what came out is not the transcript."""
    counts = engine.speculation
    before = counts.drafted, counts.accepted, counts.decodes
    for i, text_T in enumerate(transcripts):
        sampling = Sampling(max_tokens=REPLY, seed=i)
        engine.add(GenerateRequest(str(i), text_T[:-REPLY], sampling))
    while engine.state().waiting or not _all_decoding(engine):
        engine.step()
    generated, started, done = engine.tokens_generated, time.process_time(), []
    while engine.has_work:
        done += engine.step().finished
    seconds = time.process_time() - started
    for completion in done:
        assert completion.tokens_N.tolist() == transcripts[int(completion.id)][-REPLY:].tolist(), "the engine left the transcript"
    drafted, accepted, decodes = (now - then for now, then in zip((counts.drafted, counts.accepted, counts.decodes), before, strict=True))
    return {
        "rate": (engine.tokens_generated - generated) / seconds,
        "acceptance": accepted / drafted if drafted else 0.0,
        "tokens_per_step": 1 + accepted / decodes,
    }


def _all_decoding(engine: EmbeddedEngine) -> bool:
    table, slots = engine._table, [sequence.slot for sequence in engine._scheduler.running]
    return bool((table.length_R[slots] - table.context_R[slots] == 1).all())


def measure(engines: dict[str, EmbeddedEngine], script: Scripted, texts: Transcripts, kind: str, concurrency: int, rounds: int) -> dict:
    """One row of the table; the engines take turns, who is first changes from round to round."""
    results: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    for round_ in range(rounds + 1):
        transcripts = [texts.draw(kind, 1000 * round_ + i) for i in range(concurrency)]
        script.load(transcripts)
        for name in ("off", "on") if round_ % 2 else ("on", "off"):
            result = decode(engines[name], transcripts)
            if round_:  # round 0 warms up
                results[name].append(result)
    speedups = [on["rate"] / off["rate"] for on, off in zip(results["on"], results["off"], strict=True)]
    return {
        "text": kind,
        "concurrency": concurrency,
        "speedup": median(speedups),
        "spread": spread(speedups),
        "tokens_per_s_off": median([result["rate"] for result in results["off"]]),
        "tokens_per_s_on": median([result["rate"] for result in results["on"]]),
        "acceptance": median([result["acceptance"] for result in results["on"]]),
        "tokens_per_step": median([result["tokens_per_step"] for result in results["on"]]),
        "speedups": speedups,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small-moe", help="model of slipstream.models.maker")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--overhead-tokens", type=float, help="engine.speculation.overhead_tokens, else its default")
    parser.add_argument("--quick", action="store_true", help="two rounds of the tiny-moe preset")
    args = parser.parse_args()
    preset, rounds = ("tiny-moe", 2) if args.quick else (args.preset, args.rounds)
    folder = ROOT / "models" / f"bench-speculation-{preset}"
    if not (folder / "config.json").exists():
        make(folder, preset, {})
    speculation = {"type": "prompt_lookup"} | ({} if args.overhead_tokens is None else {"overhead_tokens": args.overhead_tokens})
    rows = compare(folder, args.dtype, speculation, args.concurrency, rounds)
    by_kind = {kind: {str(row["concurrency"]): row for row in rows if row["text"] == kind} for kind in KINDS}
    headline = {f"speedup_{kind}": {c: round(row["speedup"], 3) for c, row in by_kind[kind].items()} for kind in KINDS}
    headline["acceptance"] = {c: round(row["acceptance"], 3) for c, row in by_kind["repeating"].items()}
    finish("speculation", headline, rows, vars(args) | {"preset": preset, "rounds": rounds, "speculation": speculation}, COLUMNS)


def compare(folder: Path, dtype: str, speculation: dict[str, Any], levels: Sequence[int], rounds: int) -> list[dict]:
    script, texts = Scripted(), Transcripts(folder)
    common = {"dtype": dtype, "max_running": max(levels), "kv_memory_mib": 512, "prefix_cache": False, "capture_routing": True}
    configs = {"off": {"type": "off"}, "on": speculation}
    engines = {
        name: EmbeddedEngine(folder, EngineConfig.model_validate(common | {"speculation": chosen}), PROMPT + REPLY)
        for name, chosen in configs.items()
    }
    postprocess.sample = script  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return [measure(engines, script, texts, kind, concurrency, rounds) for kind in KINDS for concurrency in levels]
    finally:
        postprocess.sample = sample


if __name__ == "__main__":
    main()
