"""Training adapters: their gradients are those of W + scale · B A, everything else stands still, and a resumed run is the same run."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.config import RunConfig, load
from slipstream.errors import ConfigError, ModelError
from slipstream.models.context import FullContext
from slipstream.models.fill import save_folder
from slipstream.models.hf import hf_tensors, read_tensors, write_tensors
from slipstream.models.load import load_model
from slipstream.models.lora import PEFT_PREFIX, Adapters
from slipstream.models.peft import write_adapter
from slipstream.ops.fp8 import WEIGHT, quantise
from slipstream.ops.fp8_weight import Fp8Weight
from slipstream.trainer import rl
from slipstream.trainer.optim import optimizer_tensors
from slipstream.trainer.sft import adapter_folder, demonstration_batch
from slipstream.trainer.sft import train as sft
from slipstream.trainer.shards import Stored
from slipstream.trainer.step import Learner
from tests.unit.trainer.helpers import make_batch, model_folder, run_config, write_run
from tests.unit.trainer.test_fp8 import DEEPSEEK
from tests.unit.trainer.test_rl import fingerprints, send, train, whole_and_resumed
from tests.unit.trainer.test_sft import demonstrations
from tests.unit.trainer.test_step import learner

LORA = {"rank": 3, "alpha": 6.0, "targets": ["all"]}
SCALE = 2.0
FAMILIES = {
    "qwen3_moe": {"mlp_only_layers": [0]},
    "deepseek_v3": {**DEEPSEEK, "first_k_dense_replace": 1, "n_shared_experts": 1},
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request, tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), **FAMILIES[request.param])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def adapters_of(subject: Learner) -> Adapters:
    assert subject.adapters is not None
    return subject.adapters


@torch.no_grad()
def with_some_updates(subject: Learner, seed: int = 0) -> Learner:
    """As after some training: B is not zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapters_of(subject).parameters.items():
        if name.endswith("lora_B"):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    subject.weights.sync()
    return subject


def modules(tensors: dict[str, Tensor]) -> set[str]:
    return {name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in tensors}


