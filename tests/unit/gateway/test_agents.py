"""Environments that agents play: with clients of our own, and with openai-agents where it is installed."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import openai
import pytest

from slipstream.config.envs import EnvConfig
from slipstream.config.serve import SamplingConfig
from slipstream.envs.agent import AgentEnv
from slipstream.envs.base import load_env
from slipstream.envs.play import EnvPlayer
from slipstream.errors import RewardError, StateError
from slipstream.orchestrator.samples import rollout_samples
from slipstream.types import Outcome, Rollout, Task
from tests.unit.envs.made import demonstration_script
from tests.unit.gateway.conftest import Gate
from tests.waiting import until

TASK = Task("test/train/0", "test", 0, {})
ASK = [{"role": "user", "content": "Hello"}]


class Asks(AgentEnv):
    """Asks once with OpenAI's client; subclasses do otherwise."""

    name = "test"

    async def run(self, task, api):
        async with openai.AsyncOpenAI(base_url=api.base_url, api_key=api.api_key, max_retries=0) as client:
            return await self.act(client, api.model)

    async def act(self, client, model):
        await client.chat.completions.create(model=model, messages=ASK)
        return {"reward": 0.5, "style": 1.0}


async def play(gate: Gate, env, task: Task = TASK, name: str = "g1-0", seq_len: int = 512, **settings) -> Rollout:
    config = EnvConfig(id="test", **settings)
    env.rollout_timeout_s = config.rollout_timeout_s
    player = EnvPlayer(env, gate.driver, gate.tokenizer, config, seq_len, gateway=gate.gateway)
    return await player(task, name, "g1", 3)


async def test_what_an_agent_did_is_a_rollout_with_its_reward(start):
    gate = await start("Hi")
    rollout = await play(gate, Asks(), sampling=SamplingConfig(temperature=0.7, max_tokens=9))
    assert (rollout.outcome, rollout.reward, rollout.reward_parts) == (Outcome.completed, 0.5, {"style": 1.0})
    assert rollout.messages == (*ASK, {"role": "assistant", "content": "Hi"}) and len(rollout.turns) == 1
    [request] = gate.engine.added
    assert (request.id, request.salt, request.sampling.temperature, request.sampling.max_tokens) == ("g1-0/0", 3, 0.7, 9)
    assert not gate.gateway.sessions


async def test_a_plain_function_plays_in_a_thread_with_a_blocking_client(start):
    class Blocks(AgentEnv):
        name = "test"

        def run(self, task, api):
            assert threading.current_thread() is not threading.main_thread()
            with openai.OpenAI(base_url=api.base_url, api_key=api.api_key) as client:
                client.chat.completions.create(model=api.model, messages=ASK)
            return 1.0

    rollout = await play(await start("Hi"), Blocks())
    assert (rollout.outcome, rollout.reward, len(rollout.turns)) == (Outcome.completed, 1.0, 1)


async def test_an_engine_failure_that_the_agent_hides_is_an_infrastructure_error(start):
    class Hides(Asks):
        async def act(self, client, model):
            with pytest.raises(openai.InternalServerError):
                await super().act(client, model)
            return 1.0

    gate = await start("Hi")
    gate.engine.failures = [FloatingPointError("overflow")]
    rollout = await play(gate, Hides())
    assert (rollout.outcome, rollout.reward) == (Outcome.infra_error, None) and "overflow" in rollout.error


async def test_a_client_that_tries_again_after_a_failure_goes_on_as_if_nothing_had_happened(start):
    class Retries(Asks):
        async def act(self, client, model):
            return await super().act(client.with_options(max_retries=2), model)

    gate = await start("Hi", "Hi")
    gate.engine.failures = [FloatingPointError("overflow")]
    rollout = await play(gate, Retries())
    assert rollout.outcome is Outcome.completed and len(rollout.turns) == 1


