"""Folders of the maker are ordinary HF folders: transformers loads model, tokenizer and template, and agrees with us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.chat import template
from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.models.context import FullContext
from slipstream.models.load import load_model
from slipstream.models.maker import CHAT_TEMPLATE, PRESETS, make_model

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Compute a op b.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "op": {"type": "string"}, "b": {"type": "number"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL = {"id": "c0", "type": "function", "function": {"name": "calculate", "arguments": {"a": 12, "op": "<", "b": -3.5}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is 12 < -3.5? Naïve ☃"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, {**CALL, "id": "c1"}]},
    {"role": "tool", "tool_call_id": "c0", "content": "false"},
    {"role": "tool", "tool_call_id": "c1", "content": "false"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c0", "content": "false"},
    {"role": "assistant", "content": "No."},
]


def corpus(count: int = 50) -> list[str]:
    text = template.render(CHAT_TEMPLATE, {"messages": MESSAGES, "tools": TOOLS, "add_generation_prompt": False})
    return [text.replace("12", str(i)) for i in range(count)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "model"
    make_model(folder, "tiny-moe", corpus(), seed=3)
    return folder


@pytest.mark.parametrize("preset", PRESETS)
def test_a_made_model_gives_the_same_logits_in_transformers(preset: str, tmp_path: Path) -> None:
    import transformers

    transformers.logging.disable_progress_bar()
    small = {} if preset.startswith("tiny") else {"num_hidden_layers": 2}
    spec = make_model(tmp_path / "m", preset, corpus(), seed=1, **small)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="eager")
    biases = sum(buffer.numel() for name, buffer in theirs.named_buffers() if name.endswith("correction_bias"))
    assert theirs.num_parameters() + biases == spec.num_params
    assert tuple(theirs.generation_config.eos_token_id) == spec.eos_ids
    ids_T = torch.arange(40) % spec.vocab_size
    ours = load_model(tmp_path / "m")
    with torch.no_grad():
        logits = ours.logits(ours(ids_T, torch.arange(40), FullContext([0, 40])))
        torch.testing.assert_close(logits, theirs(ids_T[None]).logits[0], atol=1e-5, rtol=0)


def test_transformers_tokenizes_and_renders_as_we_do(made: Path) -> None:
    import transformers

    theirs, ours = transformers.AutoTokenizer.from_pretrained(made), ChatTokenizer.load(made)
    for messages, tools in ((MESSAGES, TOOLS), (MESSAGES[1:2], None), (MESSAGES[1:], TOOLS), (MESSAGES[:2], None)):
        text = ours.render(messages, tools or ())
        plain = template.plain_messages(messages)
        assert theirs.apply_chat_template(plain, tools=tools, tokenize=False, add_generation_prompt=True) == text
        assert theirs(text)["input_ids"] == ours.encode(text).tolist()
        assert theirs.decode(ours.encode(text)) == text
    assert {theirs.eos_token_id, theirs.pad_token_id} == set(ours.eos_ids)
    assert len(theirs) == ours.vocab_size


def test_tool_markers_survive_decoding_without_special_tokens(made: Path) -> None:
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(made)
    text = "<tool_call>\n{}\n</tool_call><|im_end|>"
    assert theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True) == "<tool_call>\n{}\n</tool_call>"
