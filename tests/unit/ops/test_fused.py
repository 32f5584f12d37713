"""The head of the fused decoder; the rest of it is held to the model's own forward pass by the engine's tests."""

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


def test_logits_of_a_row_are_bitwise_the_same_whatever_else_is_in_the_batch():
    decoder, hidden = fused_decoder(torch.randn(520, DIM)), torch.randn(130, DIM)
    whole = decoder.logits(hidden)
    for rows in (slice(0, 1), slice(3, 5), slice(10, 17), slice(64, 130)):
        assert torch.equal(decoder.logits(hidden[rows]), whole[rows])


def fused_decoder(head: torch.Tensor) -> FusedDecoder:
    """One dense layer of zeros under this head."""
    layer = FusedLayer(
        attention_norm=torch.zeros(DIM),
        qkv=torch.zeros(DIM, 24),
        out=torch.zeros(8, DIM),
        ffn_norm=torch.zeros(DIM),
        gate_up=torch.zeros(DIM, 16),
        down=torch.zeros(8, DIM),
        keys=torch.zeros(2, 4, 1, 8),
        values=torch.zeros(2, 4, 1, 8),
    )
    sizes = FusedSizes(heads=1, kv_heads=1, head_dim=8, num_experts=0, top_k=0, norm_top_k=False, eps=1e-6)
    tables = torch.zeros(16, 8), torch.zeros(16, 8)
    return FusedDecoder(sizes, [layer], head, head, torch.ones(DIM), *tables, np.zeros((8, 0, 0), np.uint8), np.zeros((0, 0), np.int64))
