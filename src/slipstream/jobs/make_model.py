"""`slipstream make-model`: a small model whose tokenizer has seen what it will have to say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from slipstream.chat.template import plain_messages, render
from slipstream.config.envs import EnvConfig
from slipstream.envs.base import count_tasks, load_env
from slipstream.models.maker import CHAT_TEMPLATE, make_model

CORPUS_TASKS = 1000
"""Demonstrations per environment that the tokenizer is trained on."""


def make(folder: Path, preset: str, envs: Sequence[str], seed: int) -> str:
    """Make the model; returns a line that says what was made. Raises ConfigError for an unknown preset or environment."""
    spec = make_model(folder, preset, list(corpus(envs, seed)), seed)
    return f"made {folder}: {preset}, {spec.num_layers} layers, hidden {spec.hidden}, vocabulary {spec.vocab_size}"


def corpus(envs: Sequence[str], seed: int) -> Iterator[str]:
    """The environments' demonstrations as whole conversations, rendered with the template that the model will have."""
    for name in envs:
        env = load_env(EnvConfig(id=name), seed)
        rng = np.random.default_rng(seed)
        for index in range(min(CORPUS_TASKS, count_tasks(env, "train"))):
            messages = plain_messages(env.demonstration(env.task("train", index), rng))
            yield render(CHAT_TEMPLATE, {"messages": messages, "tools": env.tools or None, "add_generation_prompt": False})
