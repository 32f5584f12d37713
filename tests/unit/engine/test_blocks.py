"""Blocks as bytes: what is read is what is written, in one piece and layer by layer, and nothing foreign or damaged is opened."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.engine.blocks import HEADER_BYTES, Label, open_sealed, seal, version_of
from slipstream.errors import WireError
from slipstream.models.maker import make_model
from tests.unit.engine.helpers import ask, make_engine, prompt, run

LABEL = Label(b"k" * 16, b"s" * 16, b"w" * 16)


@pytest.fixture(scope="module")
def sparse_folder(tmp_path_factory):
    """A model whose layers keep index keys beside keys and values."""
    folder = tmp_path_factory.mktemp("sparse") / "model"
    make_model(folder, "tiny-deepseek-v32", ["a corpus of a few words"] * 4)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["moe", "dense", "sparse"])
def test_a_block_moves_with_all_that_belongs_to_it(moe_folder, dense_folder, sparse_folder, model, dtype):
    folder = {"moe": moe_folder, "dense": dense_folder, "sparse": sparse_folder}[model]
    engine = make_engine(folder, dtype=dtype, version=3, kv_memory_mib=2)
    run(engine, [ask("a", prompt(1, 20))])
    cache, blocks = engine._cache, engine.blocks
    source, target = 0, cache.num_blocks - 1
    assert np.any(blocks.read(source)) and version_of(blocks.read(source)) == 3
    blocks.write(target, blocks.read(source))
    for layer in range(blocks.num_layers):
        for part in cache.parts(layer):
            assert part[source].equal(part[target]) and part[source].any()
    size = cache.block_tokens
    assert np.array_equal(cache.routing[:size], cache.routing[target * size :]) and cache.versions_N[target] == 3


def test_layers_and_tails_are_cut_from_the_same_bytes(moe_folder):
    engine = make_engine(moe_folder, version=2)
    run(engine, [ask("a", prompt(1, 20))])
    blocks, chosen = engine.blocks, [2, 0, 4]
    layers = [blocks.read_layer(layer, chosen) for layer in range(blocks.num_layers)]
    whole = np.concatenate([*layers, blocks.read_tails(chosen)], axis=1)
    assert np.array_equal(whole, np.stack([blocks.read(block) for block in chosen]))


def test_blocks_of_another_shape_or_arithmetic_have_another_fingerprint(moe_folder, dense_folder, sparse_folder):
    engines = [
        make_engine(moe_folder),
        make_engine(moe_folder, dtype="bfloat16"),
        make_engine(moe_folder, dtype="float8"),
        make_engine(moe_folder, block_tokens=8),
        make_engine(moe_folder, capture_routing=False),
        make_engine(dense_folder),
        make_engine(sparse_folder, kv_memory_mib=2),
    ]
    assert len({engine.blocks.shape for engine in engines}) == len(engines)
    assert make_engine(moe_folder).blocks.shape == engines[0].blocks.shape


def test_a_payload_of_another_size_is_not_written(moe_folder):
    blocks = make_engine(moe_folder).blocks
    with pytest.raises(WireError, match=f"of 7 bytes; this engine's have {blocks.block_bytes}"):
        blocks.write(0, b"1234567")


def test_a_sealed_block_says_whose_it_is():
    payload = np.arange(200, dtype=np.uint8)
    header = seal(LABEL, payload)
    assert len(header) == HEADER_BYTES and open_sealed(header, payload.tobytes()) == LABEL


def test_no_byte_of_a_sealed_block_can_change_unnoticed():
    payload = bytes(range(40))
    header = seal(LABEL, payload)
    for i in range(len(header) + len(payload)):
        raw = bytearray(header + payload)
        raw[i] ^= 0x10
        with pytest.raises(WireError):
            open_sealed(raw[:HEADER_BYTES], raw[HEADER_BYTES:])
    for cut in (0, 5, HEADER_BYTES - 1):
        with pytest.raises(WireError):
            open_sealed(header[:cut], payload)
    with pytest.raises(WireError, match="39 bytes whose header says 40"):
        open_sealed(header, payload[:-1])
