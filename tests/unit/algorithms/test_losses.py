"""Closed forms of each loss and its gradient, by hand; and what all losses have in common."""

import math

import pytest
import torch

from slipstream.algorithms.losses import LOG_RATIO_BOUND, LOSSES, LossOutput, k3, loss_fn
from slipstream.config import validate
from slipstream.config.train import (
    CispoLoss,
    CustomLoss,
    DppoLoss,
    GspoLoss,
    IcePopLoss,
    PolicyGradientLoss,
    PpoLoss,
    TrainerConfig,
)
from slipstream.errors import ConfigError

ALL = [
    DppoLoss(),
    PpoLoss(),
    CispoLoss(),
    CispoLoss(clip_low=0.2),
    IcePopLoss(),
    GspoLoss(clip_low=0.2, clip_high=0.2),
    PolicyGradientLoss(),
    PolicyGradientLoss(correction="tis"),
    PolicyGradientLoss(correction="mis"),
]
IDS = [f"{config.type}-{getattr(config, 'correction', '')}{getattr(config, 'clip_low', '')}" for config in ALL]


def run(config, ratios, advantages, *, p_engine=0.25, mask=None, samples=None):
    """Losses, drops and gradients with respect to the logprobs, for tokens with these ratios."""
    ratios = torch.tensor(ratios, dtype=torch.float64)
    engine = torch.full_like(ratios, math.log(p_engine))
    logprobs = (engine + ratios.log()).requires_grad_()
    mask_T = torch.ones(len(ratios), dtype=torch.bool) if mask is None else torch.tensor(mask)
    sample_T = torch.zeros(len(ratios), dtype=torch.long) if samples is None else torch.tensor(samples)
    out = loss_fn(config)(logprobs, engine, torch.tensor(advantages, dtype=torch.float64), mask_T, sample_T)
    out.loss_T.sum().backward()
    assert logprobs.grad is not None
    return out.loss_T.tolist(), out.masked_T.tolist(), logprobs.grad.tolist()


def approx(values):
    return pytest.approx(values, rel=1e-9, abs=1e-12)


def test_dppo_drops_only_tokens_that_moved_too_far_the_way_their_advantage_pushes():
    # p_engine 0.25: ratio 2 is p 0.5 (moved +0.25), ratio 0.1 is p 0.025 (moved -0.225), ratio 1.2 is p 0.3 (moved +0.05)
    loss, masked, grad = run(DppoLoss(tv_threshold=0.2, kl_coef=0), [2, 2, 0.1, 0.1, 1.2], [1, -1, 1, -1, 1])
    assert masked == [True, False, False, True, False]
    assert loss == approx([0, 2, -0.1, 0, -1.2])
    assert grad == approx([0, 2, -0.1, 0, -1.2])


def test_dppo_pulls_dropped_tokens_back_with_the_squared_log_ratio():
    loss, _, grad = run(DppoLoss(tv_threshold=0.2, kl_coef=0.5), [2], [1])
    assert loss == approx([0.5 * math.log(2) ** 2])
    assert grad == approx([2 * 0.5 * math.log(2)])


def test_ppo_takes_the_pessimistic_side_of_the_clip():
    loss, masked, grad = run(PpoLoss(clip_low=0.2, clip_high=0.3), [1.5, 1.5, 0.5, 0.5, 1.1], [2, -2, 2, -2, 2])
    assert loss == approx([-1.3 * 2, 1.5 * 2, -0.5 * 2, 0.8 * 2, -1.1 * 2])
    assert masked == [True, False, False, True, False]
    assert grad == approx([0, 3, -1, 0, -2.2])


def test_cispo_caps_the_weight_but_every_token_keeps_a_gradient():
    _, masked, grad = run(CispoLoss(clip_low=None, clip_high=1.0), [8, 1.5, 0.1], [1, 1, -1])
    assert grad == approx([-2, -1.5, 0.1])
    assert masked == [False, False, False]


