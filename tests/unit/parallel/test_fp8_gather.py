"""Codes that shards send: those of the whole weight, once a step, in half the bytes; and refused where an edge cuts a block."""

from __future__ import annotations

import pytest
import torch

from slipstream.config import validate
from slipstream.config.train import TrainerConfig
from slipstream.errors import ConfigError
from slipstream.ops.fp8 import WEIGHT, quantise
from slipstream.ops.fp8_weight import Fp8Errors
from slipstream.parallel.fp8_gather import GatheredCodes, check_edges
from tests.unit.ops.test_fp8 import randn


@pytest.mark.parametrize(("shape", "columns", "shards"), [((512, 300), (130, 170), 2), ((4, 72, 140), (140,), 4), ((256, 40), (40,), 1)])
def test_what_shards_send_are_the_codes_of_the_whole_in_half_the_bytes(shape, columns, shards):
    whole = torch.stack([randn(*shape[1:], seed=e, spread=2.0) for e in range(shape[0])]) if len(shape) == 3 else randn(*shape, spread=2.0)
    errors = Fp8Errors()
    senders = [GatheredCodes(shard, columns, False, errors) for shard in whole.chunk(shards)]
    sent = [sender.before(None, whole.shape, None, None, None)[0] for sender in senders]
    gathered = tuple(torch.cat(tensors) for tensors in zip(*sent, strict=True))
    parameter, _ = senders[0].after(gathered, whole.shape, torch.bfloat16)
    assert parameter.shape == whole.shape and len(senders[0].parts) == len(columns)
    for part, matrix in zip(senders[0].parts, whole.bfloat16().split(columns, -1), strict=True):
        expected = quantise(matrix, WEIGHT)
        assert torch.equal(part.codes.view(torch.uint8), expected.codes.view(torch.uint8)) and torch.equal(part.scales, expected.scales)
    assert sum(x.nbytes for x in gathered) < 0.51 * parameter.nbytes


def test_a_shard_is_quantised_anew_when_its_values_have_changed_and_only_then():
    shard = randn(128, 40)
    sender = GatheredCodes(shard, (40,), False, Fp8Errors())
    first = sender.before(None, shard.shape, None, None, None)[0]
    shard.mul_(3)
    assert sender.before(None, shard.shape, None, None, None)[0] is first
    sender.stale()
    torch.testing.assert_close(sender.before(None, shard.shape, None, None, None)[0][1], 3 * first[1], rtol=1e-2, atol=0)


def test_shards_that_cut_a_block_are_refused_with_the_reason():
    check_edges("w", torch.Size([512, 7]), 2)
    check_edges("w", torch.Size([6, 7, 7]), 3)
    with pytest.raises(ConfigError, match=r"fp8_all_gather = true: w \(384, 7\) is sharded over 2 processes, and 3 blocks of 128"):
        check_edges("w", torch.Size([384, 7]), 2)
    with pytest.raises(ConfigError, match=r"w \(6, 7, 7\) is sharded over 4 processes, and 6 experts"):
        check_edges("w", torch.Size([6, 7, 7]), 4)


def test_there_are_no_codes_to_send_in_other_dtypes():
    with pytest.raises(ConfigError, match=r"fp8_all_gather = true with trainer\.dtype = 'bfloat16'"):
        validate(TrainerConfig, {"dtype": "bfloat16", "parallel": {"processes": 2, "fp8_all_gather": True}})
