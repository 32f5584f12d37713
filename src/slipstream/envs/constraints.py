"""constraints: write about a topic under one to three verifiable instructions. One turn; for a real language model.

    Write about the sea in at least 8 words. Use lower case letters only. Use exactly 3 sentences.

The reward is the share of the instructions that are fulfilled, and 0 for a reply that is too short to be about anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.envs.base import Env, draw_task
from slipstream.envs.checks import INSTRUCTIONS, ask, fulfilled, words
from slipstream.types import Task

TOPICS = (
    *("the sea", "a garden in spring", "your favourite season", "a long train journey", "the history of bread", "city parks", "old maps"),
    *("how bees live", "a rainy afternoon", "the night sky", "learning to swim", "a mountain village", "good friends", "a busy market"),
    *(
        "the first snow",
        "a lost key",
        "how rivers form",
        "wind power",
        "a school library",
        "cooking soup",
        "lighthouses",
        "riding a bicycle",
    ),
    *("why we sleep", "a walk in the forest", "clocks and time", "the moon", "a small harbour", "making paper", "coffee", "street music"),
    *("the desert", "an old bridge", "planting trees", "winter birds", "a family dinner", "painting a wall", "the invention of the wheel"),
)
_WORDS = ("water", "light", "morning", "people", "quiet", "stone", "green", "travel", "simple", "often", "today", "world")
_PHRASES = ("that is all", "thank you for reading", "see you tomorrow", "and so it ends", "this is my view")
_KEYS = ("title", "summary", "mood", "place", "reason", "advice")


class Constraints(Env):
    """Generated prompts with verifiable instructions."""

    def __init__(
        self,
        seed: int = 0,
        kinds: Sequence[str] = tuple(INSTRUCTIONS),
        max_instructions: int = 3,
        min_words: int = 8,
        num_train: int = 20_000,
        num_eval: int = 512,
    ):
        """`kinds`: which instructions to ask for. `min_words`: shorter replies get reward 0 (an empty one would fulfil 'no commas')."""
        super().__init__(seed)
        unknown = sorted(set(kinds) - set(INSTRUCTIONS))
        if unknown or not kinds:
            raise ValueError(f"kinds = {list(kinds)}: unknown {unknown}; expected some of {list(INSTRUCTIONS)}")
        if not 1 <= max_instructions <= 3:
            raise ValueError(f"max_instructions = {max_instructions}: expected 1 to 3")
        self.kinds, self.max_instructions, self.min_words = tuple(kinds), max_instructions, min_words
        self._sizes = {"train": num_train, "eval": num_eval}

    def num_tasks(self, split: str) -> int:
        return self._sizes[split]

    def task(self, split: str, index: int) -> Task:
        payload = draw_task(self.seed, split, index, make=self._draw, key=lambda drawn: json.dumps(drawn, sort_keys=True))
        return Task(f"{self.name}/{split}/{index}", self.name, index, payload)

    async def prompt(self, task: Task) -> list[dict]:
        return [self._opening(task)]

    async def score(self, task: Task, messages: Sequence[dict]) -> dict[str, float]:
        reply = messages[-1]["content"].strip() if messages[-1]["role"] == "assistant" else ""
        entries = task.payload["instructions"]
        parts = {entry["kind"]: float(fulfilled(reply, entry["kind"], entry["parameters"])) for entry in entries}
        long_enough = len(words(reply)) >= self.min_words
        return {"reward": sum(parts.values()) / len(parts) if long_enough else 0.0, "long_enough": float(long_enough), **parts}

    def demonstration(self, task: Task, rng: np.random.Generator, noise: float = 0.0) -> list[dict]:
        """A plain text that fulfils every instruction; with probability `noise` one that ignores one of them."""
        entries = list(task.payload["instructions"])
        if rng.random() < noise:
            entries.pop(int(rng.integers(len(entries))))
        wanted = {entry["kind"]: entry["parameters"] for entry in entries}
        return [self._opening(task), {"role": "assistant", "content": _write(task.payload["topic"], wanted)}]

    def _opening(self, task: Task) -> dict:
        asked = [ask(entry["kind"], entry["parameters"]) for entry in task.payload["instructions"]]
        text = f"Write about {task.payload['topic']} in at least {self.min_words} words."
        return {"role": "user", "content": " ".join([text, *asked])}

    def _draw(self, rng: np.random.Generator) -> dict[str, Any]:
        count = int(rng.integers(1, self.max_instructions + 1))
        chosen: list[str] = []
        for i in rng.permutation(len(self.kinds)).tolist():
            kind = self.kinds[i]
            if len(chosen) < count and not INSTRUCTIONS[kind].excludes & set(chosen):
                chosen.append(kind)
        entries = [{"kind": kind, "parameters": _parameters(kind, rng)} for kind in chosen]
        return {"topic": TOPICS[rng.integers(len(TOPICS))], "instructions": entries}


def _parameters(kind: str, rng: np.random.Generator) -> dict[str, Any]:
    """Random parameters for a kind of instruction."""
    if kind in ("bullets", "sentences"):
        return {"n": int(rng.integers(2, 6))}
    if kind == "at_most":
        return {"n": int(rng.integers(8, 17)) * 5}
    if kind == "json_object":
        return {"keys": [_KEYS[i] for i in sorted(rng.permutation(len(_KEYS))[: rng.integers(2, 4)].tolist())]}
    if kind == "closing":
        return {"phrase": _PHRASES[rng.integers(len(_PHRASES))]}
    return {"word": _WORDS[rng.integers(len(_WORDS))]} if kind == "includes" else {}


def _write(topic: str, wanted: dict[str, dict[str, Any]]) -> str:
    """A text about the topic that fulfils the wanted instructions, and in its default form few others."""
    about = f"{'Well' if 'no_commas' in wanted else 'Well,'} there is a lot to say about {topic}"
    if "includes" in wanted:
        about += f" and the word {wanted['includes']['word']}"
    if "json_object" in wanted:
        text = json.dumps(dict.fromkeys(wanted["json_object"]["keys"], "One more thought") | {wanted["json_object"]["keys"][0]: about})
    elif "bullets" in wanted:
        text = "\n".join([f"- {about}", *["- One more thought"] * (wanted["bullets"]["n"] - 1)])
    else:
        text = " ".join([f"{about}.", *["Much more follows."] * (wanted.get("sentences", {"n": 6})["n"] - 1)])
    if "closing" in wanted:
        text += f"\n{wanted['closing']['phrase']}"
    if "all_caps" in wanted:
        return text.upper()
    return text.lower() if "lower_case" in wanted else text
