"""`slipstream make-model`: a small model whose tokenizer has seen what it will have to say."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from slipstream.config.envs import EnvConfig
from slipstream.envs.base import load_env
from slipstream.models.maker import make_model

CORPUS_TASKS = 2000
"""Demonstrations per environment that the tokenizer is trained on."""


def make(folder: Path, preset: str, envs: Sequence[str], seed: int) -> str:
    """Make the model; returns a line that says what was made. Raises ConfigError for an unknown preset or environment."""
    spec = make_model(folder, preset, list(corpus(envs, seed)), seed)
    return f"made {folder}: {preset}, {spec.num_layers} layers, hidden {spec.hidden}, vocabulary {spec.vocab_size}"


def corpus(envs: Sequence[str], seed: int) -> Iterator[str]:
    """Every message of the environments' demonstrations, as text."""
    for name in envs:
        env = load_env(EnvConfig(id=name), seed)
        rng = random.Random(seed)
        for index in range(min(CORPUS_TASKS, env.num_tasks("train"))):
            for message in env.demonstration(env.task("train", index), rng):
                yield message_text(message)


def message_text(message: dict) -> str:
    """What a chat template would show of one message: content and tool calls."""
    calls = [f'{{"name": "{c["function"]["name"]}", "arguments": {c["function"]["arguments"]}}}' for c in message.get("tool_calls") or ()]
    return "\n".join([message.get("content") or "", *calls])
