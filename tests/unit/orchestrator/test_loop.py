"""The whole loop among healthy fakes: how a run ends, stops and goes on. Faults are in tests/sim."""

import asyncio
import random
from dataclasses import replace

import pytest

from slipstream.config import RunConfig
from slipstream.errors import EnvError
from slipstream.fakes.engine import FakeEngine
from slipstream.fakes.envs import FakeEnv, FakePlayer
from slipstream.fakes.store import FakeMetrics, FakeStore
from slipstream.fakes.trainer import FakeTrainer
from slipstream.observe import registry
from slipstream.orchestrator.curriculum import Curriculum
from slipstream.orchestrator.ledger import Ledger
from slipstream.orchestrator.loop import BoundEnv, Orchestrator, Parts
from slipstream.orchestrator.waits import Deadlines
from slipstream.types import Outcome, Rollout
from tests.sim import clock


class Run:
    """A run of three steps, with whatever a test changes."""

    def __init__(self, ledger=":memory:", reward=None, orchestrator=None, env=None, env_settings=None, **settings):
        values = {
            "max_steps": 3,
            "model": {"path": "none", "seq_len": 256},
            "envs": [{"id": "fake", "group_size": 4, **(env_settings or {})}],
            "orchestrator": {"batch": {"type": "samples", "samples": 8}, "max_fruitless_groups": 10, **(orchestrator or {})},
            "eval": {"tasks": 3, "interval": 0},
        }
        self.config = RunConfig.model_validate({**values, **settings})
        rng = random.Random(0)
        self.engine, self.trainer, self.store, self.metrics = FakeEngine(rng), FakeTrainer(rng), FakeStore(rng), FakeMetrics()
        self.ledger = Ledger(ledger, synchronous="OFF")
        player = FakePlayer(self.engine, rng, reward=reward or (lambda rng: float(rng.random() < 0.5)))
        curriculum = Curriculum(self.config.orchestrator.curriculum, 40, 0)
        envs = (BoundEnv(self.config.envs[0], env or FakeEnv("fake", 40), player, player, curriculum),)
        parts = Parts(envs, self.engine, self.trainer, self.ledger, self.store, self.metrics, lambda: 0.0, Deadlines(cancel_grace_s=1.0))
        self.orchestrator = Orchestrator(self.config, parts)

    async def __call__(self, cancel_at=None):
        trainer = asyncio.create_task(self.trainer.run())
        task = asyncio.create_task(self.orchestrator.run())
        if cancel_at is not None:
            asyncio.get_running_loop().call_later(cancel_at, task.cancel)
        try:
            return await task
        finally:
            trainer.cancel()
            self.ledger.audit()
            assert self.ledger.in_flight == self.ledger.num_ready == 0
            self.ledger.close()


def play(cancel_at=None, **settings):
    async def main():
        run = Run(**settings)
        return await run(cancel_at), run

    return clock.run(main())


def events(run, name):
    return [fields for event, fields in run.metrics.events if event == name]


def test_a_run_ends_at_its_last_step_with_an_evaluation_of_the_last_version():
    reason, run = play()
    assert reason == run.trainer.finished == "max_steps"
    assert run.trainer.trained == [1, 2, 3]
    assert [event["version"] for event in events(run, "eval")] == [0, 3]
    assert run.ledger.trained == 24


def test_every_key_that_the_loop_emits_is_in_the_registry():
    _, run = play()
    keys = {key for _, values in run.metrics.steps for key in values}
    assert {key for key in keys if registry.find(key) is None} == set()
    assert {"orchestrator/reward/mean", "orchestrator/time/wait_version_s", "orchestrator/eval/fake/avg_at_k"} <= keys


def test_equal_rewards_for_ever_stop_the_run_with_the_reason():
    reason, run = play(reward=lambda rng: 1.0)
    assert reason.startswith("fruitless: 10 groups in a row")
    assert run.trainer.finished == reason
    assert run.trainer.trained == []
    assert run.ledger.dropped["zero_advantage"] >= 40


def test_a_run_stops_once_an_evaluation_is_good_enough():
    reason, run = play(stop_at_eval=0.1, max_steps=50, eval={"tasks": 20, "interval": 2, "skip_first": True})
    assert reason == run.trainer.finished == "stop_at_eval"
    assert len(run.trainer.trained) < 10
    assert run.engine.live.number == max(run.trainer.trained)


