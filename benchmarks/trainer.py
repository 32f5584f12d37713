"""Tokens per second of slipstream's SFT step, of transformers' Trainer and of TRL's SFTTrainer; and how near a large step comes to what the
machine's matmuls can do.

    vs_hf_trainer, vs_trl_sft   tokens/s, slipstream / other, median over rounds, of a mixture of experts (`_dense`: of a dense model)
    ceiling_frac                FLOPs of the model (forward and both gradients, nothing recomputed, attention's causal half) by the seconds
                                of a step, as a share of torch's best rate of any large product; bfloat16, 1,024 features, a mixture of
                                experts (`_dense`: a dense model)

Figures are on CPU time of one thread, as those of limits: an idle machine's wall clock says the same. The table has both clocks.

Tokens/s: one process and one thread each, the same model, documents, tokens a step and AdamW, and the same `--dtype`. Documents are pieces
of this repository's text with log-normal lengths, 16 to 1,024 tokens. In every round each trainer trains on the same new documents, in
turns, from the same weights. transformers and TRL (in benchmarks/.venv-trl, made on first use) get the fastest of several ways to lay out
the documents and to compute the experts, found first by pilot runs on CPU time.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks._process import PeerError, Process
from benchmarks._step_ceiling import LARGE_MODELS, ceiling_rows
from benchmarks._texts import MAX_TOKENS, Documents, make
from benchmarks._venvs import trl_python
from benchmarks.harness import finish, median, spread

MODELS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "moe": ("small-moe", {}),
    "dense": (
        "tiny-dense",
        {
            "vocab_size": 4096,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
        },
    ),
}
SAMPLES = 32
"""Documents a step."""
OPTIM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "clip_norm": 1.0}
EXPERTS = ("grouped_mm", "eager")
"""The third, batched_mm, copies the weights of its experts for every token: tens of gigabytes here."""
LAYOUTS: Mapping[str, Sequence[tuple[str, int]]] = {
    "hf": (("grouped", 8), ("flat", 1), ("flat", 4)),
    "trl": (("packed", 1), ("packed", 2), ("grouped", 8), ("flat", 1), ("flat", 4)),
}
"""(layout, rows a forward pass) of `benchmarks._sft_peers`; the first also serves to choose the experts."""
LOSS_TOLERANCE = 0.05
"""Mean losses may differ so much: documents come in another order, in other steps."""
COLUMNS = ("model", "what", "setting", "tokens_per_s", "spread", "ours_over_this", "tokens_per_cpu_s", "on_cpu_time", "loss", "frac")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of a round")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the comparison; the ceiling is bfloat16's")
    parser.add_argument("--quick", action="store_true", help="one round of one step without pilots, ceilings of a smaller step")
    args = parser.parse_args()
    rounds, steps = (1, 1) if args.quick else (args.rounds, args.steps)
    torch.set_num_threads(1)
    runs, versions = compared(args.dtype, rounds, steps, pilots=not args.quick)
    print("measuring the ceiling", flush=True)
    runs += [row for name in LARGE_MODELS for row in ceiling_rows(name, 2048 if args.quick else 8192, rounds)]
    settings = {"rounds": rounds, "steps": steps, "dtype": args.dtype, "optim": OPTIM, "samples": SAMPLES, "versions": versions}
    notes = f"Comparison in {args.dtype}, ceiling in bfloat16. Load when it ended: {os.getloadavg()[0]:.1f}."
    finish("trainer" if args.dtype == "bfloat16" else f"trainer_{args.dtype}", headline(runs), runs, settings, COLUMNS, notes)


def headline(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the mixtures of experts under the bare names."""
    found = {(run["model"], run["what"]): run for run in runs}
    keys = {"vs_hf_trainer": ("hf", "on_cpu_time"), "vs_trl_sft": ("trl", "on_cpu_time")}
    small = {
        key + end: found[model, what][value] for model, end in (("moe", ""), ("dense", "_dense")) for key, (what, value) in keys.items()
    }
    large = {f"ceiling_frac{end}": found[f"large {model}", "step"]["frac"] for model, end in (("moe", ""), ("dense", "_dense"))}
    return {**small, **large}


# ---- against the other trainers ----