@pytest.mark.parametrize("graded", [True, False])
async def test_an_agent_that_runs_out_of_turns_is_truncated_graded_or_with_reward_zero(start, graded):
    class Goes(Asks):
        async def act(self, client, model):
            try:
                while True:
                    await client.chat.completions.create(model=model, messages=ASK)
            except openai.BadRequestError:
                if graded:
                    return 0.25
                raise

    rollout = await play(await start(*["x"] * 3), Goes(), max_turns=3)
    assert (rollout.outcome, rollout.reward, len(rollout.turns)) == (Outcome.truncated, 0.25 if graded else 0.0, 3)


@pytest.mark.parametrize(
    ("what", "outcome"),
    [(ValueError("bug"), Outcome.env_error), (RewardError("no score"), Outcome.reward_error), (float("nan"), Outcome.reward_error)],
)
async def test_an_agent_or_score_that_fails_carries_no_reward(start, what, outcome):
    class Fails(Asks):
        async def act(self, client, model):
            await super().act(client, model)
            if isinstance(what, Exception):
                raise what
            return what

    rollout = await play(await start("Hi"), Fails())
    assert (rollout.outcome, rollout.reward) == (outcome, None) and len(rollout.turns) == 1


async def test_an_agent_that_takes_too_long_is_ended_and_leaves_nothing_in_the_engine(start):
    gate = await start("Hi")
    gate.driver.pause()
    rollout = await play(gate, Asks(), rollout_timeout_s=0.2)
    assert rollout.outcome is Outcome.env_error and "0.2 s" in rollout.error
    await until(lambda: not gate.engine.running)
    assert not gate.gateway.sessions and not rollout.turns


async def test_cancelling_the_rollout_ends_its_session(start):
    gate = await start("Hi")
    gate.driver.pause()
    playing = asyncio.create_task(play(gate, Asks()))
    await until(lambda: gate.engine.running)
    playing.cancel()
    await asyncio.wait([playing])
    assert playing.cancelled() and not gate.gateway.sessions
    await until(lambda: gate.engine.aborted)


def test_a_player_of_agents_needs_a_gateway(tokenizer):
    with pytest.raises(StateError, match="no gateway"):
        EnvPlayer(Asks(), None, tokenizer, EnvConfig(id="test"), 512)  # type: ignore[arg-type]


async def test_openai_agents_plays_the_calculator_and_every_sampled_token_is_trained_once(start):
    pytest.importorskip("agents")
    env = load_env(EnvConfig(id="calculator-agent"), seed=1)
    tasks = [env.task("train", i) for i in range(4)]
    rng = np.random.default_rng(0)
    gate = await start()
    scripts = {
        t.payload["question"]: demonstration_script(env.demonstration(t, rng, noise=i % 2), gate.tokenizer) for i, t in enumerate(tasks)
    }

    def script(request) -> list[int]:
        text = gate.tokenizer.decode(request.prompt_T)
        question = next(q for q in scripts if f"user\n{q}<" in text)
        return gate.tokenizer.encode(scripts[question][text.count("<|im_start|>assistant") - 1]).tolist()

    gate.engine.script, gate.engine.seq_len = script, 2048
    settings = {"sampling": SamplingConfig(max_tokens=200), "seq_len": 2048}
    rollouts = await asyncio.gather(*(play(gate, env, task, f"g{i}-0", **settings) for i, task in enumerate(tasks)))
    assert [rollout.outcome for rollout in rollouts] == [Outcome.completed] * 4
    assert rollouts[0].reward == rollouts[2].reward == 1.0
    trained = 0
    for rollout in rollouts:
        [sample] = rollout_samples(rollout, 1.0)
        assert len(rollout.turns) >= 2 and rollout.messages[-2]["role"] == "tool"
        trained += int(sample.loss_mask_T.sum())
        said = gate.tokenizer.decode(sample.tokens_T[sample.loss_mask_T])
        assert said == "".join(scripts[rollout.task.payload["question"]][: len(rollout.turns)])
    assert trained == gate.gateway.counts.tokens and not gate.gateway.counts.forks
