"""The head of the fused decoder; the rest of it is held to the model's own forward pass by the engine's tests."""

from functools import partial

import numpy as np
import pytest
import torch

from slipstream.ops.fused import FusedDecoder, FusedLayer, FusedSizes

DIM = 40


@pytest.mark.parametrize("vocab", [8, 256, 264, 1000, 501])
@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_logits_equal_the_product_with_the_head(vocab, rows):
    head, hidden = torch.randn(vocab, DIM), torch.randn(rows, DIM)
    torch.testing.assert_close(fused_decoder(head).logits(hidden), hidden @ head.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_row_are_bitwise_the_same_whatever_else_is_in_the_batch(dtype):
    decoder, hidden = fused_decoder(torch.randn(520, DIM).to(dtype), True), torch.randn(130, DIM).to(dtype).float()
    whole = decoder.logits(hidden)
    for rows in (slice(0, 1), slice(3, 5), slice(10, 17), slice(64, 130)):
        assert torch.equal(decoder.logits(hidden[rows]), whole[rows])


@pytest.mark.parametrize("vocab", [8, 264, 1000, 501])
@pytest.mark.parametrize("rows", [1, 5, 19, 260])
def test_a_bfloat16_head_gives_the_exact_product_or_rounds_it_once(vocab, rows):
    head, hidden = torch.randn(vocab, DIM).bfloat16(), torch.randn(rows, DIM).bfloat16().float()
    exact = hidden @ head.float().T
    wide, rounded = (fused_decoder(head, wide_head).logits(hidden) for wide_head in (True, False))
    torch.testing.assert_close(wide, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rounded, exact, rtol=2**-8, atol=1e-5)
    assert rounded.dtype is torch.float32 and torch.equal(rounded, rounded.bfloat16().float())
    assert torch.equal(rounded, wide.bfloat16().float()) or vocab % 8


def fused_decoder(head: torch.Tensor, wide_head: bool = False) -> FusedDecoder:
    """One dense layer of zeros under this head."""
    zeros = partial(torch.zeros, dtype=head.dtype)
    layer = FusedLayer(
        attention_norm=zeros(DIM),
        qkv=zeros(DIM, 24),
        out=zeros(8, DIM),
        ffn_norm=zeros(DIM),
        gate_up=zeros(DIM, 16),
        down=zeros(8, DIM),
        keys=zeros(2, 4, 1, 8),
        values=zeros(2, 4, 1, 8),
    )
    sizes = FusedSizes(heads=1, kv_heads=1, head_dim=8, num_experts=0, top_k=0, norm_top_k=False, eps=1e-6)
    tables, nothing = (torch.zeros(16, 8), torch.zeros(16, 8)), (np.zeros((8, 0, 0), np.uint8), np.zeros((0, 0), np.int64))
    return FusedDecoder(sizes, [layer], head, head, zeros(DIM) + 1, *tables, *nothing, wide_head)
