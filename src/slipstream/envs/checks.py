"""Instructions whose fulfilment a few lines of Python can verify: the text that asks, the check, and what excludes what.

Each check is a pure function of the reply and the instruction's parameters. Knows no tasks and no policy.
The idea of verifiable instructions: IFEval, arXiv 2311.07911.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_BULLET = re.compile(r"^- \S")
_SENTENCE_END = re.compile(r"[.!?]+(?=\s|$)")
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


def words(reply: str) -> list[str]:
    return _WORD.findall(reply)


def lower_case(reply: str) -> bool:
    return reply == reply.lower() and any(c.isalpha() for c in reply)


def all_caps(reply: str) -> bool:
    return reply == reply.upper() and any(c.isalpha() for c in reply)


def bullets(reply: str, n: int) -> bool:
    """Exactly `n` lines that start with '- ', as asked, and say something."""
    return sum(bool(_BULLET.match(line)) for line in reply.splitlines()) == n


def sentences(reply: str, n: int) -> bool:
    """Exactly `n` ends of sentences, the last of them at the end of the reply."""
    return len(_SENTENCE_END.findall(reply)) == n and reply.rstrip()[-1:] in (".", "!", "?")


def json_object(reply: str, keys: list[str]) -> bool:
    """The reply is one JSON object (a code fence around it is allowed) with exactly these keys and a text under each."""
    text = reply.strip()
    if text.startswith("```"):
        text = text.removeprefix("```").removeprefix("json").removesuffix("```")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and sorted(value) == sorted(keys) and all(isinstance(v, str) and v.strip() for v in value.values())


def no_commas(reply: str) -> bool:
    return "," not in reply


def closing(reply: str, phrase: str) -> bool:
    """The reply ends with the phrase, in any case; a full stop may follow."""
    return reply.rstrip().removesuffix(".").lower().endswith(phrase.lower())


def at_most(reply: str, n: int) -> bool:
    return len(words(reply)) <= n


def includes(reply: str, word: str) -> bool:
    return word.lower() in (found.lower() for found in words(reply))


@dataclass(frozen=True, slots=True)
class Instruction:
    """A kind of instruction."""

    check: Callable[..., bool]
    """(reply, **parameters) -> fulfilled."""
    text: str
    """What the prompt says, with the parameters filled in."""
    excludes: frozenset[str]
    """Kinds that cannot be asked for together with this one."""


def _instruction(check: Callable[..., bool], text: str, *excludes: str) -> Instruction:
    return Instruction(check, text, frozenset(excludes))


INSTRUCTIONS: Mapping[str, Instruction] = {
    "lower_case": _instruction(lower_case, "Use lower case letters only.", "all_caps"),
    "all_caps": _instruction(all_caps, "Use capital letters only.", "lower_case", "json_object"),
    "bullets": _instruction(bullets, "Use exactly {n} bullet points, each on a line that starts with '- '.", "sentences", "json_object"),
    "sentences": _instruction(sentences, "Use exactly {n} sentences.", "bullets", "json_object", "closing"),
    "json_object": _instruction(
        json_object,
        "Reply with one JSON object with the keys {keys}, each with a text, and nothing else.",
        *("all_caps", "bullets", "sentences", "no_commas", "closing"),
    ),
    "no_commas": _instruction(no_commas, "Do not use any commas.", "json_object"),
    "closing": _instruction(closing, "End with the words: {phrase}", "json_object", "sentences"),
    "at_most": _instruction(at_most, "Use at most {n} words."),
    "includes": _instruction(includes, "Include the word {word}."),
}


def ask(kind: str, parameters: Mapping[str, Any]) -> str:
    """The instruction as a sentence of the prompt."""
    shown = {key: ", ".join(value) if isinstance(value, list) else value for key, value in parameters.items()}
    return INSTRUCTIONS[kind].text.format(**shown)


def fulfilled(reply: str, kind: str, parameters: Mapping[str, Any]) -> bool:
    return INSTRUCTIONS[kind].check(reply, **parameters)
