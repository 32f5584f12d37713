"""Whose KV may be used: by age, and by the weights behind each number, of which no more is remembered than can be asked for."""

from __future__ import annotations

import pytest

from slipstream.engine import versions as versions_module
from slipstream.engine.scheduler import ANY_VERSION
from slipstream.engine.versions import UsableVersions


class Told:
    """Stands for the scheduler and for the tiers; keeps what they are told."""

    def __init__(self) -> None:
        self.versions, self.weights = ANY_VERSION, {}
        self.expired: list[range] = []

    def expire(self, versions: range) -> None:
        self.versions = versions
        self.expired.append(versions)

    def use(self, versions: range, weights: dict[int, bytes]) -> None:
        assert versions == self.versions
        self.weights = weights


def usable(max_age: int | None) -> tuple[Told, UsableVersions]:
    told = Told()
    return told, UsableVersions(told, told, max_age)  # type: ignore[arg-type]


def test_without_a_bound_nothing_expires_and_no_more_fingerprints_are_kept_than_versions_are_remembered(monkeypatch):
    monkeypatch.setattr(versions_module, "REMEMBERED", 10)
    told, live = usable(None)
    for number in range(100):
        live.set_live(number, f"{number:04x}")
    assert told.expired == [] and list(told.weights) == list(range(89, 100))


@pytest.mark.parametrize("age", [0, 1, 3])
def test_with_a_bound_fingerprints_are_those_of_the_versions_in_use(age):
    told, live = usable(age)
    for number in range(-1, 50):
        live.set_live(number, f"{number + 1:04x}")
    assert told.versions == range(49 - age, 50) and list(told.weights) == list(told.versions)


def test_going_back_to_the_same_weights_drops_nothing():
    told, live = usable(None)
    for number in (0, 1, 2, 1, 2):
        live.set_live(number, f"{number:04x}")
    assert told.expired == [] and list(told.weights) == [0, 1, 2]


def test_a_number_taken_by_other_weights_drops_it_and_all_that_came_after():
    told, live = usable(None)
    for number in (0, 1, 2, 3):
        live.set_live(number, f"{number:04x}")
    live.set_live(2, "ff")
    assert told.expired == [range(-1, 2), ANY_VERSION] and told.weights == {0: b"\0\0", 1: b"\0\1", 2: b"\xff"}


def test_a_number_that_is_not_remembered_counts_as_taken_by_others(monkeypatch):
    monkeypatch.setattr(versions_module, "REMEMBERED", 2)
    told, live = usable(None)
    for number in range(10):
        live.set_live(number, f"{number:04x}")
    live.set_live(3, "0003")
    assert told.expired == [range(-1, 3), ANY_VERSION] and list(told.weights) == [3]
