"""Streamed pieces join to what the whole text gives at once, wherever the text is cut into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.chat.reply import ReplySplitter, StopCutter, cut
from slipstream.chat.tools import parse_reply

PARTS = ["<tool_call>", "</tool_call>", '{"name": "a", "arguments": {"x": 1}}', "{", "<tool", "x", " ", "\n", "<"]


@st.composite
def pieces(draw, parts):
    text = "".join(draw(st.lists(st.sampled_from(parts), max_size=12)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(pieces=pieces(PARTS))
def test_content_and_calls_stream_as_they_parse(pieces):
    splitter = ReplySplitter()
    streamed = [piece for text in pieces for piece in splitter.push(text)] + splitter.flush()
    message = parse_reply("".join(pieces))
    assert "".join(p for p in streamed if isinstance(p, str)) == message["content"]
    assert [p for p in streamed if isinstance(p, dict)] == [call["function"] for call in message.get("tool_calls", [])]


@given(pieces=pieces(["ab", "a", "b", "c", "abc"]), stops=st.lists(st.sampled_from(["abc", "ba", "cc", "a"]), max_size=3))
def test_text_stops_before_the_first_stop_string_and_nothing_of_it_leaks(pieces, stops):
    cutter = StopCutter(stops)
    released = [cutter.push(text) for text in pieces]
    whole, _ = cut("".join(pieces), stops)
    assert whole.startswith("".join(released))
    assert "".join(released) + cutter.flush() == whole


def test_text_that_cannot_begin_a_stop_string_is_released_at_once():
    cutter = StopCutter(["###"])
    assert [cutter.push(text) for text in ("one", " #", "two", "##", "#three")] == ["one", " ", "#two", "", ""]
