"""`slipstream generate`: talk to a model folder, with an engine in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config import validate
from slipstream.config.envs import EnvConfig
from slipstream.config.serve import EngineConfig, SamplingConfig
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.local import local_engine
from slipstream.envs.base import Env, load_env
from slipstream.envs.play import EnvPlayer
from slipstream.models.impl import Impl, read_spec
from slipstream.types import GenerateRequest, Sampling


def chat(model: Path, prompt: str, env: str | None, *, max_tokens: int, temperature: float, seed: int, impl: Impl = "auto") -> list[str]:
    """The model's reply to one user message, as lines to print; with `env`, the whole conversation with its tools.

    Raises ConfigError or ModelError: a model, an environment or a setting that cannot be used.
    """
    import torch

    torch.set_num_threads(1)
    seq_len = min(read_spec(model, impl).max_positions, 4096)
    engine = EmbeddedEngine(model, EngineConfig(max_running=4, max_step_tokens=512), seq_len, seed=seed, version=0, impl=impl)
    sampling = validate(SamplingConfig, {"temperature": temperature, "max_tokens": min(max_tokens, seq_len - 1)})
    if env is None:
        return asyncio.run(_reply(engine, ChatTokenizer.load(model), prompt, sampling, seed))
    config = EnvConfig(id=env, sampling=sampling)
    return asyncio.run(_play(engine, ChatTokenizer.load(model), load_env(config, seed), config, prompt, seq_len))


async def _reply(engine: EmbeddedEngine, tokenizer: ChatTokenizer, prompt: str, sampling: SamplingConfig, seed: int) -> list[str]:
    ids = tokenizer.prompt_ids([{"role": "user", "content": prompt}])
    wanted = Sampling(temperature=sampling.temperature, max_tokens=sampling.max_tokens, seed=seed)
    async with local_engine(engine) as port:
        completion = await port.generate(GenerateRequest("generate", ids, wanted))
    return [tokenizer.decode(completion.tokens_N, skip_special=True)]


async def _play(engine: EmbeddedEngine, tokenizer: ChatTokenizer, env: Env, config: EnvConfig, prompt: str, seq_len: int) -> list[str]:
    async with local_engine(engine) as port:
        rollout = await EnvPlayer(env, port, tokenizer, config, seq_len)(env.task_from_prompt(prompt), "generate", "generate", 0)
    lines = [f"{m['role']}: {m.get('content') or ''} {_calls(m)}".strip() for m in rollout.messages]
    return [*lines, f"({rollout.outcome.value}{', ' + rollout.error if rollout.error else ''})"]


def _calls(message: object) -> str:
    calls = message.get("tool_calls") or () if isinstance(message, dict) else ()
    return " ".join(f"{c['function']['name']}({c['function']['arguments']})" for c in calls)
