"""Requests: what is refused, how each one ends, and what the engine says about itself."""

from __future__ import annotations

import shutil
import string
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from slipstream.config.serve import EngineConfig
from slipstream.engine.engine import EmbeddedEngine
from slipstream.errors import ConfigError, EngineUnavailable, ModelError, RequestError
from tests.unit.engine.helpers import SEQ_LEN, VOCAB, ask, make_engine, prompt, run

LETTERS = string.ascii_letters + string.digits[: VOCAB - 52]


@pytest.fixture(scope="module")
def text_folder(moe_folder, tmp_path_factory):
    """The MoE model with a tokenizer of one letter a token."""
    folder = tmp_path_factory.mktemp("text") / "model"
    shutil.copytree(moe_folder, folder)
    tokenizer = Tokenizer(WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (ask("a", prompt(1, 0)), "prompt is empty"),
        (ask("a", prompt(1, SEQ_LEN)), "128 tokens leaves no room in a context of 128"),
        (ask("a", np.array([0, VOCAB], np.int32)), "token id 61 is not in the vocabulary"),
        (ask("a", np.array([-1, 2], np.int32)), "token id -1 is not"),
        (ask("a", prompt(1, 4), max_tokens=0), "max_tokens = 0"),
        (ask("a", prompt(1, 4), temperature=-1.0), "temperature = -1.0"),
        (ask("a", prompt(1, 4), temperature=float("nan")), "temperature = nan"),
        (ask("a", prompt(1, 4), top_p=0.0), "top_p = 0.0"),
        (ask("a", prompt(1, 4), stop=("",)), "stop"),
        (ask("a", prompt(1, 4), temperature=1e-40), "temperature = 1e-40"),
        (ask("a", prompt(1, 4), temperature=1e39), r"temperature = 1e\+39"),
        (ask("a", prompt(1, 4), stop_token_ids=(2**40,)), "stop_token_ids"),
        (ask("a", prompt(1, 4), stop_token_ids=(-1,)), "stop_token_ids"),
        (replace(ask("a", prompt(1, 4)), routing_from=-1), "routing_from = -1"),
        (replace(ask("a", prompt(1, 4)), routing_from=10**30), "routing_from = 10000"),
        (replace(ask("a", prompt(1, 4)), salt=-1), "salt = -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_that_can_never_succeed_is_refused_and_leaves_no_trace(moe_folder, request_, reason):
    engine = make_engine(moe_folder)
    with pytest.raises(RequestError, match=reason):
        engine.add(request_)
    assert not engine.has_work and engine.state().waiting == 0


def test_a_sequence_that_can_never_fit_the_kv_pool_is_refused(moe_folder):
    engine = make_engine(moe_folder, seq_len=256, block_tokens=128)
    engine.add(ask("fits", prompt(1, 20), max_tokens=300))
    small = make_engine(moe_folder, seq_len=256, block_tokens=170)
    small.add(ask("fits", prompt(1, 20), max_tokens=300))
    engine._cache.num_blocks = 1
    with pytest.raises(RequestError, match="256 tokens need 2 KV blocks, but there are 1"):
        engine.add(ask("never", prompt(1, 20), max_tokens=300))


def test_two_live_requests_with_one_id_are_refused_and_ids_are_free_again_afterwards(moe_folder):
    engine = make_engine(moe_folder)
    engine.add(ask("a", prompt(1, 4)))
    with pytest.raises(RequestError, match="with this id is running"):
        engine.add(ask("a", prompt(1, 4)))
    run(engine, [])
    run(engine, [ask("a", prompt(1, 4))])


def test_requests_beyond_max_waiting_are_refused_for_now(moe_folder):
    engine = make_engine(moe_folder, max_waiting=2)
    engine.add(ask("a", prompt(1, 4)))
    engine.add(ask("b", prompt(1, 4)))
    with pytest.raises(EngineUnavailable, match="max_waiting"):
        engine.add(ask("c", prompt(1, 4)))


def test_a_context_longer_than_the_model_has_positions_is_a_config_error(moe_folder):
    with pytest.raises(ConfigError, match=r"model.seq_len = 257 and max_position_embeddings = 256 of the model"):
        make_engine(moe_folder, seq_len=257)


def test_kv_memory_that_holds_no_two_blocks_is_a_config_error(moe_folder):
    with pytest.raises(ConfigError, match=r"engine.kv_memory_mib = 1 holds 1 blocks of 400 tokens"):
        EmbeddedEngine(moe_folder, EngineConfig(kv_memory_mib=1, block_tokens=400), 128)


@pytest.mark.parametrize("wanted", [1, 2, 5])
def test_max_tokens_ends_a_request_with_reason_length(moe_folder, wanted):
    done = run(make_engine(moe_folder), [ask("a", prompt(8, 6), max_tokens=wanted)])["a"]
    assert (len(done.tokens_N), done.finish_reason) == (wanted, "length")
    assert len(done.logprobs_N) == wanted and len(done.routing.ids_TLK) == 6 + wanted - 1


def test_the_context_cuts_max_tokens_and_the_last_place_is_used(moe_folder):
    done = run(make_engine(moe_folder), [ask("a", prompt(8, SEQ_LEN - 3), max_tokens=50, temperature=1.0, seed=4)])["a"]
    assert (len(done.tokens_N), done.finish_reason) == (3, "length")
    done = run(make_engine(moe_folder), [ask("a", prompt(8, SEQ_LEN - 1), max_tokens=50)])["a"]
    assert len(done.tokens_N) == 1


def test_a_stop_token_id_ends_a_request_and_is_kept(moe_folder):
    free = run(make_engine(moe_folder), [ask("a", prompt(8, 6))])["a"].tokens_N.tolist()
    stop = free[3]
    done = run(make_engine(moe_folder), [ask("a", prompt(8, 6), stop_token_ids=(58, stop, 59))])["a"]
    assert done.finish_reason == "stop" and done.tokens_N.tolist() == free[: free.index(stop) + 1]


def test_the_models_own_end_id_ends_every_request(moe_folder):
    requests = [ask(f"r{i}", prompt(i, 5), temperature=3.0, max_tokens=100, seed=i) for i in range(20)]
    done = run(make_engine(moe_folder), requests)
    stopped = [c for c in done.values() if c.finish_reason == "stop"]
    assert stopped and all(c.tokens_N[-1] == 60 for c in stopped)
    assert all(60 not in c.tokens_N[:-1] for c in done.values())


def test_a_stop_string_that_spans_tokens_ends_a_request_and_its_tokens_are_kept(text_folder):
    free = run(make_engine(text_folder), [ask("a", prompt(8, 6))])["a"].tokens_N.tolist()
    text = "".join(LETTERS[token] for token in free)
    stop = text[3:6]
    done = run(make_engine(text_folder), [ask("a", prompt(8, 6), stop=("never", stop)), ask("b", prompt(8, 6), stop=("never",))])
    assert done["a"].finish_reason == "stop"
    assert len(done["a"].tokens_N) == text.index(stop) + 3
    assert done["b"].tokens_N.tolist() == free


def test_a_stop_string_in_the_prompt_does_not_end_a_request(text_folder):
    prompt_T = prompt(8, 6)
    free = run(make_engine(text_folder), [ask("a", prompt_T)])["a"].tokens_N.tolist()
    across = LETTERS[prompt_T[-1]] + LETTERS[free[0]]
    done = run(make_engine(text_folder), [ask("a", prompt_T, stop=(across,))])["a"]
    assert across in "".join(LETTERS[t] for t in done.tokens_N) or done.finish_reason == "length"
    assert len(done.tokens_N) > 1


def test_stop_strings_without_a_tokenizer_are_a_model_error_at_once(moe_folder):
    engine = make_engine(moe_folder)
    with pytest.raises(ModelError, match=r"no tokenizer.json"):
        engine.add(ask("a", prompt(1, 4), stop=("x",)))
    assert not engine.has_work


def test_aborting_ends_waiting_and_running_requests_and_frees_everything(moe_folder):
    engine = make_engine(moe_folder, max_running=2, max_step_tokens=16)
    for i in range(4):
        engine.add(ask(f"r{i}", prompt(20 + i, 5), max_tokens=50))
    for _ in range(3):
        engine.step()
    assert (engine.state().running, engine.state().waiting) == (2, 2)
    engine.abort(["r0", "r3", "unknown", "r0"])
    aborted = {c.id: c for c in engine.step().finished}
    assert set(aborted) == {"r0", "r3"} and all(c.finish_reason == "abort" for c in aborted.values())
    assert len(aborted["r0"].tokens_N) == 3 and aborted["r0"].routing.valid_T.all()
    assert len(aborted["r3"].tokens_N) == 0 and not aborted["r3"].routing.valid_T.any() and aborted["r3"].versions == ()
    engine.abort([f"r{i}" for i in range(4)])
    run(engine, [])
    assert engine.state().kv_used_frac == 0 and engine.state().running == engine.state().waiting == 0


def test_aborting_during_a_chunked_prefill_marks_unprocessed_rows_as_unknown(moe_folder):
    engine = make_engine(moe_folder, max_running=4, max_step_tokens=8)
    engine.add(ask("a", prompt(1, 20)))
    engine.step()
    engine.abort(["a"])
    aborted = engine.step().finished[0]
    assert len(aborted.tokens_N) == 0 and aborted.routing.valid_T.tolist() == [True] * 8 + [False] * 11


def test_a_paused_engine_accepts_requests_and_takes_no_step(moe_folder):
    engine = make_engine(moe_folder)
    engine.pause()
    engine.add(ask("a", prompt(1, 4)))
    assert not engine.has_work and engine.step().finished == [] and engine.state().paused
    engine.abort(["a"])
    assert engine.has_work and engine.step().finished[0].finish_reason == "abort"
    engine.add(ask("b", prompt(1, 4)))
    engine.resume()
    assert len(run(engine, [])["b"].tokens_N) == 12


def test_prefixes_of_different_salts_never_meet(moe_folder):
    engine = make_engine(moe_folder)
    hits = [run(engine, [ask(f"r{i}", prompt(1, 20), salt=salt)])[f"r{i}"].cached_tokens for i, salt in enumerate([0, 1, 1, 0])]
    assert hits == [0, 0, 16, 16]


def test_without_a_prefix_cache_nothing_is_reused(moe_folder):
    engine = make_engine(moe_folder, prefix_cache=False)
    assert [run(engine, [ask(f"r{i}", prompt(1, 20))])[f"r{i}"].cached_tokens for i in range(2)] == [0, 0]


def test_without_capture_there_is_no_routing(moe_folder):
    assert run(make_engine(moe_folder, capture_routing=False), [ask("a", prompt(1, 4))])["a"].routing is None


def test_routing_from_beyond_the_end_returns_no_rows(moe_folder):
    done = run(make_engine(moe_folder), [ask("a", prompt(1, 4), routing_from=99)])["a"]
    assert done.routing.start == 99 and done.routing.ids_TLK.shape == (0, 2, 2)


def test_steps_stream_each_sampled_token_once_and_in_order(moe_folder):
    engine = make_engine(moe_folder)
    for i in range(5):
        engine.add(ask(f"r{i}", prompt(i, 3 + i), max_tokens=3 + i))
    streamed: dict[str, list[int]] = {}
    logprobs: dict[str, list[float]] = {}
    done = {}
    while engine.has_work:
        result = engine.step()
        for name, tokens, values in result.tokens:
            streamed.setdefault(name, []).extend(tokens)
            logprobs.setdefault(name, []).extend(values)
        done |= {c.id: c for c in result.finished}
    assert streamed == {name: c.tokens_N.tolist() for name, c in done.items()}
    assert logprobs == {name: c.logprobs_N.tolist() for name, c in done.items()}


def test_counters_add_up_over_a_run(moe_folder):
    engine = make_engine(moe_folder)
    done = run(engine, [ask(f"r{i}", prompt(7, 21), max_tokens=6) for i in range(4)])
    sampled = sum(len(c.tokens_N) for c in done.values())
    cached = sum(c.cached_tokens for c in done.values())
    assert engine.tokens_generated == sampled == engine.state().generated_tokens
    assert engine.tokens_cached == cached == 60
    assert engine.tokens_prefilled == 4 * 21 - cached
    processed = 4 * 21 - cached + sampled - 4
    assert engine.expert_load.sum() == processed * 2 * 2, "two MoE layers, two experts a token; the last sampled token is not processed"
    assert engine.outcomes["length"] + engine.outcomes["stop"] == 4
    assert 0 < engine.busy_s <= engine.state().uptime_s


def test_timings_cover_the_life_of_a_request(moe_folder):
    done = run(make_engine(moe_folder, max_running=1), [ask("a", prompt(1, 4)), ask("b", prompt(2, 4))])
    assert done["b"].timings.queued_s >= done["a"].timings.decode_s > 0 and done["b"].timings.prefill_s > 0


def test_seeds_drawn_by_the_engine_differ_between_requests_and_repeat_with_its_own_seed(moe_folder):
    def texts(seed):
        engine = EmbeddedEngine(moe_folder, EngineConfig(kv_memory_mib=1), SEQ_LEN, seed=seed)
        done = run(engine, [ask(f"r{i}", prompt(1, 4), temperature=1.0) for i in range(4)])
        return [done[f"r{i}"].tokens_N.tolist() for i in range(4)]

    assert len({tuple(text) for text in texts(1)}) > 1
    assert texts(1) == texts(1) != texts(2)


def test_a_context_without_room_for_a_token_is_refused(moe_folder):
    with pytest.raises(ConfigError, match=r"model\.seq_len = 1:"):
        EmbeddedEngine(moe_folder, EngineConfig(), seq_len=1)


@pytest.mark.parametrize("extreme", [{"top_k": 10**30}, {"top_p": 1e-300}, {"temperature": 1e-5}, {"min_p": 1.0}, {"seed": -(10**30)}])
def test_no_request_can_fail_the_step_of_the_others(moe_folder, extreme):
    engine = make_engine(moe_folder)
    wanted = {"temperature": 1.0, "max_tokens": 3}
    done = run(engine, [ask("extreme", prompt(1, 4), **{**wanted, **extreme}), ask("other", prompt(1, 4), **wanted)])
    assert done.keys() == {"extreme", "other"}