def test_cispo_with_a_lower_clip_raises_small_weights_to_it():
    _, _, grad = run(CispoLoss(clip_low=0.2, clip_high=1.0), [0.1], [1])
    assert grad == approx([-0.8])


def test_icepop_drops_ratios_outside_the_band_on_both_sides():
    loss, masked, grad = run(IcePopLoss(low=0.5, high=5), [0.4, 0.6, 4, 5.1], [1, 1, -1, 1], p_engine=0.1)
    assert masked == [True, False, False, True]
    assert loss == approx([0, -0.6, 4, 0])
    assert grad == approx([0, -0.6, 4, 0])


def test_gspo_gives_every_token_of_a_sample_the_ratio_of_the_geometric_mean():
    # sample 0: sqrt(1.21 * 1) = 1.1, clipped at 1.05; sample 1: ratio 0.9, negative advantage, clipped at 0.95
    config = GspoLoss(clip_low=0.05, clip_high=0.05)
    loss, masked, grad = run(config, [1.21, 1, 0.9], [1, 1, -1], samples=[7, 7, 9])
    assert loss == approx([-1.05, -1.05, 0.95])
    assert masked == [True, True, True]
    assert grad == approx([0, 0, 0])


def test_gspo_spreads_the_gradient_evenly_over_the_tokens_of_a_sample():
    loss, _, grad = run(GspoLoss(clip_low=0.5, clip_high=0.5), [1.21, 1, 0.9], [1, 1, 2], samples=[0, 0, 1])
    assert loss == approx([-1.1, -1.1, -1.8])
    assert grad == approx([-1.1, -1.1, -1.8])  # d/dlogp_t of n * s * A is s * A: each token weighs the same


def test_gspo_leaves_prompt_tokens_out_of_the_mean():
    loss, _, _ = run(GspoLoss(clip_low=0.5, clip_high=0.5), [9, 1.21, 1], [1, 1, 1], mask=[False, True, True])
    assert loss == approx([0, -1.1, -1.1])


def test_plain_policy_gradient_ignores_the_ratio():
    loss, masked, grad = run(PolicyGradientLoss(), [3, 0.1], [1, -2], p_engine=0.25)
    assert loss == approx([-math.log(0.75), 2 * math.log(0.025)])
    assert grad == approx([-1, 2])
    assert masked == [False, False]


def test_tis_caps_large_weights_and_keeps_small_ones():
    _, masked, grad = run(PolicyGradientLoss(correction="tis", tis_cap=2), [3, 0.1], [1, 1])
    assert grad == approx([-2, -0.1])
    assert masked == [False, False]


def test_mis_drops_weights_outside_the_band():
    _, masked, grad = run(PolicyGradientLoss(correction="mis", mis_low=0.5, mis_high=2), [3, 1.5, 0.4], [1, 1, 1])
    assert grad == approx([0, -1.5, 0])
    assert masked == [True, False, True]


@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_on_policy_the_gradient_is_minus_the_advantage(config):
    _, masked, grad = run(config, [1, 1, 1], [1, -0.5, 0], p_engine=0.3, samples=[0, 1, 2])
    assert grad == approx([-1, 0.5, 0])
    assert masked == [False, False, False]


@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_tokens_outside_the_loss_mask_have_no_loss_and_no_gradient_even_when_their_logprobs_are_rubbish(config):
    logprobs = torch.tensor([-1.0, -50.0, float("-inf")], requires_grad=True)
    engine = torch.tensor([-1.1, 0.0, 0.0])
    mask = torch.tensor([True, False, False])
    out = loss_fn(config)(logprobs, engine, torch.tensor([1.0, 1.0, -1.0]), mask, torch.zeros(3, dtype=torch.int32))
    out.loss_T.sum().backward()
    assert logprobs.grad is not None
    assert out.loss_T[1:].tolist() == [0, 0]
    assert logprobs.grad[1:].tolist() == [0, 0]
    assert logprobs.grad[0] != 0
    assert not (out.masked_T & ~mask).any()


