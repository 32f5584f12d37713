"""The accounting of sessions with the embedded engine and a real, tiny MoE: every token that it sampled, and all that belongs to it."""

from __future__ import annotations

import asyncio

import numpy as np
import openai
import pytest

from slipstream.chat.recording import Limits
from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config.gateway import GatewayConfig
from slipstream.config.serve import EngineConfig
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.local import local_engine
from slipstream.models.maker import make_model
from slipstream.orchestrator.samples import rollout_samples
from slipstream.serving.gateway.app import serving
from slipstream.serving.gateway.gateway import Gateway
from slipstream.types import Outcome, Rollout, Sample, Sampling, Task

SEQ_LEN = 512
ASK = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real") / "tiny"
    make_model(folder, "tiny-moe", ["the quick brown fox jumps over the lazy dog", "a calculator adds numbers"] * 3, vocab_size=400)
    return folder


def routed(sample: Sample) -> np.ndarray:
    """Which tokens have a routing row."""
    valid_T = np.zeros(sample.num_tokens, np.bool_)
    for rows in sample.routing:
        valid_T[rows.start : rows.start + len(rows.valid_T)] |= rows.valid_T
    return valid_T


async def agent(base_url: str, api_key: str, turns: int, stream: bool) -> None:
    """Talks for some turns, and from the first reply on with a second conversation beside."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def say(messages: list) -> list:
            if stream:
                chunks = await client.chat.completions.create(model="policy", messages=messages, stream=True)
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
            else:
                text = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message.content
            return [*messages, {"role": "assistant", "content": text}]

        async def talk(messages: list, word: str) -> None:
            for i in range(turns):
                messages = await say([*messages, {"role": "user", "content": f"{word} {i}"}])

        begun = await say(ASK)
        await asyncio.gather(talk(begun, "left"), talk(begun, "right"))


async def test_every_sampled_token_is_trained_once_with_its_logprob_version_and_routing_rows(folder):
    engine = EmbeddedEngine(folder, EngineConfig(kv_memory_mib=8, max_running=64, block_tokens=4), SEQ_LEN, version=7)
    tokenizer = ChatTokenizer.load(folder)
    async with local_engine(engine) as driver:
        gateway = Gateway(driver, tokenizer, "policy", SEQ_LEN, "t", GatewayConfig())
        async with serving(gateway, "127.0.0.1", 0, 60.0):
            limits, contract = Limits(SEQ_LEN, 60.0), Sampling(max_tokens=12)
            sessions = [gateway.open(f"r{i}", 7, contract, limits) for i in range(4)]
            await asyncio.gather(*(agent(s.base_url, s.api_key, turns=3, stream=i % 2 == 0) for i, s in enumerate(sessions)))
    trained = 0
    for session in sessions:
        assert session.failure is None and len(session.turns) == 7
        samples = rollout_samples(Rollout(session.id, Task("t", "e", 0), "g", Outcome.completed, tuple(session.turns), reward=1.0), 1.0)
        assert len(samples) == 2 and dict(session.forks) == {"branched": 1}
        for sample in samples:
            mask_T = sample.loss_mask_T
            trained += int(mask_T.sum())
            assert (sample.logprobs_T[mask_T] < 0).all() and (sample.versions_T[mask_T] == 7).all()
            assert routed(sample)[:-1].all(), "every token but the last, which was never processed"
    state = await driver.state()
    assert trained == sum(s.num_sampled for s in map(_rollout, sessions)) == gateway.counts.tokens == state.generated_tokens
    engine.check_integrity()


def _rollout(session) -> Rollout:
    return Rollout(session.id, Task("t", "e", 0), "g", Outcome.completed, tuple(session.turns), reward=1.0)
