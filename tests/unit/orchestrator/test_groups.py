import asyncio
from collections import Counter

import pytest

from slipstream.config.envs import EnvConfig
from slipstream.config.run import FilterConfig, OrchestratorConfig
from slipstream.config.train import AdvantageConfig
from slipstream.orchestrator.dispatch import Flight
from slipstream.orchestrator.groups import Open, Verdict, fruitless_after, judge, next_env, pass_rate, play_group
from slipstream.types import Group, Outcome, Rollout
from tests.sim import clock
from tests.unit.orchestrator.make import TASK, player, rollout

ENV = EnvConfig(id="env", group_size=4)
ZERO = (FilterConfig(type="zero_advantage"),)


def play(players, **settings):
    """(group, ids that ended in order, seconds). `players` serve the rollouts in the order of issue, retries last."""
    config = OrchestratorConfig(**settings)

    async def main():
        served = iter(players)

        def issue(id, attempt):
            flight = Flight(next(served)(TASK, id, "g1", 0), Rollout(id, TASK, "g1", Outcome.cut), 60.0, grace_s=2.0)
            flight.attempt = attempt
            return flight

        ended = []
        group = await play_group(Open("g1", TASK, 4, issue), config, lambda r: ended.append(r.id))
        return group, ended, asyncio.get_running_loop().time()

    return clock.run(main())


def outcomes(group):
    return Counter(r.outcome.value for r in group.rollouts)


def test_a_group_closes_when_its_last_rollout_has_ended():
    group, ended, seconds = play([player(s) for s in (3, 1, 4, 2)])
    assert ended == ["g1-1", "g1-3", "g1-0", "g1-2"]
    assert (outcomes(group), seconds) == ({"completed": 4}, 4)


def test_a_quorum_closes_it_after_the_grace_and_cuts_the_rest():
    group, _, seconds = play([player(1), player(1), player(1), player(50)], group_quorum=0.75, group_grace_s=5.0)
    assert (outcomes(group), seconds) == ({"completed": 3, "cut": 1}, 6)


def test_a_straggler_within_the_grace_counts():
    group, _, seconds = play([player(1), player(1), player(1), player(4)], group_quorum=0.75, group_grace_s=5.0)
    assert (outcomes(group), seconds) == ({"completed": 4}, 4)


def test_rollouts_without_a_reward_do_not_make_a_quorum():
    failed = player(1, outcome=Outcome.env_error)
    group, _, seconds = play([failed, failed, player(9), player(9)], group_quorum=0.5, group_grace_s=0.0)
    assert (outcomes(group), seconds) == ({"env_error": 2, "completed": 2}, 9)


def test_a_quorum_never_closes_a_group_that_would_be_too_small_to_train():
    group, _, _ = play([player(1), player(9), player(50), player(50)], group_quorum=0.25, group_grace_s=0.0, min_group=2)
    assert outcomes(group) == {"completed": 2, "cut": 2}


def test_infrastructure_failures_are_issued_again_under_a_fresh_id_and_counted():
    failed = player(1, outcome=Outcome.infra_error)
    group, ended, _ = play([failed, player(1), player(1), player(1), failed, player(1)], infra_retries=2)
    assert ended[-2:] == ["g1-4", "g1-5"]
    assert len(ended) == 6
    assert outcomes(group) == {"completed": 4}


def test_after_the_last_retry_the_group_goes_on_without_it():
    failed = player(1, outcome=Outcome.infra_error)
    group, ended, _ = play([failed, player(1), player(1), player(1), failed], infra_retries=1)
    assert outcomes(group) == {"completed": 3, "infra_error": 1}
    assert len(ended) == 5


def closed(*rollouts):
    return Group("g1", TASK, tuple(rollouts))


def test_the_baseline_of_a_partial_group_is_over_the_rollouts_that_it_has():
    group = closed(rollout("g1-0", 1.0), rollout("g1-1", 0.0), rollout("g1-2", outcome=Outcome.infra_error), rollout("g1-3", 0.5))
    verdict = judge(group, ENV, ZERO, min_group=2, seq_len=64)
    assert [(r.id, a) for r, a in verdict.trained] == [("g1-0", 0.5), ("g1-1", -0.5), ("g1-3", 0.0)]


def test_a_group_with_equal_rewards_teaches_nothing():
    verdict = judge(closed(rollout("g1-0"), rollout("g1-1")), ENV, ZERO, 2, 64)
    assert verdict == Verdict((), {"g1-0": "zero_advantage", "g1-1": "zero_advantage"}, {"zero_advantage": 2})


def test_a_monitor_counts_without_dropping():
    verdict = judge(closed(rollout("g1-0"), rollout("g1-1")), ENV, (FilterConfig(type="zero_advantage", mode="monitor"),), 2, 64)
    assert (len(verdict.trained), verdict.dropped, verdict.caught) == (2, {}, {"zero_advantage": 2})


def test_a_filtered_rollout_still_counts_in_the_baseline():
    dull = FilterConfig(type="gibberish", min_logprob=-0.5)
    verdict = judge(closed(rollout("g1-0", 1.0), rollout("g1-1", 0.0, versions=())), ENV, (dull,), 2, 64)
    assert verdict.dropped == {"g1-0": "gibberish"}
    assert [a for _, a in verdict.trained] == [-0.5]


def test_a_group_that_is_too_small_is_dropped_as_such():
    verdict = judge(closed(rollout("g1-0"), rollout("g1-1", outcome=Outcome.cut)), ENV, ZERO, 2, 64)
    assert (verdict.trained, verdict.dropped) == ((), {"g1-0": "small_group"})


def test_other_advantages_come_from_the_environments_own_settings():
    env = EnvConfig(id="env", advantage=AdvantageConfig(type="rloo"))
    verdict = judge(closed(rollout("g1-0", 1.0), rollout("g1-1", 0.0)), env, ZERO, 2, 64)
    assert [a for _, a in verdict.trained] == [1.0, -1.0]


@pytest.mark.parametrize(
    ("ends", "after"),
    [
        ((Outcome.env_error, Outcome.env_error), 6),
        ((Outcome.cut, Outcome.cut), 6),
        ((Outcome.infra_error, Outcome.cut), 5),
        ((Outcome.stale, Outcome.completed), 5),
        ((Outcome.completed, Outcome.completed), 6),
    ],
)
def test_only_tasks_that_teach_nothing_count_as_fruitless(ends, after):
    group = closed(*(rollout(f"g1-{i}", outcome=outcome) for i, outcome in enumerate(ends)))
    assert fruitless_after(5, group, judge(group, ENV, ZERO, 2, 64)) == after


def test_one_trained_rollout_ends_the_drought():
    group = closed(rollout("g1-0", 1.0), rollout("g1-1", 0.0))
    assert fruitless_after(5, group, judge(group, ENV, ZERO, 2, 64)) == 0


def test_the_pass_rate_is_the_mean_reward_of_what_was_graded():
    assert pass_rate(closed(rollout("g1-0", 1.0), rollout("g1-1", 0.5), rollout("g1-2", outcome=Outcome.cut))) == 0.75
    assert pass_rate(closed(rollout("g1-2", outcome=Outcome.cut))) is None
    assert pass_rate(closed(rollout("g1-0", -3.0), rollout("g1-1", -1.0))) == 0.0


def test_environments_take_turns_by_weight_without_bursts():
    credits, order = {}, []
    for _ in range(7):
        chosen, credits = next_env(credits, {"a": 5.0, "b": 1.0, "c": 1.0})
        order.append(chosen)
    assert "".join(order) == "aabacaa"
