"""The checks themselves: run every case, compare with the first, and say what is broken. `examine` is all that others call."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from slipstream.config import RunConfig, to_toml
from slipstream.config.serve import embedded
from slipstream.config.train import TrainerConfig
from slipstream.doctor import material
from slipstream.doctor.shrink import VOCAB, write_small_model
from slipstream.doctor.worker import OTHER_EXPERTS, REPLAY_OFF, TRAINER_FILE, Case, case_file, cases
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.weights import LiveWeights
from slipstream.errors import ConfigError
from slipstream.launch.ranks import free_port
from slipstream.launch.topology import ranks
from slipstream.models.fp8 import load_in_fp8
from slipstream.models.hf import hf_tensors, hf_views
from slipstream.models.load import build_model, load_model
from slipstream.models.matrices import is_matrix
from slipstream.models.spec import ModelSpec
from slipstream.models.tensor_file import TensorStream
from slipstream.ops.fp8_weight import Fp8Weight
from slipstream.trainer.precision import Weights
from slipstream.trainer.publish import publish
from slipstream.transport.codec import encode_batch
from slipstream.types import Batch, MicroBatch

LOSS_LIMIT = 1e-6
"""Relative. float32 sums of some hundred numbers, added up in another order, differ by about 1e-7."""
LEAST_LOSS = 0.01
"""A policy-gradient loss can be 0 by chance, with terms that are not."""
GRADIENT_LIMIT = 1e-5
"""Of the largest gradient; also for weights after two steps."""
LOGPROB_LIMIT = 1e-4
"""Nats, of one token that is sampled twice."""
KL_LIMIT = 1e-8
"""Mean of r - log r - 1 over sampled tokens, r = p trainer / p engine; differences of 1e-4 nats give half of it."""
WORLD_TIMEOUT_S = 1200.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    check: str
    verdict: Literal["ok", "broken", "not possible"]
    found: str

    @property
    def broken(self) -> bool:
        return self.verdict == "broken"


def examine(config: RunConfig, most: int = 4, tell: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Every check of up to `most` processes, on the shrunken model of `config`. `tell` hears what is being done.

    Raises ConfigError or ModelError: the run file or its model cannot be used.
    """
    if config.model.impl == "hf":
        raise ConfigError('model.impl = "hf": doctor makes a two-layer copy of the families that slipstream has; there is none of others')
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="slipstream-doctor-") as scratch:
        folder = Path(scratch)
        spec = write_small_model(config.model.path, folder / "model", config.seed)
        tell("two turns of rollouts by an embedded engine")
        engine = material.make_engine(folder / "model", embedded(config.engine), config.seed)
        samples = material.play(engine, VOCAB, config.seed)
        (folder / TRAINER_FILE).write_text(to_toml(config.trainer))
        batches = material.batches(samples, spec.num_experts)
        for name, batch in batches.items():
            (folder / f"{name}.batch").write_bytes(b"".join(encode_batch(batch)))
        rows = [*_compare(_compute(folder, [case for case in cases(config.trainer) if case.world <= most], tell), spec, batches)]
        tell("weights to the engine and back")
        rows += _weight_sync(folder, engine)
        rows += _precision_map(folder / "model", config.trainer)
    return rows


def print_rows(rows: list[Row], console: Console) -> None:
    table = Table(title="doctor: the run file's own model, two layers of it", title_justify="left")
    for column in ("check", "", "found"):
        table.add_column(column, overflow="fold")
    styles = {"ok": "green", "broken": "bold red", "not possible": "yellow"}
    for row in rows:
        table.add_row(row.check, f"[{styles[row.verdict]}]{row.verdict}[/]", row.found)
    console.print(table)


# ---- cases in processes of their own ------------------------------------------------------------------------------


