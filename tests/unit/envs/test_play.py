import asyncio

import numpy as np
import pytest

from slipstream.chat.prefix import TurnTokens
from slipstream.config.envs import EnvConfig
from slipstream.config.serve import SamplingConfig
from slipstream.envs.base import Env, Played, TruncatedError, load_env
from slipstream.envs.demonstrations import demonstration_samples, tokenize
from slipstream.envs.play import EnvPlayer, greedy
from slipstream.errors import EngineUnavailable, RequestError
from slipstream.orchestrator.samples import rollout_samples
from slipstream.types import Outcome, Rollout, Task
from tests.unit.envs.made import HangingEngine, ScriptedEngine, completion, demonstration_script

TASK = Task("test/train/0", "test", 0, {})


class Test(Env):
    """One question; subclasses break it."""

    __test__ = False
    name = "test"

    async def prompt(self, task):
        return [{"role": "user", "content": "question"}]

    async def score(self, task, messages):
        return 1.0


async def play(env: Env, engine, tokenizer, task: Task = TASK, seq_len: int = 512, **settings) -> Rollout:
    config = EnvConfig(id=env.name, **settings)
    return await EnvPlayer(env, engine, tokenizer, config, seq_len)(task, "r1", "g1", 3)


async def play_calculator(tokenizer, index=0, noise=0.0, seq_len=512, **settings):
    env = load_env(EnvConfig(id="calculator"), seed=1)
    task = env.task("train", index)
    messages = env.demonstration(task, np.random.default_rng(index), noise)
    engine = ScriptedEngine(tokenizer, *demonstration_script(messages, tokenizer), version=3)
    return await play(env, engine, tokenizer, task, seq_len, **settings), messages, engine, env


async def test_a_scripted_demonstration_plays_to_full_reward(tokenizer):
    rollout, messages, engine, _ = await play_calculator(tokenizer)
    assert rollout.outcome is Outcome.completed
    assert rollout.reward == 1.0
    assert rollout.error == ""
    assert [m["content"] for m in rollout.messages] == [m["content"] for m in messages]
    assert [r.id for r in engine.requests] == ["r1/0", "r1/1", "r1/2"]
    assert {r.salt for r in engine.requests} == {3}
    assert len(rollout.turns) == 3


async def test_each_prompt_extends_the_tokens_before_and_asks_for_routing_from_the_last_of_them(tokenizer):
    rollout, _, engine, _ = await play_calculator(tokenizer)
    for before, turn, request in zip(rollout.turns, rollout.turns[1:], engine.requests[1:], strict=False):
        so_far = np.concatenate([before.prompt_T, before.completion.tokens_N])
        assert np.array_equal(turn.prompt_T[: len(so_far)], so_far)
        assert request.routing_from == len(so_far) - 1
    assert engine.requests[0].routing_from == 0


async def test_a_demonstration_sample_has_the_tokens_and_mask_of_its_rollout(tokenizer):
    for index in range(20):
        rollout, messages, _, env = await play_calculator(tokenizer, index, noise=0.5)
        (sample,) = rollout_samples(rollout, advantage=1.0)
        tokens_T, mask_T = tokenize(messages, env, TurnTokens(tokenizer))
        assert np.array_equal(sample.tokens_T, tokens_T)
        assert np.array_equal(sample.loss_mask_T, mask_T)


def test_demonstration_samples_are_deterministic_and_train_the_end_of_each_reply(tokenizer):
    env = load_env(EnvConfig(id="calculator"), seed=1)
    first, second = (demonstration_samples(env, tokenizer, 10, seed=4) for _ in range(2))
    assert all(np.array_equal(a, b) and np.array_equal(m, n) for (a, m), (b, n) in zip(first, second, strict=True))
    end = tokenizer.encode("<|im_end|>")[0]
    for tokens_T, mask_T in first:
        assert mask_T[-1]
        assert (tokens_T[mask_T] == end).sum() == 3
        assert not mask_T[0]


async def test_a_completion_cut_by_length_is_truncated_and_still_graded(tokenizer):
    rollout = await play(Test(), ScriptedEngine(tokenizer, "a long answer<|im_end|>"), tokenizer, sampling={"max_tokens": 3})
    assert rollout.outcome is Outcome.truncated
    assert rollout.reward == 1.0
    assert rollout.num_sampled == 3


