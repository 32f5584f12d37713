import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import StateError
from slipstream.orchestrator.pack import make_batch, pack
from slipstream.transport.buffers import KEPT, room
from slipstream.transport.codec import decode_batch, encode_batch
from slipstream.types import MicroBatch, Sample
from tests.unit.orchestrator.made_turns import sample


def documents(row: MicroBatch) -> dict[int, slice]:
    """Sample index -> its place in the row."""
    bounds = row.doc_starts_D.tolist()
    return {int(row.sample_T[start]): slice(start, stop) for start, stop in itertools.pairwise(bounds)}


def assert_holds(row: MicroBatch, index: int, place: slice, each: Sample) -> None:
    assert np.array_equal(row.tokens_T[place], each.tokens_T)
    assert np.array_equal(row.positions_T[place], np.arange(each.num_tokens))
    assert np.array_equal(row.loss_mask_T[place], each.loss_mask_T)
    assert np.array_equal(row.logprobs_T[place], each.logprobs_T)
    assert np.array_equal(row.versions_T[place], each.versions_T)
    assert set(row.advantages_T[place].tolist()) == {np.float32(each.advantage)}
    assert set(row.temperature_T[place].tolist()) == {np.float32(each.temperature)}
    assert set(row.sample_T[place].tolist()) == {index}
    if not each.routing:
        assert row.routing_valid_T is None or not row.routing_valid_T[place].any()
    else:
        assert row.routing_TLK is not None
        assert row.routing_valid_T is not None
        (part,) = each.routing
        assert np.array_equal(row.routing_valid_T[place], part.valid_T)
        assert np.array_equal(row.routing_TLK[place][part.valid_T], part.ids_TLK[part.valid_T])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=30))
def test_every_sample_lies_unchanged_in_exactly_one_row(shapes):
    samples = [sample(length, seed, routed, advantage=float(seed) - 2) for seed, (length, routed) in enumerate(shapes)]
    rows = pack(samples, 64)
    seen = []
    for row in rows:
        assert row.num_tokens <= 64
        assert row.doc_starts_D[0] == 0
        assert row.doc_starts_D[-1] == row.num_tokens
        for index, place in documents(row).items():
            assert_holds(row, index, place, samples[index])
            seen.append(index)
    assert sorted(seen) == list(range(len(samples)))


def test_memory_that_is_used_again_brings_nothing_into_a_row():
    samples = [sample(30, 0, routed=True), sample(20, 1, routed=False)]
    (clean,) = pack(samples, 64)
    assert clean.routing_TLK is not None
    wanted, size = clean.routing_TLK.copy(), clean.routing_TLK.nbytes
    del clean
    dirty = [room(size) for _ in range(KEPT)]
    for memory in dirty:
        memory[:] = b"\xff" * size
    del memory
    dirty.clear()
    (row,) = pack(samples, 64)
    assert np.array_equal(row.routing_TLK, wanted)
    assert not wanted[documents(row)[1]].any()


def test_rows_are_balanced_by_tokens():
    rng = np.random.default_rng(0)
    rows = pack([sample(int(n), i) for i, n in enumerate(rng.integers(5, 60, 200))], 512)
    loads = [row.num_tokens for row in rows]
    assert max(loads) - min(loads) < 20


def test_rows_without_routing_have_none():
    (row,) = pack([sample(4), sample(5)], 16)
    assert row.routing_TLK is None
    assert row.routing_valid_T is None


def test_a_sample_longer_than_a_row_is_refused_with_both_lengths():
    with pytest.raises(StateError, match=r"rollout r3 has 65 tokens and a row holds 64"):
        pack([sample(5), sample(65, seed=3)], 64)


def test_a_batch_counts_loss_tokens_and_survives_the_wire():
    samples = [sample(10, seed, routed=seed % 2 == 0, advantage=seed - 1.0, loss=seed + 1) for seed in range(5)]
    batch = make_batch(7, samples, 24, {"cursor": 3})
    assert batch.loss_tokens == 15 == sum(int(row.loss_mask_T.sum()) for row in batch.micro_batches)
    assert batch.num_tokens == 50
    assert batch.version == 6
    assert batch.rollout_ids == ("r0", "r1", "r2", "r3", "r4")
    assert batch.advantages_S.tolist() == [-1, 0, 1, 2, 3]
    assert batch.rewards_S.tolist() == [-0.5, 0.5, 1.5, 2.5, 3.5]
    back = decode_batch(b"".join(encode_batch(batch)))
    assert back.orchestrator_state == {"cursor": 3}
    for row, copy in zip(batch.micro_batches, back.micro_batches, strict=True):
        for name in MicroBatch.__dataclass_fields__:
            assert np.array_equal(getattr(row, name), getattr(copy, name))


def test_a_batch_with_nothing_to_train_is_refused():
    for samples in ([], [sample(4, loss=0)]):
        with pytest.raises(StateError, match=r"batch 2: .* without a single token"):
            make_batch(2, samples, 64, {})
