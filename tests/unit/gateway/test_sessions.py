"""Calls of a session become turns whose tokens are exactly the engine's, on branches whose tokens go on byte for byte."""

from __future__ import annotations

import asyncio

import numpy as np
import openai
import pytest

from slipstream.chat.recording import Limits
from slipstream.errors import EngineUnavailable, StateError
from slipstream.orchestrator.samples import rollout_samples
from slipstream.serving.gateway.session import Session
from slipstream.types import Outcome, Rollout, Sampling, Task
from tests.unit.gateway.conftest import Gate, ids_of
from tests.unit.server.scripted import ScriptedEngine
from tests.waiting import until

ASK = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>\n{"name":"add","arguments":{"a":1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}}


async def say(client: openai.AsyncOpenAI, messages: list, stream: bool = False, **more):
    """The reply as the client would send it back."""
    answer = await client.chat.completions.create(model="policy", messages=messages, **more)
    return answer.choices[0].message.model_dump(exclude_none=True)


def samples(session: Session):
    rollout = Rollout(session.id, Task("t", "e", 0), "g", Outcome.completed, tuple(session.turns), reward=1.0)
    return rollout_samples(rollout, 1.0)


def accounted(gate: Gate, session: Session) -> None:
    """Every token that the engine sampled is trained exactly once, with its logprob and version."""
    found = samples(session)
    trained = np.concatenate([s.tokens_T[s.loss_mask_T] for s in found])
    assert sorted(trained) == sorted(np.concatenate([turn.completion.tokens_N for turn in session.turns]))
    assert len(trained) == gate.gateway.counts.tokens
    for sample in found:
        assert (sample.logprobs_T[sample.loss_mask_T] == -0.5).all() and (sample.versions_T[sample.loss_mask_T] == 0).all()
        assert (sample.versions_T[~sample.loss_mask_T] == -1).all()


async def test_a_tool_conversation_is_one_sample_with_the_very_tokens_that_were_sampled(start):
    gate = await start(CALL, "It is 3.")
    session = gate.open("r", salt=7)
    client = await gate.openai(session)
    call = await say(client, ASK, tools=[TOOL])
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "3"}
    assert (await say(client, [*ASK, call, result], tools=[TOOL]))["content"] == "It is 3."
    first, second = session.turns
    so_far = [*first.prompt_T.tolist(), *ids_of(gate.tokenizer, CALL)]
    assert second.prompt_T[: len(so_far)].tolist() == so_far, "compact JSON that the template would have written with spaces"
    assert [request.routing_from for request in gate.engine.added] == [0, len(so_far) - 1]
    assert [request.salt for request in gate.engine.added] == [7, 7]
    assert [request.id for request in gate.engine.added] == ["r/0", "r/1"]
    assert len(samples(session)) == 1 and not session.forks
    assert session.messages[-1]["content"] == "It is 3." and session.messages[2]["role"] == "tool"
    accounted(gate, session)


@pytest.mark.parametrize("written", ["content null", "content empty", "spaces in the arguments", "extra fields"])
async def test_a_reply_that_comes_back_written_otherwise_is_still_that_reply(start, written):
    gate = await start(CALL, "done")
    session = gate.open()
    client = await gate.openai(session)
    call = await say(client, ASK, tools=[TOOL])
    back = dict(call)
    if written == "extra fields":
        back |= {"refusal": None, "annotations": [], "audio": None}
    if written == "spaces in the arguments":
        [function] = [c["function"] for c in back["tool_calls"]]
        back["tool_calls"] = [{**back["tool_calls"][0], "function": {**function, "arguments": '{ "a" : 1 }'}}]
    back["content"] = None if written == "content null" else ""
    await say(client, [*ASK, back, {"role": "tool", "tool_call_id": "x", "content": "3"}], tools=[TOOL])
    assert len(samples(session)) == 1 and not session.forks


