"""The maker: template, tokenizer, presets, determinism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.chat import template
from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.errors import ConfigError, ModelError
from slipstream.models.maker import CHAT_TEMPLATE, CONTROL_TOKENS, TOOL_TOKENS, make_model, train_tokenizer
from slipstream.models.spec import ModelSpec

CALL = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 22}}}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}},
    {"type": "function", "function": {"name": "now"}},
]
CORPUS = [f'<|im_start|>user\nAdd {i} and {i + 7}.<|im_end|>\n{{"name": "add", "arguments": {{"a": {i}, "b": 7}}}}' for i in range(60)]


def render(messages: list[dict[str, Any]], tools: Any = None, add_generation_prompt: bool = False) -> str:
    return template.render(CHAT_TEMPLATE, {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt})


def test_the_template_writes_chatml_with_hermes_tool_calls_and_short_signatures() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 22?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c0", "content": "23"},
        {"role": "assistant", "content": "23"},
    ]
    assert render(messages, TOOLS) == (
        "<|im_start|>system\nBe brief.\nTools: add(a, b) now()<|im_end|>\n"
        "<|im_start|>user\n1 + 22?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 22}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n23\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n23<|im_end|>\n"
    )


def test_neighbouring_tool_results_share_a_turn_and_calls_follow_content_on_a_new_line() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "Both.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "x"},
        {"role": "tool", "content": [{"type": "text", "text": "y"}]},
    ]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 22}}\n</tool_call>'
    results = "<tool_response>\nx\n</tool_response>\n<tool_response>\ny\n</tool_response>"
    assert render(messages) == f"<|im_start|>assistant\nBoth.\n{call}\n{call}<|im_end|>\n<|im_start|>user\n{results}<|im_end|>\n"


def test_each_turn_of_the_template_extends_the_text_before_it() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1 + 22?"}]
    prompt = render(messages, TOOLS, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>assistant\n")
    messages += [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "23"}]
    reply = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 22}}\n</tool_call><|im_end|>'
    assert render(messages, TOOLS, add_generation_prompt=True).startswith(prompt + reply)


def test_an_unknown_role_is_refused_by_the_template() -> None:
    with pytest.raises(Exception, match="not wizard"):
        render([{"role": "wizard", "content": "x"}])


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
@pytest.mark.parametrize("split", ["phrases", "words"])
def test_any_text_survives_the_tokenizer(split: str, text: str) -> None:
    tokenizer = _TOKENIZERS.setdefault(split, train_tokenizer(CORPUS, 330, split)) if split not in _TOKENIZERS else _TOKENIZERS[split]
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


_TOKENIZERS: dict[str, Any] = {}


def test_digits_and_line_ends_are_single_tokens_and_merges_cross_spaces_only_in_phrases() -> None:
    phrases, words = train_tokenizer(CORPUS, 400, "phrases"), train_tokenizer(CORPUS, 400, "words")
    vocabulary = [phrases.decode([i], skip_special_tokens=False) for i in range(phrases.get_vocab_size())]
    for piece in vocabulary:
        if piece not in (*CONTROL_TOKENS, *TOOL_TOKENS):
            assert len(piece) == 1 or not any(c.isdigit() or c == "\n" for c in piece)
    assert '{"name": "add", "arguments": {"a": ' in vocabulary
    assert len(words.encode(CORPUS[0]).ids) > 1.5 * len(phrases.encode(CORPUS[0]).ids)


def test_special_tokens_in_the_corpus_are_never_learned_as_text() -> None:
    tokenizer = train_tokenizer(["<|im_start|>user"] * 50, 400)
    assert [tokenizer.token_to_id(token) for token in (*CONTROL_TOKENS, *TOOL_TOKENS)] == list(range(7))
    assert not [piece for piece in tokenizer.get_vocab() if "im_" in piece and piece not in CONTROL_TOKENS]


def test_the_same_arguments_give_the_same_bytes_and_another_seed_other_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        make_model(tmp_path / name, "tiny-moe", CORPUS, seed=seed)
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    assert (tmp_path / "a" / "model.safetensors").read_bytes() != (tmp_path / "c" / "model.safetensors").read_bytes()


def test_overrides_reach_the_model_and_an_earlier_folder_is_replaced(tmp_path: Path) -> None:
    make_model(tmp_path / "m", "tiny-moe", CORPUS)
    (tmp_path / "m" / "stale.txt").write_text("x")
    made = make_model(tmp_path / "m", "tiny-moe", CORPUS, hidden_size=96, mlp_only_layers=[0], vocab_size=300)
    assert made == ModelSpec.from_folder(tmp_path / "m")
    assert (made.hidden, made.moe_layers, made.vocab_size) == (96, (1, 2, 3), 300)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]
    assert not (tmp_path / "m" / "stale.txt").exists()
    assert ChatTokenizer.load(tmp_path / "m").eos_ids == set(made.eos_ids)


def test_the_quickstart_model_has_four_moe_layers_of_sixteen_experts_top_two(tmp_path: Path) -> None:
    spec = make_model(tmp_path / "m", "tiny-moe", CORPUS)
    assert (len(spec.moe_layers), spec.num_experts, spec.top_k) == (4, 16, 2)
    assert json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tiny-moe"):
        make_model(tmp_path / "m", "tiny", CORPUS)
    with pytest.raises(ConfigError, match="'hidden_size'"):
        make_model(tmp_path / "m", "tiny-moe", CORPUS, hiden_size=3)
    with pytest.raises(ConfigError, match="phrases, words"):
        make_model(tmp_path / "m", "tiny-moe", CORPUS, split="letters")
    with pytest.raises(ConfigError, match="263"):
        make_model(tmp_path / "m", "tiny-moe", CORPUS, vocab_size=100)
    with pytest.raises(ModelError, match="num_key_value_heads = 3"):
        make_model(tmp_path / "m", "tiny-moe", CORPUS, num_key_value_heads=3)
    assert not list(tmp_path.iterdir())
