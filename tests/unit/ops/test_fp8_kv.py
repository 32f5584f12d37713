"""Keys and values in FP8: what is stored, and that attention over them is attention over what they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.errors import StateError
from slipstream.ops import Sight, paged_attention, write_kv
from slipstream.ops.fp8_kv import Fp8Pages, scales_of

N, B, G, H = 9, 4, 2, 4


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("features", [8, 128, 192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_is_off_by_half_a_step_of_its_code_at_most(features, dtype):
    x = (randn(10, G, features) * torch.logspace(-3, 3, 10)[:, None, None]).to(dtype)
    pages = Fp8Pages.zeros((N, B, G, features))
    slots = torch.tensor([35, 0, 7, 8, 9, 10, 11, 3, 2, 20])
    pages.write(x, slots)
    read = pages.read(torch.arange(N)).flatten(0, 1)
    for x_Gd, found_Gd in zip(x.float(), read[slots], strict=True):
        for start in range(0, features, 128):
            part, found = x_Gd[:, start : start + 128], found_Gd[:, start : start + 128]
            smallest = part.abs().amax(-1, keepdim=True) * 2.0**-16  # below this the codes are subnormal
            assert ((part - found).abs() <= part.abs() * 2.0**-4 + smallest).all()
    untouched = [slot for slot in range(N * B) if slot not in slots.tolist()]
    assert not read[untouched].any()


def test_the_bytes_of_a_token_do_not_depend_on_who_is_written_with_it():
    x = randn(6, G, 16)
    x[4] *= 1000
    together, alone = Fp8Pages.zeros((N, B, G, 16)), Fp8Pages.zeros((N, B, G, 16))
    together.write(x, torch.arange(6))
    for token in (3, 0, 5, 4, 2, 1):
        alone.write(x[token : token + 1], torch.tensor([token]))
    for one, other in zip((together.codes, together.scales), (alone.codes, alone.scales), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_scales_are_powers_of_two_and_a_byte_for_every_128_features():
    pages = Fp8Pages.zeros((N, B, G, 192))
    pages.write(randn(4, G, 192), torch.arange(4))
    assert scales_of(192) == 2 and pages.scales.nbytes == N * B * G * 2 and pages.codes.nbytes == N * B * G * 192
    mantissas, _ = pages.scales[0].float().frexp()
    assert (mantissas == 0.5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sight", ["all", "window", "sinks", "selected"])
def test_attention_is_that_over_the_values(dtype, sight):
    features, counts, contexts = 16, [1, 1, 5, 2], [13, 1, 9, 16]
    keys, values = Fp8Pages.zeros((N, B, G, features)), Fp8Pages.zeros((N, B, G, features))
    every = torch.arange(N * B)
    write_kv(randn(N * B, G, features).to(dtype), randn(N * B, G, features, seed=1).to(dtype), keys, values, every)
    table = torch.tensor([[4, 1, 8, 0], [3, -7, 99, 99], [4, 1, 5, 99], [2, 6, 7, 0]], dtype=torch.int32)  # behind the context: anything
    starts = torch.tensor([0, 1, 2, 7, 9], dtype=torch.int32)
    q = randn(sum(counts), H, features, seed=2).to(dtype)
    chosen = torch.stack([torch.arange(sum(counts)) % 2, torch.full((sum(counts),), -1)], 1).int()
    kinds = {"all": None, "window": Sight(window=3), "sinks": Sight(sinks_H=randn(H)), "selected": Sight(selected_TK=chosen * 0)}
    context = torch.tensor(contexts, dtype=torch.int32)
    out = paged_attention(q, keys, values, table, starts, context, 0.25, kinds[sight])
    plain = [pages.read(torch.arange(N)) for pages in (keys, values)]
    safe = table.where((table >= 0) & (table < N), 0)
    expected = paged_attention(q.float(), *plain, safe, starts, context, 0.25, kinds[sight])
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype), rtol=1e-5, atol=1e-6)


def test_what_is_not_finite_stays_with_its_own_token():
    x = randn(2, G, 8)
    x[1, 0, 3] = float("nan")
    pages = Fp8Pages.zeros((N, B, G, 8))
    pages.write(x, torch.arange(2))
    read = pages.read(torch.tensor([0]))[0]
    assert read[0].isfinite().all() and read[1, 0].isnan().any() and read[1, 1].isfinite().all()


def test_another_shape_is_refused():
    with pytest.raises(StateError, match="FP8 KV cache"):
        Fp8Pages.zeros((N, B, G, 8)).write(randn(2, G, 16), torch.arange(2))
