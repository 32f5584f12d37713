"""The sampler against the closed form of the distribution that it must sample from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.engine.sampler import SampleParams, mix_seed, sample, uniforms
from slipstream.errors import EngineError
from slipstream.ops.sampling import draw, draw_reference

LOGITS_V = np.array([1.2, -0.4, 0.3, 2.0, -3.0, 0.9, 0.1, 1.9], np.float32)


def params(rows: int, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, first_position=0) -> SampleParams:
    def column(value, dtype):
        return np.full(rows, value, dtype)

    return SampleParams(
        column(temperature, np.float32),
        column(top_p, np.float32),
        column(top_k, np.int32),
        column(min_p, np.float32),
        column(mix_seed(seed), np.uint64),
        np.arange(first_position, first_position + rows, dtype=np.int32),
    )


def distribution(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) -> np.ndarray:
    """Temperature, then top-k, then top-p of what is left, then min-p: written out plainly."""
    p = np.exp(LOGITS_V.astype(np.float64) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    keep = order[: top_k or len(p)]
    mass, nucleus = 0.0, []
    for token in keep:
        if mass >= top_p * p[keep].sum():
            break
        nucleus.append(token)
        mass += p[token]
    kept = np.zeros_like(p)
    for token in nucleus:
        if p[token] >= min_p * p.max():
            kept[token] = p[token]
    return kept / kept.sum()


CASES = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.25},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.85, "min_p": 0.1},
    {"top_k": 100},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_follow_the_truncated_softmax_and_logprobs_are_its_logarithm(case):
    rows, expected_V = 20000, distribution(**case)
    tokens_S, logprobs_S = sample(torch.from_numpy(np.tile(LOGITS_V, (rows, 1))), params(rows, seed=7, **case))
    counts_V = np.bincount(tokens_S, minlength=len(LOGITS_V))
    assert (counts_V[expected_V == 0] == 0).all()
    alive = expected_V > 0
    chi_square = ((counts_V - rows * expected_V)[alive] ** 2 / (rows * expected_V[alive])).sum()
    assert chi_square < 24.3, "0.1% point of chi-square with 7 degrees of freedom"
    np.testing.assert_allclose(logprobs_S, np.log(expected_V[tokens_S]), atol=2e-6)


def test_greedy_rows_take_the_argmax_and_report_the_untempered_logprob():
    tokens_S, logprobs_S = sample(torch.from_numpy(LOGITS_V[None].copy()), params(1, temperature=0.0, top_k=2))
    assert tokens_S.tolist() == [3]
    np.testing.assert_allclose(logprobs_S, np.log(distribution()[3:4]), atol=1e-6)


def test_rows_of_different_kinds_in_one_batch_sample_as_they_do_alone():
    kinds = [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"temperature": 0.5}, {"top_k": 2}, {"min_p": 0.3}]
    alone = [sample(torch.from_numpy(LOGITS_V[None].copy()), params(1, seed=3, **kind)) for kind in kinds]
    columns = [params(1, seed=3, **kind) for kind in kinds]
    names = SampleParams.__dataclass_fields__
    mixed = SampleParams(**{name: np.concatenate([getattr(c, name) for c in columns]) for name in names})
    tokens_S, logprobs_S = sample(torch.from_numpy(np.tile(LOGITS_V, (len(kinds), 1))), mixed)
    assert tokens_S.tolist() == [int(tokens[0]) for tokens, _ in alone]
    np.testing.assert_allclose(logprobs_S, [float(logprobs[0]) for _, logprobs in alone], atol=1e-6)


def test_a_certain_token_is_drawn_whatever_the_seed():
    logits_SV = torch.full((500, 40), -1e9)
    logits_SV[:, 17] = 0.0
    tokens_S, logprobs_S = sample(logits_SV, params(500))
    assert set(tokens_S.tolist()) == {17} and np.abs(logprobs_S).max() == 0


def test_uniforms_are_uniform_along_positions_and_along_seeds():
    along_positions = uniforms(np.full(20000, mix_seed(1)), np.arange(20000))
    along_seeds = uniforms(np.array([mix_seed(seed) for seed in range(20000)]), np.full(20000, 5))
    for values in (along_positions, along_seeds):
        counts = np.histogram(values, bins=20, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8, "0.1% point of chi-square with 19 degrees of freedom"
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
    assert along_seeds.min() >= 0 and along_seeds.max() < 1


@pytest.mark.parametrize("vocab", [1, 7, 8, 63, 64, 65, 500, 4096])
def test_the_native_draw_equals_the_reference(vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits_SV = 3 * torch.randn(300, vocab, generator=generator)
    logits_SV[::7, ::3] = -float("inf")
    logits_SV[::7, vocab - 1] = 0.5
    temperature_S = torch.tensor([0.0, 0.3, 1.0, 2.0]).repeat(75)
    uniform_S = torch.rand(300, generator=generator, dtype=torch.float64)
    expected_tokens, expected_logprobs = draw_reference(logits_SV.clone(), temperature_S, uniform_S)
    tokens_S, logprobs_S = draw(logits_SV.clone(), temperature_S, uniform_S)
    assert (tokens_S != expected_tokens).sum() <= 1, "a uniform number may fall between two roundings of one boundary"
    same = tokens_S == expected_tokens
    torch.testing.assert_close(logprobs_S[same], expected_logprobs[same], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-48])
def test_the_ends_of_the_unit_interval_draw_tokens_that_have_a_probability(uniform):
    logits_SV = torch.full((1, 200), -float("inf"))
    logits_SV[0, [3, 150]] = 0.0
    tokens_S, _ = draw(logits_SV, torch.ones(1), torch.tensor([uniform], dtype=torch.float64))
    assert tokens_S.tolist() == [3 if uniform == 0 else 150]


@pytest.mark.parametrize("case", [{}, {"temperature": 0.0}, {"top_p": 0.5}], ids=str)
def test_logits_that_are_not_finite_are_an_error_and_never_a_token(case):
    logits_SV = torch.tensor([[0.0, float("nan"), 1.0]])
    with pytest.raises(EngineError, match="1 of 1 rows have logits that are not finite"):
        sample(logits_SV, params(1, **case))
