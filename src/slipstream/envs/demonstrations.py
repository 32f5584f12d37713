"""Demonstrations of an environment as token sequences for supervised warm-up: the very tokens that a rollout of them would have."""

from __future__ import annotations

import numpy as np

from slipstream.chat.branches import Branches
from slipstream.chat.prefix import TurnTokens
from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.envs.base import Env, count_tasks
from slipstream.types import BoolArray, IntArray


def demonstration_samples(env: Env, tokenizer: ChatTokenizer, num: int, seed: int, noise: float = 0.0) -> list[tuple[IntArray, BoolArray]]:
    """`num` demonstrations of distinct training tasks (as far as there are so many) as (tokens_T, loss_mask_T).

    The mask is True for what the assistant says, its end-of-turn token included. `noise` is the probability that a
    demonstration is wrong. Deterministic in `seed`.
    """
    rng = np.random.default_rng(seed)
    turn_tokens = TurnTokens(tokenizer)
    size = count_tasks(env, "train")
    order = np.concatenate([rng.permutation(size) for _ in range(-(-num // size))])[:num]
    return [tokenize(env.demonstration(env.task("train", int(i)), rng, noise), env, turn_tokens) for i in order]


def tokenize(messages: list[dict], env: Env, turn_tokens: TurnTokens) -> tuple[IntArray, BoolArray]:
    """One finished conversation as (tokens_T, loss_mask_T), up to the end of its last assistant message."""
    branches = Branches(turn_tokens)
    tokens_T, mask_T = np.zeros(0, np.int32), np.zeros(0, np.bool_)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = branches.prompt(messages[:i], env.tools)
        prompt_T, reply_T = prompt.tokens_T, turn_tokens.reply(message)
        branches.add(prompt, reply_T, message)
        sampled_T = np.concatenate([np.zeros(len(prompt_T), np.bool_), np.ones(len(reply_T), np.bool_)])
        sampled_T[: len(mask_T)] = mask_T
        tokens_T, mask_T = np.concatenate([prompt_T, reply_T]), sampled_T
    return tokens_T, mask_T
