"""A small ChatML tokenizer trained on calculator conversations, and an engine that says what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import slipstream.models
from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.types import Completion, GenerateRequest, Versions

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

TEMPLATE = (Path(slipstream.models.__path__[0]) / "chatml.jinja").read_text()
"""What the models that slipstream makes use."""


def write_tokenizer(folder: Path, corpus: Iterable[str] = (), template: str = TEMPLATE) -> ChatTokenizer:
    """A byte-level BPE tokenizer with single digits and the template above, loaded from `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    lines = ['user assistant system {"name": "calculator", "arguments": {"a": 1, "op": "+", "b": 2}}', *corpus] * 4
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens(SPECIAL)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}))
    return ChatTokenizer.load(folder)


class ScriptedEngine:
    """Answers the requests of a rollout with the given texts in turn. An entry may be an exception, or make the Completion."""

    def __init__(self, tokenizer: ChatTokenizer, *script: str | Exception | Callable[[GenerateRequest], Completion], version: int = 0):
        self.tokenizer = tokenizer
        self.script = list(script)
        self.version = version
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        step = self.script[len(self.requests) - 1]
        if isinstance(step, Exception):
            raise step
        if callable(step):
            return step(request)
        return completion(request, self.tokenizer.encode(step), ((self.version, None),))

    async def prepare(self, version):
        raise NotImplementedError

    async def commit(self, number):
        raise NotImplementedError

    async def abort(self, request_ids):
        raise NotImplementedError

    async def state(self):
        raise NotImplementedError


class HangingEngine(ScriptedEngine):
    """Never answers."""

    def __init__(self, tokenizer: ChatTokenizer):
        super().__init__(tokenizer)
        self.asked = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


def completion(
    request: GenerateRequest, tokens: np.ndarray | list[int], versions=((0, None),), finish_reason: str | None = None
) -> Completion:
    """These tokens, cut at max_tokens, with made-up logprobs; one version segment may leave its length open."""
    tokens_N = np.asarray(tokens, np.int32)[: request.sampling.max_tokens]
    reason = finish_reason or ("length" if len(tokens_N) < len(tokens) else "stop")
    filled: Versions = tuple((v, len(tokens_N) if n is None else n) for v, n in versions)
    logprobs_N = -0.1 * np.arange(1, len(tokens_N) + 1, dtype=np.float32)
    return Completion(request.id, tokens_N, logprobs_N, filled, reason)  # type: ignore[arg-type]


def demonstration_script(messages: list[dict], tokenizer: ChatTokenizer) -> list[str]:
    """What an engine has to say to replay a demonstration."""
    user = {"role": "user", "content": "x"}
    start = len(tokenizer.render([user]))
    texts = [tokenizer.render([user, m], add_generation_prompt=False)[start:] for m in messages if m["role"] == "assistant"]
    return [text.removesuffix("\n") for text in texts]
