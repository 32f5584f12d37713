"""What an environment is: tasks, how to play one, how to score it; and how a run file names one.

An environment is one class in one file. `Env.play` is the usual conversation; override `prompt` and `score` for one turn, also
`respond` for several, or `play` itself for anything else. Environments see chat messages only: no token, version or engine.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import numpy as np
import xxhash

from slipstream import ports
from slipstream.chat.recording import TruncatedError
from slipstream.config.envs import EnvConfig
from slipstream.envs.hooks import run_hook
from slipstream.errors import ConfigError, EnvError, RewardError, StateError
from slipstream.ports import Policy
from slipstream.types import Task

Messages = Sequence[dict]
"""A conversation in OpenAI's chat format."""
Score = float | Mapping[str, float]
"""A reward, or named parts with the reward under the key 'reward'."""

BUILT_IN = {
    "reverse-text": "slipstream.envs.reverse_text:ReverseText",
    "constraints": "slipstream.envs.constraints:Constraints",
    "calculator": "slipstream.envs.calculator:Calculator",
    "calculator-agent": "slipstream.envs.calculator_agent:CalculatorAgent",
}
"""Name in a run file -> 'package.module:Class'."""


_PLAIN: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
"""Annotation of an argument -> types of a run file's value that fit it. Other annotations are the class's own business."""


@dataclass(slots=True)
class Played:
    """The conversation of one rollout and its score."""

    messages: Sequence[dict]
    reward: float
    reward_parts: dict[str, float] = field(default_factory=dict)


class Env:
    """Base class of environments. Hooks may be `def` (run in a thread, under a deadline) or `async def` (run on the loop).

    The constructor takes `seed` and, by keyword, whatever `args` of the run file should set.
    """

    name: str = ""
    """Label in the run file; `load_env` sets it."""
    tools: Sequence[dict] = ()
    """OpenAI tool specifications that the chat template shows to the policy."""
    hook_timeout_s: float = 60.0
    """Deadline of one hook; `load_env` sets it to the run file's `turn_timeout_s`."""
    rollout_timeout_s: float = 300.0
    """Deadline of a whole rollout, from the run file; only what plays one in a single call needs it."""

    def __init__(self, seed: int = 0):
        self.seed = seed

    def num_tasks(self, split: str) -> int:
        """Size of a split ('train' or 'eval')."""
        self._missing("num_tasks(self, split) -> int")

    def task(self, split: str, index: int) -> Task:
        """Deterministic in (seed, split, index)."""
        self._missing("task(self, split, index) -> Task")

    def task_from_prompt(self, text: str) -> Task:
        """A task that a user typed, to try a policy by hand. Raises ConfigError: not a task of this environment."""
        raise ConfigError(f"environment {self.name!r} plays its own tasks only: leave it out, or add a method task_from_prompt(self, text)")

    def prompt(self, task: Task) -> Messages | Awaitable[Messages]:
        """The messages that open the conversation."""
        self._missing("prompt(self, task) -> list of messages")

    def respond(self, task: Task, messages: Messages) -> Messages | Awaitable[Messages]:
        """The environment's answer to the last message of the policy; empty (the default): the conversation is over."""
        return ()

    def score(self, task: Task, messages: Messages) -> Score | Awaitable[Score]:
        """The reward, or named parts with the reward under the key 'reward'. Also called on truncated conversations."""
        self._missing("score(self, task, messages) -> float")

    def demonstration(self, task: Task, rng: np.random.Generator, noise: float = 0.0) -> list[dict]:
        """A conversation that solves the task (prompt included), or with probability `noise` one that fails plausibly."""
        raise ConfigError(f"environment {self.name!r} has no demonstrations: add a method demonstration(self, task, rng, noise) to it")

    async def play(self, task: Task, policy: Policy) -> Played:
        """Prompt, then reply and respond in turn until the environment has nothing to add or the policy is truncated; then score."""
        messages = [dict(message) for message in await self.hook(self.prompt, task)]
        try:
            while True:
                messages.append(await policy.reply(messages, self.tools))
                answer = await self.hook(self.respond, task, messages) if type(self).respond is not Env.respond else ()
                if not answer:
                    break
                messages.extend(answer)
        except TruncatedError:
            pass  # what there is gets graded; the player records the outcome
        return await self.graded(task, messages)

    async def graded(self, task: Task, messages: Sequence[dict]) -> Played:
        """`messages` with their score. Raises RewardError: the score raised, hung, or is not a finite number."""
        try:
            score = await self.hook(self.score, task, messages)
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(f"environment {self.name!r}, task {task.id}: {one_line(error)}") from error
        return self.checked(task, messages, score)

    def checked(self, task: Task, messages: Sequence[dict], score: Any) -> Played:
        """`messages` with this score. Raises RewardError: it is not a finite number, or a part of it is not."""
        parts = dict(score) if isinstance(score, Mapping) else {"reward": score}
        checked = {key: check_reward(value, self.name, task, key) for key, value in parts.items()}
        if "reward" not in checked:
            raise RewardError(f"environment {self.name!r}, task {task.id}: score has no key 'reward' (keys: {sorted(checked)})")
        return Played(messages, checked.pop("reward"), checked)

    async def hook(self, fn: Any, *args: Any) -> Any:
        """Call one of this environment's own functions under `hook_timeout_s`."""
        return await run_hook(fn, *args, timeout=self.hook_timeout_s)

    def _missing(self, signature: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} needs a method {signature}")


