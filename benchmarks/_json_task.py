"""The task of `benchmarks.rl_vs_trl`: write a chain of operations as JSON. One turn and no tools, so that any trainer can play it.

    user       37*5-12
    assistant  [{"n": 37}, {"op": "*", "n": 5}, {"op": "-", "n": 12}]

Answers differ in length as those of language models do: a chain of k operations is drawn with probability proportional to 1/k, so most are
short and the longest of a batch is a few times the mean.

A noisy demonstration of the warm-up exchanges the first two numbers. With more than half of them noisy, the warmed-up policy knows the form
and has both orders in it, but prefers the wrong one: what RL has to find is which is wanted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from slipstream.envs.base import Env, draw_task
from slipstream.types import Task

SYMBOLS = "+-*"


class JsonChain(Env):
    """Up to `max_steps` operations on numbers up to `max_operand`; reward 1 for exactly the wanted text, else 0."""

    def __init__(self, seed: int = 0, max_steps: int = 8, max_operand: int = 99, num_train: int = 20_000, num_eval: int = 512):
        super().__init__(seed)
        self.max_operand, self._sizes = max_operand, {"train": num_train, "eval": num_eval}
        weight_K = 1 / np.arange(1, max_steps + 1)
        self._chance_K = weight_K / weight_K.sum()

    def num_tasks(self, split: str) -> int:
        return self._sizes[split]

    def task(self, split: str, index: int) -> Task:
        numbers, symbols = draw_task(self.seed, split, index, make=self._draw, key=str)
        question = str(numbers[0]) + "".join(f"{symbol}{number}" for symbol, number in zip(symbols, numbers[1:], strict=True))
        payload = {"question": question, "numbers": numbers, "symbols": symbols, "answer": as_json(numbers, symbols)}
        return Task(f"{self.name}/{split}/{index}", self.name, index, payload)

    async def prompt(self, task: Task) -> list[dict]:
        return [{"role": "user", "content": task.payload["question"]}]

    async def score(self, task: Task, messages: Sequence[dict]) -> float:
        return float(messages[-1]["role"] == "assistant" and messages[-1]["content"].strip() == task.payload["answer"])

    def demonstration(self, task: Task, rng: np.random.Generator, noise: float = 0.0) -> list[dict]:
        first, second, *rest = task.payload["numbers"]
        numbers = [second, first, *rest] if rng.random() < noise else [first, second, *rest]
        answer = as_json(numbers, task.payload["symbols"])
        return [{"role": "user", "content": task.payload["question"]}, {"role": "assistant", "content": answer}]

    def _draw(self, rng: np.random.Generator) -> tuple[list[int], str]:
        steps = int(rng.choice(len(self._chance_K), p=self._chance_K)) + 1
        numbers = rng.integers(1, self.max_operand + 1, size=steps + 1).tolist()
        return numbers, "".join(SYMBOLS[i] for i in rng.integers(len(SYMBOLS), size=steps))


def as_json(numbers: Sequence[int], symbols: str) -> str:
    steps = [{"op": symbol, "n": number} for symbol, number in zip(symbols, numbers[1:], strict=True)]
    return json.dumps([{"n": numbers[0]}, *steps])