def compared(dtype: str, rounds: int, steps: int, pilots: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(rows of every model and trainer, versions of their libraries). All pilot runs come first."""
    python, runs, versions, ready = trl_python(), [], {}, []
    with tempfile.TemporaryDirectory() as scratch, closing_all() as processes:
        for model, made_of in MODELS.items():
            folder = make(Path(scratch) / model, *made_of)
            texts = Documents(folder)
            peers = {name: start(name, python, folder, dtype) for name in ("slipstream", "hf", "trl")}
            processes += peers.values()
            versions |= {name: peer.about["versions"] for name, peer in peers.items()}
            settings: dict[str, dict[str, Any]] = {"slipstream": {}}
            for name in LAYOUTS:
                tried = pilot_runs(model, peers[name], texts.draw(SAMPLES // 2, 0)) if pilots else []
                runs += [pilot_row(model, name, *one) for one in tried]
                settings[name] = best(tried) if tried else first_settings(model, name)
            ready.append((model, peers, texts, settings))
        print("measuring", flush=True)
        for model, peers, texts, settings in ready:
            runs += measure(model, peers, texts, settings, rounds, steps)
    return runs, versions


@contextmanager
def closing_all() -> Iterator[list[Process]]:
    """Closes whatever has been put into the list."""
    processes: list[Process] = []
    try:
        yield processes
    finally:
        for process in processes:
            process.close()


def start(name: str, python: Path, folder: Path, dtype: str) -> Process:
    own = sys.executable if name == "slipstream" else python
    return Process(name, own, ["benchmarks._sft_peers", name, str(folder), dtype], {"PYTHONWARNINGS": "ignore"})


def pilot_runs(model: str, peer: Process, documents: Sequence[Sequence[int]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(settings, answer) of one step in every layout, after each implementation of the experts in the first of them."""

    def pilot(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        answer = train(peer, documents, settings)
        print(f"pilot {model} {peer.name} {described(settings)}: {cpu_rate(answer):.0f} tokens per CPU second", flush=True)
        return settings, answer

    (layout, rows), *layouts = LAYOUTS[peer.name]
    first = [{"layout": layout, "rows": rows, "experts": experts} for experts in (EXPERTS if model == "moe" else (None,))]
    train(peer, documents[:4], first[0])  # warms up
    found = [pilot(settings) for settings in first]
    experts = best(found)["experts"]
    return found + [pilot({"layout": layout, "rows": rows, "experts": experts}) for layout, rows in layouts]


def best(tried: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Settings of the fastest."""
    return max(tried, key=lambda one: cpu_rate(one[1]))[0]


def cpu_rate(answer: Mapping[str, Any]) -> float:
    return answer["tokens"] / answer["cpu_s"]


def described(settings: Mapping[str, Any]) -> str:
    if not settings:
        return "rows of 4096"
    return f"{settings['layout']} x{settings['rows']}" + (f" {settings['experts']}" if settings["experts"] else "")


def pilot_row(model: str, name: str, settings: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    what = f"pilot {name} {described(settings)}"
    return {"model": model, "what": what, "tokens_per_cpu_s": cpu_rate(answer), "loss": answer["loss"]}


def first_settings(model: str, name: str) -> dict[str, Any]:
    layout, rows = LAYOUTS[name][0]
    return {"layout": layout, "rows": rows, "experts": EXPERTS[0] if model == "moe" else None}


def train(peer: Process, documents: Sequence[Sequence[int]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Raises PeerError: it trained on other tokens than it was given."""
    answer = peer.ask({"documents": documents, "samples": SAMPLES, "max_tokens": MAX_TOKENS, "optim": OPTIM, "settings": settings})
    if answer["tokens"] != sum(map(len, documents)):
        raise PeerError(f"{peer.name} with {settings}: {answer}, but there were {sum(map(len, documents))} tokens")
    return answer


def measure(
    model: str, peers: Mapping[str, Process], texts: Documents, settings: Mapping[str, Mapping[str, Any]], rounds: int, steps: int
) -> list[dict[str, Any]]:
    """A row for each trainer. Raises PeerError: it had another loss than slipstream, so it did other work."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    for name, peer in peers.items():
        train(peer, texts.draw(4, 0), settings[name])  # warms up
    for round_ in range(1, rounds + 1):
        documents = texts.draw(SAMPLES * steps, round_)
        for name, peer in peers.items():
            answer = train(peer, documents, settings[name])
            answers[name].append(answer)
            print(f"round {round_}  {model:5s} {name:10s} {answer['tokens'] / answer['seconds']:8.0f} tokens/s", flush=True)
            ours = answers["slipstream"][-1]["loss"]
            if abs(answer["loss"] / ours - 1) > LOSS_TOLERANCE:
                raise PeerError(f"{name} with {described(settings[name])}: loss {answer['loss']:.3f} where slipstream has {ours:.3f}")
    return [trainer_row(model, name, answers, settings[name]) for name in peers]


def trainer_row(model: str, name: str, answers: Mapping[str, Sequence[Mapping[str, Any]]], settings: Mapping[str, Any]) -> dict[str, Any]:
    rates = [answer["tokens"] / answer["seconds"] for answer in answers[name]]
    ratios = {
        clock: [other[clock] / ours[clock] for ours, other in zip(answers["slipstream"], answers[name], strict=True)]
        for clock in ("seconds", "cpu_s")
    }
    return {
        "model": model,
        "what": name,
        "tokens_per_s": median(rates),
        "spread": spread(rates),
        "ours_over_this": median(ratios["seconds"]),
        "on_cpu_time": median(ratios["cpu_s"]),
        "tokens_per_cpu_s": median([cpu_rate(answer) for answer in answers[name]]),
        "setting": described(settings),
        "loss": median([answer["loss"] for answer in answers[name]]),
        "rounds": list(answers[name]),
    }


if __name__ == "__main__":
    main()
