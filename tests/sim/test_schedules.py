"""1,000 seeded schedules of the orchestrator on a virtual clock, with faults injected at any await; the laws are in world.World.check.

Slow and hanging environments, players that swallow cancellation, dead and returning engines, lost, late and doubled messages, trainer
deaths that go back to a checkpoint, full disks, and the orchestrator killed between any two awaits and started again from its ledger.

What the laws are worth was tried by planting bugs, which stay here as tests (`test_the_simulation_catches`): a staleness sweep that is
skipped, a batch that ships a rollout twice, a wake-up that is dropped, a cancelled slot that leaks, a ledger that loses the release
after a crash, retries that the ledger hears of too late. To look at a schedule: `simulate(plan(SEED), path).trace.lines`.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.orchestrator import queue
from slipstream.orchestrator.dispatch import Dispatcher
from slipstream.orchestrator.ledger import Ledger
from slipstream.orchestrator.loop import Orchestrator
from slipstream.types import Outcome
from tests.sim.world import World, plan, simulate

SCHEDULES, CHUNK = 1000, 40
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Ledgers of simulations need a file system, but no disk."""
    if not SHARED_MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as name:
        yield Path(name)


@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_every_schedule_keeps_the_laws_and_reaches_its_last_step(first: int, folder: Path) -> None:
    for seed in range(first, first + CHUNK):
        try:
            simulate(plan(seed), folder / f"{seed}.sqlite")
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise


def test_a_seed_replays_exactly(folder: Path) -> None:
    for seed in range(8):
        first, second = (simulate(plan(seed), folder / f"{seed}-{i}.sqlite") for i in range(2))
        assert first.digest == second.digest
        assert len(first.trace.lines) > 50


def test_a_failing_seed_replays_exactly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leak_cancelled_slots(monkeypatch)
    seed = first_caught(folder / "search")
    assert seed is not None
    failures = []
    for i in range(2):
        with pytest.raises((AssertionError, Exception)) as caught:
            simulate(plan(seed), folder / f"again-{i}.sqlite")
        failures.append(str(caught.value))
    assert failures[0] == failures[1]


# ---- planted bugs ----


def skip_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "sweep", lambda ready, step, max_lag, mask: (list(ready), []))


def ship_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = queue.ReadyQueue.cut

    def cut(self):
        taken = real(self)
        self.items.extend(taken[:1] if taken else [])
        return taken

    monkeypatch.setattr(queue.ReadyQueue, "cut", cut)


def drop_a_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that close do not wake `learn`."""
    real = Orchestrator.__init__

    def init(self, config, parts):
        real(self, config, parts)
        self._can_learn.set = lambda: None

    monkeypatch.setattr(Orchestrator, "__init__", init)


def leak_cancelled_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Dispatcher._landed

    def landed(self, flight, rollout):
        real(self, flight, rollout)
        if rollout.outcome in (Outcome.cut, Outcome.stale):
            self.flights[rollout.id] = flight

    monkeypatch.setattr(Dispatcher, "_landed", landed)


def forget_the_roll_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash between ledger and release, the batch is thrown away."""
    monkeypatch.setattr(Ledger, "unsent", lambda self: [])


def issue_before_the_ledger_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing reaches the disk before the next batch: after a crash, rollouts were played that were never issued."""
    monkeypatch.setattr(Ledger, "flush", lambda self: None)


@pytest.mark.parametrize(
    "plant",
    [skip_the_sweep, ship_twice, drop_a_wake_up, leak_cancelled_slots, forget_the_roll_forward, issue_before_the_ledger_knows],
)
def test_the_simulation_catches(plant: Callable[[pytest.MonkeyPatch], None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert first_caught(folder) is not None


def first_caught(folder: Path) -> int | None:
    """The first of the seeds whose schedule breaks a law."""
    folder.mkdir(exist_ok=True)
    for seed in range(60):
        try:
            simulate(plan(seed, limit_s=1000.0), folder / f"{seed}.sqlite")
        except Exception:
            return seed
    return None


def test_synchronous_training_is_exact(folder: Path) -> None:
    """With max_off_policy_steps = 0 every token of batch n was sampled by version n - 1, and nothing is thrown away in a calm world."""
    base = plan(0)
    settings = base.config.orchestrator.replace(
        max_off_policy_steps=0, batch={"type": "samples", "samples": 8}, filters=(), group_quorum=1.0, stale="drop"
    )
    config = base.config.replace(orchestrator=settings, envs=({"id": "fake", "group_size": 4},))
    world = simulate(plan(0, config=config, faults=CALM, crashes=()), folder / "sync.sqlite")
    assert lags(world) == {0}
    assert world.orchestrators[0].parts.ledger.dropped == {}


def test_asynchronous_training_uses_the_lag_that_it_may(folder: Path) -> None:
    base = plan(0)
    settings = base.config.orchestrator.replace(max_off_policy_steps=2, batch={"type": "samples", "samples": 8}, filters=(), stale="drop")
    config = base.config.replace(orchestrator=settings, envs=({"id": "fake", "group_size": 4},))
    world = simulate(plan(0, config=config, faults=CALM, crashes=()), folder / "async.sqlite")
    assert max(lags(world)) > 0


CALM = plan(0).faults.__class__()


def lags(world: World) -> set[int]:
    return {
        step - 1 - int(version)
        for step, batch in world.trainer.batches.items()
        for row in batch.micro_batches
        for version in row.versions_T[row.loss_mask_T]
    }
