"""Tiers under a device that is too small: whatever path a block takes, tokens, logprobs and routing rows are those of computing."""

from __future__ import annotations

import errno
import shutil
import threading

import numpy as np
import pytest

from slipstream.config.tiers import TiersConfig
from slipstream.engine.blocks import Label, seal
from slipstream.engine.tiers import health as health_module
from slipstream.engine.tiers.hierarchy import DISK, RAM, SHARED
from slipstream.engine.tiers.index import Place
from slipstream.errors import ConfigError
from slipstream.models.maker import make_model
from tests.unit.engine.helpers import Reference, ask, make_engine, prompt, write_model
from tests.unit.engine.test_weights import publish, swap
from tests.waiting import HUNG_S

PROMPTS = [prompt(seed, 41 + seed) for seed in range(6)]
DEVICE_BLOCKS = 30
"""Less than three of the prompts need with their replies."""


class Played:
    """An engine with a small device, what it answers, and its tiers; closed at the end of the test."""

    def __init__(self, folder, dtype="float32", version=0, device_blocks=DEVICE_BLOCKS, on_update="keep", max_kv_age=None, **tiers):
        tiers = {"min_tokens": 4, "scan_s": 0.02, "fetch_timeout_s": HUNG_S, **tiers}
        options = {"on_update": on_update, "max_kv_age": max_kv_age, "max_running": 2}
        self.engine = make_engine(folder, dtype=dtype, version=version, kv_memory_mib=2, tiers=TiersConfig(**tiers), **options)
        pool = self.engine._scheduler.pool
        pool._free = pool._free[-device_blocks:]
        assert self.engine.tiers is not None
        self.tiers = self.engine.tiers

    def value(self, key: str) -> float:
        return self.engine.block_values()[f"engine/tiers/{key}"]

    def play(self, numbers, salt=0, max_tokens=4, settle=True):
        """Completions of these prompts, one after another.

        `settle`: what is on its way down has arrived before the next one begins; else it may be found on the way.
        """
        answers = []
        for number in numbers:
            self.engine.add(ask("a", PROMPTS[number], salt, temperature=1.0, seed=number, max_tokens=max_tokens))
            while self.engine.wait():
                answers += self.engine.step().finished
            if settle:
                assert self.tiers.flush()
        return answers

    def spill(self, salt=0):
        """Compute all prompts, so that most of them leave the device; and wait for the writer."""
        answers = self.play(range(len(PROMPTS)), salt, settle=False)
        assert self.tiers.flush()
        return answers


@pytest.fixture
def played():
    """Makes engines; ends their threads."""
    made = []

    def make(folder, **options) -> Played:
        made.append(Played(folder, **options))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


@pytest.fixture(scope="module")
def computed(moe_folder):
    """What an engine with a large device and no tiers answers."""
    return Played(moe_folder, device_blocks=250, ram_mib=1).play(range(len(PROMPTS)))


def same(ones, others) -> bool:
    return len(ones) == len(others) and all(
        a.tokens_N.tolist() == b.tokens_N.tolist()
        and a.logprobs_N.tolist() == b.logprobs_N.tolist()
        and (a.routing is None or (a.routing.valid_T.all() and np.array_equal(a.routing.ids_TLK, b.routing.ids_TLK)))
        for a, b in zip(ones, others, strict=True)
    )


def files(folder):
    return sorted(folder.rglob("*.kv"))


SETUPS = {
    RAM: lambda tmp: {"ram_mib": 4},
    DISK: lambda tmp: {"disk_path": tmp / "disk", "disk_mib": 4},
    SHARED: lambda tmp: {"shared_path": tmp / "shared", "shared_mib": 4},
}


