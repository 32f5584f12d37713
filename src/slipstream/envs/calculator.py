"""calculator: arithmetic by real tool calls over several turns. The tool takes two integers, so every question needs dependent calls.

    user       12+7-5
    assistant  <tool_call> calculator {"a": 12, "op": "+", "b": 7} </tool_call>
    tool       19
    assistant  <tool_call> calculator {"a": 19, "op": "-", "b": 5} </tool_call>
    tool       14
    assistant  14

Prompts and results are a few tokens, so that a model of a million parameters can learn to copy operands and to chain the calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.envs.base import Env, draw_task
from slipstream.errors import ConfigError
from slipstream.types import Task

_APPLY = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
_ANSWER = re.compile(r"(?:answer\s*[:=]\s*)?(-?\d+)\.?", re.IGNORECASE)
_MISTAKES = ("digit", "order", "early")

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes a op b for two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "op": {"type": "string", "enum": ["+", "-", "*"]}, "b": {"type": "integer"}},
            "required": ["a", "op", "b"],
        },
    },
}


class Calculator(Env):
    """Chains of `num_steps` operations; reward 1 for the right answer reached through the tool, else 0."""

    def __init__(
        self,
        seed: int = 0,
        num_steps: int = 2,
        max_operand: int = 99,
        operations: str = "+-",
        require_calls: bool = True,
        show_tools: bool = True,
        num_train: int = 20_000,
        num_eval: int = 512,
        mistakes: Sequence[str] = _MISTAKES,
    ):
        """Operands are 1 to `max_operand`. `require_calls`: the right answer counts only when the tool returned every intermediate value.
        `show_tools`: let the template show the tool (7 tokens in the models that slipstream makes, some 200 in others; a model that was
        warmed up on the calls can do without).
        `mistakes`: kinds of wrong demonstrations ('digit': a wrong digit in an operand, 'order': the last operation first, 'early':
        answers after the first call)."""
        super().__init__(seed)
        _check("num_steps", num_steps, num_steps >= 2, "at least 2, so that calls depend on one another")
        _check("max_operand", max_operand, max_operand >= 2, "at least 2")
        _check("operations", operations, bool(operations) and set(operations) <= set(_APPLY), "some of '+-*'")
        _check("mistakes", mistakes, bool(mistakes) and set(mistakes) <= set(_MISTAKES), f"some of {list(_MISTAKES)}")
        self.num_steps, self.max_operand, self.operations = num_steps, max_operand, operations
        self.require_calls, self.mistakes = require_calls, tuple(mistakes)
        self.tools = (TOOL,) if show_tools else ()
        self._sizes = {"train": num_train, "eval": num_eval}

    def num_tasks(self, split: str) -> int:
        return self._sizes[split]

    def task(self, split: str, index: int) -> Task:
        numbers, operations = draw_task(self.seed, split, index, make=self._draw, key=lambda drawn: question(*drawn))
        return self._task(f"{self.name}/{split}/{index}", index, numbers, operations)

    def task_from_prompt(self, text: str) -> Task:
        """A question such as '12+7-5' or '(12+7)*5': a chain that is worked off from left to right."""
        return self._task(f"{self.name}/prompt/0", 0, *parse_question(text))

    async def prompt(self, task: Task) -> list[dict]:
        return [{"role": "user", "content": task.payload["question"]}]

    async def respond(self, task: Task, messages: Sequence[dict]) -> list[dict]:
        """The result of each call in the last message; a call that the template could not read gets an error too."""
        last = messages[-1]
        calls = last.get("tool_calls") or ()
        if not calls and "<tool_call>" in last["content"]:
            return [{"role": "tool", "content": "error"}]
        return [{"role": "tool", "tool_call_id": call["id"], "content": calculate(call["function"])} for call in calls]

    async def score(self, task: Task, messages: Sequence[dict]) -> dict[str, float]:
        values = intermediate_values(task.payload["numbers"], task.payload["operations"])
        last = messages[-1]
        said = _ANSWER.fullmatch(last["content"].strip()) if last["role"] == "assistant" and not last.get("tool_calls") else None
        correct = said is not None and int(said.group(1)) == values[-1]
        results = [message["content"] for message in messages if message["role"] == "tool"]
        followed = _in_order([str(value) for value in values], results)
        reward = correct and (followed or not self.require_calls)
        return {"reward": float(reward), "correct": float(correct), "followed": float(followed), "calls": float(len(results))}

    def demonstration(self, task: Task, rng: np.random.Generator, noise: float = 0.0) -> list[dict]:
        """The calls in order and the answer; with probability `noise` one mistake, with true results for the calls that it makes."""
        numbers, operations = list(task.payload["numbers"]), list(task.payload["operations"])
        messages: list[dict] = [{"role": "user", "content": task.payload["question"]}]
        mistake = self.mistakes[rng.integers(len(self.mistakes))] if rng.random() < noise else ""
        if mistake == "digit":
            place = int(rng.integers(len(numbers)))
            numbers[place] = _wrong_digit(numbers[place], rng)
        if mistake == "order":
            numbers, operations = [*numbers[1:], numbers[0]], [*operations[1:], operations[0]]
        if mistake == "early":
            numbers, operations = numbers[:2], operations[:1]
        result = numbers[0]
        for i, (operation, number) in enumerate(zip(operations, numbers[1:], strict=True)):
            call = _call(f"call_{i}_0", result, operation, number)
            result = _APPLY[operation](result, number)
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
        return [*messages, {"role": "assistant", "content": str(result)}]

    def _task(self, id_: str, index: int, numbers: list[int], operations: list[str]) -> Task:
        payload = {"question": question(numbers, operations), "numbers": numbers, "operations": operations}
        return Task(id_, self.name, index, payload)

    def _draw(self, rng: np.random.Generator) -> tuple[list[int], list[str]]:
        numbers = rng.integers(1, self.max_operand + 1, size=self.num_steps + 1).tolist()
        return numbers, [self.operations[i] for i in rng.integers(len(self.operations), size=self.num_steps)]


def question(numbers: Sequence[int], operations: Sequence[str]) -> str:
    """The chain, applied from left to right, in ordinary notation: brackets only where precedence needs them."""
    text, weak = str(numbers[0]), False
    for operation, number in zip(operations, numbers[1:], strict=True):
        if operation == "*" and weak:
            text = f"({text})"
        text, weak = f"{text}{operation}{number}", operation != "*"
    return text


def parse_question(text: str) -> tuple[list[int], list[str]]:
    """The inverse of `question`. Raises ConfigError: not such a chain."""
    plain = "".join(text.split())
    numbers, operations = [int(n) for n in re.findall(r"\d+", plain)], re.findall(r"[-+*]", plain)
    if len(operations) < 1 or len(numbers) != len(operations) + 1 or question(numbers, operations) != plain:
        raise ConfigError(f"question {text!r}: expected a chain that is worked off from left to right, such as 12+7-5 or (12+7)*5")
    return numbers, operations


def intermediate_values(numbers: Sequence[int], operations: Sequence[str]) -> list[int]:
    """The result after each operation; the last one is the answer."""
    values, value = [], numbers[0]
    for operation, number in zip(operations, numbers[1:], strict=True):
        value = _APPLY[operation](value, number)
        values.append(value)
    return values


def calculate(function: dict[str, Any]) -> str:
    """What the tool returns for a call {name, arguments: JSON text}: the result, or 'error'."""
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return "error"
    if function["name"] != "calculator" or not isinstance(arguments, dict) or set(arguments) != {"a", "op", "b"}:
        return "error"
    a, operation, b = arguments["a"], arguments["op"], arguments["b"]
    if type(a) is not int or type(b) is not int or operation not in ("+", "-", "*") or max(abs(a), abs(b)) > 10**12:
        return "error"
    return str(_APPLY[operation](a, b))


def _call(id_: str, a: int, operation: str, b: int) -> dict[str, Any]:
    arguments = json.dumps({"a": a, "op": operation, "b": b})
    return {"id": id_, "type": "function", "function": {"name": "calculator", "arguments": arguments}}


def _wrong_digit(number: int, rng: np.random.Generator) -> int:
    """`number` with one digit replaced by another one (a leading digit never by 0)."""
    digits = list(str(number))
    place = int(rng.integers(len(digits)))
    others = [d for d in "0123456789" if d != digits[place] and not (d == "0" and place == 0)]
    digits[place] = others[rng.integers(len(others))]
    return int("".join(digits))


def _in_order(wanted: Sequence[str], found: Sequence[str]) -> bool:
    """Whether `wanted` is a subsequence of `found`."""
    rest = iter(found)
    return all(value in rest for value in wanted)


def _check(name: str, value: object, fits: bool, expected: str) -> None:
    if not fits:
        raise ValueError(f"{name} = {value!r}: expected {expected}")
