"""Guessing ahead changes how many steps it takes, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.config.speculation import PromptLookup
from slipstream.engine import runner
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.sequence import SlotTable
from slipstream.engine.speculation import Drafter, verify
from slipstream.engine.stops import Stops
from slipstream.errors import ConfigError, EngineError
from slipstream.models import hf
from tests.parity.test_engine_parity import FAMILIES
from tests.unit.engine.helpers import ask, make_engine, prompt, run, write_model
from tests.unit.engine.test_weights import publish

SPECULATE = {"speculation": {"type": "prompt_lookup"}}
EAGER = {"speculation": {"type": "prompt_lookup", "overhead_tokens": 1e9}}
"""Guesses wherever something matches: most of them wrong."""
SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.2},
    {"temperature": 0.5, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 0.6, "min_p": 0.2},
]


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory):
    """A model whose next token depends on the last one more than on the others, so that what it writes repeats itself."""
    folder = write_model(tmp_path_factory.mktemp("speculation") / "moe", moe=True)
    tensors = hf.read_tensors(folder)
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor *= 0.3
    hf.write_tensors(folder, tensors)
    return folder


def repeating(seed: int, length: int = 30) -> np.ndarray:
    """A prompt of a few phrases that come again and again."""
    rng = np.random.default_rng(seed)
    phrases = [prompt(1000 * seed + i, 5) for i in range(3)]
    return np.concatenate([phrases[i] for i in rng.integers(0, 3, 1 + length // 5)])[:length]


def requests(count: int = 20, max_tokens: int = 60, **options):
    """Ordinary requests, every way of sampling in turn."""
    return [
        ask(f"r{i}", repeating(i, 10 + i), **{"max_tokens": max_tokens, "seed": i, **SAMPLINGS[i % len(SAMPLINGS)], **options})
        for i in range(count)
    ]


def check_identical(done, expected) -> None:
    """Bit for bit."""
    assert done.keys() == expected.keys()
    for name, a in done.items():
        b = expected[name]
        np.testing.assert_array_equal(a.tokens_N, b.tokens_N)
        np.testing.assert_array_equal(a.logprobs_N, b.logprobs_N)
        assert (a.finish_reason, a.versions, a.kv_age) == (b.finish_reason, b.versions, b.kv_age)
        if a.routing is not None:
            np.testing.assert_array_equal(a.routing.ids_TLK, b.routing.ids_TLK)
            np.testing.assert_array_equal(a.routing.valid_T, b.routing.valid_T)


def check_speculation(folder, asked, config=None, plain=None, speculation=None) -> EmbeddedEngine:
    """The same requests with and without: identical, and the guesses did happen. Returns the engine that guessed."""
    config = {"kv_memory_mib": 4, **(config or {})}
    ordinary = plain or make_engine(folder, **config)
    guessing = make_engine(folder, **config, **(speculation or SPECULATE))
    expected, done = run(ordinary, asked), run(guessing, asked)
    check_identical(done, expected)
    np.testing.assert_array_equal(guessing.expert_load, ordinary.expert_load)
    assert guessing.tokens_generated == ordinary.tokens_generated and guessing.state().kv_used_frac == 0
    counts = guessing.speculation
    assert 0 < counts.accepted < counts.drafted
    assert counts.decodes + counts.accepted == ordinary.speculation.decodes, "each right guess saves its sequence a step"
    return guessing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("speculation", [SPECULATE, EAGER], ids=["adaptive", "eager"])
def test_tokens_logprobs_and_routing_are_those_of_decoding_without_guesses(moe_folder, dtype, speculation):
    check_speculation(moe_folder, requests(), {"dtype": dtype}, speculation=speculation)


def test_a_request_alone_guesses_and_is_the_same(moe_folder):
    for asked in requests(5):
        check_identical(run(make_engine(moe_folder, **EAGER), [asked]), run(make_engine(moe_folder), [asked]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_models_own_forward_pass_gives_the_same_with_guesses(moe_folder, dense_folder, dtype, monkeypatch):
    monkeypatch.setattr(runner, "bind", lambda *args: None)
    check_speculation(moe_folder, requests(8), {"dtype": dtype}, speculation=EAGER)
    for asked in requests(4):
        check_identical(run(make_engine(dense_folder, dtype=dtype, **EAGER), [asked]), run(make_engine(dense_folder, dtype=dtype), [asked]))


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss", "glm_moe_dsa"])
def test_other_architectures_sample_the_same_tokens(tmp_path, family):
    folder = write_model(tmp_path / "model", moe=True, **FAMILIES[family])
    asked = requests(6, max_tokens=30)
    engine = make_engine(folder, **EAGER)
    done, expected = run(engine, asked), run(make_engine(folder), asked)
    assert engine.speculation.accepted
    for name, completion in done.items():  # torch's attention under a mask is not row-invariant
        assert completion.tokens_N.tolist() == expected[name].tokens_N.tolist()
        np.testing.assert_allclose(completion.logprobs_N, expected[name].logprobs_N, atol=1e-5)
        np.testing.assert_array_equal(completion.routing.ids_TLK, expected[name].routing.ids_TLK)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_max_tokens_ends_a_completion_inside_a_run_of_right_guesses(moe_folder, max_tokens):
    engine = make_engine(moe_folder, **EAGER)
    asked = requests(10, max_tokens=max_tokens, temperature=0.0)
    done = run(engine, asked)
    check_identical(done, run(make_engine(moe_folder), asked))
    assert all(len(c.tokens_N) == max_tokens or c.finish_reason == "stop" for c in done.values())


def test_the_context_is_filled_to_its_last_token(moe_folder):
    asked = [ask("a", repeating(1, 100), max_tokens=500)]
    engine = make_engine(moe_folder, **EAGER)
    done = run(engine, asked)
    check_identical(done, run(make_engine(moe_folder), asked))
    assert len(done["a"].tokens_N) == 28 and engine.speculation.accepted


def test_a_stop_id_among_right_guesses_ends_the_completion_there(moe_folder):
    free = run(make_engine(moe_folder), [ask("a", repeating(1), max_tokens=60)])["a"].tokens_N
    tail = free[30:].tolist()
    stop = max(set(tail), key=lambda token: free.tolist().index(token))  # turns up late, when the guesses are right already
    asked = [ask("a", repeating(1), max_tokens=60, stop_token_ids=(stop,))]
    engine = make_engine(moe_folder, **EAGER)
    done = run(engine, asked)
    check_identical(done, run(make_engine(moe_folder), asked))
    assert done["a"].finish_reason == "stop" and done["a"].tokens_N[-1] == stop and engine.speculation.accepted


class Letters:
    """A tokenizer of one character a token."""

    eos_ids = frozenset()

    def decode(self, ids, skip_special=False):
        return "".join(chr(ord("A") + int(i)) for i in ids)


def test_a_stop_text_that_ends_among_right_guesses_ends_the_completion_there(moe_folder, monkeypatch):
    monkeypatch.setattr(Stops, "_tokenizer", Letters())
    asked = [ask(f"r{i}", repeating(i), max_tokens=60) for i in range(12)]
    free = run(make_engine(moe_folder), asked)
    texts = {name: Letters().decode(c.tokens_N) for name, c in free.items() if len(c.tokens_N) > 30}
    stopping = [ask(r.id, r.prompt_T, max_tokens=60, stop=(texts[r.id][20:23], "never")) for r in asked if r.id in texts]
    assert len(stopping) > 3
    engine = make_engine(moe_folder, **EAGER)
    done = run(engine, stopping)
    check_identical(done, run(make_engine(moe_folder), stopping))
    assert engine.speculation.accepted > 0
    for name, completion in done.items():
        assert completion.finish_reason == "stop" and Letters().decode(completion.tokens_N).endswith(texts[name][20:23])


def test_preemption_with_guesses_changes_nothing(moe_folder):
    asked = requests(24, max_tokens=80)
    roomy = run(make_engine(moe_folder, kv_memory_mib=8), asked)
    engine = make_engine(moe_folder, **EAGER)
    check_identical(run(engine, asked), roomy)
    assert engine.preemptions > 0 and engine.speculation.accepted > 0 and engine.state().kv_used_frac == 0


def test_guesses_preempt_nobody(moe_folder):
    asked = requests(12, max_tokens=70, temperature=0.0)
    plain, guessing = (make_engine(moe_folder, prefix_cache=False, **extra) for extra in ({}, EAGER))
    plain_done, done = run(plain, asked), run(guessing, asked)
    check_identical(done, plain_done)
    assert guessing.preemptions <= plain.preemptions


def test_after_a_step_a_sequence_holds_the_blocks_of_the_tokens_that_it_keeps_and_no_others(moe_folder):
    engine = make_engine(moe_folder, kv_memory_mib=4, **EAGER)

    def check(step):
        for sequence in engine._scheduler.running:
            context = int(engine._table.context_R[sequence.slot])
            assert len(sequence.blocks) == engine._table.num_blocks_R[sequence.slot] == engine._scheduler.blocks_for(context)

    run(engine, requests(8), check)
    assert engine.speculation.drafted > engine.speculation.accepted > 0


@pytest.mark.parametrize("budget", [20, 23, 40])
def test_guesses_take_only_what_the_step_has_left(moe_folder, budget):
    guessing = make_engine(moe_folder, max_step_tokens=budget, max_running=20, kv_memory_mib=4, **EAGER)
    steps: list[int] = []
    plan = guessing._scheduler.plan

    def spy(*args):
        steps.append((planned := plan(*args)).num_tokens)
        assert planned.counts_S.sum() == planned.num_tokens <= budget
        return planned

    guessing._scheduler.plan = spy
    check_identical(run(guessing, requests(20)), run(make_engine(moe_folder, kv_memory_mib=4), requests(20)))
    assert max(steps) == budget and guessing.speculation.drafted


def test_a_prefix_hit_finds_what_was_accepted_and_never_what_was_rejected(moe_folder):
    engine, plain = make_engine(moe_folder, **EAGER), make_engine(moe_folder)
    for turn in range(4):
        longer = [ask(f"r{i}/{turn}", repeating(i, 20 + 15 * turn), max_tokens=30, temperature=0.3, seed=i) for i in range(4)]
        done, expected = run(engine, longer), run(plain, longer)
        check_identical(done, expected)
        texts = [(r.id + "+", np.concatenate([r.prompt_T, done[r.id].tokens_N, prompt(9, 3)])) for r in longer]
        after, wanted = (run(one, [ask(name, text_T, max_tokens=5) for name, text_T in texts]) for one in (engine, plain))
        check_identical(after, wanted)
        assert {name: c.cached_tokens for name, c in after.items()} == {name: c.cached_tokens for name, c in wanted.items()}


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_a_weight_update_in_flight_stamps_the_same_versions(moe_folder, other_folder, tmp_path, on_update):
    """The engines are updated when the request has the same number of tokens, not after the same number of steps."""
    second = publish(other_folder, tmp_path / "v000001", 1)

    def updated(tokens, **extra):
        engine = make_engine(moe_folder, on_update=on_update, **extra)
        engine.prepare(second)
        engine.add(ask("a", repeating(2), max_tokens=60, temperature=0.2, seed=5))
        while engine.tokens_generated < tokens:
            engine.step()
        tokens = engine.tokens_generated
        engine.commit(1)
        return tokens, run(engine, []), engine

    seen, done, engine = updated(25, **EAGER)
    assert engine.speculation.accepted
    assert done["a"].versions == ((0, seen), (1, 60 - seen))
    check_identical(done, updated(seen)[1])


def test_steps_stream_every_token_of_a_run_of_right_guesses_once_and_in_order(moe_folder):
    engine = make_engine(moe_folder, **EAGER)
    for asked in requests(5):
        engine.add(asked)
    streamed, logprobs, done, most = {}, {}, {}, 0
    while engine.has_work:
        result = engine.step()
        names = [name for name, _, _ in result.tokens]
        most = max(most, max((names.count(name) for name in names), default=0))
        for name, tokens, values in result.tokens:
            streamed.setdefault(name, []).extend(tokens)
            logprobs.setdefault(name, []).extend(values)
        done |= {c.id: c for c in result.finished}
    assert most > 3
    assert streamed == {name: c.tokens_N.tolist() for name, c in done.items()}
    assert logprobs == {name: c.logprobs_N.tolist() for name, c in done.items()}


def test_tokens_processed_on_trial_are_no_prefill(moe_folder):
    engine = make_engine(moe_folder, prefix_cache=False, **EAGER)
    run(engine, requests(5))
    assert engine.tokens_prefilled == sum(10 + i for i in range(5)) and engine.speculation.drafted


def test_without_speculation_every_step_gives_a_sequence_one_token(moe_folder):
    engine = make_engine(moe_folder)
    done = run(engine, requests(3))
    counts = engine.speculation
    assert (counts.drafted, counts.accepted, counts.acceptance, counts.tokens_per_step) == (0, 0, 0.0, 1.0)
    assert counts.decodes == sum(len(c.tokens_N) - 1 for c in done.values()), "the first token comes out of the prefill"


def test_verify_keeps_right_guesses_and_the_token_behind_them_up_to_a_stop():
    ahead = np.array([0, 1, 2, 0, 0, 1, 2, 3, 0, 1])
    tokens = np.array([5, 6, 7, 1, 2, 3, 4, 5, 8, 9])
    guesses = np.array([5, 0, 7, 1, 2, 3, 4, 0, 0, 9])
    stops = np.array([False] * 10)
    verdict = verify(tokens, guesses, stops, ahead)
    assert verdict.gained_S.tolist() == [2, 1, 4, 1] and not verdict.stopped_S.any()
    assert np.flatnonzero(~verdict.kept_N).tolist() == [2, 9]
    stops[[1, 5, 9]] = True
    verdict = verify(tokens, guesses, stops, ahead)
    assert verdict.gained_S.tolist() == [2, 1, 2, 1] and verdict.stopped_S.tolist() == [True, False, True, False]


def drafter(overhead: float, sequences: int, most: int = 8) -> tuple[Drafter, SlotTable]:
    """Sequences that have always repeated the same three tokens."""
    table = SlotTable(sequences, 100, 4)
    table.tokens_RT[:, :30] = np.tile([3, 1, 2], 10)
    table.length_R[:], table.limit_R[:] = 30, 100
    return Drafter(table, PromptLookup(overhead_tokens=overhead, max_draft_tokens=most)), table


def drafts_of(guessing: Drafter, sequences: int = 1, budget: int = 512) -> np.ndarray:
    """In a step with nothing else."""
    drafts = np.zeros(sequences, np.int32)
    assert guessing.draft(np.arange(sequences), sequences, budget, drafts) == drafts.any()
    return drafts


def test_the_fuller_the_step_the_fewer_guesses():
    drafts = []
    for sequences in (1, 8, 32, 128):
        guessing, _ = drafter(8.0, sequences)
        drafts.append(int(drafts_of(guessing, sequences)[0]))
    assert drafts == sorted(drafts, reverse=True) and drafts[0] > 3 and drafts[-1] == 0


def test_wrong_guesses_end_the_guessing_and_right_ones_bring_it_back_without_a_trial():
    guessing, table = drafter(8.0, 1)
    slots = np.arange(1)
    for _ in range(20):
        drafts = drafts_of(guessing)
        guessing.learn(slots, np.array([60]), drafts, np.array([0]))
    assert drafts[0] == 0
    for _ in range(20):
        drafts = drafts_of(guessing)
        first = table.tokens_RT[slots, table.length_R[slots]]
        guessing.learn(slots, first, np.zeros(1, np.int32), np.array([0]))
    assert drafts[0] > 3


def test_no_more_guesses_than_the_limit_leaves_room_for():
    guessing, table = drafter(1e9, 1)
    table.limit_R[:] = 33
    assert drafts_of(guessing)[0] == 2, "with both right, the third token is sampled"
    table.limit_R[:] = 31
    assert drafts_of(guessing)[0] == 0


def test_a_wrong_setting_is_refused_by_name(moe_folder):
    from slipstream.config.base import validate
    from slipstream.config.serve import EngineConfig

    with pytest.raises(ConfigError, match=r"speculation.*max_draft_tokens"):
        validate(EngineConfig, {"speculation": {"type": "prompt_lookup", "max_draft_tokens": 0}})
    with pytest.raises(ConfigError, match=r"prompt_lookup"):
        validate(EngineConfig, {"speculation": {"type": "ngram"}})


def test_broken_weights_fail_the_step_and_the_books_balance(moe_folder):
    engine = make_engine(moe_folder, **EAGER)
    for asked in requests(4, temperature=0.0):
        engine.add(asked)
    while not engine.speculation.accepted:
        engine.step()
    with torch.no_grad():
        engine._weights.model.norm.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        for _ in range(3):
            engine.step()
    assert len(engine.recover()) == 4 and engine.state().kv_used_frac == 0