async def test_a_tool_call_cut_by_length_gets_an_error_and_the_end_of_turn_that_it_lacks(tokenizer):
    rollout, _, _, env = await play_calculator(tokenizer, sampling={"max_tokens": 3})
    assert rollout.messages[2] == {"role": "tool", "content": "error"}
    assert tokenizer.decode(rollout.turns[1].prompt_T) == tokenizer.render(rollout.messages[:3], env.tools)


@pytest.mark.parametrize(
    ("settings", "turns"), [({"max_turns": 2}, 2), ({"max_rollout_tokens": 1000, "max_turns": 1}, 1), ({"max_turns": 3}, 3)]
)
async def test_turns_beyond_the_limit_truncate_the_rollout(tokenizer, settings, turns):
    rollout, *_ = await play_calculator(tokenizer, **settings)
    assert len(rollout.turns) == turns
    assert rollout.outcome is (Outcome.completed if turns == 3 else Outcome.truncated)


async def test_max_rollout_tokens_bounds_the_sampled_tokens_over_all_turns(tokenizer):
    full, *_ = await play_calculator(tokenizer)
    for cap in range(1, full.num_sampled + 2):
        rollout, *_ = await play_calculator(tokenizer, max_rollout_tokens=cap)
        assert rollout.num_sampled <= cap
        assert (rollout.outcome is Outcome.completed) == (cap >= full.num_sampled)
        assert rollout.outcome.gradable


async def test_no_sequence_grows_beyond_the_context(tokenizer):
    full, *_ = await play_calculator(tokenizer)
    first, longest = len(full.turns[0].prompt_T), len(full.turns[-1].prompt_T) + len(full.turns[-1].completion.tokens_N)
    for seq_len in range(first + 1, longest + 2):
        rollout, *_ = await play_calculator(tokenizer, seq_len=seq_len)
        assert all(len(t.prompt_T) + len(t.completion.tokens_N) <= seq_len for t in rollout.turns)
        assert (rollout.outcome is Outcome.completed) == (seq_len >= longest)
        assert rollout.outcome.gradable


async def test_a_first_prompt_longer_than_the_context_is_an_environment_error_naming_both_lengths(tokenizer):
    rollout, *_ = await play_calculator(tokenizer, seq_len=5)
    assert rollout.outcome is Outcome.env_error
    assert rollout.reward is None
    assert "model.seq_len = 5" in rollout.error
    assert "first prompt has" in rollout.error


async def test_an_engine_failure_is_an_infrastructure_error_and_keeps_the_turns_before_it(tokenizer):
    env = load_env(EnvConfig(id="calculator"), seed=1)
    task = env.task("train", 0)
    script = demonstration_script(env.demonstration(task, np.random.default_rng(0)), tokenizer)
    for error in (EngineUnavailable("gone"), RequestError("no")):
        rollout = await play(env, ScriptedEngine(tokenizer, script[0], error), tokenizer, task)
        assert rollout.outcome is Outcome.infra_error
        assert rollout.reward is None
        assert len(rollout.turns) == 1
        assert rollout.messages[-1]["tool_calls"]
        assert type(error).__name__ in rollout.error


async def test_an_environment_cannot_turn_an_engine_failure_into_a_reward_or_an_error_of_its_own(tokenizer):
    class Hides(Test):
        async def play(self, task, policy):
            try:
                await policy.reply([{"role": "user", "content": "go"}])
            except Exception as error:
                if task.index:
                    raise ValueError("something went wrong") from error
            return Played([], 0.0)

    for index in (0, 1):
        engine = ScriptedEngine(tokenizer, EngineUnavailable("gone"))
        rollout = await play(Hides(), engine, tokenizer, Task("t", "test", index))
        assert (rollout.outcome, rollout.reward) == (Outcome.infra_error, None)
        assert "gone" in rollout.error


async def test_an_environment_may_ask_again_after_an_engine_failure(tokenizer):
    class Retries(Test):
        async def play(self, task, policy):
            messages = [{"role": "user", "content": "go"}]
            with pytest.raises(EngineUnavailable):
                await policy.reply(messages)
            return Played([*messages, await policy.reply(messages)], 1.0)

    rollout = await play(Retries(), ScriptedEngine(tokenizer, EngineUnavailable("busy"), "ok<|im_end|>"), tokenizer)
    assert (rollout.outcome, rollout.reward) == (Outcome.completed, 1.0)


