"""The gateway of a run: where its environments' agents call the policy, in the orchestrator's process, while there are such environments.

In this process a rollout's deadline and cancellation reach its calls directly, and its turns need no second copy.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config import RunConfig
from slipstream.envs.agent import AgentEnv
from slipstream.ports import Env
from slipstream.serving.gateway.app import serving
from slipstream.serving.gateway.gateway import Gateway, GatewayEngine


@asynccontextmanager
async def gateway_for(
    envs: Iterable[Env], engine: GatewayEngine, tokenizer: ChatTokenizer, config: RunConfig
) -> AsyncIterator[Gateway | None]:
    """The gateway while the block runs; None where no environment needs one. Raises ConfigError when its port is taken."""
    if not any(isinstance(env, AgentEnv) for env in envs):
        yield None
        return
    gateway = Gateway(engine, tokenizer, config.name, config.model.seq_len, secrets.token_urlsafe(32), config.gateway)
    async with serving(gateway, config.gateway.host, config.gateway.port, config.gateway.turn_timeout_s):
        yield gateway