async def test_a_history_that_was_rewritten_is_a_branch_of_its_own_and_counted(start):
    gate = await start("<think>hm</think>Yes", "ok")
    session = gate.open()
    client = await gate.openai(session)
    await say(client, ASK)
    await say(client, [*ASK, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "more"}])
    assert dict(session.forks) == {"rewritten": 1} == dict(gate.gateway.counts.forks)
    assert len(samples(session)) == 2 and gate.engine.added[1].routing_from == 0
    accounted(gate, session)


async def test_two_calls_that_go_on_from_one_reply_share_its_tokens_and_only_one_of_them_its_sample(start):
    gate = await start("first", "left", "right", "after left")
    session = gate.open()
    client = await gate.openai(session)
    first = await say(client, ASK)
    left, right = ([*ASK, first, {"role": "user", "content": side}] for side in ("left?", "right?"))
    said = await say(client, left)
    await say(client, right)
    await say(client, [*left, said, {"role": "user", "content": "go on"}])
    shared = len(session.turns[0].prompt_T) + len(session.turns[0].completion.tokens_N)
    assert np.array_equal(session.turns[1].prompt_T[:shared], session.turns[2].prompt_T[:shared])
    assert dict(session.forks) == {"branched": 1}
    assert [len(s.loss_mask_T.nonzero()[0]) for s in samples(session)] == [
        sum(len(ids_of(gate.tokenizer, text)) for text in texts) for texts in (("first", "left", "after left"), ("right",))
    ]
    assert gate.engine.added[2].routing_from == 0, "its sample needs the rows of the tokens before"
    accounted(gate, session)


async def test_calls_side_by_side_are_branches_and_every_token_is_accounted_for(start):
    gate = await start(engine=ScriptedEngine(lambda r: ids_of(gate.tokenizer, f"reply {len(r.prompt_T)}"), seq_len=512))
    session = gate.open()
    client = await gate.openai(session)
    first = await say(client, ASK)
    asks = [[*ASK, first, {"role": "user", "content": "x" * n}] for n in (1, 20, 40)]
    await asyncio.gather(*(say(client, ask) for ask in asks), say(client, [{"role": "user", "content": "another agent"}]))
    assert session.forks["branched"] == 3 and len(session.turns) == 5 and len(samples(session)) == 4
    accounted(gate, session)


async def test_choices_of_one_call_are_turns_and_a_conversation_may_go_on_from_any(start):
    gate = await start("a", "b", "c")
    session = gate.open()
    client = await gate.openai(session)
    answer = await client.chat.completions.create(model="policy", messages=ASK, n=2)
    said = {choice.message.content: choice.message.model_dump(exclude_none=True) for choice in answer.choices}
    await say(client, [*ASK, said["b"], {"role": "user", "content": "more"}])
    assert len(session.turns) == 3 and [len(s.loss_mask_T.nonzero()[0]) for s in samples(session)] == [2, 4]
    accounted(gate, session)


async def test_a_streamed_call_is_recorded_like_any_other(start):
    gate = await start(CALL, "done")
    session = gate.open()
    client = await gate.openai(session)
    async with client.chat.completions.stream(model="policy", messages=ASK, tools=[TOOL]) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    sent = {"role": "assistant", "content": message.content, "tool_calls": [call.model_dump() for call in message.tool_calls]}
    await say(client, [*ASK, sent, {"role": "tool", "tool_call_id": "x", "content": "3"}], tools=[TOOL])
    assert len(samples(session)) == 1 and not session.forks
    accounted(gate, session)


