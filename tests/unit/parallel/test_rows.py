"""Who works on which rows and tokens."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.config import validate
from slipstream.config.parallel import ParallelConfig
from slipstream.parallel.mesh import Mesh
from slipstream.parallel.rows import cut, own_rows, spans, take
from slipstream.types import MicroBatch
from tests.unit.trainer.helpers import make_batch


def meshes(processes: int, **sizes: int) -> list[Mesh]:
    config = validate(ParallelConfig, {"processes": processes, **sizes})
    return [Mesh(config, rank) for rank in range(processes)]


def documents(rows: list[MicroBatch]) -> list[bytes]:
    """The tokens of every document, sorted."""
    return sorted(row.tokens_T[a:b].tobytes() for row in rows for a, b in zip(row.doc_starts_D, row.doc_starts_D[1:], strict=False))


@pytest.mark.parametrize("processes", [2, 3, 4, 7])
@pytest.mark.parametrize("row_tokens", [25, 64, 4096])
def test_every_document_is_worked_on_once_and_everybody_runs_equally_many_rows(processes, row_tokens):
    batch = make_batch(row_tokens=row_tokens)
    shares = [own_rows(batch.micro_batches, mesh) for mesh in meshes(processes)]
    assert len({len(share) for share in shares}) == 1
    assert documents([row for share in shares for row in share]) == documents(list(batch.micro_batches))
    if processes <= 12:  # there are 12 documents
        assert all(row.num_tokens for share in shares for row in share[:1])


def test_one_row_of_many_documents_is_shared_about_evenly():
    (row,) = make_batch(row_tokens=4096).micro_batches
    sizes = [share[0].num_tokens for share in (own_rows([row], mesh) for mesh in meshes(2))]
    assert sum(sizes) == row.num_tokens and max(sizes) < 0.6 * row.num_tokens


def test_one_row_of_one_document_leaves_the_others_with_an_empty_one():
    row = cut(make_batch().micro_batches[0], 0, 4)
    assert len(row.doc_starts_D) == 2
    shares = [own_rows([row], mesh)[0].num_tokens for mesh in meshes(3)]
    assert shares == [4, 0, 0]


@pytest.mark.parametrize("row_tokens", [25, 64, 4096])
@pytest.mark.parametrize("sizes", [{"pp": 3}, {"pp": 3, "cp": 2}, {"pp": 3, "pp_schedule": "interleaved_1f1b", "pp_stages": 2}])
def test_a_pipeline_runs_the_same_rows_in_each_stage_and_has_enough_of_them(sizes, row_tokens):
    batch = make_batch(row_tokens=row_tokens)
    shares = [own_rows(batch.micro_batches, mesh) for mesh in meshes(12, **sizes)]
    per_stage = len(shares) // 3
    for stage in (1, 2):
        for first, later in zip(shares, shares[stage * per_stage :], strict=False):
            assert [row.tokens_T.tobytes() for row in first] == [row.tokens_T.tobytes() for row in later]
    for stage in range(3):
        first_of_cp = shares[stage * per_stage : (stage + 1) * per_stage : sizes.get("cp", 1)]
        assert documents([row for share in first_of_cp for row in share]) == documents(list(batch.micro_batches))
    rows = {len(share) for share in shares}
    assert len(rows) == 1 and min(rows) >= 3 and (sizes.get("pp_stages") is None or min(rows) % 3 == 0)


def test_processes_that_share_a_row_get_the_same_rows():
    shares = [own_rows(make_batch().micro_batches, mesh) for mesh in meshes(4, cp=2)]
    for a, b in ((0, 1), (2, 3)):
        assert documents(shares[a]) == documents(shares[b])
    assert documents(shares[0]) != documents(shares[2])


@pytest.mark.parametrize("method", ["all_gather", "ulysses"])
@pytest.mark.parametrize(("tokens", "cp"), [(0, 2), (1, 4), (5, 4), (61, 3), (61, 4), (64, 4)])
def test_every_token_and_every_label_belongs_to_one_process(tokens, cp, method):
    parts = spans(np.array([0, tokens // 3, tokens]), validate(ParallelConfig, {"processes": cp, "cp": cp, "cp_method": method}))
    assert sorted(np.concatenate([part.tokens_t for part in parts]).tolist()) == list(range(tokens))
    assert max(part.num_tokens for part in parts) <= tokens / cp + 2
    at_N = np.arange(1, tokens)
    assert (np.sum([part.own(at_N) for part in parts], 0) == 1).all()
    for part in parts:  # the token before, which predicts it, is there
        at_n = at_N[part.own(at_N)]
        assert part.tokens_t[part.before(at_n)].tolist() == (at_n - 1).tolist()


def test_a_process_takes_an_early_and_a_late_chunk_unless_heads_are_shared():
    def chunks(**values):
        return [part.chunks for part in spans(np.array([0, 12]), validate(ParallelConfig, {"processes": 3, "cp": 3, **values}))]

    assert chunks() == chunks(cp_method="ring") == [((0, 2), (10, 12)), ((2, 4), (8, 10)), ((4, 8),)]
    assert chunks(cp_method="ulysses") == [((0, 4),), ((4, 8),), ((8, 12),)]


def test_a_chunk_that_sees_much_goes_with_one_that_sees_little_wherever_documents_begin():
    parts = spans(np.array([0, 8, 10, 12, 14, 16]), validate(ParallelConfig, {"processes": 4, "cp": 4}))
    assert [part.chunks for part in parts] == [((0, 2), (6, 8)), ((4, 6), (8, 10)), ((2, 4), (10, 12)), ((12, 16),)]


def test_chunks_are_taken_with_everything_that_belongs_to_their_tokens():
    (row,) = make_batch(row_tokens=4096).micro_batches
    for span in spans(row.doc_starts_D, validate(ParallelConfig, {"processes": 3, "cp": 3})):
        part = take(row, span)
        for field in ("tokens_T", "positions_T", "loss_mask_T", "logprobs_T", "sample_T", "routing_TLK", "routing_valid_T"):
            np.testing.assert_array_equal(getattr(part, field), getattr(row, field)[span.tokens_t])
        inside = [np.searchsorted(span.tokens_t, start) for start in row.doc_starts_D if start in span.tokens_t]
        first = np.cumsum([0, *(end - first for first, end in span.chunks)])
        assert part.doc_starts_D.tolist() == sorted({*inside, *first.tolist()})


def test_a_cut_document_keeps_its_positions_and_counts_as_a_document():
    row = make_batch().micro_batches[0]
    first, end = int(row.doc_starts_D[1]) + 2, int(row.doc_starts_D[3])
    part = cut(row, first, end)
    assert part.doc_starts_D.tolist() == [0, int(row.doc_starts_D[2]) - first, end - first]
    assert part.positions_T[0] == 2 and part.positions_T[part.doc_starts_D[1]] == 0
    assert part.routing_TLK is not None and row.routing_TLK is not None
    np.testing.assert_array_equal(part.routing_TLK, row.routing_TLK[first:end])
