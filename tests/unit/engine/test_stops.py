"""Stop strings against tokens that are parts of characters, lose their space alone, or hold several characters."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.engine.stops import StopText


class Bytes:
    """One byte a token, as in a byte-level tokenizer; 256 is a word with the leading space that it loses when it stands alone."""

    def decode(self, ids, skip_special: bool = False) -> str:
        text = b"".join(b" end" if i == 256 else bytes([i]) for i in ids).decode(errors="replace")
        return text.lstrip(" ") if len(ids) == 1 else text


def first_hit(data: list[int], stops: tuple[str, ...]) -> int | None:
    """How many tokens it takes until a stop string is found, seen token by token."""
    matcher = StopText(Bytes())
    return next((n for n in range(1, len(data) + 1) if matcher.hit(np.array(data[:n], np.int32), stops)), None)


@pytest.mark.parametrize("text", ["ab", "é", "日本", "x" * 40 + "END"])
def test_a_stop_string_is_found_when_its_last_byte_arrives_and_not_before(text):
    data = list(f"some text and {text} more".encode())
    assert first_hit(data, ("never", text)) == len(f"some text and {text}".encode())


def test_a_token_that_loses_its_space_alone_still_completes_a_stop_string_ending_in_space():
    assert first_hit([*b"the", 256], ("the ",)) == 4


def test_text_without_a_stop_string_is_never_stopped():
    assert first_hit(list("läßt alles durch".encode()), ("halt", "ß ")) is None
