"""The auxiliary loss against its formula: value, gradient, what it does not depend on, and what it does to a skewed router."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.models.context import FullContext
from slipstream.models.decoder import Decoder
from slipstream.models.layers import MoE
from slipstream.models.load import load_model
from slipstream.types import Batch
from tests.unit.trainer.helpers import make_batch, model_folder, without_routing
from tests.unit.trainer.test_balance import GLM, learner, skew
from tests.unit.trainer.test_step import gradients

WEIGHT = 0.03


@pytest.fixture(scope="module", params=["softmax", "sigmoid"])
def folder(request, tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), **(GLM if request.param == "sigmoid" else {}))


def formula(model: Decoder, batch: Batch) -> Tensor:
    """Σ over layers, documents by hand: E · Σ_e f_e P_e, weighed by tokens. Routing as in training."""
    logits: list[Tensor] = []
    hooks = [
        m.register_forward_hook(lambda m, args, _: logits.append(args[0].float() @ m.router)) for m in model.modules() if isinstance(m, MoE)
    ]
    total, tokens = torch.zeros(()), sum(row.num_tokens for row in batch.micro_batches)
    for row in batch.micro_batches:
        logits.clear()
        context = FullContext(row.doc_starts_D)
        if row.routing_TLK is not None:
            context = FullContext(row.doc_starts_D, torch.tensor(row.routing_TLK.astype(np.int64)), torch.tensor(row.routing_valid_T))
        model(torch.tensor(row.tokens_T), torch.tensor(row.positions_T), context)
        for scores_TE in logits:
            sigmoid = scores_TE.sigmoid()
            p_TE = scores_TE.softmax(-1) if model.spec.router_score == "softmax" else sigmoid / sigmoid.sum(-1, keepdim=True)
            for start, end in zip(row.doc_starts_D[:-1], row.doc_starts_D[1:], strict=True):
                chosen = scores_TE[start:end].topk(2).indices.flatten()
                share_E = torch.tensor([float((chosen == e).sum()) for e in range(8)]) / len(chosen)
                total = total + 8 * (share_E * p_TE[start:end].mean(0)).sum() * (end - start) / tokens
    for hook in hooks:
        hook.remove()
    return total


@pytest.mark.parametrize("replay", [True, False])
def test_value_and_gradient_are_those_of_the_formula_added_to_the_loss(folder, replay):
    batch = make_batch() if replay else without_routing(make_batch())
    without, with_it = gradients(learner(folder), batch), gradients(learner(folder, aux_loss=WEIGHT), batch)
    model = load_model(folder)
    expected = formula(model, batch)
    (WEIGHT * expected).backward()
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.requires_grad}
    for name, grad in with_it.items():
        difference = grad - without[name]
        torch.testing.assert_close(difference, own.get(name, torch.zeros_like(grad)), rtol=1e-3, atol=2e-6, msg=name)
    assert float(own["layers.0.ffn.router"].norm()) > 1e-3
    metrics = learner(folder, aux_loss=WEIGHT).step(batch).metrics
    assert metrics["trainer/balance/aux_loss"] == pytest.approx(expected.item() / 2, rel=1e-5)
    assert "trainer/balance/aux_loss" not in learner(folder).step(batch).metrics


@pytest.mark.parametrize("changes", [{"recompute": "layer"}, {"router_replay": True}])
def test_packing_and_recomputation_change_nothing(folder, changes):
    whole, cut = make_batch(row_tokens=256), make_batch(row_tokens=32)
    assert len(whole.micro_batches) < len(cut.micro_batches)
    a, b = gradients(learner(folder, aux_loss=WEIGHT), whole), gradients(learner(folder, aux_loss=WEIGHT, **changes), cut)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_pulls_a_skewed_router_towards_even_probabilities(folder, seed):
    """Advantages of zero: nothing else moves the weights."""
    subject = learner(folder, aux_loss=0.1, loss={"type": "policy_gradient"}, optim={"lr": 3e-2})
    skew(subject, seed)
    values = []
    for step in range(1, 21):
        batch = without_routing(make_batch(step, seed=seed))
        rows = tuple(replace(row, advantages_T=np.zeros_like(row.advantages_T)) for row in batch.micro_batches)
        values.append(subject.step(replace(batch, micro_batches=rows)).metrics["trainer/balance/aux_loss"])
    assert values[0] > 1.4 and 1 <= np.mean(values[-3:]) < 1 + 0.3 * (values[0] - 1), values


def test_it_is_refused_where_it_has_nothing_to_move(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"aux_loss = 0\.1.*freeze_router"):
        learner(folder, aux_loss=0.1, freeze_router=True)
    dense = model_folder(tmp_path, model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    with pytest.raises(ConfigError, match=r"aux_loss = 0\.1.*'qwen3' has no experts"):
        learner(dense, aux_loss=0.1)
