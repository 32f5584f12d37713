"""Block-scaled FP8 against the definition: every code, scale and product computed again here in float64, one tile at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.errors import StateError
from slipstream.ops.fp8 import ACTIVATION, TOKENS, WEIGHT, Quantised, contract_tokens, decode, grouped_matmul, matmul, quantise

TILES = [ACTIVATION, TOKENS, WEIGHT]
GRID = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
GRID = GRID[GRID.isfinite()].unique()
"""All 253 numbers of E4M3, ascending: the largest is 448."""


def randn(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    """Normal values whose size differs from row to row and column to column by about `spread` powers of e."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (
        x * (spread * torch.randn(shape[-2], 1, generator=generator)).exp() * (spread * torch.randn(shape[-1], generator=generator)).exp()
    )


def rounded(x: Tensor, tile: tuple[int, int], power_of_two: bool = False) -> Tensor:
    """The values that the codes of `x` [M, N] stand for, float64, by searching the grid."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], tile[0]):
        for j in range(0, x.shape[1], tile[1]):
            part = x[i : i + tile[0], j : j + tile[1]]
            scale = (part.abs().max().float() / 448).double()
            scale = scale.log2().ceil().exp2() if power_of_two else scale
            at = (part / scale.float()).double()
            nearest = (at.unsqueeze(-1) - GRID).abs().argmin(-1)
            out[i : i + tile[0], j : j + tile[1]] = GRID[nearest] * scale
    return out


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (5, 130), (130, 5), (200, 300), (127, 129)])
def test_every_value_becomes_the_nearest_of_its_tile(shape, tile):
    x = randn(*shape, spread=2.0)
    assert relative(quantise(x, tile).dequantise(), rounded(x, tile)) < 1e-7


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), tile=st.sampled_from(TILES), seed=st.integers(0, 2**16), power=st.booleans())
def test_the_error_of_a_value_is_at_most_half_a_step_of_its_tile(rows, columns, tile, seed, power):
    x = randn(rows, columns, seed=seed, spread=3.0)
    q = quantise(x, tile, power)
    assert q.scales.shape == (math.ceil(rows / tile[0]), math.ceil(columns / tile[1]))
    assert torch.isfinite(q.dequantise()).all()
    scale = q.row_scales().repeat_interleave(tile[1], 1)[:, :columns] if tile[1] > 1 else q.row_scales()
    half_step = torch.maximum(x.abs() * 2**-4, scale * 2**-10)  # three bits of mantissa; below 2^-6 the steps stay 2^-9
    assert ((q.dequantise() - x).abs() <= half_step * (1 + 1e-5)).all()


@pytest.mark.parametrize("tile", TILES)
def test_a_ragged_edge_is_as_if_zeros_followed(tile):
    x = randn(200, 300)
    padded = quantise(torch.nn.functional.pad(x, (0, 84, 0, 56)), tile)
    ragged = quantise(x, tile)
    counts = ragged.scales.shape
    assert torch.equal(ragged.codes.view(torch.uint8), padded.codes.view(torch.uint8)[:200, :300])
    assert torch.equal(ragged.scales, padded.scales[: counts[0], : counts[1]])


def test_the_largest_value_of_a_tile_takes_the_largest_code_and_the_scale_is_its_share():
    q = quantise(torch.tensor([[7.0, -3.5, 0.0]]), ACTIVATION)
    assert q.codes.float().tolist() == [[448.0, -224.0, 0.0]]
    assert q.scales.tolist() == [[torch.tensor(7.0).div(448).item()]]


def test_numbers_of_the_grid_survive_a_round_trip():
    x = GRID.float().unsqueeze(0).repeat(3, 1)[:, :128]
    x[:, 0] = 448.0
    assert torch.equal(quantise(x, ACTIVATION).dequantise(), x)
    assert torch.equal(quantise(x * 2**-20, ACTIVATION).dequantise(), x * 2**-20)


@pytest.mark.parametrize("tile", TILES)
def test_power_of_two_scales_are_the_next_power_of_two_and_applying_them_is_exact(tile):
    x = randn(200, 300, spread=4.0)
    exact, power = quantise(x, tile), quantise(x, tile, power_of_two=True)
    mantissa, _ = power.scales.frexp()
    assert (mantissa == 0.5).all()
    assert (power.scales >= exact.scales).all() and (power.scales < 2 * exact.scales).all()
    again = quantise(power.dequantise(), tile, power_of_two=True)
    assert torch.equal(again.dequantise(), power.dequantise())


def test_a_scale_that_is_a_power_of_two_already_stays():
    assert quantise(torch.full((1, 4), 448 * 2.0**-7), ACTIVATION, power_of_two=True).scales.item() == 2.0**-7


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 1e-30, 1e30, 3e38])
def test_extreme_values_saturate_or_vanish_but_never_become_nan(value, power):
    q = quantise(torch.full((2, 130), value), ACTIVATION, power)
    assert torch.isfinite(q.dequantise()).all() and torch.isfinite(q.scales).all()
    if value == 0 or value >= 1e-30:
        torch.testing.assert_close(q.dequantise(), torch.full((2, 130), value), rtol=0.07, atol=0.0)


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_hidden(value, power):
    x = torch.ones(2, 256)
    x[0, 3] = value
    result = quantise(x, ACTIVATION, power)
    assert result.dequantise()[0, 3].isnan()
    y = matmul(result, quantise(torch.ones(256, 4), WEIGHT, power))
    assert y[0].isnan().all()
    torch.testing.assert_close(y[1], torch.full((4,), 256.0))


def test_a_transposed_weight_has_the_codes_of_the_transpose():
    x = randn(200, 300, spread=2.0)
    a, b = quantise(x, WEIGHT).mT, quantise(x.T, WEIGHT)
    assert torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8)) and torch.equal(a.scales, b.scales) and a.tile == b.tile


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 60), depth=st.integers(1, 400), columns=st.integers(1, 200), seed=st.integers(0, 2**16))
def test_a_product_is_that_of_the_rounded_operands(rows, depth, columns, seed):
    a, b = quantise(randn(rows, depth, seed=seed), ACTIVATION), quantise(randn(depth, columns, seed=seed + 1), WEIGHT)
    expected = a.dequantise().double() @ b.dequantise().double()
    magnitude = a.dequantise().double().abs() @ b.dequantise().double().abs()
    assert ((matmul(a, b).double() - expected).abs() <= 1e-5 * magnitude).all()


def test_scales_are_applied_to_each_128_of_the_contracted_dimension():
    """Two tiles whose scales differ by 2^40: in one sum of codes the small one would be as large as the other."""
    x = torch.cat([torch.full((1, 128), 2.0**-20), torch.full((1, 128), 2.0**20)], 1)
    w = torch.cat([torch.full((128, 2), 2.0**20), torch.full((128, 2), -(2.0**-20))])
    assert matmul(quantise(x, ACTIVATION), quantise(w, WEIGHT)).tolist() == [[0.0, 0.0]]
    torch.testing.assert_close(matmul(quantise(x[:, :200], ACTIVATION), quantise(w[:200], WEIGHT)), torch.full((1, 2), 56.0))


def test_a_grouped_product_is_one_product_for_each_group():
    a, b = randn(20, 150), torch.stack([randn(150, 140, seed=e) for e in range(4)])
    y = grouped_matmul(quantise(a, ACTIVATION), quantise(b, WEIGHT), [3, 3, 15, 20])
    for expert, (start, end) in enumerate([(0, 3), (3, 3), (3, 15), (15, 20)]):
        assert torch.equal(y[start:end], matmul(quantise(a[start:end], ACTIVATION), quantise(b[expert], WEIGHT)))


def test_contracting_tokens_starts_its_tiles_anew_with_every_group():
    x, y = randn(400, 20, spread=2.0), randn(400, 30, seed=1, spread=2.0)
    result = contract_tokens(x, y, [130, 130, 400])
    for expert, (start, end) in enumerate([(0, 130), (130, 130), (130, 400)]):
        expected = rounded(x[start:end], TOKENS).T @ rounded(y[start:end], TOKENS)
        assert start == end or relative(result[expert], expected) < 1e-6
    assert not result[1].any()


def test_a_product_of_normal_values_is_off_by_about_four_percent():
    a, w = randn(256, 512, spread=0.0), randn(512, 256, seed=1, spread=0.0)
    assert 0.02 < relative(matmul(quantise(a, ACTIVATION), quantise(w, WEIGHT)), a @ w) < 0.05


def test_operands_that_do_not_go_together_are_bugs():
    a, w = quantise(randn(4, 256), ACTIVATION), quantise(randn(256, 4), WEIGHT)
    for left, right in [(a, a), (a.mT, w.mT), (a, quantise(randn(128, 4), WEIGHT)), (quantise(randn(4, 256), TOKENS), w)]:
        with pytest.raises(StateError, match="FP8 product"):
            matmul(left, right)
    with pytest.raises(StateError, match="cannot be cut out"):
        w.rows(0, 1)


def test_another_device_is_refused_by_name():
    with pytest.raises(StateError, match="no kernel for tensors on meta"):
        quantise(torch.empty(2, 2, device="meta"), ACTIVATION)


def test_nothing_has_no_tiles():
    empty = quantise(torch.empty(0, 40), TOKENS)
    assert isinstance(empty, Quantised) and empty.scales.shape == (0, 40) and empty.dequantise().shape == (0, 40)


def test_a_row_of_a_product_does_not_depend_on_how_many_there_are():
    """Unlike float32 products of fewer than four rows: sums of 128 products of codes mostly fit float32, whatever their order."""
    a, b = quantise(randn(24, 200, spread=2.0), ACTIVATION), quantise(randn(200, 61, seed=1, spread=2.0), WEIGHT)
    whole = matmul(a, b)
    for count in (1, 2, 3, 4, 7):
        for start in range(0, 24 - count, count):
            assert torch.equal(matmul(a.rows(start, start + count), b), whole[start : start + count]), (start, count)
    assert matmul(a.rows(0, 0), b).shape == (0, 61)


def test_codes_are_decoded_to_what_they_stand_for():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = every.view(16, 16).T
    assert torch.equal(decode(codes).nan_to_num(1e9), codes.float().nan_to_num(1e9))
