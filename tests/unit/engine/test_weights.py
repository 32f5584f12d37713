"""Weight updates in the middle of sequences: two phases, stamps per token, and what happens to KV."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from slipstream.engine.weights import fingerprint_folder
from slipstream.errors import EngineError
from slipstream.types import PolicyVersion
from tests.unit.engine.helpers import Reference, ask, make_engine, prompt, run


@pytest.fixture
def second(other_folder, tmp_path) -> PolicyVersion:
    """Version 1: other weights of the same architecture."""
    return publish(other_folder, tmp_path / "v000001", 1)


def publish(folder: Path, to: Path, number: int) -> PolicyVersion:
    to.mkdir()
    shutil.copy(folder / "model.safetensors", to)
    return PolicyVersion(number, fingerprint_folder(to), number - 1, str(to))


def start(engine, requests, steps):
    for request in requests:
        engine.add(request)
    for _ in range(steps):
        assert engine.step().finished == []


def swap(engine, version):
    engine.prepare(version)
    engine.commit(version.number)


def test_keep_goes_on_with_old_kv_and_stamps_each_token_with_its_version(moe_folder, second):
    engine = make_engine(moe_folder)
    plain = run(make_engine(moe_folder), [ask("a", prompt(1, 9))])["a"]
    start(engine, [ask("a", prompt(1, 9))], steps=5)
    swap(engine, second)
    done = run(engine, [])["a"]
    assert done.versions == ((0, 5), (1, 7)) and done.kv_age == 1
    assert done.tokens_N[:5].tolist() == plain.tokens_N[:5].tolist()
    assert done.tokens_N.tolist() != plain.tokens_N.tolist()
    assert engine.state().live_version == 1 and engine.state().fingerprint == second.fingerprint


def test_recompute_continues_as_if_the_prefix_had_always_been_processed_by_the_new_weights(moe_folder, other_folder, second):
    engine = make_engine(moe_folder, on_update="recompute")
    start(engine, [ask("a", prompt(1, 9)), ask("b", prompt(2, 30))], steps=5)
    swap(engine, second)
    done = run(engine, [])
    reference = Reference(other_folder)
    for name, prompt_T in (("a", prompt(1, 9)), ("b", prompt(2, 30))):
        assert done[name].versions == ((0, 5), (1, 7)) and done[name].kv_age == 0
        tokens_T = np.concatenate([prompt_T, done[name].tokens_N])
        logprobs_TV, ids_TLK = reference.score(tokens_T)
        begin = len(prompt_T) + 5
        assert done[name].tokens_N[5:].tolist() == logprobs_TV[begin - 1 : -1].argmax(-1).tolist()
        np.testing.assert_allclose(done[name].logprobs_N[5:], logprobs_TV[begin - 1 : -1].max(-1), atol=1e-5)
        np.testing.assert_array_equal(np.sort(done[name].routing.ids_TLK), np.sort(ids_TLK[:-1]))


def test_after_recompute_no_later_turn_finds_old_kv(moe_folder, second):
    engine = make_engine(moe_folder, on_update="recompute")
    run(engine, [ask("r/0", prompt(1, 20))])
    swap(engine, second)
    assert run(engine, [ask("r/1", prompt(1, 20))])["r/1"].cached_tokens == 0


def test_abort_ends_what_has_begun_and_leaves_what_waits(moe_folder, second):
    engine = make_engine(moe_folder, on_update="abort", max_running=2)
    start(engine, [ask(f"r{i}", prompt(i, 9)) for i in range(3)], steps=4)
    swap(engine, second)
    done = run(engine, [])
    assert [done[f"r{i}"].finish_reason for i in range(3)] == ["abort", "abort", "length"]
    assert done["r0"].versions == ((0, 4),) and done["r2"].versions == ((1, 12),)


def test_keep_lets_a_running_rollout_reuse_its_kv_but_not_a_new_one(moe_folder, other_folder, second):
    engine = make_engine(moe_folder)
    run(engine, [ask("old/0", prompt(1, 20), salt=0)])
    swap(engine, second)
    old = run(engine, [ask("old/1", prompt(1, 20), salt=0)])["old/1"]
    new = run(engine, [ask("new/0", prompt(1, 20), salt=1)])["new/0"]
    assert (old.cached_tokens, old.kv_age) == (16, 1) and (new.cached_tokens, new.kv_age) == (0, 0)
    Reference(other_folder).check_greedy(prompt(1, 20), new)


def test_prepare_changes_nothing_until_commit_and_both_are_idempotent(moe_folder, second):
    engine = make_engine(moe_folder)
    plain = run(make_engine(moe_folder), [ask("a", prompt(1, 9))])["a"]
    engine.prepare(second)
    engine.prepare(second)
    assert (engine.state().live_version, engine.state().prepared_version) == (0, 1)
    assert run(engine, [ask("a", prompt(1, 9))])["a"].tokens_N.tolist() == plain.tokens_N.tolist()
    engine.commit(1)
    engine.commit(1)
    engine.prepare(second)
    assert (engine.state().live_version, engine.state().prepared_version) == (1, None)


def test_preparing_the_next_version_leaves_the_live_one_as_it_is(moe_folder, other_folder, second, tmp_path):
    engine = make_engine(moe_folder)
    swap(engine, second)
    for number in (2, 3):
        engine.prepare(publish(moe_folder, tmp_path / f"v{number}", number))
        done = run(engine, [ask(f"r{number}", prompt(1, 9), salt=number)])[f"r{number}"]
        Reference(other_folder).check_greedy(prompt(1, 9), done)
    with pytest.raises(EngineError, match="prepared is 3, live is 1"):
        engine.commit(2)


def test_versions_alternate_without_mixing_weights(moe_folder, other_folder, tmp_path):
    engine = make_engine(moe_folder)
    references = [Reference(moe_folder), Reference(other_folder)]
    for number in range(1, 5):
        folder = (moe_folder, other_folder)[number % 2]
        swap(engine, publish(folder, tmp_path / f"v{number}", number))
        done = run(engine, [ask("a", prompt(number, 9), salt=number)])["a"]
        references[number % 2].check_greedy(prompt(number, 9), done)
        assert done.versions == ((number, len(done.tokens_N)),)


def test_weights_with_another_fingerprint_are_refused_and_the_live_ones_stay(moe_folder, second):
    engine = make_engine(moe_folder)
    wrong = PolicyVersion(1, "0" * 32, 0, second.path)
    with pytest.raises(EngineError, match=r"policy version 1 cannot be prepared.*fingerprint"):
        engine.prepare(wrong)
    with pytest.raises(EngineError, match="prepared is none, live is 0"):
        engine.commit(1)
    Reference(moe_folder).check_greedy(prompt(1, 9), run(engine, [ask("a", prompt(1, 9))])["a"])


@pytest.mark.parametrize("damage", ["truncated", "missing", "another architecture"])
def test_damaged_weights_are_refused_and_the_next_good_version_loads(moe_folder, dense_folder, second, tmp_path, damage):
    engine = make_engine(moe_folder)
    folder = tmp_path / "bad"
    bad = publish(dense_folder if damage == "another architecture" else moe_folder, folder, 1)
    file = folder / "model.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-10])
    elif damage == "missing":
        file.unlink()
    with pytest.raises(EngineError, match="policy version 1 cannot be prepared"):
        engine.prepare(bad)
    swap(engine, second)
    assert engine.state().live_version == 1


def test_committing_the_first_version_makes_an_engine_live_that_had_none(moe_folder, second):
    engine = make_engine(moe_folder, version=-1)
    assert engine.state().live_version == -1
    swap(engine, second)
    assert run(engine, [ask("a", prompt(1, 9))])["a"].versions == ((1, 12),)


def test_preempted_sequences_keep_their_stamps_across_an_update(moe_folder, second):
    engine = make_engine(moe_folder)
    requests = [ask(f"r{i}", prompt(i, 30), max_tokens=60, temperature=1.0, seed=i) for i in range(40)]

    def update(step):
        if step == 12:
            swap(engine, second)

    done = run(engine, requests, update)
    assert engine.preemptions > 0 and engine.state().kv_used_frac == 0
    for completion in done.values():
        assert sum(n for _, n in completion.versions) == len(completion.tokens_N) == len(completion.logprobs_N)
        assert [v for v, _ in completion.versions] in ([0], [1], [0, 1])
    assert any(len(completion.versions) == 2 for completion in done.values())