async def test_an_exception_of_the_engines_client_is_an_infrastructure_error(tokenizer):
    rollout = await play(Test(), ScriptedEngine(tokenizer, OSError("connection reset")), tokenizer)
    assert rollout.outcome is Outcome.infra_error
    assert "OSError: connection reset" in rollout.error


async def test_an_aborted_completion_is_an_infrastructure_error_and_its_tokens_are_kept(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda request: completion(request, [5, 6], finish_reason="abort"))
    rollout = await play(Test(), engine, tokenizer)
    assert rollout.outcome is Outcome.infra_error
    assert "aborted" in rollout.error
    assert rollout.num_sampled == 2


async def test_an_engine_that_never_answers_is_an_infrastructure_error_after_the_turn_deadline(tokenizer):
    rollout = await play(Test(), HangingEngine(tokenizer), tokenizer, turn_timeout_s=0.01)
    assert rollout.outcome is Outcome.infra_error
    assert "turn_timeout_s" in rollout.error


async def test_cancellation_passes_through_the_player(tokenizer):
    engine = HangingEngine(tokenizer)
    task = asyncio.create_task(play(Test(), engine, tokenizer))
    await engine.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_environment_that_raises_is_an_environment_error_in_one_line(tokenizer):
    class Raises(Test):
        async def respond(self, task, messages):
            raise KeyError("first\nsecond")

    rollout = await play(Raises(), ScriptedEngine(tokenizer, "hi<|im_end|>"), tokenizer)
    assert rollout.outcome is Outcome.env_error
    assert "KeyError" in rollout.error
    assert "test/train/0" in rollout.error
    assert "\n" not in rollout.error
    assert len(rollout.turns) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", {"other": 1.0}, {"reward": 1.0, "part": float("nan")}])
async def test_a_reward_that_is_no_finite_number_is_a_reward_error_naming_environment_and_task(tokenizer, value):
    class Bad(Test):
        async def score(self, task, messages):
            return value

    rollout = await play(Bad(), ScriptedEngine(tokenizer, "hi<|im_end|>"), tokenizer)
    assert rollout.outcome is Outcome.reward_error
    assert rollout.reward is None
    assert "'test', task test/train/0" in rollout.error


@pytest.mark.parametrize("value", [1, True, 0.5, np.float32(0.5), {"reward": 0.5, "style": 1}])
async def test_any_finite_number_is_a_reward(tokenizer, value):
    class Good(Test):
        async def score(self, task, messages):
            return value

    rollout = await play(Good(), ScriptedEngine(tokenizer, "hi<|im_end|>"), tokenizer)
    assert rollout.outcome is Outcome.completed
    assert rollout.reward == (value["reward"] if isinstance(value, dict) else value)
    assert isinstance(rollout.reward, float)


async def test_a_score_that_raises_is_a_reward_error(tokenizer):
    class Raises(Test):
        def score(self, task, messages):
            raise ZeroDivisionError("no tests ran")

    rollout = await play(Raises(), ScriptedEngine(tokenizer, "hi<|im_end|>"), tokenizer)
    assert rollout.outcome is Outcome.reward_error
    assert "ZeroDivisionError: no tests ran" in rollout.error


async def test_a_score_that_hangs_is_a_reward_error_whether_it_blocks_or_awaits(tokenizer, release):
    class Blocks(Test):
        hook_timeout_s = 0.02

        def score(self, task, messages):
            release.wait()

    class Awaits(Test):
        hook_timeout_s = 0.02

        async def score(self, task, messages):
            await asyncio.Event().wait()

    for env in (Blocks(), Awaits()):
        rollout = await play(env, ScriptedEngine(tokenizer, "hi<|im_end|>"), tokenizer)
        assert rollout.outcome is Outcome.reward_error
        assert "did not return within 0.02 s" in rollout.error


async def test_a_tool_that_hangs_is_an_environment_error(tokenizer, release):
    class Blocks(Test):
        hook_timeout_s = 0.02

        def respond(self, task, messages):
            release.wait()

    rollout = await play(Blocks(), ScriptedEngine(tokenizer, "hi<|im_end|>"), tokenizer)
    assert rollout.outcome is Outcome.env_error
    assert "did not return" in rollout.error


