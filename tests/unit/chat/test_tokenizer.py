"""ChatTokenizer renders like transformers and never invents or hides text."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.chat.stream import TextStream
from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.errors import ModelError, RequestError
from tests.unit.chat.made import SPECIAL, TEMPLATE, write_tokenizer

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add <two> numbers & more: a ≤ b",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
CALL = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "text": "é"}}}
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "c0"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return ChatTokenizer.load(folder)


@pytest.mark.parametrize("tools", [(), (ADD,)], ids=["no tools", "tools"])
@pytest.mark.parametrize("messages", [CHAT, CHAT[:2], CHAT[1:2]], ids=["tool turn", "system", "user"])
@pytest.mark.parametrize("prompt", [True, False])
def test_a_chat_renders_and_encodes_as_in_transformers(folder, tokenizer, messages, tools, prompt):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    text = theirs.apply_chat_template(messages, tools=list(tools) or None, add_generation_prompt=prompt, tokenize=False)
    assert tokenizer.render(messages, tools, add_generation_prompt=prompt) == text
    assert tokenizer.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]


def test_arguments_as_json_text_render_like_arguments_as_objects(tokenizer):
    function = {**CALL["function"], "arguments": json.dumps(CALL["function"]["arguments"])}
    as_text = [*CHAT[:2], {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": function}]}, CHAT[3]]
    assert tokenizer.render(as_text) == tokenizer.render(CHAT)


def test_encoding_adds_no_special_tokens_even_where_the_tokenizer_would(tmp_path):
    tokenizer = ChatTokenizer.load(write_tokenizer(tmp_path, adds_bos=True))
    assert tokenizer.decode(tokenizer.encode("fox")) == "fox"


@given(text=st.text(max_size=60))
def test_decode_inverts_encode(tokenizer, text):
    ids_T = tokenizer.encode(text)
    assert tokenizer.decode(ids_T) == text
    assert ids_T.dtype == np.int32 and not ids_T.flags.writeable


def test_special_tokens_are_one_id_each_and_the_tool_markers_survive_skipping(tokenizer):
    ids_T = tokenizer.encode("<|im_start|><tool_call>x</tool_call><|im_end|>")
    assert len(ids_T) == 5
    assert tokenizer.decode(ids_T, skip_special=True) == "<tool_call>x</tool_call>"


def test_a_reply_ends_at_the_end_token_of_the_model_or_of_the_tokenizer(tokenizer):
    assert tokenizer.eos_ids == {int(tokenizer.encode(text)[0]) for text in ("<|endoftext|>", "<|im_end|>")}
    assert tokenizer.vocab_size == int(tokenizer.encode("</tool_response>")[0]) + 1


def test_a_generated_call_parses_back_to_the_message_that_was_rendered(tokenizer):
    body = tokenizer.render(CHAT[:3], add_generation_prompt=False).rsplit("<|im_start|>assistant\n", 1)[1].removesuffix("\n")
    message = tokenizer.parse_reply(body)
    assert message["content"] == ""
    [call] = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1, "text": "é"})


def test_a_model_without_a_chat_template_is_refused_by_name_unless_none_is_needed(tmp_path):
    folder = write_tokenizer(tmp_path, chat_template=None)
    with pytest.raises(ModelError, match=f"{folder} has no chat template"):
        ChatTokenizer.load(folder)
    plain = ChatTokenizer.load(folder, need_template=False)
    assert plain.decode(plain.encode("fox")) == "fox"
    with pytest.raises(ModelError, match="no chat template"):
        plain.render(CHAT)


def test_a_missing_or_broken_tokenizer_is_a_model_error_with_the_path(tmp_path):
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        ChatTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ModelError, match="does not load as a tokenizer"):
        ChatTokenizer.load(tmp_path)


def test_a_template_that_is_not_jinja_is_a_model_error_and_refused_messages_are_a_request_error(tmp_path, tokenizer):
    broken = ChatTokenizer.load(write_tokenizer(tmp_path, chat_template="{% if %}"))
    with pytest.raises(ModelError, match="line 1"):
        broken.render(CHAT)
    with pytest.raises(RequestError, match="role narrator is unknown"):
        tokenizer.render([{"role": "narrator", "content": "x"}])
    with pytest.raises(RequestError, match="chat template"):
        tokenizer.render([{"role": "user", "content": 3}, {"role": 4}])


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path):
    evil = ChatTokenizer.load(write_tokenizer(tmp_path, chat_template="{{ messages.__class__.__mro__ }}{{ messages.append(1) }}"))
    with pytest.raises(RequestError):
        evil.render(CHAT)


def test_a_template_in_tokenizer_config_and_one_for_tools_are_found(tmp_path):
    folder = write_tokenizer(tmp_path, chat_template=None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools={{ tools | length }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    tokenizer = ChatTokenizer.load(folder)
    assert tokenizer.render(CHAT[1:2]) == "<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render(CHAT[1:2], [ADD]) == "tools=1"


@given(data=st.data())
def test_streamed_pieces_join_to_the_decoded_whole_and_break_no_character(tokenizer, data):
    text = data.draw(st.text(alphabet=st.sampled_from("ab é😀漢 the\n"), max_size=30))
    ids = tokenizer.encode(text).tolist()
    stream, pieces = TextStream(tokenizer), []
    while ids:
        count = data.draw(st.integers(1, 3))
        pieces.append(stream.push(ids[:count]))
        ids = ids[count:]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == text


@given(ids=st.lists(st.integers(0, 260), max_size=40))
def test_streamed_garbage_still_joins_to_the_decoded_whole(tokenizer, ids):
    stream = TextStream(tokenizer)
    assert "".join(stream.push([i]) for i in ids) + stream.flush() == tokenizer.decode(ids)


def test_special_tokens_never_show_in_streamed_text(tokenizer):
    stream = TextStream(tokenizer)
    ids = tokenizer.encode("fox" + "".join(SPECIAL) + "dog").tolist()
    assert "".join(stream.push([i]) for i in ids) + stream.flush() == "foxdog"