def test_a_run_ends_at_the_first_step_after_its_time_with_an_evaluation_of_the_last_version():
    _, whole = play(max_steps=50, eval={"tasks": 4, "interval": 100})
    reason, run = play(max_steps=50, max_minutes=0.05, eval={"tasks": 4, "interval": 100})
    assert reason == run.trainer.finished == "max_minutes"
    assert 1 <= len(run.trainer.trained) < len(whole.trainer.trained) == 50
    assert events(run, "eval")[-1]["version"] == max(run.trainer.trained)


def test_a_cancelled_run_drops_what_is_in_flight_and_tells_the_trainer():
    run = None

    async def main():
        nonlocal run
        run = Run(max_steps=100)
        with pytest.raises(asyncio.CancelledError):
            await run(cancel_at=1.0)

    clock.run(main())
    assert run.trainer.finished == "stopped"
    assert run.ledger.dropped["stopped"] > 0


def test_an_environment_without_tasks_ends_the_run_with_its_error():
    class Broken(FakeEnv):
        def task(self, split, index):
            raise ValueError("no such file")

    run = None

    async def main():
        nonlocal run
        run = Run(env=Broken("fake", 40))
        with pytest.raises(EnvError, match="no such file"):
            await run()

    clock.run(main())
    assert run.trainer.finished.startswith("error: EnvError")


def test_the_rate_limit_spaces_groups_out():
    async def main():
        run = Run(orchestrator={"concurrency": {"tasks_per_minute": 6}, "filters": []}, eval={"tasks": 0})
        await run()
        return asyncio.get_running_loop().time()

    assert clock.run(main()) >= 50.0  # six groups, ten seconds apart


def test_a_run_goes_on_after_its_last_step(tmp_path):
    path = tmp_path / "ledger.sqlite"

    async def first():
        run = Run(ledger=path, max_steps=2)
        await run()
        return dict(run.trainer.batches)

    batches = clock.run(first())

    async def second():
        run = Run(ledger=path, max_steps=4)
        run.trainer.batches.update(batches)
        await run()
        return run

    run = clock.run(second())
    assert sorted(run.trainer.batches) == [1, 2, 3, 4]
    ids = [id for batch in run.trainer.batches.values() for id in set(batch.rollout_ids)]
    assert len(set(ids)) == len(ids) == run.ledger.trained == 32


def test_a_finished_run_that_is_started_again_has_nothing_left_to_do(tmp_path):
    path = tmp_path / "ledger.sqlite"
    _, before = play(ledger=path)

    async def again():
        run = Run(ledger=path)
        run.trainer.batches.update(before.trainer.batches)
        return await run(), run

    reason, run = clock.run(again())
    assert (reason, run.ledger.trained, events(run, "eval")) == ("max_steps", 24, [])


def test_weights_that_may_still_be_read_are_kept():
    _, run = play()
    assert run.store.oldest_weights == 2  # version 3 is live, 2 may be in use by a replica that lags


def test_everything_that_ended_is_stored_before_it_is_dropped():
    _, run = play()
    stored = {id for ids in run.store.rollouts.values() for id in ids}
    assert len(stored) == sum(run.ledger.outcomes.values())


def test_an_environment_that_always_fails_ends_the_run_at_once_with_its_error():
    async def fails(task, rollout_id, group_id, version):
        return Rollout(rollout_id, task, group_id, Outcome.reward_error, error="RewardError: reward is nan", version_start=version)

    async def main():
        run = Run()
        bound = run.orchestrator.envs["fake"]
        run.orchestrator.envs["fake"] = replace(bound, player=fails)
        run.orchestrator.evaluator._envs = [(bound.config, bound.env, fails)]
        return await run(), run, asyncio.get_running_loop().time()

    reason, run, seconds = clock.run(main())
    assert reason.startswith("fruitless: 10 groups in a row") and "reward_error: RewardError: reward is nan" in reason
    assert seconds < 60.0  # the first evaluation does not wait for grades that will not come
    assert events(run, "eval") == [] and "reward is nan" in events(run, "eval_failed")[0]["error"]
