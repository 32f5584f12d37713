"""Anthropic's Messages API, by its events and bodies as their reference has them; the same over the gateway and the engine's own server."""

from __future__ import annotations

import json

import pytest

from slipstream.types import Sampling
from tests.unit.gateway.conftest import Gate, ids_of

ASK = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "text": "é"}}\n</tool_call>'
TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}}}


def body(messages=ASK, **more) -> dict:
    return {"model": "policy", "max_tokens": 200, "messages": messages, **more}


async def events(gate: Gate, sent: dict, key: str) -> list[dict]:
    """The stream's events; each is named as its type says."""
    found = []
    async with gate.http.post("/v1/messages", json={**sent, "stream": True}, headers={"X-Api-Key": key}) as response:
        assert response.status == 200 and response.headers["Content-Type"].startswith("text/event-stream")
        for block in (await response.text()).strip().split("\n\n"):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def joined(found: list[dict]) -> dict:
    """The message that a client makes of the events."""
    assert found[0]["type"] == "message_start" and found[-1]["type"] == "message_stop" and found[-2]["type"] == "message_delta"
    message = {**found[0]["message"], **found[-2]["delta"], "usage": found[-2]["usage"]}
    content: list[dict] = []
    is_open = False
    for event in found[1:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open and event["index"] == len(content)
            content.append({**event["content_block"], "json": ""})
        elif kind == "content_block_delta":
            assert is_open and event["index"] == len(content) - 1
            content[-1]["text" if "text" in event["delta"] else "json"] += event["delta"].get("text", event["delta"].get("partial_json"))
        is_open = kind != "content_block_stop"
    for block in content:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    assert not is_open
    return {**message, "content": content}


def without_ids(message: dict) -> dict:
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**message, "id": "", "content": blocks}


@pytest.mark.parametrize(
    ("said", "content", "stop"),
    [
        ("Hi 漢字 😀", [{"type": "text", "text": "Hi 漢字 😀"}], ("end_turn", None)),
        ("", [], ("end_turn", None)),
        ("one two STOP three", [{"type": "text", "text": "one two"}], ("stop_sequence", " STOP")),
        (
            f"Let me.\n{CALL}\n{CALL}",
            [{"type": "text", "text": "Let me."}, *[{"type": "tool_use", "name": "add", "input": {"a": 1, "text": "é"}}] * 2],
            ("tool_use", None),
        ),
        ("<tool_call>{broken</tool_call>", [{"type": "text", "text": "<tool_call>{broken</tool_call>"}], ("end_turn", None)),
        ("word " * 300, None, ("max_tokens", None)),
    ],
    ids=["text", "nothing", "stop", "calls", "broken call", "cut"],
)
async def test_a_message_answered_at_once_or_streamed_is_the_same_message(start, said, content, stop):
    gate = await start(said, said)
    session = gate.open("r")
    sent = body(tools=[TOOL], stop_sequences=["never", " STOP"])
    whole = await gate.post("/v1/messages", sent, key=session.api_key)
    assert without_ids(joined(await events(gate, sent, session.api_key))) == without_ids(whole)
    assert (whole["stop_reason"], whole["stop_sequence"]) == stop and (whole["type"], whole["role"]) == ("message", "assistant")
    assert content is None or without_ids(whole)["content"] == content
    prompt = len(session.turns[0].prompt_T)
    assert whole["usage"] == {
        "input_tokens": prompt - 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 1,
        "output_tokens": min(len(ids_of(gate.tokenizer, said)), 200),
    }
    assert gate.engine.added[0].sampling == Sampling(max_tokens=200, stop=("never", " STOP"))


async def test_a_tool_result_goes_back_on_the_same_branch_in_the_models_own_form(start):
    gate = await start(f"Let me.\n{CALL}", "3")
    session = gate.open("r")
    first = await gate.post("/v1/messages", body(system="Be brief.", tools=[TOOL]), key=session.api_key)
    [_, call] = first["content"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "4"}], "is_error": False}
    more = [
        *ASK,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    sent = body(more, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}], tools=[TOOL])
    await gate.post("/v1/messages", sent, key=session.api_key)
    first_turn, second = session.turns
    known = [*first_turn.prompt_T.tolist(), *first_turn.completion.tokens_N.tolist()]
    assert second.prompt_T[: len(known)].tolist() == known and not session.forks
    text = gate.tokenizer.decode(second.prompt_T)
    assert "<tool_response>\n4\n</tool_response>" in text and text.index("</tool_response>") < text.index("so?")
    assert '"name": "add"' in text and "Be brief." in text


async def test_openais_and_anthropics_calls_of_one_session_share_their_branches(start):
    gate = await start("a", "b")
    session = gate.open("r")
    first = await gate.post("/v1/messages", body(), key=session.api_key)
    chat = {"model": "policy", "messages": [*ASK, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "more"}]}
    await gate.post("/v1/chat/completions", chat, key=session.api_key)
    assert len(session.turns) == 2 and not session.forks


async def test_tokens_are_counted_as_the_prompt_has_them(start):
    gate = await start("a")
    sent = body(system="s", tools=[TOOL])
    counted = await gate.post("/v1/messages/count_tokens", {key: sent[key] for key in ("model", "messages", "system", "tools")})
    answer = await gate.post("/v1/messages", sent)
    assert counted["input_tokens"] == answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"messages": []}, "messages: empty"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role: 'system'"),
        ({"messages": [*ASK, {"role": "assistant", "content": "x"}]}, "continuing a reply"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}, *ASK]}, "messages[0].content[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "'hot'"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: type 'any'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"description": "x"}]}, "tools[0]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"system": 3}, "system"),
    ],
)
async def test_what_cannot_be_honoured_is_a_400_that_names_the_field(start, change, part):
    gate = await start("a")
    answer = await gate.post("/v1/messages", {**body(), **change}, 400)
    assert answer["error"]["type"] == "invalid_request_error" and part in answer["error"]["message"], answer


async def test_max_tokens_is_required_as_in_anthropics_api(start):
    gate = await start("a")
    answer = await gate.post("/v1/messages", {"model": "policy", "messages": ASK}, 400)
    assert "max_tokens" in answer["error"]["message"]


async def test_a_full_queue_is_a_rate_limit_error(start):
    gate = await start("a")
    gate.engine.max_waiting = 0
    answer = await gate.post("/v1/messages", body(), 429)
    assert answer["error"]["type"] == "rate_limit_error"
