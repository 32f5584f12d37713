import asyncio

import pytest

from slipstream.config.envs import EnvConfig, EvalConfig
from slipstream.fakes.envs import FakeEnv
from slipstream.orchestrator.evals import Evaluator, eval_sampling, is_due, is_pinned, score
from slipstream.types import Outcome, Task
from tests.sim import clock
from tests.unit.orchestrator.make import rollout


def test_versions_are_evaluated_at_the_start_at_each_interval_and_at_the_end():
    config = EvalConfig(interval=5)
    assert is_due(0, -1, config)
    assert not is_due(4, 0, config)
    assert is_due(5, 0, config)
    assert is_due(7, 3, config)  # 5 and 6 were skipped
    assert not is_due(9, 7, config)
    assert is_due(9, 7, config, final=True)
    assert not is_due(9, 9, config, final=True)


def test_the_first_evaluation_can_be_skipped_and_all_can_be_off():
    assert not is_due(0, -1, EvalConfig(skip_first=True))
    assert is_due(5, -1, EvalConfig(skip_first=True, interval=5))
    assert not is_due(0, -1, EvalConfig(tasks=0))
    assert not is_due(9, -1, EvalConfig(tasks=0), final=True)


def test_a_token_of_another_version_unpins_a_rollout():
    assert is_pinned(rollout(versions=((3, 5),)), 3)
    assert not is_pinned(rollout(versions=((3, 5), (4, 1))), 3)


def test_avg_at_k_and_pass_at_k_in_closed_form():
    def of(task, reward, outcome=Outcome.completed):
        return rollout(f"{task}-x", reward, outcome, task=Task(f"env/eval/{task}", "env", task))

    result = score([of(0, 1.0), of(0, 0.0), of(1, 0.5), of(1, 0.0), of(2, 1.0), of(2, 0.0, Outcome.infra_error)], success_reward=1.0)
    assert result.avg_at_k == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert result.pass_at_k == pytest.approx(2 / 3)
    assert result.reward_mean == pytest.approx(0.5)
    assert (result.samples, result.ungraded) == (5, 1)


def test_nothing_graded_is_no_score():
    assert score([rollout("a-0", outcome=Outcome.cut)], 1.0).samples == 0


def test_evaluations_sample_at_their_own_temperature_within_the_environments_limits():
    env = EnvConfig.model_validate({"id": "env", "sampling": {"max_tokens": 7, "top_p": 0.5}})
    assert eval_sampling(env, EvalConfig()).model_dump() == {**env.sampling.model_dump(), "temperature": 0.0, "top_p": 1.0}
    warm = eval_sampling(env, EvalConfig(temperature=0.7))
    assert (warm.temperature, warm.max_tokens, warm.top_p) == (0.7, 7, 0.5)


def evaluate(player, limit=4, **settings):
    async def main():
        config = EnvConfig(id="env", rollout_timeout_s=10.0)
        evaluator = Evaluator([(config, FakeEnv("env"), player)], EvalConfig(**settings), lambda: limit, lambda: 0.0, grace_s=1.0)
        results, rollouts = await evaluator.run(7)
        return results["env"], rollouts, asyncio.get_running_loop().time(), evaluator.in_flight

    return clock.run(main())


def test_all_tasks_are_played_k_times_and_at_most_limit_at_once():
    running, most = 0, 0

    async def play(task, id, group_id, version):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1.0)
        running -= 1
        return rollout(id, versions=((7, 2),), task=task)

    result, rollouts, seconds, in_flight = evaluate(play, tasks=5, samples=2)
    assert (result.samples, len(rollouts), most, seconds, in_flight) == (10, 10, 4, 3.0, 0)


def test_a_rollout_in_which_another_version_had_a_part_is_played_again():
    async def play(task, id, group_id, version):
        versions = ((7, 2),) if id.endswith("-1") else ((6, 1), (7, 1))
        return rollout(id, versions=versions, task=task)

    result, rollouts, _, _ = evaluate(play, tasks=1)
    assert (result.samples, rollouts[0].id[-2:]) == (1, "-1")


def test_what_never_gets_a_grade_is_left_out_and_counted():
    async def hang(task, id, group_id, version):
        await asyncio.sleep(1e6 if task.index == 1 else 1.0)
        return rollout(id, versions=((7, 2),), task=task)

    result, rollouts, seconds, _ = evaluate(hang, tasks=2)
    assert (result.samples, result.ungraded) == (1, 1)
    assert rollouts[1].outcome is Outcome.cut
    assert seconds == 61.0  # four tries of 10 s, with 1, 4 and 16 s between


def test_no_grade_at_all_is_not_a_score_of_zero():
    """An engine that is away for a while: everything is played again once it answers."""

    async def play(task, id, group_id, version):
        if asyncio.get_running_loop().time() < 100.0:
            return rollout(id, outcome=Outcome.infra_error, task=task)
        return rollout(id, versions=((7, 2),), task=task)

    result, _, seconds, _ = evaluate(play, tasks=2)
    assert (result.avg_at_k, result.samples) == (1.0, 2)
    assert seconds > 100.0


def test_a_mixed_version_is_no_grade_even_at_the_last_try():
    async def play(task, id, group_id, version):
        return rollout(id, versions=((6 if task.index else 7, 2),), task=task)

    result, rollouts, _, _ = evaluate(play, tasks=2)
    assert result.samples == 1
    assert (rollouts[1].reward, rollouts[1].outcome) == (None, Outcome.infra_error)


@pytest.mark.parametrize("outcome", [Outcome.env_error, Outcome.reward_error])
def test_a_broken_environment_is_not_played_again_and_has_no_score(outcome):
    async def play(task, id, group_id, version):
        return rollout(id, outcome=outcome, task=task)

    result, rollouts, seconds, _ = evaluate(play, tasks=3)
    assert (result.samples, result.ungraded, len(rollouts), seconds) == (0, 3, 3, 0.0)