def sums(base: dict[str, Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """W + scale · B A by the names and in the layout of the checkpoint."""
    merged = dict(base)
    for module in modules(tensors):
        a, b = (tensors[f"{PEFT_PREFIX}{module}.lora_{kind}.weight"] for kind in "AB")
        merged[f"{module}.weight"] = base[f"{module}.weight"] + SCALE * b @ a
    return merged


def moved(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    assert a.keys() == b.keys()
    return {name for name in a if not torch.equal(a[name], b[name])}


# ---- what is trained ----


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gradients_are_those_of_the_explicit_sum(folder, seed):
    """Autograd through base + scale · B A, written in the checkpoint's own layout, with the mean negative log-likelihood as the loss."""
    subject, samples = with_some_updates(learner(folder, lora=LORA, loss={"type": "policy_gradient"}), seed), demonstrations(12)
    leaves = {name: view.clone().requires_grad_() for name, view in adapters_of(subject).tensors().items()}
    merged = sums(read_tensors(folder), leaves)
    plain = load_model(folder)
    views = plain.names.views(plain.spec, {name: p.detach().clone() for name, p in plain.named_parameters()})
    assert merged.keys() - {"lm_head.weight"} == views.keys()
    own = {name: _fused(plain, name, merged) for name, _ in plain.named_parameters()}
    total, count = torch.tensor(0.0), 0
    for tokens, mask in samples:
        t, at = torch.tensor(tokens).long(), np.flatnonzero(mask)
        hidden = torch.func.functional_call(plain, own, (t, torch.arange(len(t)), FullContext([0, len(t)])))
        total = total - (hidden @ own["embed"].T).log_softmax(-1)[at - 1, t[at]].sum()
        count += len(at)
    (total / count).backward()
    subject.accumulate(demonstration_batch(1, samples, 64))
    found = {name: p.grad for name, p in adapters_of(subject).parameters.items()}
    assert all(grad is not None for grad in found.values())
    pairs = {name: (view, leaves[name].grad) for name, view in _as_peft(adapters_of(subject), found).items()}
    scale = max(float(grad.abs().max()) for _, grad in pairs.values() if grad is not None)
    for name, (ours, theirs) in pairs.items():
        assert theirs is not None and float((ours - theirs).abs().max()) < 1e-5 * scale, name
    assert sum(float(ours.abs().max()) > 0 for ours, _ in pairs.values()) > 0.9 * len(pairs)


def _fused(model, ours: str, merged: dict[str, Tensor]) -> Tensor:
    """Our parameter as a function of tensors of the checkpoint: the views of indices say where each element comes from."""
    parameter = model.get_parameter(ours)
    index = torch.arange(parameter.numel()).view(parameter.shape)
    views = model.names.views(model.spec, {ours: index})
    at = torch.cat([view.flatten() for view in views.values()])
    values = torch.cat([merged[name].flatten() for name in views])
    return values[at.argsort()].view(parameter.shape)


def _as_peft(adapters: Adapters, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    kept = {name: p.detach().clone() for name, p in adapters.parameters.items()}
    with torch.no_grad():
        for name, p in adapters.parameters.items():
            p.copy_(tensors[name])
        views = {name: view.clone() for name, view in adapters.tensors().items()}
        for name, p in adapters.parameters.items():
            p.copy_(kept[name])
    return views


def test_a_fresh_adapter_changes_nothing_and_a_step_changes_its_matrices_only(folder):
    subject, base = learner(folder, lora={**LORA, "targets": ["attention", "down_proj"]}), read_tensors(folder)
    before = {name: tensor.clone() for name, tensor in subject.published().items()}
    assert not moved(before, {name: base[name] for name in before})
    subject.step(make_batch(1))
    after = dict(subject.published().items())
    attention = {name for name in base if ".self_attn." in name and "_proj" in name and "norm" not in name}
    down = {name for name in base if name.endswith("down_proj.weight")}
    assert attention and down and moved(before, after) <= attention | down
    assert moved(before, after) >= attention  # an expert that no token reached stays
    assert len(moved(before, after) & down) > 0.8 * len(down)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
def test_what_is_published_is_the_rounded_sum_and_what_the_next_step_multiplies(folder, dtype):
    subject = learner(folder, lora=LORA, dtype=dtype)
    for step in (1, 2):
        subject.step(make_batch(step))
    tensors = adapters_of(subject).tensors()
    assert all(float(tensors[name].abs().max()) > 0 for name in tensors if ".self_attn." in name)
    expected, published = sums(read_tensors(folder), tensors), dict(subject.published().items())
    for name, tensor in published.items():
        assert tensor.dtype == (torch.float32 if dtype == "float32" or "bias" in name else torch.bfloat16)
        torch.testing.assert_close(tensor, expected[name].to(tensor.dtype), rtol=1e-6 if dtype == "float32" else 2**-7, atol=1e-6)
    model = subject.weights.compute
    codes = {
        name: torch.cat([part.dequantise() for part in p.parts], -1) for name, p in model.named_parameters() if isinstance(p, Fp8Weight)
    }
    assert bool(codes) == (dtype == "float8")
    for name, values in model.names.views(model.spec, codes).items():
        assert torch.equal(quantise(published[name], WEIGHT, False).dequantise(), values), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
def test_gradients_follow_from_those_of_the_merged_model_in_every_dtype(tmp_path, folder, dtype):
    """The chain rule on gradients of a trainer of all weights that starts from the sum: dA = scale · Bᵀ dW, dB = scale · dW Aᵀ."""
    subject = with_some_updates(learner(folder, lora=LORA, dtype=dtype))
    model_folder(tmp_path, **json.loads((folder / "config.json").read_text()))
    write_tensors(tmp_path, {name: t.float() for name, t in with_some_updates(learner(folder, lora=LORA)).published().items()})
    full, batch = learner(tmp_path, dtype=dtype), make_batch(1, num_samples=20)
    full.accumulate(batch), subject.accumulate(batch)
    grads = {name: p.grad for name, p in full.weights.master.named_parameters() if p.grad is not None}
    whole = full.weights.master.names.views(full.weights.master.spec, grads)
    own = _as_peft(adapters_of(subject), {name: p.grad for name, p in adapters_of(subject).parameters.items()})
    tensors = adapters_of(subject).tensors()
    for module in modules(own):
        names = [f"{PEFT_PREFIX}{module}.lora_{kind}.weight" for kind in "AB"]
        a, b = (tensors[name] for name in names)
        dw = whole[f"{module}.weight"]
        for name, expected in zip(names, (SCALE * b.T @ dw, SCALE * dw @ a.T), strict=True):
            assert float((own[name] - expected).abs().max()) <= 1e-6 + 1e-5 * float(expected.abs().max()), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
def test_the_base_has_no_gradients_and_no_moments(folder, dtype, monkeypatch):
    subject, alive = learner(folder, lora=LORA, dtype=dtype), []
    receive = Adapters.receive

    def watched(self: Adapters, ours: str, grad: Tensor) -> None:
        alive.append(sum(p.grad is not None for p in subject.weights.compute.parameters()))
        receive(self, ours, grad)

    monkeypatch.setattr(Adapters, "receive", watched)
    batch = make_batch(1)
    subject.accumulate(batch)
    assert len(alive) == len(adapters_of(subject).within) * len(batch.micro_batches) and set(alive) == {0}
    assert all(p.grad is None for p in subject.weights.compute.parameters())
    subject.step(batch)
    adapters = sum(p.numel() for p in adapters_of(subject).parameters.values())
    assert sum(value.numel() for value in optimizer_tensors(subject.optimizer, subject.names).values() if value.ndim) == 2 * adapters
    assert adapters < 0.5 * sum(p.numel() for p in subject.weights.compute.parameters())


def test_the_base_is_kept_in_bfloat16_where_that_loses_nothing(tmp_path, model):
    rounded = model_folder(tmp_path / "rounded", dtype="bfloat16")
    save_folder(load_model(model, torch.bfloat16), rounded, like=model)
    kept = {folder: {base.dtype for base in adapters_of(learner(folder, lora=LORA))._base.values()} for folder in (model, rounded)}
    assert kept == {model: {torch.float32}, rounded: {torch.bfloat16}}
    subject = learner(rounded, lora=LORA)
    assert not moved(hf_tensors(subject.weights.compute), hf_tensors(load_model(rounded)))


@pytest.mark.parametrize("optim", [{"type": "muon"}, {"type": "sgd", "lr": 0.1}, {"type": "sign_sgd"}, {"moments": "bfloat16"}])
def test_every_optimizer_trains_adapters(model, optim):
    subject = learner(model, lora=LORA, optim={"lr": 1e-2, **optim}, freeze_router=True)
    before = {name: p.detach().clone() for name, p in adapters_of(subject).parameters.items()}
    for step in (1, 2):
        assert not subject.step(make_batch(step)).problem
    after = adapters_of(subject).parameters
    assert all(not torch.equal(before[name], after[name]) for name in before)
    if optim.get("type") == "muon":
        assert {key.partition("/")[0] for key in optimizer_tensors(subject.optimizer, subject.names)} == {"momentum"}


def test_a_step_that_is_skipped_leaves_the_adapters_alone(model):
    subject, batch = learner(model, lora=LORA), make_batch(1)
    for row in batch.micro_batches:
        row.advantages_T[:] = np.inf
    before = {name: tensor.clone() for name, tensor in adapters_of(subject).tensors().items()}
    assert subject.step(batch).problem
    assert not moved(before, adapters_of(subject).tensors())


def test_recomputing_activations_changes_no_gradient(model):
    grads = []
    for on in ("none", "layer"):
        subject = with_some_updates(learner(model, lora=LORA, recompute=on))
        subject.accumulate(make_batch(1))
        grads.append([p.grad for p in subject.weights.parameters])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# ---- files ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
def test_a_run_that_is_interrupted_and_resumed_ends_with_bit_identical_weights(tmp_path, folder, dtype):
    whole, resumed = whole_and_resumed(tmp_path, folder, {"dtype": dtype, "lora": LORA})
    assert fingerprints(resumed) == fingerprints(whole) and len(set(fingerprints(whole).values())) == 5
    adapters = [(run / "adapter" / "adapter_model.safetensors").read_bytes() for run in (whole, resumed)]
    assert adapters[0] == adapters[1]
    stored = Stored(whole / "checkpoints" / "step_000004").kinds
    weights = sum(prod(shape) for name, (_, shape) in stored.items() if name.startswith("model/"))
    assert weights == sum(tensor.numel() for tensor in load_file(whole / "adapter" / "adapter_model.safetensors").values())


def test_a_run_goes_on_from_the_adapter_of_another_to_the_same_policy(tmp_path, folder):
    first = write_run(run_config(tmp_path / "first", folder, trainer={"lora": LORA}))
    train(first, 1, 2)
    lora = {**LORA, "path": str(first / "adapter")}
    second = write_run(run_config(tmp_path / "second", folder, trainer={"lora": lora}))
    train(second, 1)
    assert fingerprints(second)[0] == fingerprints(first)[2] != fingerprints(first)[0]
    final = read_tensors(first / "final")
    expected = sums(read_tensors(folder), load_file(first / "adapter" / "adapter_model.safetensors"))
    for name in final:
        torch.testing.assert_close(final[name], expected[name], rtol=1e-6, atol=1e-6)
    assert json.loads((first / "adapter" / "adapter_config.json").read_text())["r"] == 3


def test_sft_trains_adapters_and_writes_both_folders_again_and_again(tmp_path, model):
    losses = []
    tables = {"sft": {"steps": 40, "samples_per_step": 16, "optim": {"lr": 3e-2}}, "trainer": {"lora": LORA}}
    config = run_config(tmp_path / "run", model, **tables)
    for _ in range(2):
        sft(model, demonstrations(), config, tmp_path / "out", on_step=lambda step, values: losses.append(values["loss"]))
    assert losses[39] < 0.6 * losses[0] and losses[40:] == losses[:40]
    expected = sums(read_tensors(model), load_file(adapter_folder(tmp_path / "out") / "adapter_model.safetensors"))
    for name, tensor in read_tensors(tmp_path / "out").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
    assert not list((tmp_path / "out").glob("adapter*"))


# ---- what is refused ----


def started_from(folder: Path, adapter: Path, **changes) -> Learner:
    return learner(folder, lora={**LORA, "path": str(adapter), **changes})


def test_an_adapter_of_other_settings_is_refused_with_what_to_set(tmp_path, model):
    write_adapter(tmp_path / "a", adapters_of(learner(model, lora=LORA)), model)
    with pytest.raises(ConfigError, match=r"trainer\.lora\.rank = 4, .* has 3: set trainer\.lora\.rank = 3"):
        started_from(model, tmp_path / "a", rank=4)
    with pytest.raises(ConfigError, match=r"trainer\.lora\.alpha = 5\.0, .* has 6\.0"):
        started_from(model, tmp_path / "a", alpha=5.0)
    with pytest.raises(ModelError, match=r"q_proj.lora_A.weight is unexpected: trainer.lora.targets names no such matrix"):
        started_from(model, tmp_path / "a", targets=["o_proj", "experts", "v_proj", "k_proj"])


def test_a_checkpoint_of_other_settings_is_refused_by_tensor(tmp_path, model):
    folder = write_run(run_config(tmp_path / "run", model, trainer={"lora": LORA}))
    train(folder, 1, 2)
    send(folder, 3)
    for trainer in ({"lora": {**LORA, "rank": 4}}, {}):
        write_run(run_config(tmp_path / "run", model, trainer=trainer))
        with pytest.raises(ModelError, match=r"layers\.\d.*(has shape \[\d+, \d+\], but the model's is|is missing)"):
            rl.main(folder)


@pytest.mark.parametrize("targets", [["dense"], ["all", "q_prj"], ["gate"]])
def test_a_target_that_matches_nothing_is_refused_with_what_there_is(model, targets):
    with pytest.raises(
        ConfigError, match=rf"'{targets[-1]}' matches no matrix of this qwen3_moe model; it has attention \(k_proj, .*experts"
    ):
        learner(model, lora={**LORA, "targets": targets})


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("trainer.balance_rate=0.001", ("trainer.lora", "trainer.balance_rate = 0.001")),
        ("trainer.lora.rank=0", ("trainer.lora.rank = 0",)),
        ("trainer.lora.targets=[]", ("trainer.lora.targets",)),
        ("trainer.lora.rnak=8", ("trainer.lora.rnak", "'trainer.lora.rank'")),
    ],
)
def test_settings_that_contradict_are_refused_by_name(setting, named):
    sets = ['model.path="m"', 'envs=[{"id": "calculator"}]', "trainer.lora.alpha=8"]
    assert load(RunConfig, (), sets).trainer.lora is not None
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, (), [*sets, setting])
    assert all(name in str(caught.value) for name in named)
