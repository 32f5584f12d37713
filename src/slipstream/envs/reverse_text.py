"""reverse-text: write a text backwards. One turn; the smallest task on which a policy visibly learns."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np

from slipstream.envs.base import Env, draw_task
from slipstream.types import Task

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class ReverseText(Env):
    """Random lower-case words; reward 1 for the exact reversal."""

    def __init__(
        self,
        seed: int = 0,
        num_words: int = 2,
        word_len: int = 4,
        partial_credit: bool = False,
        instruction: str = "reverse: ",
        num_train: int = 20_000,
        num_eval: int = 512,
    ):
        """Words have 2 to `word_len` letters. `partial_credit`: the reward is the similarity (difflib ratio), 1 only when exact."""
        super().__init__(seed)
        if num_words < 1 or word_len < 2:
            raise ValueError(f"num_words = {num_words}, word_len = {word_len}: need at least 1 word of at least 2 letters")
        self.num_words, self.word_len = num_words, word_len
        self.partial_credit, self.instruction = partial_credit, instruction
        self._sizes = {"train": num_train, "eval": num_eval}

    def num_tasks(self, split: str) -> int:
        return self._sizes[split]

    def task(self, split: str, index: int) -> Task:
        text = draw_task(self.seed, split, index, make=self._text, key=str)
        return self._task(f"{self.name}/{split}/{index}", index, text)

    def task_from_prompt(self, text: str) -> Task:
        return self._task(f"{self.name}/prompt/0", 0, text.removeprefix(self.instruction))

    async def prompt(self, task: Task) -> list[dict]:
        return [{"role": "user", "content": self.instruction + task.payload["text"]}]

    async def score(self, task: Task, messages: Sequence[dict]) -> float:
        if messages[-1]["role"] != "assistant":
            return 0.0
        said, answer = messages[-1]["content"].strip(), task.payload["answer"]
        if self.partial_credit:
            return SequenceMatcher(None, said, answer, autojunk=False).ratio()
        return float(said == answer)

    def demonstration(self, task: Task, rng: np.random.Generator, noise: float = 0.0) -> list[dict]:
        """The reversal; with probability `noise` with two neighbouring letters in the wrong order."""
        text, answer = task.payload["text"], task.payload["answer"]
        if rng.random() < noise:
            answer = _swap_neighbours(answer, rng)
        return [{"role": "user", "content": self.instruction + text}, {"role": "assistant", "content": answer}]

    def _task(self, id_: str, index: int, text: str) -> Task:
        return Task(id_, self.name, index, {"text": text, "answer": text[::-1]})

    def _text(self, rng: np.random.Generator) -> str:
        lengths = rng.integers(2, self.word_len + 1, size=self.num_words)
        letters = rng.integers(0, len(_LETTERS), size=int(lengths.sum())).tolist()
        words, start = [], 0
        for length in lengths.tolist():
            words.append("".join(_LETTERS[i] for i in letters[start : start + length]))
            start += length
        return " ".join(words)


def _swap_neighbours(text: str, rng: np.random.Generator) -> str:
    """`text` with two different neighbours exchanged; unchanged when all its characters are the same."""
    places = [i for i in range(len(text) - 1) if text[i] != text[i + 1]]
    if not places:
        return text
    i = places[rng.integers(len(places))]
    return text[:i] + text[i + 1] + text[i] + text[i + 2 :]