def one_line(error: BaseException) -> str:
    """Class and message in one line, for logs and rollouts."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def check_reward(value: Any, env: str, task: Task, part: str = "reward") -> float:
    """`value` as a float. Raises RewardError naming environment and task when it is not a finite number."""
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise RewardError(f"environment {env!r}, task {task.id}: {part} is {value!r}; expected a finite number")


def load_env(config: EnvConfig, seed: int) -> Env:
    """Build the environment that `config.id` names, with `config.args`.

    Raises ConfigError: no such environment, not an Env, arguments that its class does not take or refuses.
    """
    cls = _find(config.id)
    try:
        inspect.signature(cls).bind(seed=seed, **config.args)
    except TypeError as error:
        known = [name for name in inspect.signature(cls).parameters if name != "seed"]
        raise ConfigError(
            f"envs[{config.label}].args = {config.args!r}: {error}. {cls.__name__} takes: {', '.join(known) or 'none'}"
        ) from None
    for name, value in config.args.items():
        kind = _kind(cls, name)
        if kind in _PLAIN and type(value) not in _PLAIN[kind]:
            raise ConfigError(f"envs[{config.label}].args.{name} = {value!r}: expected {kind}")
    try:
        env = cls(seed=seed, **config.args)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"envs[{config.label}].args = {config.args!r}: {error}") from error
    env.name, env.hook_timeout_s, env.rollout_timeout_s = config.label, config.turn_timeout_s, config.rollout_timeout_s
    return env


def count_tasks(env: ports.Env, split: str) -> int:
    """Size of a split. Raises EnvError where the environment raises anything or has no tasks: without them there is no run."""
    try:
        count = env.num_tasks(split)
    except Exception as error:
        raise EnvError(f"environment {env.name!r}: num_tasks({split!r}) raised {one_line(error)}") from error
    if count < 1:
        raise EnvError(f"environment {env.name!r}: num_tasks({split!r}) is {count}; expected at least 1")
    return count


def _find(id_: str) -> type[Env]:
    path = BUILT_IN.get(id_, id_)
    module_name, colon, class_name = path.partition(":")
    if not colon:
        near = difflib.get_close_matches(id_, BUILT_IN, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"environment {id_!r}: {hint}Built in: {', '.join(BUILT_IN)}; your own: 'package.module:Class'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"environment {id_!r}: {error}. Put its folder on PYTHONPATH or install its package") from error
    cls = getattr(module, class_name, None)
    if cls is None:
        raise ConfigError(f"environment {id_!r}: module {module_name!r} ({module.__file__}) has no class {class_name!r}")
    if not (isinstance(cls, type) and issubclass(cls, Env)):
        raise ConfigError(f"environment {id_!r}: {class_name} is not an environment; write `class {class_name}(slipstream.envs.base.Env)`")
    return cls


def _kind(cls: type[Env], argument: str) -> str:
    """Name of an argument's annotation; '' where it has none, or is taken by **kwargs."""
    parameter = inspect.signature(cls).parameters.get(argument)
    annotation = None if parameter is None else parameter.annotation
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")


# ---- seeded tasks with a held-out split ----

_HELD_OUT = 8
"""One task in this many belongs to the eval split."""
_ATTEMPTS = 10_000

Drawn = TypeVar("Drawn")


def draw_task(seed: int, split: str, index: int, make: Callable[[np.random.Generator], Drawn], key: Callable[[Drawn], str]) -> Drawn:
    """Task `index` of a split, drawn by `make`: deterministic, and no task of one split ever appears in the other.

    The hash of `key(task)` decides which split a task belongs to, so the splits are disjoint however many tasks are drawn,
    and whatever the seeds: a warm-up with another seed never saw a held-out task either.
    Raises ConfigError when `make` has too few different tasks for both splits.
    """
    if split not in ("train", "eval"):
        raise StateError(f"split {split!r}: expected 'train' or 'eval'")
    rng = np.random.default_rng((seed, split == "eval", index))
    task = make(rng)
    for _ in range(_ATTEMPTS):
        if (xxhash.xxh3_64_intdigest(key(task).encode()) % _HELD_OUT == 0) == (split == "eval"):
            return task
        task = make(rng)
    raise ConfigError(
        f"no task for split {split!r} in {_ATTEMPTS} draws (the last: {key(task)!r}): "
        "there are too few different tasks; widen the environment's args"
    )
