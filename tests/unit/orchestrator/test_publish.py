import asyncio
import random

import pytest

from slipstream.config.router import RouterConfig
from slipstream.errors import EngineError, EngineUnavailable, TrainerError, WireError
from slipstream.fakes.engine import FakeEngine
from slipstream.fakes.store import FakeMetrics
from slipstream.fakes.trainer import FakeTrainer, fake_version
from slipstream.orchestrator.publish import Publisher
from slipstream.orchestrator.waits import Deadlines
from slipstream.types import EngineState
from tests.sim import clock

DEADLINES = Deadlines(prepare_s=5.0, commit_s=5.0, state_s=2.0, poll_s=1.0)


class World:
    def __init__(self, engine=None):
        rng = random.Random(0)
        self.engine = engine or FakeEngine(rng)
        self.trainer = FakeTrainer(rng)
        self.metrics = FakeMetrics()
        self.publisher = Publisher(self.engine, self.trainer, self.metrics, DEADLINES, silence_s=30.0)

    def events(self):
        return [name for name, _ in self.metrics.events]


def run(script, **fields):
    async def main():
        world = World(**fields)
        return await script(world), world

    return clock.run(main())


def test_a_version_is_live_when_the_engine_says_so():
    async def script(world):
        return await world.publisher.make_live(fake_version(3))

    version, world = run(script)
    assert (version.number, world.engine.live.number, world.events()) == (3, 3, ["published"])


def test_an_engine_that_is_away_is_tried_until_it_returns():
    async def script(world):
        asyncio.get_running_loop().create_task(world.engine.die(40.0))
        await asyncio.sleep(0)
        await world.publisher.make_live(fake_version(3))
        return asyncio.get_running_loop().time()

    seconds, world = run(script)
    assert 40.0 < seconds < 46.0
    assert world.events()[-1] == "published"


def test_a_newer_version_overtakes_one_that_the_engine_cannot_have_yet():
    async def script(world):
        asyncio.get_running_loop().create_task(world.engine.die(10.0))
        await asyncio.sleep(0)
        world.trainer.published = 7
        return await world.publisher.make_live(fake_version(3))

    version, world = run(script)
    assert (version.number, world.engine.commits) == (7, [7])


class Hanging(FakeEngine):
    """Takes longer over the first commit than anybody waits."""

    async def commit(self, number):
        if not self.commits:
            self.commits.append(number)
            await asyncio.sleep(100.0)
        await super().commit(number)


def test_a_commit_that_hangs_is_said_and_tried_again():
    async def script(world):
        return await world.publisher.make_live(fake_version(1))

    version, world = run(script, engine=Hanging(random.Random(0)))
    (name, fields), (last, _) = world.metrics.events
    assert (name, last, version.number) == ("publish_failed", "published", 1)
    assert fields["error"] == "EngineUnavailable: commit: no answer of the engines within 5 s; it is tried again"


def test_the_deadlines_of_an_update_are_longer_than_those_of_the_pool_whose_errors_name_the_replica():
    deadlines = Deadlines.of_run(RouterConfig(update_timeout_s=300.0, patience_s=50.0))
    assert deadlines.prepare_s == deadlines.commit_s == 650.0


class Refusing(FakeEngine):
    async def prepare(self, version):
        raise EngineError("wrong fingerprint")


def test_an_engine_that_refuses_again_and_again_ends_the_run():
    with pytest.raises(EngineError, match="wrong fingerprint"):
        run(lambda world: world.publisher.make_live(fake_version(1)), engine=Refusing(random.Random(0)))


class Lying(FakeEngine):
    """Says yes to everything and goes on with other weights, twice."""

    lies = 2

    async def state(self):
        self.lies -= 1
        return EngineState(1, "other weights") if self.lies >= 0 else await super().state()


def test_equal_numbers_with_other_weights_are_not_live():
    async def script(world):
        return await world.publisher.make_live(fake_version(1))

    _, world = run(script, engine=Lying(random.Random(0)))
    assert world.events() == ["publish_failed", "publish_failed", "published"]


def test_old_news_is_no_news():
    async def script(world):
        world.trainer.published = 3
        return await world.publisher.next_version(3, owed=False), await world.publisher.next_version(2, owed=True)

    (nothing, version), world = run(script)
    assert nothing is None
    assert version.number == 3
    assert world.publisher.waited_s == pytest.approx(1.0, abs=0.01)


def test_a_trainer_that_owes_a_version_for_too_long_ends_the_run():
    async def script(world):
        while True:
            await world.publisher.next_version(0, owed=True)

    with pytest.raises(TrainerError, match="is the trainer alive"):
        run(script)


def test_a_trainer_that_owes_nothing_may_be_silent():
    async def script(world):
        return [await world.publisher.next_version(0, owed=False) for _ in range(100)]

    assert set(run(script)[0]) == {None}


def test_a_version_that_is_replaced_while_it_is_read_is_read_again():
    async def script(world):
        problems = [WireError("half a file")]
        real = world.trainer.news

        async def news(after):
            if problems:
                raise problems.pop()
            return await real(after)

        world.trainer.news = news
        world.trainer.published = 1
        return [await world.publisher.next_version(0, owed=True) for _ in range(2)]

    (first, second), world = run(script)
    assert (first, second.number, world.events()) == (None, 1, ["publish_failed"])


def test_unavailable_is_not_a_refusal():
    class Flaky(FakeEngine):
        left = 100

        async def prepare(self, version):
            self.left -= 1
            if self.left > 0:
                raise EngineUnavailable("restarting")
            await super().prepare(version)

    version, _ = run(lambda world: world.publisher.make_live(fake_version(1)), engine=Flaky(random.Random(0)))
    assert version.number == 1
