"""Whatever a model writes is legal: calls that are well-formed become tool_calls, the rest stays content."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.chat.tools import parse_reply

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")), lambda c: st.lists(c, max_size=3))


@given(name=st.text(st.characters(codec="utf-8")), arguments=st.dictionaries(st.text(st.characters(codec="utf-8")), JSON, max_size=3))
def test_a_well_formed_call_comes_back_unchanged(name, arguments):
    body = json.dumps({"name": name, "arguments": arguments})
    message = parse_reply(f"so:\n<tool_call>\n{body}\n</tool_call>")
    [call] = message["tool_calls"]
    assert message["content"] == "so:"
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (name, arguments)


def test_several_calls_keep_their_order_and_get_their_own_ids():
    text = '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b"}</tool_call>'
    message = parse_reply(text, id_prefix="t3")
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == [
        ("t3_0", "a", "{}"),
        ("t3_1", "b", "{}"),
    ]
    assert message["content"] == ""


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "not json",
        "[]",
        '{"arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "a", "arguments": "text"}',
        '{"name": "a", "arguments": {"x": NaN}}',
        '{"name": "a", "arguments": {"x": "\\ud800"}}',
        "[" * 100_000,
        '{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}",
    ],
)
def test_a_malformed_block_stays_in_the_content(body):
    text = f"<tool_call>{body}</tool_call>"
    assert parse_reply(text) == {"role": "assistant", "content": text}


def test_an_unclosed_block_stays_in_the_content_and_a_good_one_beside_a_bad_one_is_still_a_call():
    unclosed = '<tool_call>{"name": "a", "arguments": {}}'
    assert parse_reply(unclosed)["content"] == unclosed
    message = parse_reply('<tool_call>{]</tool_call><tool_call>{"name": "a"}</tool_call>')
    assert message["content"] == "<tool_call>{]</tool_call>" and len(message["tool_calls"]) == 1


@given(text=st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "a"}', "{", "x", "\n"]), max_size=12).map("".join))
def test_no_text_makes_the_parser_raise(text):
    assert parse_reply(text)["role"] == "assistant"
