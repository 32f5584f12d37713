"""calculator-agent: the calculator's tasks, played by openai-agents (PyPI; extra `agents`) as it is, its own loop and tool calls included.

A template for agents of your own: the library gets the session's base URL and key, and `run` returns the score of what it did.
"""

from __future__ import annotations

import json
from typing import Any

from slipstream.envs.agent import AgentApi, AgentEnv
from slipstream.envs.calculator import Calculator, calculate
from slipstream.errors import ConfigError
from slipstream.types import Task

try:
    import agents  # pyright: ignore[reportMissingImports]
    import openai
except ModuleNotFoundError as error:
    raise ConfigError(
        f"environment 'calculator-agent' needs the package openai-agents ({error}): pip install 'slipstream[agents]'"
    ) from None

MOST_TURNS = 16
"""Where the library itself gives up; the run file's max_turns is usually lower."""


class CalculatorAgent(AgentEnv, Calculator):
    """Tasks, arguments, demonstrations and reward of `calculator`."""

    async def run(self, task: Task, api: AgentApi) -> dict[str, float]:
        results: list[str] = []

        def calculator(a: int, op: str, b: int) -> str:
            """Computes a op b for two integers."""
            results.append(calculate({"name": "calculator", "arguments": json.dumps({"a": a, "op": op, "b": b})}))
            return results[-1]

        # the gateway speaks plain HTTP: reading certificates would take longer than a call
        async with openai.DefaultAsyncHttpxClient(verify=False) as http:
            client = openai.AsyncOpenAI(base_url=api.base_url, api_key=api.api_key, http_client=http)
            model = agents.OpenAIChatCompletionsModel(api.model, client)
            agent = agents.Agent(name="calculator", model=model, tools=[agents.function_tool(calculator)] if self.tools else [])
            said = await self._answer(agent, task.payload["question"])
        messages = [*({"role": "tool", "content": result} for result in results), {"role": "assistant", "content": said}]
        return await self.score(task, messages)

    async def _answer(self, agent: Any, question: str) -> str:
        """What the agent says in the end; nothing where the policy made the library give up."""
        config = agents.RunConfig(tracing_disabled=True)
        try:
            return str((await agents.Runner.run(agent, question, max_turns=MOST_TURNS, run_config=config)).final_output)
        except (agents.ModelBehaviorError, agents.MaxTurnsExceeded):
            return ""