async def test_the_contract_holds_whatever_the_agent_asks_for(start):
    gate = await start("one STOP two", "x")
    contract = Sampling(temperature=0.7, top_p=0.9, max_tokens=20, stop=("END",))
    session = gate.open(sampling=contract)
    client = await gate.openai(session)
    said = await say(client, ASK, temperature=0.0, max_tokens=500, stop=[" STOP"], seed=3)
    assert said["content"] == "one", "an agent's own stop strings cut its text"
    [request] = gate.engine.added
    assert request.sampling == Sampling(temperature=0.7, top_p=0.9, max_tokens=20, stop=("END", " STOP"))
    assert gate.gateway.counts.overridden == 1
    await say(client, [*ASK, said, {"role": "user", "content": "more"}], temperature=0.7)
    assert gate.gateway.counts.overridden == 1 and len(samples(session)) == 1


@pytest.mark.parametrize(
    ("limits", "part"),
    [
        (Limits(512, 10.0, max_turns=1), "max_turns"),
        (Limits(512, 10.0, max_rollout_tokens=2), "max_rollout_tokens"),
        (Limits(40, 10.0), "model.seq_len"),
    ],
)
async def test_a_spent_budget_is_an_error_of_its_own_and_marks_the_session_truncated(start, limits, part):
    gate = await start("a", "b")
    session = gate.open(limits=limits)
    client = await gate.openai(session)
    said = await say(client, ASK)
    with pytest.raises(openai.BadRequestError, match=part) as caught:
        await say(client, [*ASK, said, {"role": "user", "content": "more " * 10}])
    assert caught.value.code == "session_budget_spent" and session.truncated and len(session.turns) == 1
    assert gate.gateway.counts.errors["session_budget_spent"] == 1


async def test_a_failed_call_stays_a_failure_until_the_same_call_succeeds(start):
    gate = await start("a", "b", "c")
    session = gate.open()
    client = await gate.openai(session)
    gate.engine.failures = [FloatingPointError("overflow")]
    with pytest.raises(openai.InternalServerError, match="overflow"):
        await say(client, ASK)
    await say(client, [{"role": "user", "content": "something else"}])
    assert isinstance(session.failure, EngineUnavailable)
    await say(client, ASK)
    assert session.failure is None and len(session.turns) == 2
    assert gate.gateway.counts.errors["unavailable"] == 1


async def test_an_engine_that_does_not_answer_in_time_is_a_503(start):
    gate = await start("a")
    gate.driver.pause()
    session = gate.open(limits=Limits(512, turn_timeout_s=0.05))
    client = await gate.openai(session)
    with pytest.raises(openai.InternalServerError, match="turn_timeout_s"):
        await say(client, ASK)
    assert gate.engine.aborted == ["r/0"] and session.failure is not None


async def test_an_aborted_reply_is_a_failure_that_a_retry_replaces(start):
    gate = await start("a long reply", "short")
    session = gate.open()
    client = await gate.openai(session)
    gate.driver.pause()
    asking = asyncio.create_task(say(client, ASK))
    await until(lambda: gate.engine.running)
    await gate.driver.abort(["r/0"])
    gate.driver.resume()
    with pytest.raises(openai.InternalServerError, match="aborted"):
        await asking
    assert session.failure is not None and len(session.turns) == 1
    await say(client, ASK)
    assert session.failure is None and [t.completion.finish_reason for t in session.turns] == ["stop"]


async def test_ending_a_session_aborts_its_calls_and_refuses_later_ones(start):
    gate = await start("a", "b")
    session = gate.open()
    client = await gate.openai(session)
    gate.driver.pause()
    asking = asyncio.create_task(say(client, ASK))
    await until(lambda: gate.engine.running)
    gate.gateway.end("r")
    with pytest.raises(openai.APIStatusError, match="has ended") as caught:
        await asking
    assert caught.value.status_code == 410 and gate.engine.aborted == ["r/0"]
    with pytest.raises(openai.APIStatusError, match="has ended") as caught:
        await say(client, ASK)
    assert (caught.value.status_code, caught.value.code) == (410, "session_ended")
    with pytest.raises(StateError, match="'r' was opened before"):
        gate.open()
    gate.gateway.end("r")
    assert gate.gateway.metrics()["gateway/sessions/open"] == 0
