"""A recorded rollout as text for people: who said what, what it cost, which policy version sampled it, what it was worth.

Everything the policy or an environment wrote is untrusted: control characters are made visible, so that a transcript cannot move
the cursor or recolour the terminal that shows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


def format_rollout(record: Mapping[str, Any]) -> str:
    """A row of the rollout store (`read_rollouts`) as a transcript."""
    lines = [_headline(record), _result(record), _provenance(record)]
    if record["error"]:
        lines.append(f"error: {visible(record['error'])}")
    turns = _turn_of_message(record)
    for index, message in enumerate(record["messages"]):
        lines += ["", _role_line(record, message, turns.get(index)), *_body(message)]
    return "\n".join(lines)


def visible(text: str) -> str:
    """`text` with control characters other than newline and tab spelled out."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match.group()):02x}", text)


def conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    """Who said what, without what it cost."""
    return "\n".join(line for message in messages for line in (_label(message), *_body(message)))


def num_prompt_messages(record: Mapping[str, Any]) -> int:
    """Messages before the first one that the policy sampled; all of them where it sampled none."""
    return min(_turn_of_message(record), default=len(record["messages"]))


def _headline(record: Mapping[str, Any]) -> str:
    return visible(f"=== {record['task_id']}   rollout {record['id']}   group {record['group_id']}   step {record['step']}")


def score_line(record: Mapping[str, Any]) -> str:
    """The reward with its components."""
    if record["reward"] is None:
        return "no reward"
    parts = ", ".join(f"{visible(name)} {value:.3g}" for name, value in record["reward_parts"].items())
    return f"reward {record['reward']:.3f}" + (f" ({parts})" if parts else "")


def _result(record: Mapping[str, Any]) -> str:
    parts = [f"outcome {record['outcome']}", score_line(record)]
    if record["advantage"] is not None:
        parts.append(f"advantage {record['advantage']:+.3f}")
    if record["dropped"]:
        parts.append(f"not trained: {visible(record['dropped'])}")
    return " · ".join(parts)


def _provenance(record: Mapping[str, Any]) -> str:
    sampled = sum(len(tokens) for tokens in record["tokens"])
    low, high = record["version_min"], record["version_max"]
    versions = f"policy version {low}" if low == high else f"policy versions {low} to {high}"
    amount = f"{len(record['tokens'])} turns · {sampled} tokens · {record['duration_s']:.2f} s"
    return f"{versions} (dispatched at {record['version_start']}) · {amount}"


def _turn_of_message(record: Mapping[str, Any]) -> dict[int, int]:
    """Message index -> turn. Assistant messages before the first sampled one are examples in the prompt, so count from the end."""
    replies = [index for index, message in enumerate(record["messages"]) if message.get("role") == "assistant"]
    turns = range(len(record["tokens"]))
    return dict(zip(replies[::-1], reversed(turns), strict=False))


def _role_line(record: Mapping[str, Any], message: Mapping[str, Any], turn: int | None) -> str:
    label = _label(message)
    if turn is None:
        return label
    versions = ", ".join(f"v{version} x{count}" for version, count in record["versions"][turn])
    times = " ".join(f"{phase} {record[phase + '_s'][turn]:.3f} s" for phase in ("queued", "prefill", "decode"))
    prompt, cached = len(record["prompt"][turn]), record["cached_tokens"][turn]
    ended = record["finish_reason"][turn]
    return f"{label} [turn {turn + 1}: {prompt} prompt tokens ({cached} cached), {versions or 'no tokens'}, ended by {ended}, {times}]"


def _label(message: Mapping[str, Any]) -> str:
    role = visible(str(message.get("role", "?")))
    name = message.get("name") or message.get("tool_call_id")
    return f"--- {role}" + (f" {visible(str(name))}" if name else "")


def _body(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    lines = [visible(content)] if isinstance(content, str) and content else []
    if content and not isinstance(content, str):
        lines.append(visible(repr(content)))
    for call in _calls(message):
        function = call.get("function", {})
        lines.append(visible(f"[calls {function.get('name')}({function.get('arguments')})]"))
    return lines


def _calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()