@pytest.mark.parametrize("tier", [RAM, DISK, SHARED])
def test_what_the_device_gave_up_comes_back_from_the_tier(moe_folder, computed, tmp_path, played, tier):
    one = played(moe_folder, **SETUPS[tier](tmp_path))
    assert same(one.spill(), computed)
    prefilled = one.engine.tokens_prefilled
    again = one.play(range(len(PROMPTS)))
    assert same(again, computed)
    for number, answer in enumerate(again[:4]):
        assert answer.cached_tokens == (len(PROMPTS[number]) - 1) // 4 * 4 == sum(answer.cached_by_tier.values())
        assert answer.cached_by_tier.get(tier, 0) >= 32
    assert one.engine.tokens_prefilled - prefilled <= 6 * 4
    assert one.value(f"{tier}/hit_tokens") == sum(answer.cached_by_tier.get(tier, 0) for answer in again)
    assert one.value(f"{tier}/read_mib") > 0 and one.value(f"{tier}/written_mib") > 0 and one.value(f"{tier}/damaged") == 0
    on_device = sum(answer.cached_by_tier.get("device", 0) for answer in again)
    assert one.value("device/hit_tokens") == on_device


@pytest.mark.parametrize(
    ("model", "dtype"), [("dense", "float32"), ("dense", "bfloat16"), ("dense", "float8"), ("sparse", "float32"), ("sparse", "bfloat16")]
)
def test_other_models_and_dtypes_come_back_the_same(moe_folder, dense_folder, tmp_path, played, model, dtype):
    folder = dense_folder
    if model == "sparse":
        folder = tmp_path / "model"
        make_model(folder, "tiny-deepseek-v32", ["a corpus of a few words"] * 4)
    one = played(folder, dtype=dtype, **SETUPS[DISK](tmp_path) | {"disk_mib": 32})
    device = played(folder, dtype=dtype, device_blocks=100, ram_mib=1)
    assert same(one.spill(), device.play(range(len(PROMPTS))))
    again, found = one.play(range(len(PROMPTS))), device.play(range(len(PROMPTS)))
    assert same(again, found), "bit for bit what a hit on the device gives"
    assert again[0].cached_by_tier == {DISK: 40} and found[0].cached_by_tier == {"device": 40}


def test_blocks_go_down_tier_by_tier_and_nothing_is_lost_while_there_is_room(moe_folder, computed, tmp_path, played):
    one = played(moe_folder, device_blocks=16, **{k: v for setup in SETUPS.values() for k, v in setup(tmp_path).items()})
    size = one.engine.blocks.block_bytes
    one.tiers.contents.tiers[RAM].capacity, one.tiers.contents.tiers[DISK].capacity = 10, 12
    assert same(one.spill(), computed)
    ram, disk, shared = (one.tiers.contents.tiers[name] for name in (RAM, DISK, SHARED))
    assert (len(ram), len(disk)) == (10, 12) and len(shared) > 20
    assert ram.used_bytes == 10 * size and len(files(tmp_path / "disk")) == 12 and len(files(tmp_path / "shared")) == len(shared)
    again = one.play(range(len(PROMPTS)))
    assert same(again, computed)
    seen = {tier for answer in again for tier in answer.cached_by_tier}
    assert {SHARED, DISK} <= seen or {SHARED, RAM} <= seen
    assert all(answer.cached_tokens >= 40 for answer in again)


