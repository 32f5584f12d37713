"""Every model family against transformers on tiny random models, in float32: the tests' own models (`tests.parity.zoo`), with figures.

For each shape, over all seeds (weights and tokens), the largest:

    logit_diff    |difference| of logits, with and without gradients (other kernels serve)
    grad_diff     |difference| of the gradient of the mean cross-entropy, over every element of every parameter, under HF names
    grad_rel      the same by the size of the gradient tensor (`tests.parity.zoo.Gaps`)
    decode_diff   |difference| of logprobs between the embedded engine, which prefills and decodes several requests at once over paged
                  blocks of four tokens, and one full forward pass over each whole sequence

and whether, for all seeds, the HF folder that is written is that which was read, byte for byte (`round_trip`), and greedy decoding took
the full pass's argmax and experts at every token (`decode`).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.parity.zoo import ZOO, changed_tensors, gaps, reference, tokens
from tests.unit.engine.helpers import Reference, ask, make_engine, prompt, run

from benchmarks.harness import finish
from slipstream.models import fill
from slipstream.models.load import load_model
from slipstream.models.spec import ModelSpec

WORST = ("logit_diff", "grad_diff", "grad_rel", "decode_diff")
COLUMNS = ("family", "shape", "params", "logit_std", *WORST, "round_trip", "decode", "decoded")
PROMPT_LENGTHS = (1, 3, 8, 17, 31)
TOKENS = 60
"""Of the forward and backward pass; sparse attention, windows and YaRN's original context are all shorter."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one seed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds = 1 if args.quick else args.seeds
    runs = [shape_row(name, seeds) for name in sorted(ZOO)]
    finish("parity_families", headline(runs), runs, {"seeds": seeds, "tokens": TOKENS, "shapes": sorted(ZOO)}, COLUMNS)


def headline(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The worst of all shapes."""
    return {
        "families": len({run["family"] for run in runs}),
        "shapes": len(runs),
        **{key: max(run[key] for run in runs) for key in WORST},
        "round_trip": all(run["round_trip"] for run in runs),
        "decode": all(run["decode"] for run in runs),
    }


def shape_row(name: str, seeds: int) -> dict[str, Any]:
    """The worst of all seeds."""
    measured = [measure(name, seed) for seed in range(seeds)]
    return {
        "family": name.partition("-")[0],
        "shape": name.partition("-")[2] or "plain",
        "params": measured[0]["params"],
        "logit_std": min(one["logit_std"] for one in measured),
        **{key: max(one[key] for one in measured) for key in WORST},
        **{key: all(one[key] for one in measured) for key in ("round_trip", "decode")},
        "decoded": sum(one["decoded"] for one in measured),
    }


def measure(name: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        source, copy = Path(scratch) / "source", Path(scratch) / "copy"
        theirs, ours = reference(name, source, seed), load_model(source)
        fill.save_folder(ours, copy, like=source)
        same_config = (source / "config.json").read_bytes() == (copy / "config.json").read_bytes()
        found = gaps(ours, theirs, tokens(seed, TOKENS))
        return {
            "params": ModelSpec.from_folder(source).num_params,
            "logit_std": found.spread,
            "logit_diff": max(found.logits, found.logits_serving),
            "grad_diff": max(found.grads.values()),
            "grad_rel": max(found.grads_relative.values()),
            "round_trip": same_config and not changed_tensors(source, copy),
            **decode(source, seed),
        }


def decode(folder: Path, seed: int) -> dict[str, Any]:
    """Greedy decoding in the embedded engine, against one full forward pass over each sequence."""
    full = Reference(folder)
    prompts = [prompt(100 * seed + length, length) for length in PROMPT_LENGTHS]
    done = run(make_engine(folder), [ask(str(i), tokens_T, max_tokens=32) for i, tokens_T in enumerate(prompts)])
    compared = [(done[str(i)], full.compare(tokens_T, done[str(i)])) for i, tokens_T in enumerate(prompts)]
    return {
        "decode_diff": max(gap for _, (_, gap, _) in compared),
        "decode": all(routed and np.array_equal(completion.tokens_N, argmax_N) for completion, (argmax_N, _, routed) in compared)
        and all((completion.routing is not None) == bool(full.model.spec.moe_layers) for completion in done.values()),
        "decoded": sum(len(completion.tokens_N) for completion, _ in compared),
    }


if __name__ == "__main__":
    main()
