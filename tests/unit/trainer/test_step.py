"""One optimizer step: what must not matter does not, what must is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.config import validate
from slipstream.config.train import TrainerConfig
from slipstream.errors import StateError
from slipstream.models.context import FullContext
from slipstream.models.load import load_model
from slipstream.parallel.rows import spans
from slipstream.trainer.step import Learner
from slipstream.types import Batch
from tests.unit.trainer.helpers import make_batch, model_folder, without_routing


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def learner(folder: Path, **changes) -> Learner:
    config = validate(TrainerConfig, {"row_tokens": 64, "optim": {"lr": 1e-2}, **changes})
    return Learner(load_model(folder), config, config.optim, max_steps=10)


def gradients(learner: Learner, batch: Batch) -> dict[str, torch.Tensor]:
    learner.accumulate(batch)
    return {name: p.grad.clone() for name, p in learner.weights.master.named_parameters() if p.grad is not None}


def parameters(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.weights.master.named_parameters()}


def assert_equal_gradients(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    scale = max(float(g.abs().max()) for g in a.values())
    assert max(float((a[name] - b[name]).abs().max()) for name in a) <= tolerance * scale


@pytest.mark.parametrize("row_tokens", [32, 4096], ids=["many rows", "one row"])
def test_gradients_do_not_depend_on_how_the_batch_is_cut_into_rows(folder, row_tokens):
    many, other = make_batch(row_tokens=64), make_batch(row_tokens=row_tokens)
    assert len(many.micro_batches) != len(other.micro_batches)
    assert_equal_gradients(gradients(learner(folder), many), gradients(learner(folder), other), 1e-6)


def test_gradients_and_loss_do_not_depend_on_the_order_of_the_samples(folder):
    shuffled = make_batch(order=np.random.default_rng(1).permutation(12))
    a, b = learner(folder), learner(folder)
    assert_equal_gradients(gradients(a, make_batch()), gradients(b, shuffled), 1e-6)
    assert a.step(make_batch()).metrics["trainer/loss/mean"] == pytest.approx(b.step(shuffled).metrics["trainer/loss/mean"], rel=1e-6)


def test_the_gradient_of_a_batch_is_the_token_weighted_mean_of_its_parts(folder):
    batch = make_batch(row_tokens=32)
    whole = gradients(learner(folder), batch)
    total = {name: torch.zeros_like(g) for name, g in whole.items()}
    for row in batch.micro_batches:
        tokens = int(row.loss_mask_T.sum())
        part = gradients(learner(folder), replace(batch, micro_batches=(row,), loss_tokens=tokens))
        for name, g in part.items():
            total[name] += g * tokens / batch.loss_tokens
    assert_equal_gradients(whole, total, 1e-6)


def test_replay_forces_the_engines_experts_and_the_router_keeps_its_gradient(folder):
    batch = make_batch()
    rows = [replace(row, routing_valid_T=np.ones_like(row.routing_valid_T)) for row in batch.micro_batches]
    batch = replace(batch, micro_batches=tuple(rows))
    subject = learner(folder)
    forced_LE = np.zeros((2, 8))
    for row in rows:
        for layer in range(2):
            forced_LE[layer] += np.bincount(row.routing_TLK[:, layer].ravel(), minlength=8)
    _, routing = subject.accumulate(batch)
    np.testing.assert_array_equal(routing.load_LE, forced_LE)
    assert routing.metrics()["trainer/replay/coverage_frac"] == 1.0
    for layer in subject.weights.master.layers:
        assert layer.ffn.router.grad.abs().sum() > 0


def test_tokens_without_a_valid_row_route_natively(folder):
    batch = make_batch()
    rows = tuple(replace(row, routing_valid_T=np.zeros_like(row.routing_valid_T)) for row in batch.micro_batches)
    invalid, absent = replace(batch, micro_batches=rows), without_routing(batch)
    assert_equal_gradients(gradients(learner(folder), invalid), gradients(learner(folder), absent), 0.0)
    off = gradients(learner(folder, router_replay=False), batch)
    assert_equal_gradients(off, gradients(learner(folder), absent), 0.0)
    assert_different(off, gradients(learner(folder), batch))


def assert_different(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert any(not torch.equal(a[name], b[name]) for name in a)


def test_replaying_the_trainers_own_choice_changes_nothing_and_counts_no_flip(folder):
    batch = without_routing(make_batch())
    model, rows = load_model(folder), []
    for row in batch.micro_batches:
        context = FullContext(row.doc_starts_D, record=True)
        model(torch.tensor(row.tokens_T), torch.tensor(row.positions_T), context)
        native = context.native_ids_TLK.numpy().astype(np.uint8)
        rows.append(replace(row, routing_TLK=native, routing_valid_T=np.ones(row.num_tokens, dtype=bool)))
    replayed = replace(batch, micro_batches=tuple(rows))
    assert_equal_gradients(gradients(learner(folder), batch), gradients(learner(folder), replayed), 0.0)
    assert learner(folder).step(replayed).metrics["trainer/replay/flip_frac"] == 0.0


def test_a_head_in_float32_rounds_no_logits(folder):
    """Of the same hidden states in bfloat16, logprobs are those of exact products with the head."""
    found, batch = {}, make_batch()
    for head_dtype in ("auto", "float32"):
        subject, row = learner(folder, dtype="bfloat16", head_dtype=head_dtype), batch.micro_batches[0]
        model, context = subject.weights.compute, FullContext(row.doc_starts_D)
        hidden_TD = model(torch.tensor(row.tokens_T), torch.tensor(row.positions_T), context)
        at_N = row.loss_mask_T.nonzero()[0]
        logprobs_N, _ = subject._logprobs(hidden_TD, row, spans(row.doc_starts_D, subject.mesh.config), at_N)
        logits_NV = hidden_TD[at_N - 1].float() @ model.head_weight.float().T / torch.tensor(row.temperature_T[at_N])[:, None]
        exact_N = logits_NV.log_softmax(-1).gather(1, torch.tensor(row.tokens_T[at_N]).long()[:, None]).squeeze(1)
        found[head_dtype] = float((logprobs_N - exact_N).detach().abs().max())
        assert all(torch.isfinite(g).all() for g in gradients(subject, batch).values())
    assert found["float32"] < 1e-5 < 1e-3 < found["auto"]


def test_recomputing_activations_changes_no_gradient_and_counts_no_expert_twice(folder):
    kept, recomputed = learner(folder), learner(folder, recompute="layer")
    assert_equal_gradients(gradients(kept, make_batch()), gradients(recomputed, make_batch()), 0.0)
    np.testing.assert_array_equal(kept.step(make_batch()).load_LE, recomputed.step(make_batch()).load_LE)


def test_the_mismatch_is_zero_where_the_engine_says_what_the_trainer_computes_and_split_by_lag(folder):
    batch = make_batch()
    model, rows = load_model(folder), []
    for row in batch.micro_batches:
        forced = torch.from_numpy(row.routing_TLK.astype(np.int64))
        context = FullContext(row.doc_starts_D, forced, torch.tensor(row.routing_valid_T))
        logits = model.logits(model(torch.tensor(row.tokens_T), torch.tensor(row.positions_T), context)).detach() / 0.8
        logprobs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(row.tokens_T[1:]).long().unsqueeze(1)).squeeze(1).numpy()
        logprobs = np.concatenate([[0.0], logprobs]).astype(np.float32)
        stale = row.versions_T < batch.version
        rows.append(replace(row, logprobs_T=np.where(stale, logprobs - np.log(4).astype(np.float32), logprobs)))
    metrics = learner(folder).step(replace(batch, micro_batches=tuple(rows))).metrics
    assert metrics["trainer/mismatch_kl/fresh"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["trainer/mismatch_kl/stale"] == pytest.approx(4 - 1 - np.log(4), rel=1e-4)
    stale_frac = metrics["trainer/lag/mean"]  # lags are 0 and 1
    assert metrics["trainer/ratio/extreme_frac"] == pytest.approx(stale_frac)
    assert metrics["trainer/mismatch_kl/mean"] == pytest.approx(stale_frac * metrics["trainer/mismatch_kl/stale"], rel=1e-4)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_batch_that_is_not_finite_is_skipped_and_leaves_weights_and_moments_alone(folder, broken):
    subject = learner(folder)
    subject.step(make_batch(1))
    before, moments = parameters(subject), [s["exp_avg"].clone() for s in subject.optimizer.state.values()]
    batch = make_batch(2)
    first = batch.micro_batches[0]
    bad = replace(first, advantages_T=np.full_like(first.advantages_T, broken))
    outcome = subject.step(replace(batch, micro_batches=(bad, *batch.micro_batches[1:])))
    assert outcome.problem.startswith("the loss is ") and outcome.metrics["trainer/step/skipped"] == 1.0
    assert all(torch.equal(before[name], p) for name, p in parameters(subject).items())
    assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(moments, subject.optimizer.state.values(), strict=True))
    assert subject.step(make_batch(3)).problem == ""


def test_a_batch_without_loss_tokens_is_skipped(folder):
    batch = make_batch()
    rows = tuple(replace(row, loss_mask_T=np.zeros_like(row.loss_mask_T)) for row in batch.micro_batches)
    assert learner(folder).step(replace(batch, micro_batches=rows, loss_tokens=0)).problem == "no token of the batch carries loss"


def test_clipping_bounds_what_reaches_the_optimizer_but_not_what_is_reported(folder):
    norm = learner(folder).step(make_batch()).metrics["trainer/grad/norm"]
    clipped = learner(folder, optim={"clip_norm": norm / 10})
    assert clipped.step(make_batch()).metrics["trainer/grad/norm"] == pytest.approx(norm)
    reached = sum(float(s["exp_avg"].square().sum()) for s in clipped.optimizer.state.values()) ** 0.5
    assert reached == pytest.approx((1 - 0.9) * norm / 10, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_router_stays_and_the_rest_moves(folder, dtype):
    subject = learner(folder, freeze_router=True, dtype=dtype)
    before = parameters(subject)
    subject.step(make_batch())
    moved = {name for name, p in parameters(subject).items() if not torch.equal(before[name], p)}
    assert moved == {name for name in before if not name.endswith(".router")}


def test_a_frozen_router_keeps_its_bias(tmp_path):
    gpt_oss = {"model_type": "gpt_oss", "architectures": None, "num_local_experts": 8, "rope_scaling": {"rope_type": "default"}}
    subject = learner(model_folder(tmp_path / "model", **gpt_oss), freeze_router=True)
    before = parameters(subject)
    subject.step(make_batch())
    moved = {name for name, p in parameters(subject).items() if not torch.equal(before[name], p)}
    assert {name for name in before if name not in moved} == {f"layers.{n}.ffn.{part}" for n in (0, 1) for part in _ROUTER}


_ROUTER = ("router", "router_logit_bias")


def test_batches_that_contradict_themselves_are_bugs(folder):
    batch = make_batch()
    with pytest.raises(StateError, match="loss tokens, its rows hold"):
        learner(folder).step(replace(batch, loss_tokens=batch.loss_tokens + 1))
    first = batch.micro_batches[0]
    mask = first.loss_mask_T.copy()
    mask[0] = True
    bad = replace(batch, micro_batches=(replace(first, loss_mask_T=mask), *batch.micro_batches[1:]), loss_tokens=batch.loss_tokens + 1)
    with pytest.raises(StateError, match="first token carries loss"):
        learner(folder).step(bad)


def test_bfloat16_computes_near_float32_and_trains_float32_masters(folder):
    exact, rounded = learner(folder), learner(folder, dtype="bfloat16")
    a, b = gradients(exact, make_batch()), gradients(rounded, make_batch())
    norms = [sum(float(g.square().sum()) for g in grads.values()) ** 0.5 for grads in (a, b)]
    difference = sum(float((a[name] - b[name]).square().sum()) for name in a) ** 0.5
    assert difference < 0.05 * norms[0] and norms[1] == pytest.approx(norms[0], rel=0.05)
    rounded.step(make_batch())
    for master, computed in zip(rounded.weights.master.parameters(), rounded.weights.compute.parameters(), strict=True):
        assert (master.dtype, computed.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(master.bfloat16(), computed)


def test_a_dense_model_trains_and_has_no_routing_metrics(tmp_path):
    folder = model_folder(tmp_path, model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    outcome = learner(folder).step(without_routing(make_batch()))
    assert outcome.problem == "" and outcome.load_LE.size == 0
    assert not any("replay" in key or "balance" in key for key in outcome.metrics)
