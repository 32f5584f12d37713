"""The index over the tiers against stores in memory: budgets hold, books agree, and what comes back is what was saved, in any order."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from slipstream.config.tiers import TiersConfig
from slipstream.engine.blocks import Label
from slipstream.engine.tiers.hierarchy import DISK, RAM, SHARED, Tiers
from slipstream.engine.tiers.index import Place, Tier, by_name, key_of
from slipstream.errors import WireError
from slipstream.types import GenerateRequest, Sampling
from tests.waiting import HUNG_S, wait_until

SIZE, RAM_BLOCKS, DISK_BLOCKS, SHARED_BLOCKS = 64, 3, 4, 6
WEIGHTS = {0: b"a" * 16, 1: b"b" * 16}
REQUEST = GenerateRequest("r", np.zeros(1, np.int32), Sampling())
PLACE = Place(0, b"a" * 8)


def key_of_number(number: int) -> bytes:
    return bytes([number]) * 16


class DeviceBlocks:
    """Block `number + 100 * version` has the content of key `number`, written by `version`."""

    block_bytes, block_tokens, shape = SIZE, 1, b"s" * 16

    def __init__(self) -> None:
        self.written: dict[int, bytes] = {}

    def read(self, block: int) -> np.ndarray:
        payload = np.full(SIZE, block % 100, np.uint8)
        payload[-4:] = np.array([block // 100], np.int32).view(np.uint8)
        return payload

    def version(self, block: int) -> int:
        return block // 100

    def write(self, block: int, payload: np.ndarray) -> None:
        self.written[block] = payload.tobytes()


class MemoryStore:
    """The port, without files."""

    def __init__(self) -> None:
        self.held: dict[tuple[bytes, Place], bytes] = {}
        self.full = False

    def scan(self) -> list[tuple[bytes, Place]]:
        return [*self.held]

    def read(self, key: bytes, place: Place) -> np.ndarray:
        if (raw := self.held.get((key, place))) is None:
            raise FileNotFoundError
        if raw == b"damaged":
            raise WireError("damaged")
        return np.frombuffer(raw, np.uint8)

    def write(self, label: Label, version: int, payload) -> None:
        if self.full:
            raise OSError("full")
        self.held[label.key, Place(version, label.weights[:8])] = bytes(payload)

    def remove(self, key: bytes, place: Place) -> None:
        self.held.pop((key, place), None)


class TiersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.stores = DeviceBlocks(), {DISK: MemoryStore(), SHARED: MemoryStore()}
        paths = {"disk_path": "d", "disk_mib": 1, "shared_path": "s", "shared_mib": 1}
        config = TiersConfig(ram_mib=1, min_tokens=1, scan_s=3600, **paths)  # type: ignore[arg-type]
        self.tiers = Tiers(config, self.blocks, self.stores)  # type: ignore[arg-type]
        self.tiers.use(range(2), WEIGHTS)
        wait_until(lambda: self.tiers.writer.scan_at)  # the writer's first look
        for name, capacity in ((RAM, RAM_BLOCKS), (DISK, DISK_BLOCKS), (SHARED, SHARED_BLOCKS)):
            self.tiers.contents.tiers[name].capacity = capacity

    @rule(number=st.integers(0, 19), version=st.integers(0, 1))
    def save(self, number: int, version: int) -> None:
        self.tiers.save(key_of_number(number), number + 100 * version)

    @rule(first=st.integers(0, 19), count=st.integers(1, 5))
    def fetch(self, first: int, count: int) -> None:
        keys = [key_of_number(number) for number in range(first, first + count)]
        found = self.tiers.find(REQUEST, keys)
        if not found:
            return
        over = threading.Event()
        fetch = self.tiers.start(REQUEST, keys[:found], over.set)
        assert fetch.arrived or over.wait(HUNG_S)
        self.blocks.written.clear()
        complete = fetch.write(range(found), found)
        assert fetch.done and complete <= found
        for i in range(complete):
            raw = self.blocks.written[i]
            usable = [version for version in WEIGHTS if version in self.tiers.contents.versions]
            assert raw in [self.blocks.read(first + i + 100 * version).tobytes() for version in usable]

    @rule(tier=st.sampled_from([DISK, SHARED]), pick=st.integers(0, 9), gone=st.booleans())
    def lose_or_damage(self, tier: str, pick: int, gone: bool) -> None:
        assert self.tiers.flush()
        held = self.stores[tier].held
        if held:
            name = [*held][pick % len(held)]
            if gone:
                del held[name]
            else:
                held[name] = b"damaged"

    @rule(number=st.integers(0, 19), weights=st.sampled_from([b"a", b"x"]))
    def another_engine_writes(self, number: int, weights: bytes) -> None:
        assert self.tiers.flush()
        label = Label(key_of_number(number), b"s" * 16, weights * 16)
        self.stores[SHARED].write(label, 0, self.blocks.read(number if weights == b"a" else 66))
        self.tiers.writer.look()

    @rule(oldest=st.integers(0, 1))
    def bound_age(self, oldest: int) -> None:
        self.tiers.use(range(oldest, 2), WEIGHTS)

    @invariant()
    def budgets_hold_and_books_agree(self) -> None:
        assert self.tiers.flush()
        with self.tiers.contents.lock:
            ram, disk, shared = (self.tiers.contents.tiers[name] for name in (RAM, DISK, SHARED))
            assert self.tiers.contents.ram.keys() == set(ram._places) and len(ram) <= RAM_BLOCKS
            assert len(disk) <= DISK_BLOCKS and {*self.stores[DISK].held} <= {*disk._places.items()}
            assert len(self.stores[SHARED].held) <= SHARED_BLOCKS or len(shared) > SHARED_BLOCKS
            assert self.tiers.writer.written.keys() <= set(shared._places) and ram.used_bytes == len(ram) * SIZE

    def teardown(self) -> None:
        self.tiers.close()


TiersMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestTiersMachine = TiersMachine.TestCase


def test_two_contents_of_a_key_in_the_shared_folder_both_count():
    machine = TiersMachine()
    numbers, versions = (0, 1, 4, 3, 0, 2, 5, 1, 3, 0, 4, 2, 1, 0), (0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    for number, version in zip(numbers, versions, strict=True):
        machine.save(number=number, version=version)
        machine.budgets_hold_and_books_agree()
    machine.teardown()


def test_the_least_recently_used_block_goes_first():
    tier = Tier("ram", 3 * SIZE, SIZE)
    for number in range(3):
        tier.put(key_of_number(number), PLACE)
    tier.touch(key_of_number(0))
    assert tier.oldest() == (key_of_number(1), PLACE) and tier.over == 0
    tier.put(key_of_number(3), PLACE)
    assert tier.over == 1
    tier.evict(tier.oldest()[0])
    assert (tier.over, tier.evicted, tier.used_bytes) == (0, 1, 3 * SIZE)


def test_others_blocks_count_as_least_recently_used_and_what_is_gone_is_forgotten():
    tier = Tier("shared", 9 * SIZE, SIZE)
    mine, gone = key_of_number(9), key_of_number(8)
    tier.put(gone, PLACE)
    tier.put(mine, PLACE)
    tier.merge(dict.fromkeys((key_of_number(2), mine, key_of_number(1)), PLACE))
    assert [*tier._places] == [key_of_number(1), key_of_number(2), mine]


def test_of_several_contents_of_a_key_the_usable_one_has_its_name():
    key, foreign, old = key_of_number(1), Place(0, b"x" * 8), Place(3, b"y" * 8)
    for order in ([foreign, PLACE, old], [PLACE, old, foreign], [old, foreign, PLACE]):
        names = by_name([(key, place) for place in order], lambda place: place == PLACE)
        assert names[key] == PLACE and len(names) == 3 and {key_of(name) for name in names} == {key}