@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_ratios_beyond_the_clamp_stay_finite(config):
    logprobs = torch.tensor([-0.1, -300.0], requires_grad=True)
    engine = torch.tensor([-300.0, -0.1])
    ones = torch.ones(2, dtype=torch.bool)
    out = loss_fn(config)(logprobs, engine, torch.tensor([-1.0, 1.0]), ones, torch.tensor([0, 1]))
    out.loss_T.sum().backward()
    assert out.loss_T.isfinite().all()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()
    assert out.loss_T.abs().max() <= math.exp(LOG_RATIO_BOUND) * 1.01


@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_the_split_into_rows_does_not_change_the_sum(config):
    generator = torch.Generator().manual_seed(0)
    engine = -torch.rand(12, generator=generator, dtype=torch.float64) * 3
    logprobs = engine + 0.3 * torch.randn(12, generator=generator, dtype=torch.float64)
    advantages = torch.randn(3, generator=generator, dtype=torch.float64).repeat_interleave(4)
    samples = torch.arange(3).repeat_interleave(4)
    mask = torch.rand(12, generator=generator) > 0.3
    arrays = (logprobs, engine, advantages, mask, samples)
    whole = loss_fn(config)(*arrays).loss_T
    parts = [loss_fn(config)(*(array[rows] for array in arrays)).loss_T for rows in (slice(0, 4), slice(4, 12))]
    assert torch.allclose(whole, torch.cat(parts), rtol=1e-12)


def test_every_loss_of_the_config_has_a_function():
    annotation = TrainerConfig.model_fields["loss"].annotation
    types = {section.model_fields["type"].default for section in annotation.__args__}  # type: ignore[union-attr]
    assert types == {*LOSSES, "custom"}


def half_reinforce(logprobs_T, engine_logprobs_T, advantages_T, mask_T, sample_T, *, scale):
    return LossOutput(-scale * advantages_T * logprobs_T * mask_T, torch.zeros_like(mask_T))


def test_a_custom_loss_gets_its_arguments():
    path = f"{__name__}:half_reinforce"
    _, _, grad = run(CustomLoss(path=path, args={"scale": 0.5}), [1, 2], [1, -1])
    assert grad == approx([-0.5, 0.5])


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nowhere", "expected 'package.module:function'"),
        ("no.such.module:f", "does not import"),
        ("slipstream.algorithms.losses:nothing", "has no function 'nothing'"),
        ("slipstream.algorithms.losses:LOG_RATIO_BOUND", "has no function"),
    ],
)
def test_a_custom_path_that_does_not_work_is_a_config_error_that_names_it(path, problem):
    config = validate(TrainerConfig, {"loss": {"type": "custom", "path": path}}).loss
    with pytest.raises(ConfigError, match=problem) as caught:
        loss_fn(config)
    assert "trainer.loss.path" in str(caught.value)


def test_k3_is_zero_on_equal_logprobs_and_positive_otherwise():
    engine = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    train = engine + torch.tensor([0.0, math.log(2), -math.log(2)], dtype=torch.float64)
    assert k3(train, engine).tolist() == approx([0, 1 - math.log(2), -0.5 + math.log(2)])


def test_k3_stays_finite_on_a_token_that_one_side_finds_impossible():
    assert k3(torch.tensor([-0.1]), torch.tensor([-500.0])).isfinite().all()
    assert k3(torch.tensor([float("-inf")]), torch.tensor([-0.1])).tolist() == pytest.approx([LOG_RATIO_BOUND - 1])


def test_k3_is_not_negative_for_ratios_next_to_one_in_float32():
    engine = -torch.linspace(0.01, 8, 20_000)
    assert (k3(engine + torch.linspace(-1e-4, 1e-4, 20_000), engine) >= 0).all()