@pytest.mark.parametrize("damage", ["flip in header", "flip", "truncate", "delete", "empty", "of another key"])
@pytest.mark.parametrize("tier", [DISK, SHARED])
def test_a_damaged_block_is_computed_again_and_counted(moe_folder, computed, tmp_path, played, tier, damage):
    one = played(moe_folder, **SETUPS[tier](tmp_path))
    one.spill()
    found = files(tmp_path)
    contents = [file.read_bytes() for file in found]
    for i, file in enumerate(found):
        raw = bytearray(contents[i])
        if damage.startswith("flip"):
            raw[20 if damage == "flip in header" else len(raw) // 2] ^= 1
        file.unlink()
        if damage == "truncate":
            raw = raw[:-7]
        elif damage == "empty":
            raw = b""
        elif damage == "of another key":
            raw = contents[i - 1]
        if damage != "delete":
            file.write_bytes(raw)
    again = one.play(range(len(PROMPTS)))
    assert same(again, computed)
    assert all(not answer.cached_by_tier.get(tier) for answer in again[:3])
    assert one.value(f"{tier}/on") == 1
    assert (one.value(f"{tier}/damaged") > 0) == (damage != "delete")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("tier", [DISK, SHARED])
def test_a_store_that_cannot_be_written_is_switched_off_loudly_and_generation_goes_on(
    moe_folder, computed, tmp_path, played, monkeypatch, caplog, tier, code
):
    monkeypatch.setattr(health_module, "RETRY_S", 1e9)
    one = played(moe_folder, **SETUPS[tier](tmp_path))
    store = one.tiers.contents.stores[tier]

    def fail(fresh, header, payload):
        fresh.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(b"half")
        raise OSError(code, "no")

    with monkeypatch.context() as patch:
        patch.setattr(store, "_write", fail)
        assert same(one.spill(), computed)
        assert same(one.play(range(len(PROMPTS))), computed)
        assert one.value(f"{tier}/on") == 0 and one.value("dropped") > 0
        assert caplog.text.count("switched off") == 1
        assert not list(tmp_path.rglob("*.tmp")) and not files(tmp_path)
    one.tiers.contents.health[tier]._retry_at = 0.0
    one.spill()
    assert one.value(f"{tier}/on") == 1 and "works again" in caplog.text
    assert same(one.play(range(len(PROMPTS))), computed)


def test_a_folder_deleted_under_it_is_made_again(moe_folder, computed, tmp_path, played):
    one = played(moe_folder, **SETUPS[DISK](tmp_path))
    one.spill()
    shutil.rmtree(next((tmp_path / "disk" / "0").iterdir()))
    assert same(one.play(range(len(PROMPTS))), computed)
    assert one.tiers.flush() and files(tmp_path)
    assert same(one.play(range(len(PROMPTS))), computed)
    assert one.value("disk/hit_tokens") > 0 and one.value("disk/on") == 1


def test_a_disk_that_hangs_costs_one_deadline_and_is_then_left_alone(moe_folder, computed, tmp_path, played, monkeypatch, caplog):
    monkeypatch.setattr(health_module, "RETRY_S", 1e9)
    one = played(moe_folder, **SETUPS[DISK](tmp_path))
    one.spill()
    one.tiers.timeout_s = 0.2
    asked, over = [], threading.Event()

    def hangs(key, place):
        asked.append(key)
        over.wait()
        raise OSError("gone")

    monkeypatch.setattr(one.tiers.contents.stores[DISK], "read", hangs)
    try:
        assert same(one.play(range(4)), computed[:4])
    finally:
        over.set()
    assert len(asked) == 1 and one.engine._scheduler.fetches.ended["late"] == 1
    assert caplog.text.count("fetch_timeout_s = 0.2") == 1


def test_a_slow_writer_drops_blocks_and_steps_go_on(moe_folder, computed, tmp_path, played, monkeypatch):
    one = played(moe_folder, **SETUPS[DISK](tmp_path))
    one.tiers.writer.queue_blocks = 3
    real = one.tiers.contents.stores[DISK].write
    go = threading.Event()
    monkeypatch.setattr(one.tiers.contents.stores[DISK], "write", lambda *a: (go.wait(HUNG_S), real(*a)))
    assert same(one.play(range(len(PROMPTS)), settle=False), computed)
    go.set()
    assert one.tiers.flush()
    assert one.value("dropped") > 0 and 0 < len(files(tmp_path)) < 40
    assert same(one.play(range(len(PROMPTS))), computed)


def test_the_disk_tier_survives_a_restart(moe_folder, computed, tmp_path, played):
    first = played(moe_folder, **SETUPS[DISK](tmp_path))
    first.spill()
    kept = [*first.tiers.contents.tiers[DISK]._places]
    first.engine.close()
    leftover = files(tmp_path)[0].with_name(".half.tmp")
    leftover.write_bytes(b"half")
    (leftover.parent / "notes.txt").write_text("not a block")
    second = played(moe_folder, **SETUPS[DISK](tmp_path))
    assert set(second.tiers.contents.tiers[DISK]._places) == set(kept) and not leftover.exists()
    answers = second.play(range(4))
    assert same(answers, computed[:4])
    assert answers[0].cached_by_tier == {DISK: 40}


def test_engines_on_one_disk_path_have_folders_of_their_own(moe_folder, tmp_path, played):
    one, two = (played(moe_folder, **SETUPS[DISK](tmp_path)) for _ in range(2))
    one.spill()
    two.spill()
    assert {file.relative_to(tmp_path / "disk").parts[0] for file in files(tmp_path)} == {"0", "1"}


def test_engines_share_a_folder_both_ways(moe_folder, computed, tmp_path, played):
    one, two = (played(moe_folder, **SETUPS[SHARED](tmp_path)) for _ in range(2))
    one.spill()
    two.tiers.writer.look()
    answers = two.play(range(3))
    assert same(answers, computed[:3]) and all(answer.cached_by_tier[SHARED] >= 40 for answer in answers)
    two.spill(salt=7)
    one.tiers.writer.look()
    assert one.play([0], salt=7)[0].cached_by_tier == {SHARED: 40}


def test_the_shared_folder_stays_within_its_budget_whoever_writes(moe_folder, computed, tmp_path, played):
    one, two = (played(moe_folder, **SETUPS[SHARED](tmp_path)) for _ in range(2))
    for engine in (one, two):
        engine.tiers.contents.tiers[SHARED].capacity = 20
    one.spill()
    assert len(files(tmp_path)) == 20
    two.tiers.writer.look()
    two.spill(salt=3)
    assert len(files(tmp_path)) <= 20
    one.tiers.writer.look()
    assert same(one.play(range(len(PROMPTS))), computed)
    assert one.value("shared/damaged") == 0, "what another engine removed is missing, not damaged"


def test_what_other_weights_computed_is_never_read(moe_folder, other_folder, computed, tmp_path, played):
    """Same shape, same salt, same tokens, same version number: another run's policy."""
    other = played(other_folder, **SETUPS[SHARED](tmp_path))
    other.spill()
    one = played(moe_folder, **SETUPS[SHARED](tmp_path))
    one.tiers.writer.look()
    answers = one.spill()
    assert same(answers, computed) and all(not answer.cached_by_tier for answer in answers)
    one.tiers.writer.look()
    again = one.play(range(4))
    assert same(again, computed[:4]) and all(answer.cached_by_tier[SHARED] >= 32 for answer in again)
    assert other.play([0])[0].cached_by_tier[SHARED] == 40


def test_blocks_of_another_shape_lie_in_another_folder(moe_folder, tmp_path, played):
    played(moe_folder, **SETUPS[SHARED](tmp_path)).spill()
    two = played(moe_folder, dtype="bfloat16", **SETUPS[SHARED](tmp_path))
    two.tiers.writer.look()
    assert len(two.tiers.contents.tiers[SHARED]) == 0 and not two.play([0])[0].cached_by_tier


def test_salts_do_not_meet_in_any_tier(moe_folder, tmp_path, played):
    one = played(moe_folder, **SETUPS[RAM](tmp_path))
    one.spill(salt=1)
    assert not one.play([0], salt=2)[0].cached_by_tier
    assert one.play([0], salt=1)[0].cached_by_tier == {RAM: 40}


@pytest.mark.parametrize("tier", [RAM, DISK, SHARED])
@pytest.mark.parametrize("mode", ["keep", "recompute", "bounded", "abort"])
def test_age_is_kept_and_bounded_in_every_tier(moe_folder, other_folder, tmp_path, played, tier, mode):
    options = {"on_update": "keep", "max_kv_age": 0} if mode == "bounded" else {"on_update": mode}
    one = played(moe_folder, **options, **SETUPS[tier](tmp_path))
    one.spill()
    swap(one.engine, publish(other_folder, tmp_path / "v1", 1))
    answer = one.play([0])[0]
    if mode in ("keep", "abort"):
        assert (answer.cached_by_tier, answer.kv_age) == ({tier: 40}, 1)
    else:
        assert (answer.cached_tokens, answer.kv_age) == (0, 0)
        Reference(other_folder).check_greedy(PROMPTS[0], _greedy(one))
    one.spill()
    assert one.play([0])[0].cached_tokens == 40


def _greedy(one):
    one.engine.add(ask("g", PROMPTS[0]))
    done = []
    while one.engine.wait():
        done += one.engine.step().finished
    return done[0]


def test_a_version_number_taken_again_by_other_weights_finds_nothing_of_the_first(moe_folder, other_folder, tmp_path, played):
    """After a rollback: version 1, back to 0, and another version 1."""
    third = write_model(tmp_path / "third", moe=True, seed=3)
    one = played(moe_folder, **SETUPS[RAM](tmp_path))
    swap(one.engine, publish(other_folder, tmp_path / "v1", 1))
    one.spill(salt=1)
    swap(one.engine, publish(moe_folder, tmp_path / "v0", 0))
    swap(one.engine, publish(third, tmp_path / "w1", 1))
    for number in range(len(PROMPTS)):
        assert not one.play([number], salt=1)[0].cached_by_tier


def test_what_a_rollback_has_left_behind_is_not_found_when_its_number_is_taken_again_below(moe_folder, other_folder, tmp_path, played):
    """Versions 1 and 2, back to 0, and another version 1: KV of the old 2 belongs to no policy that is left."""
    third, fourth = (write_model(tmp_path / name, moe=True, seed=seed) for name, seed in (("third", 3), ("fourth", 4)))
    one = played(moe_folder, **SETUPS[RAM](tmp_path))
    swap(one.engine, publish(other_folder, tmp_path / "v1", 1))
    swap(one.engine, publish(third, tmp_path / "v2", 2))
    one.spill()
    swap(one.engine, publish(moe_folder, tmp_path / "v0", 0))
    assert one.play([0])[0].cached_by_tier == {RAM: 40}, "it is the same rollout's, whatever has computed it"
    swap(one.engine, publish(fourth, tmp_path / "w1", 1))
    for number in range(len(PROMPTS)):
        assert not one.play([number])[0].cached_by_tier


def test_a_short_prefix_is_not_worth_a_fetch(moe_folder, tmp_path, played):
    one = played(moe_folder, **SETUPS[RAM](tmp_path) | {"min_tokens": 44})
    one.spill()
    assert not one.play([0])[0].cached_by_tier, "40 tokens are in RAM"
    assert one.play([5])[0].cached_by_tier


def test_a_path_that_cannot_be_used_is_a_config_error(moe_folder, tmp_path):
    (tmp_path / "file").write_text("")
    for tier in (DISK, SHARED):
        with pytest.raises(ConfigError, match=f"engine.tiers.{tier}_path = .*file.* cannot be used"):
            Played(moe_folder, **{f"{tier}_path": tmp_path / "file", f"{tier}_mib": 1})


def test_a_tier_without_room_for_one_block_is_a_config_error(moe_folder, tmp_path):
    with pytest.raises(ConfigError, match=r"engine.tiers.ram_mib = 1 holds no block of 1\.\d\d MiB"):
        make_engine(moe_folder, kv_memory_mib=8, block_tokens=1000, tiers=TiersConfig(ram_mib=1), seq_len=128)


def test_after_an_error_a_store_is_left_alone_for_a_while(caplog):
    now = [0.0]
    health = health_module.Health("disk", lambda: now[0])
    health.failed(OSError(errno.ENOSPC, "full"))
    health.failed(OSError(errno.ENOSPC, "full"))
    assert not health.may_try() and caplog.text.count("full") == 1
    now[0] = health_module.RETRY_S
    assert health.may_try() and not health.ok
    health.worked()
    assert health.ok


def test_a_block_whose_name_lies_about_its_version_is_refused(moe_folder, computed, tmp_path, played):
    one = played(moe_folder, **SETUPS[DISK](tmp_path))
    one.spill()
    store, tier = one.tiers.contents.stores[DISK], one.tiers.contents.tiers[DISK]
    for key, place in [*tier._places.items()]:
        payload = store.read(key, place).copy()
        payload[-4:] = np.array([3], np.int32).view(np.uint8)
        label = Label(key, one.engine.blocks.shape, one.tiers.contents.weights[0])
        store._file(key, place).write_bytes(seal(label, payload) + payload.tobytes())
    assert same(one.play(range(len(PROMPTS))), computed) and one.value("disk/damaged") > 0
    assert Place(0, label.weights[:8]) == place