def _compute(folder: Path, every: list[Case], tell: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """What each case came to, by name. A case whose world failed says `failed`."""
    outcomes: dict[str, dict[str, Any]] = {}
    for world in sorted({case.world for case in every}):
        names = [case.name for case in every if case.world == world]
        tell(f"{world} process{'es' if world > 1 else ''}: {', '.join(names)}")
        problem = _run_world(folder, world)
        for number, case in enumerate(every):
            if case.world == world:
                file = case_file(folder, number)
                outcomes[case.name] = torch.load(file) if file.exists() else {"failed": problem}
    return outcomes


def _run_world(folder: Path, world: int) -> str:
    """Returns what the first process that failed said last; '' when none did."""
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "slipstream.doctor.worker", str(folder))
    errors = [folder / f"world-{world}-{rank}.err" for rank in range(world)]
    started = []
    for rank, file in enumerate(errors):
        with file.open("w") as stream:
            started.append(subprocess.Popen(command, env={**environment, **ranks(rank, world, port)}, stderr=stream))
    try:
        for process in started:
            process.wait(WORLD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"not done after {WORLD_TIMEOUT_S:.0f} s"
    finally:
        for process in started:
            process.kill()
            process.wait()
    said = [file.read_text().strip().splitlines() for file, process in zip(errors, started, strict=True) if process.returncode]
    return next((lines[-1] for lines in said if lines), "ended without a word") if said else ""


# ---- comparisons ----------------------------------------------------------------------------------------------------


def _compare(outcomes: dict[str, dict[str, Any]], spec: ModelSpec, batches: Mapping[str, Batch]) -> Iterator[Row]:
    base = next(iter(outcomes.values()))
    if "loss" not in base:
        yield Row("one process", "broken", base.get("failed") or base["refused"])
        return
    yield from _engine_and_trainer(base, spec, batches["packed"])
    for name, found in outcomes.items():
        if "refused" in found:
            yield Row(name, "not possible", found["refused"])
        elif "failed" in found:
            yield Row(name, "broken", f"a process ended: {found['failed']}")
        elif "differ" in found:
            differ = found["differ"]
            text = f"{len(differ)} weights differ after going back, among them {differ[0]}" if differ else "the same bits after going back"
            yield _verdict(name, not differ, text)
        elif name == OTHER_EXPERTS:
            if spec.moe_layers:
                yield _forced(found["load"], spec, batches["forced"])
        else:
            yield from _load(name, found["load"], base["load"], spec, batches["packed"])
            if found is not base:
                yield _same(name, found, base, weights=name != REPLAY_OFF)


def _engine_and_trainer(base: dict[str, Any], spec: ModelSpec, batch: Batch) -> Iterator[Row]:
    """What the engine sampled, seen by the trainer with the same weights."""
    yield _verdict("engine = trainer: logprobs", base["kl"] <= KL_LIMIT, f"mismatch KL {base['kl']:.1e}, both in float32")
    if spec.moe_layers:
        flips, coverage = base["flips"], base["coverage"]
        expected = sum(int(_valid(row).sum()) for row in batch.micro_batches) / batch.num_tokens
        text = f"{flips:.1%} of the replayed choices are not the trainer's own, {coverage:.1%} of the tokens replayed"
        yield _verdict("engine = trainer: experts", not flips and abs(coverage - expected) < 1e-9 and expected > 0.5, text)


def _load(name: str, load_LE: Tensor, base_LE: Tensor, spec: ModelSpec, batch: Batch) -> Iterator[Row]:
    """Only what is wrong with it: every token chooses `top_k` experts of every layer, wherever it is computed."""
    pairs = batch.num_tokens * spec.top_k
    wrong = [layer for layer, count in enumerate(load_LE.sum(1).tolist()) if count != pairs]
    if wrong:
        yield Row(f"{name}: expert load", "broken", f"MoE layer {wrong[0]} counts {int(load_LE[wrong[0]].sum())} choices, not {pairs}")
    elif not torch.equal(load_LE, base_LE):
        most = int((load_LE - base_LE).abs().max())
        yield Row(f"{name}: expert load", "broken", f"an expert got up to {most} tokens more or less than with one process")


def _forced(load_LE: Tensor, spec: ModelSpec, batch: Batch) -> Row:
    """Routing rows that say other experts than the trainer would choose."""
    forced_LE, free = torch.zeros_like(load_LE), 0
    for row in batch.micro_batches:
        valid_T = _valid(row)
        free += int((~valid_T).sum())
        for layer in range(len(spec.moe_layers)):
            ids = (
                torch.from_numpy(row.routing_TLK[valid_T, layer].astype(np.int64)) if row.routing_TLK is not None else torch.empty(0).long()
            )
            forced_LE[layer] += torch.bincount(ids.flatten(), minlength=spec.num_experts)
    rest_LE = load_LE - forced_LE
    fine = bool((rest_LE >= 0).all()) and rest_LE.sum(1).tolist() == [free * spec.top_k] * len(spec.moe_layers)
    return _verdict(OTHER_EXPERTS, fine, "tokens go where the routing rows say" if fine else "tokens do not go where the routing rows say")


def _valid(row: MicroBatch) -> np.ndarray:
    return np.zeros(row.num_tokens, bool) if row.routing_valid_T is None else row.routing_valid_T


def _same(name: str, found: dict[str, Any], base: dict[str, Any], weights: bool) -> Row:
    """`weights`: whether they must agree too. Without replay they need not: after the first step the trainer may choose other experts."""
    loss = abs(found["loss"] - base["loss"]) / max(abs(base["loss"]), LEAST_LOSS)
    gradient, where = _largest(found["gradients"], base["gradients"])
    weight = _largest(found["weights"], base["weights"])[0] if weights else 0.0
    text = f"loss {loss:.1e}, gradients {gradient:.1e}" + (f", weights after two steps {weight:.1e}" if weights else "")
    fine = loss <= LOSS_LIMIT and gradient <= GRADIENT_LIMIT and weight <= GRADIENT_LIMIT
    return _verdict(name, fine, text if fine else f"{text}; largest in {where}")


def _largest(found: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest difference over the largest value, and where it is."""
    if found.keys() != base.keys():
        return float("inf"), f"names: {sorted(found.keys() ^ base.keys())[:3]}"
    scale = max(float(tensor.abs().max()) for tensor in base.values())
    worst = {name: float((found[name] - tensor).abs().max()) / scale for name, tensor in base.items()}
    where = max(worst, key=lambda name: worst[name])
    return worst[where], where


def _verdict(check: str, fine: bool, text: str) -> Row:
    return Row(check, "ok" if fine else "broken", text)


# ---- between trainer and engine -------------------------------------------------------------------------------------


def _weight_sync(folder: Path, engine: EmbeddedEngine) -> Iterator[Row]:
    """A version that is sent twice: its bits in the engine, and what the engine samples with them."""
    trained = build_model(engine.spec, seed=1)
    version = publish(folder / "weights", 1, TensorStream.of(hf_tensors(trained)), None)
    live, sampled = LiveWeights(engine.folder, torch.float32, 0), []
    for _ in range(2):
        live.prepare(version)
        live.commit(version.number)
        engine.prepare(version)
        engine.commit(version.number)
        sampled.append(material.play(engine, VOCAB, seed=2))
    same = all(torch.equal(tensor, hf_tensors(live.model)[name]) for name, tensor in hf_tensors(trained).items())
    yield _verdict("weight sync", same, "the engine has the published bits" if same else "the engine has other weights than were published")
    # not to the bit: the second time prefixes come from the cache, and other tokens share a step
    twice = all(
        np.array_equal(a.tokens_T, b.tokens_T) and np.allclose(a.logprobs_T, b.logprobs_T, rtol=0, atol=LOGPROB_LIMIT)
        for a, b in zip(*sampled, strict=True)
    )
    yield _verdict("weight sync, twice", twice, "changes nothing" if twice else "sending a version again changed what is sampled")


def _precision_map(folder: Path, trainer_config: TrainerConfig) -> Iterator[Row]:
    """Which weights the trainer multiplies in FP8, and the codes of those that an engine makes from the published copy."""
    fp8 = trainer_config.replace(dtype="float8", optim={"type": "adamw"}, parallel={})
    compute = Weights(load_model(folder), fp8).compute
    trainer = {name: weight for name, weight in compute.named_parameters() if isinstance(weight, Fp8Weight)}
    served = load_in_fp8(folder, fp8.fp8_scales == "power_of_two")
    engine = {name: weight for name, weight in served.named_parameters() if isinstance(weight, Fp8Weight)}
    mapped = {name for name in hf_views(compute) if is_matrix(name)}
    known = set(hf_views(compute, dict(trainer.items())))
    odd = sorted(known ^ mapped)
    text = f"{len(odd)} weights are FP8 for the trainer or by the map, not both, among them {odd[0]}" if odd else f"{len(mapped)} weights"
    yield _verdict("precision map", not odd, text)
    codes = [n for n in trainer if n in engine and not _same_codes(trainer[n], engine[n])]
    fine = trainer.keys() == engine.keys() and not codes
    text = f"{len(engine)} weights, the same codes and scales" if fine else f"trainer and engine differ: {(codes or ['names'])[0]}"
    yield _verdict("FP8 codes, trainer = engine", fine, text)


def _same_codes(a: Fp8Weight, b: Fp8Weight) -> bool:
    pairs = zip(a.parts, b.parts, strict=True)
    return all(torch.equal(x.codes.view(torch.uint8), y.codes.view(torch.uint8)) and torch.equal(x.scales, y.scales) for x, y in pairs)
