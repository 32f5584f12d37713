"""The native kernels compute what the torch references compute, independent of the batch, and refuse bad input."""

import shutil
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slipstream.errors import StateError
from slipstream.ops import experts, native, paged_attention, rms_norm, rope, write_kv
from slipstream.ops.attention import paged_attention_reference, write_kv_reference
from slipstream.ops.experts import experts_reference
from slipstream.ops.norm import rms_norm_reference
from slipstream.ops.rope import rope_reference
from tests.unit.ops.helpers import expert_inputs, paged_inputs


def test_the_kernels_compile_here():
    assert native.library() is not None


def test_without_a_home_that_can_be_written_they_lie_in_a_private_temporary_folder(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("not a folder")
    for name in ("SLIPSTREAM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = native._compiled(native._cache_folder())
    assert path.exists() and path.parent.parent == tmp_path and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.parent.chmod(0o777)  # as if somebody else could have put something there
    with pytest.raises(OSError, match="SLIPSTREAM_CACHE"):
        native._cache_folder()


@pytest.mark.parametrize("shape", [(1, 8), (5, 96), (33, 128), (7, 4, 32), (3, 2, 24), (0, 64)])
def test_rms_norm_equals_its_reference(shape):
    x, weight = torch.randn(shape), torch.rand(shape[-1]) + 0.5
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rotary", [32, 16, 2])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (1, 1)])
def test_rope_equals_its_reference_also_when_only_a_part_is_rotated(heads, rotary):
    q, k, cos, sin = torch.randn(9, heads[0], 32), torch.randn(9, heads[1], 32), torch.randn(9, rotary), torch.randn(9, rotary)
    for ours, theirs in zip(rope(q, k, cos, sin), rope_reference(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_slices_of_a_fused_projection_need_no_copy():
    fused = torch.randn(6, 8 * 16)
    q, k, v = (x.unflatten(1, (-1, 16)) for x in fused.split([64, 32, 32], dim=1))
    cos, sin, weight = torch.randn(6, 16), torch.randn(6, 16), torch.rand(16)
    torch.testing.assert_close(rms_norm(q, weight, 1e-6), rms_norm_reference(q, weight, 1e-6), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rope(q, k, cos, sin), rope_reference(q, k, cos, sin), rtol=1e-5, atol=1e-6)
    cache = torch.zeros(2, 3, 4, 2, 16)
    write_kv(k, v, cache[0], cache[1], torch.tensor([0, 5, 2, 11, 7, 8]))
    torch.testing.assert_close(cache.flatten(1, 2)[:, [0, 5, 2, 11, 7, 8]], torch.stack([k, v]))


@pytest.mark.parametrize("heads", [(4, 2, 32), (4, 4, 24), (8, 1, 64), (2, 2, 8), (6, 2, 128)])
@pytest.mark.parametrize("block", [1, 5, 16, 64])
def test_paged_attention_equals_its_reference_in_a_mixed_batch(heads, block):
    queries, contexts = [1, 17, 1, 4, 0, 1], [1, 17, 63, 70, 5, 200]
    inputs = paged_inputs(queries, contexts, *heads, block)
    ours, theirs = paged_attention(*inputs, scale=0.3), paged_attention_reference(*inputs, scale=0.3)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_paged_attention_survives_scores_of_any_size():
    inputs = paged_inputs([1, 3], [90, 40], 2, 1, 16, 8)
    inputs[0] = inputs[0] * 1000
    torch.testing.assert_close(paged_attention(*inputs, scale=1.0), paged_attention_reference(*inputs, scale=1.0), rtol=1e-4, atol=1e-5)


def test_paged_attention_never_reads_behind_the_context():
    inputs = paged_inputs([2, 1, 1], [21, 9, 24], 4, 2, 16, 8)
    expected = paged_attention(*inputs, scale=0.2)
    k_cache, v_cache, table, contexts = inputs[1], inputs[2], inputs[3], inputs[5]
    for s, context in enumerate(contexts.tolist()):
        for place in range(context, table.shape[1] * 8):
            k_cache[table[s, place // 8], place % 8] = torch.nan
            v_cache[table[s, place // 8], place % 8] = torch.nan
    assert torch.equal(paged_attention(*inputs, scale=0.2), expected)
    torch.testing.assert_close(paged_attention_reference(*inputs, scale=0.2), expected, rtol=1e-5, atol=1e-6)


def test_a_token_gets_bitwise_the_same_attention_as_a_decode_row_and_in_a_prefill_chunk():
    inputs = paged_inputs([150], [150], 4, 2, 32, 16)
    whole = paged_attention(*inputs, scale=0.2)
    q, k_cache, v_cache, table = inputs[:4]
    for position in (0, 1, 7, 8, 63, 64, 149):
        starts, context = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([position + 1], dtype=torch.int32)
        alone = paged_attention(q[position : position + 1], k_cache, v_cache, table, starts, context, scale=0.2)
        assert torch.equal(alone[0], whole[position])


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 7, 40, 300])
@pytest.mark.parametrize("sizes", [(16, 2, 96, 64), (4, 1, 8, 8), (3, 3, 40, 72), (8, 4, 64, 128)])
def test_native_experts_equal_their_reference(tokens, sizes):
    inputs = expert_inputs(tokens, *sizes)
    torch.testing.assert_close(experts(*inputs), experts_reference(*inputs), rtol=1e-5, atol=5e-6)


def test_an_experts_row_is_bitwise_the_same_whatever_else_is_in_the_batch():
    inputs = expert_inputs(257, 4, 2, 64, 48)
    whole = experts(*inputs)
    for rows in (slice(0, 1), slice(3, 5), slice(10, 17), slice(100, 230)):
        part = experts(inputs[0][rows], inputs[1][rows], inputs[2][rows], *inputs[3:])
        assert torch.equal(part, whole[rows])


def test_all_tokens_on_one_expert_and_the_same_expert_twice_both_count():
    x, ids, gates, gate_up, down = expert_inputs(100, 4, 2, 32, 32)
    ids = torch.full_like(ids, 2)
    torch.testing.assert_close(experts(x, ids, gates, gate_up, down), experts_reference(x, ids, gates, gate_up, down), rtol=1e-5, atol=5e-6)


def test_write_kv_equals_its_reference_and_touches_nothing_else():
    k, v = torch.randn(2, 5, 2, 16)
    ours = torch.randn(2, 4, 8, 2, 16)
    theirs = ours.clone()
    slots = torch.tensor([31, 0, 8, 17, 16])
    write_kv(k, v, ours[0], ours[1], slots)
    write_kv_reference(k, v, theirs[0], theirs[1], slots)
    assert torch.equal(ours, theirs)


def test_memory_in_large_pages_keeps_its_content():
    x = torch.randn(3 << 20)  # 12 MiB: several pages, not aligned to them
    expected = x.clone()
    assert native.in_large_pages(x) is x
    assert torch.equal(x, expected)
    assert native.in_large_pages(torch.ones(3)).sum() == 3


def test_gradients_and_other_dtypes_take_the_reference():
    x = torch.randn(4, 32)
    weight = torch.rand(32, requires_grad=True)
    assert native.native_for(x, weight) is None
    assert native.native_for(x.bfloat16()) is None
    assert native.native_for(x, weight, training=True) is not None
    with torch.no_grad():
        assert native.native_for(x, weight) is not None
    rms_norm(x, weight, 1e-6).sum().backward()
    assert weight.grad is not None


def test_paged_attention_in_bf16_is_right_to_bf16_precision():
    inputs = paged_inputs([1, 6], [30, 20], 4, 2, 32, 8)
    exact = paged_attention(*inputs, scale=0.2)
    rough = paged_attention(*[x.bfloat16() if x.is_floating_point() else x for x in inputs], scale=0.2)
    assert rough.dtype is torch.bfloat16
    torch.testing.assert_close(rough.float(), exact, rtol=2e-2, atol=2e-2)


def test_features_that_do_not_fill_a_vector_take_the_reference():
    x, weight = torch.randn(4, 12), torch.rand(12)
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    inputs = expert_inputs(5, 4, 2, 12, 20)
    assert torch.equal(experts(*inputs), experts_reference(*inputs))


def test_bad_shapes_and_dtypes_are_named():
    with pytest.raises(StateError, match=r"weight has shape \(7,\)"):
        rms_norm(torch.randn(2, 8), torch.rand(7), 1e-6)
    with pytest.raises(StateError, match="r even and at most d"):
        rope(torch.randn(2, 1, 8), torch.randn(2, 1, 8), torch.randn(2, 10), torch.randn(2, 10))
    x, ids, gates, gate_up, down = expert_inputs(3, 4, 2, 16, 24)
    with pytest.raises(StateError, match=r"expected \[T, D\]"):
        experts(x, ids, gates, gate_up.mT.contiguous(), down)
    inputs = paged_inputs([1], [4], 2, 1, 8, 4)
    with pytest.raises(StateError, match="block_table must be contiguous int32"):
        paged_attention(*inputs[:3], inputs[3].long(), *inputs[4:], scale=1.0)
    with pytest.raises(StateError, match="q has 2 heads of 16"):
        paged_attention(torch.randn(1, 2, 16), *inputs[1:], scale=1.0)


def test_indices_outside_their_array_are_refused_before_anything_is_written():
    x, ids, gates, gate_up, down = expert_inputs(3, 4, 2, 16, 8)
    ids[1, 0] = 4
    with pytest.raises(StateError, match="outside its array"):
        experts(x, ids, gates, gate_up, down)
    cache = torch.zeros(2, 2, 4, 1, 8)
    with pytest.raises(StateError, match="outside its array"):
        write_kv(torch.ones(2, 1, 8), torch.ones(2, 1, 8), cache[0], cache[1], torch.tensor([0, 8]))
    assert not cache.any()
    inputs = paged_inputs([1], [4], 2, 1, 8, 4)
    for bad_table, bad_context in ((torch.tensor([[99]]), 4), (torch.tensor([[-1]]), 4), (inputs[3], 5), (inputs[3], 0)):
        with pytest.raises(StateError, match="outside its array"):
            paged_attention(*inputs[:3], bad_table.int(), inputs[4], torch.tensor([bad_context], dtype=torch.int32), scale=1.0)


def test_without_a_compiler_there_is_one_warning_and_the_reference_serves(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    native.library.cache_clear()
    x, weight = torch.randn(2, 8), torch.rand(8)
    with pytest.warns(RuntimeWarning, match="Install a C compiler") as caught:
        first = rms_norm(x, weight, 1e-6)
        rms_norm(x, weight, 1e-6)
    native.library.cache_clear()
    assert len(caught) == 1
    assert torch.equal(first, rms_norm_reference(x, weight, 1e-6))


def test_workers_that_start_together_share_one_whole_library_and_later_ones_do_not_compile(tmp_path, monkeypatch):
    compiler, cache, calls = tmp_path / "cc", tmp_path / "cache", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho run >> {calls}\nwhile [ "$1" != -o ]; do shift; done\nprintf half > "$2"; printf whole > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(native._compiled, [cache] * 4))
    assert [path.read_text() for path in paths] == ["whole"]
    assert list(cache.iterdir()) == list(paths), "no scratch files may stay behind"
    before = calls.read_text()
    assert {native._compiled(cache)} == paths
    assert calls.read_text() == before


def test_a_changed_kernel_gets_its_own_library(tmp_path, monkeypatch):
    kernels = tmp_path / "kernels"
    shutil.copytree(native.KERNELS, kernels)
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(native, "KERNELS", kernels)
    before = native._compiled(tmp_path / "cache")
    (kernels / "shared.h").write_text("/* changed */")
    assert native._compiled(tmp_path / "cache") != before
