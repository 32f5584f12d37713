"""Text to token ids and back, and chats to prompts, for an ordinary HF model folder. Needs neither torch nor transformers.

Knows tokens and templates, not engines or models. Prompts are rendered by the folder's chat template, whose text holds the special
tokens; encoding parses them and adds none, so nothing is doubled (a template that writes BOS gets one BOS).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from slipstream.chat import template, tools
from slipstream.errors import ModelError
from slipstream.types import ChatMessage, IntArray

_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class ChatTokenizer:
    """The tokenizer and chat template of one model folder. Immutable; safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, templates: Mapping[str, str], named: Mapping[str, str], eos_ids: frozenset[int], folder: Path):
        self._tokenizer = tokenizer
        self._templates = templates
        self._named = named
        self._folder = folder
        added = tokenizer.get_added_tokens_decoder()
        self._hidden = frozenset(i for i, token in added.items() if token.special and token.content not in tools.MARKERS)
        self._eos_texts = tuple(text for i in sorted(eos_ids) if (text := tokenizer.id_to_token(i)))
        self._encode = lru_cache(maxsize=4096)(self._encode_uncached)
        self.eos_ids = eos_ids
        """Ids that end a reply: of generation_config.json (else config.json), and the tokenizer's own."""
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, folder: str | Path, need_template: bool = True) -> ChatTokenizer:
        """Read a model folder. `need_template=False` is for plain completions from a base model.

        Raises ModelError: tokenizer.json or the chat template is missing or broken.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.exists():
            raise ModelError(f"model folder {folder} has no tokenizer.json; save it with a fast tokenizer (save_pretrained writes one)")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception for everything
            raise ModelError(f"{file} does not load as a tokenizer: {error}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        named = _named_tokens(config, _read_json(folder / "special_tokens_map.json"))
        loaded = cls(tokenizer, template.read_templates(folder, config), named, _eos_ids(folder, tokenizer, named), folder)
        if need_template:
            loaded._template(tools=())
        return loaded

    def encode(self, text: str) -> IntArray:
        """Token ids; special tokens in the text are parsed, none are added. The array is read-only and may be shared."""
        # the rollouts of a group encode the same prompt, the turns of a rollout the same headers
        return self._encode(text) if len(text) <= 4096 else self._encode_uncached(text)

    def decode(self, ids: Sequence[int] | IntArray, skip_special: bool = False) -> str:
        """Text of these ids. `skip_special` leaves out special tokens except the tool-call markers, which `parse_reply` needs."""
        values = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if skip_special:
            values = [i for i in values if i not in self._hidden]
        return self._tokenizer.decode(values, skip_special_tokens=False)

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = (), add_generation_prompt: bool = True) -> str:
        """The conversation as the model's text.

        Raises ModelError: there is no chat template. RequestError: the template refuses these messages.
        """
        variables = {
            **self._named,
            "messages": template.plain_messages(messages),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return template.render(self._template(tools), variables)

    def prompt_ids(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> IntArray:
        """Ids of the rendered conversation, up to where the assistant's next message starts."""
        return self.encode(self.render(messages, tools))

    def parse_reply(self, text: str, id_prefix: str = "call") -> dict[str, Any]:
        """The assistant message of a decoded reply (`slipstream.chat.tools.parse_reply`), without its end-of-reply token."""
        for eos in self._eos_texts:
            text = text.removesuffix(eos)
        return tools.parse_reply(text, id_prefix)

    def _encode_uncached(self, text: str) -> IntArray:
        ids_T = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        ids_T.flags.writeable = False
        return ids_T

    def _template(self, tools: Sequence[Any]) -> str:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise ModelError(
                f"the tokenizer in {self._folder} has no chat template: neither chat_template.jinja nor chat_template in "
                "tokenizer_config.json; use an instruction-tuned model or add a template"
            )
        return self._templates["default"]


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{file} holds a {type(values).__name__}; expected an object")
    return values


def _named_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as text; files write them as text or as {"content": text}. The first file that has one wins."""
    named: dict[str, str] = {}
    for config in configs:
        for name in _NAMED_TOKENS:
            value = config.get(name)
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                named.setdefault(name, text)
    return named


def _eos_ids(folder: Path, tokenizer: Tokenizer, named: Mapping[str, str]) -> frozenset[int]:
    value = _read_json(folder / "generation_config.json").get("eos_token_id")
    if value is None:
        value = _read_json(folder / "config.json").get("eos_token_id")
    ids = {value} if isinstance(value, int) else set(value or ())
    own = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return frozenset(ids if own is None else ids | {own})