async def test_an_environment_that_does_not_grade_unfinished_conversations_gets_reward_zero_for_them(tokenizer):
    class Strict(Test):
        async def play(self, task, policy):
            messages = [{"role": "user", "content": "go"}]
            while True:
                messages.append(await policy.reply(messages))
                messages.append({"role": "user", "content": "more"})

    rollout = await play(Strict(), ScriptedEngine(tokenizer, *["x<|im_end|>"] * 4), tokenizer, max_turns=4)
    assert rollout.outcome is Outcome.truncated
    assert rollout.reward == 0.0
    assert len(rollout.turns) == 4


@pytest.mark.parametrize("result", [None, 1.0, Played([], float("nan")), Played([], None)])  # type: ignore[arg-type]
async def test_a_play_that_returns_nonsense_carries_no_reward(tokenizer, result):
    class Odd(Test):
        async def play(self, task, policy):
            return result

    rollout = await play(Odd(), ScriptedEngine(tokenizer), tokenizer)
    assert rollout.outcome in (Outcome.env_error, Outcome.reward_error)
    assert rollout.reward is None


async def test_messages_that_the_template_refuses_are_an_environment_error(tokenizer):
    class BadRole(Test):
        async def prompt(self, task):
            return [{"role": "narrator", "content": "x"}]

    rollout = await play(BadRole(), ScriptedEngine(tokenizer), tokenizer)
    assert rollout.outcome is Outcome.env_error
    assert "narrator" in rollout.error


async def test_a_completion_without_a_token_is_played_on_and_gives_no_sample_of_its_own(tokenizer):
    class Twice(Test):
        async def respond(self, task, messages):
            return [{"role": "user", "content": "again"}] if len(messages) < 3 else ()

    engine = ScriptedEngine(tokenizer, "", "ok<|im_end|>")
    rollout = await play(Twice(), engine, tokenizer)
    assert rollout.outcome is Outcome.completed
    assert rollout.messages[1] == {"role": "assistant", "content": ""}
    (sample,) = rollout_samples(rollout, 1.0)
    assert int(sample.loss_mask_T.sum()) == len(rollout.turns[1].completion.tokens_N)
    text = tokenizer.render([*rollout.messages[:-1]])
    assert tokenizer.decode(rollout.turns[1].prompt_T) == text

    nothing = await play(Test(), ScriptedEngine(tokenizer, ""), tokenizer)
    assert nothing.outcome is Outcome.completed
    assert rollout_samples(nothing, 1.0) == ()


async def test_an_edited_conversation_starts_afresh(tokenizer):
    class Forgets(Test):
        async def play(self, task, policy):
            await policy.reply([{"role": "user", "content": "long story"}])
            messages = [{"role": "user", "content": "summary"}]
            messages.append(await policy.reply(messages))
            return await self.graded(task, messages)

    engine = ScriptedEngine(tokenizer, "a<|im_end|>", "b<|im_end|>")
    rollout = await play(Forgets(), engine, tokenizer)
    assert rollout.outcome is Outcome.completed
    assert engine.requests[1].routing_from == 0
    assert len(rollout_samples(rollout, 1.0)) == 2


async def test_an_evaluation_replaces_the_sampling(tokenizer):
    config = EnvConfig(id="test", sampling=SamplingConfig(temperature=0.7, top_p=0.9, max_tokens=9, stop=("x",)))
    engine = ScriptedEngine(tokenizer, "hi<|im_end|>")
    await EnvPlayer(Test(), engine, tokenizer, config, 512, sampling=greedy(config.sampling))(TASK, "e", "g", 0)
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.stop) == (0.0, 1.0, 9, ("x",))


async def test_a_truncated_error_is_what_an_environment_catches(tokenizer):
    class Catches(Test):
        async def play(self, task, policy):
            messages = [{"role": "user", "content": "go"}, await policy.reply([{"role": "user", "content": "go"}])]
            with pytest.raises(TruncatedError, match="max_turns"):
                await policy.reply([*messages, {"role": "user", "content": "more"}])
            return Played(messages, 0.25)

    rollout = await play(Catches(), ScriptedEngine(tokenizer, "x<|im_end|>"), tokenizer, max_turns=1)
    assert (rollout.outcome, rollout.reward) == (Outcome.truncated, 0.25)


async def test_an_environment_that_calls_exit_costs_its_rollout_and_not_the_process(tokenizer):
    class Exits(Test):
        async def prompt(self, task):
            raise SystemExit(7)

    rollout = await play(Exits(), ScriptedEngine(tokenizer), tokenizer)
    assert rollout.outcome is Outcome.env_error and "SystemExit: 7" in rollout.error
