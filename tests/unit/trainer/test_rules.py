"""Update rules against closed forms and against torch's own optimizers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from slipstream.config import validate
from slipstream.config.train import OptimConfig
from slipstream.errors import ConfigError
from slipstream.models.matrices import fused_columns
from slipstream.trainer.optim import empty_optimizer_tensors, make_optimizer, optimizer_tensors
from slipstream.trainer.rules import RuleOptimizer, orthogonalised
from tests.unit.trainer.helpers import make_batch, model_folder
from tests.unit.trainer.test_rl import fingerprints, whole_and_resumed
from tests.unit.trainer.test_step import learner

KINDS = ["adamw", "muon", "sgd", "sign_sgd"]
OURS = [(kind, moments) for kind in KINDS for moments in ("float32", "bfloat16") if (kind, moments) != ("adamw", "float32")]
"""What `trainer.rules` does; AdamW with float32 moments is torch's."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def optim(kind: str, **values) -> OptimConfig:
    return validate(OptimConfig, {"type": kind, "lr": 0.1, **values})


def steps(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradients: list[Tensor]) -> Tensor:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach().clone()


def ours(start: Tensor, gradients: list[Tensor], columns: tuple[int, ...] = (), **values) -> Tensor:
    """Where our optimizer takes a parameter 'w' in some steps."""
    parameter = nn.Parameter(start.clone())
    optimizer = make_optimizer({"w": parameter}, {"w": columns} if columns else {}, optim(**values))
    assert isinstance(optimizer, RuleOptimizer)
    return steps(optimizer, parameter, gradients)


def with_singular_values(values: list[float], rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(U diag(values) Vᵀ, U, V)"""
    u, _ = torch.linalg.qr(randn(rows, len(values), seed=seed).double())
    v, _ = torch.linalg.qr(randn(columns, len(values), seed=seed + 1).double())
    return (u * torch.tensor(values).double()) @ v.T, u, v


GRADIENTS = [randn(6, 10, seed=s) for s in range(5)]


# ---- the rules ----


def test_adamw_equals_torchs():
    parameter, start = nn.Parameter(randn(6, 10, seed=9)), randn(6, 10, seed=9)
    theirs = torch.optim.AdamW([parameter], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3)
    mine = ours(start, GRADIENTS, kind="muon", weight_decay=0.3)  # not among the columns: what muon leaves to AdamW
    torch.testing.assert_close(mine, steps(theirs, parameter, GRADIENTS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_torchs(momentum):
    parameter, start = nn.Parameter(randn(6, 10, seed=9)), randn(6, 10, seed=9)
    theirs = torch.optim.SGD([parameter], lr=0.1, momentum=momentum)
    mine = ours(start, GRADIENTS, kind="sgd", momentum=momentum)
    torch.testing.assert_close(mine, steps(theirs, parameter, GRADIENTS), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (40, 24)])
def test_muon_equals_torchs_up_to_its_bfloat16(shape):
    parameter, start, gradients = nn.Parameter(randn(*shape, seed=9)), randn(*shape, seed=9), [randn(*shape, seed=s) for s in range(5)]
    theirs = torch.optim.Muon([parameter], lr=0.1, momentum=0.95, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    mine, torchs = ours(start, gradients, (shape[1],), kind="muon", weight_decay=0.3), steps(theirs, parameter, gradients)
    moved = float((torchs - start).norm())
    assert float((mine - torchs).norm()) < 0.01 * moved


def test_sign_sgd_moves_by_the_rate_against_the_sign_of_the_mean_gradient():
    start = torch.tensor([[1.0, 1.0, 1.0]])
    gradients = [torch.tensor([[5.0, -0.01, 0.0]]), torch.tensor([[-4.0, 0.02, 0.0]])]
    torch.testing.assert_close(ours(start, gradients, kind="sign_sgd", momentum=0.0), start)
    # 0.8 · 0.2 · 5 - 0.2 · 4 = 0, a tie that float32 breaks; with 0.9 the first gradient wins: 0.9 · 0.5 - 0.4 > 0
    torch.testing.assert_close(ours(start, gradients, kind="sign_sgd", momentum=0.9), torch.tensor([[0.8, 1.0, 1.0]]))


@pytest.mark.parametrize("kind", KINDS)
def test_decay_is_decoupled_and_touches_matrices_only(kind):
    """Without a gradient a matrix shrinks by lr · decay, whatever the rule; a vector stays."""
    parameters = {"w": nn.Parameter(torch.ones(4, 2)), "e": nn.Parameter(torch.ones(3, 4, 2)), "norm": nn.Parameter(torch.ones(3))}
    optimizer = make_optimizer(parameters, {"w": (2,)}, optim(kind, weight_decay=0.5))
    for p in parameters.values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert [p.detach().min().item() for p in parameters.values()] == pytest.approx([0.95, 0.95, 1.0])
    assert [p.detach().max().item() for p in parameters.values()] == pytest.approx([0.95, 0.95, 1.0])


# ---- orthogonalisation ----


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (5, 12), (12, 5)])
def test_each_singular_value_goes_through_the_polynomial_and_the_vectors_stay(rows, columns):
    values = [3.0, 1.0, 0.5, 0.1, 0.02]
    x, u, v = with_singular_values(values, rows, columns)
    expected = torch.tensor(values).double() / torch.tensor(values).double().norm()
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    torch.testing.assert_close(orthogonalised(x.float()).double(), (u * expected) @ v.T, rtol=1e-4, atol=1e-5)
    assert ((expected > 0.3) & (expected < 1.3)).all()


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_size_of_a_gradient_does_not_matter(scale):
    x = randn(6, 10)
    torch.testing.assert_close(orthogonalised(scale * x), orthogonalised(x), rtol=1e-4, atol=1e-5)


def test_nothing_becomes_nothing():
    assert not orthogonalised(torch.zeros(2, 3, 5)).any()


@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (128, 32)])
def test_an_update_has_the_root_mean_square_of_adamws(shape):
    """0.2 for a matrix of full rank, whatever its shape."""
    moved = ours(torch.zeros(shape), [randn(*shape)], (shape[1],), kind="muon", lr=1.0)
    assert 0.14 < float(moved.square().mean().sqrt()) * max(shape) ** 0.5 / min(shape) ** 0.5 / (max(shape) / min(shape)) ** 0.5 < 0.23


@pytest.mark.parametrize("columns", [(4, 6), (2, 3, 5)])
def test_matrices_side_by_side_are_orthogonalised_each_by_itself(columns):
    start, gradient = randn(6, 10, seed=3), GRADIENTS[0]
    together = ours(start, [gradient], columns, kind="muon")
    for a, g, result in zip(start.split(columns, 1), gradient.split(columns, 1), together.split(columns, 1), strict=True):
        torch.testing.assert_close(result, ours(a, [g], (a.shape[1],), kind="muon"))
    assert not torch.allclose(together, ours(start, [gradient], (10,), kind="muon"), atol=1e-3)


def test_experts_are_orthogonalised_each_by_itself_and_one_without_tokens_stays():
    start, gradients = randn(3, 6, 10, seed=3), [randn(3, 6, 10, seed=s) for s in range(3)]
    for gradient in gradients[1:]:
        gradient[2] = 0.0
    stacked = ours(start, gradients, (4, 6), kind="muon")
    for expert, taken in ((0, 3), (1, 3), (2, 1)):
        alone = ours(start[expert], [g[expert] for g in gradients[:taken]], (4, 6), kind="muon")
        torch.testing.assert_close(stacked[expert], alone)


# ---- which parameter takes which rule ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), tie_word_embeddings=False)


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest(folder):
    subject = learner(folder, optim={"type": "muon", "lr": 1e-3})
    subject.step(make_batch())
    names = {subject.names[p]: set(state) for p, state in subject.optimizer.state.items()}
    muon = {name for name, state in names.items() if state == {"momentum"}}
    assert muon == {
        f"layers.{i}.{part}" for i in (0, 1) for part in ("attention.qkv", "attention.out", "ffn.experts.gate_up", "ffn.experts.down")
    }
    assert all(state == {"step", "exp_avg", "exp_avg_sq"} for name, state in names.items() if name not in muon)
    assert {"embed", "head", "norm", "layers.0.ffn.router", "layers.1.attention.q_norm"} <= names.keys() - muon


@pytest.mark.parametrize(("kind", "moments"), OURS)
def test_the_loss_of_a_repeated_batch_falls(folder, kind, moments):
    rate = {"adamw": 5e-3, "muon": 5e-3, "sgd": 2e-2, "sign_sgd": 2e-3}[kind]
    subject = learner(folder, optim={"type": kind, "moments": moments, "lr": rate}, loss={"type": "policy_gradient"})
    losses = [subject.step(make_batch()).metrics["trainer/loss/mean"] for _ in range(6)]
    assert losses[-1] < losses[0]


def test_a_frozen_router_stays_also_with_muon(folder):
    subject = learner(folder, freeze_router=True, optim={"type": "muon"})
    before = {name: p.detach().clone() for name, p in subject.weights.master.named_parameters()}
    subject.step(make_batch())
    moved = {name for name, p in subject.weights.master.named_parameters() if not torch.equal(before[name], p)}
    assert moved == {name for name in before if not name.endswith(".router")}


# ---- moments in bfloat16 ----


@pytest.mark.parametrize("kind", KINDS)
def test_moments_are_kept_in_bfloat16_and_a_step_is_near_that_of_float32(kind):
    parameters = [nn.Parameter(randn(6, 10, seed=9)) for _ in range(2)]
    optimizers = [
        make_optimizer({"w": p}, {"w": (10,)}, optim(kind, moments=moments, lr=0.01))
        for p, moments in zip(parameters, ("float32", "bfloat16"), strict=True)
    ]
    exact, rounded = (steps(o, p, GRADIENTS) for o, p in zip(optimizers, parameters, strict=True))
    kept = {key: value.dtype for key, value in optimizers[1].state[parameters[1]].items() if key != "step"}
    assert kept and set(kept.values()) == {torch.bfloat16}
    moved = float((exact - randn(6, 10, seed=9)).norm())
    assert 0 < float((exact - rounded).norm()) < (0.02 if kind != "sign_sgd" else 0.3) * moved or kind == "sign_sgd"


@pytest.mark.parametrize(("kind", "key"), [("adamw", "beta2"), ("muon", "beta1"), ("muon", "momentum"), ("sgd", "momentum")])
def test_moments_that_bfloat16_could_never_let_fade_are_refused(kind, key):
    assert (torch.tensor(1.0).bfloat16().float() * 0.999).bfloat16() == 1.0
    with pytest.raises(ConfigError, match=rf"optim\.{key} = 0\.999 .* never fades; use {key} = 0\.99"):
        optim(kind, moments="bfloat16", **{key: 0.999})
    optim(kind, **{key: 0.999})


def test_at_the_limit_they_fade():
    parameter = nn.Parameter(torch.zeros(1, 1))
    optimizer = make_optimizer({"w": parameter}, {}, optim("adamw", moments="bfloat16", beta2=0.99))
    steps(optimizer, parameter, [torch.ones(1, 1)])
    first = float(optimizer.state[parameter]["exp_avg_sq"])
    steps(optimizer, parameter, [torch.zeros(1, 1)] * 300)
    assert 0 < float(optimizer.state[parameter]["exp_avg_sq"]) < 0.2 * first


# ---- state ----


@pytest.mark.parametrize(("kind", "moments"), OURS)
def test_state_survives_a_round_trip_through_named_tensors(kind, moments):
    def make() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        parameter = nn.Parameter(randn(6, 10, seed=9))
        return parameter, make_optimizer({"w": parameter}, {"w": (10,)}, optim(kind, moments=moments))

    (a, first), (b, second) = make(), make()
    steps(first, a, GRADIENTS[:2])
    stored = {key: value.clone() for key, value in optimizer_tensors(first, {a: "w"}).items()}
    assert stored
    b.data.copy_(a.data)
    given = empty_optimizer_tensors(second, {b: "w"}, {key: (value.dtype, tuple(value.shape)) for key, value in stored.items()})
    for key, value in stored.items():
        given[key].copy_(value)
    assert torch.equal(steps(first, a, GRADIENTS[2:]), steps(second, b, GRADIENTS[2:]))


@pytest.mark.parametrize(("kind", "moments"), OURS)
def test_a_run_that_is_interrupted_and_resumed_ends_with_bit_identical_weights(tmp_path, folder, kind, moments):
    trainer = {"optim": {"type": kind, "moments": moments, "lr": 1e-3, "weight_decay": 0.1}}
    whole, resumed = whole_and_resumed(tmp_path, folder, trainer)
    assert fingerprints(resumed) == fingerprints(whole)


def test_the_columns_are_those_of_the_checkpoints_matrices(folder):
    model = learner(folder).weights.master
    assert fused_columns(model.names, model.spec)["layers.0.attention.qkv"] == (32, 16, 16)
