"""Tool calls through the openai package, all the way: `slipstream engine` with a model that was made and taught here, tools in the request,
parsed calls in the answer, results sent back, an answer at the end. Streamed as in one piece."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest

from slipstream.config.envs import EnvConfig
from slipstream.envs.base import load_env
from slipstream.envs.calculator import TOOL, calculate
from tests.e2e.conftest import RUN_FILE, slipstream
from tests.waiting import HUNG_S

ARGS = {"max_operand": 9, "num_train": 1500, "num_eval": 128}
QUESTIONS = 12
MOST_TURNS = 5


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of the engine's own process, which serves a model that has seen nothing but right demonstrations."""
    folder = tmp_path_factory.mktemp("tools")
    (folder / "run.toml").write_text(RUN_FILE.format(model=folder / "raw"))
    teach = ("sft", folder / "run.toml", "--out", folder / "taught", "--set", "sft.noise=0.0", "--set", "sft.steps=200")
    for command in (("make-model", folder / "raw", "--env", "calculator"), teach):
        done = slipstream(*command)
        assert done.returncode == 0, done.stderr
    argv = [sys.executable, "-m", "slipstream.cli", "engine", "--model", str(folder / "taught"), "--seq-len", "192"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline()
            found = re.search(r"http://\S+/v1", said)
            assert found, said
            with openai.OpenAI(base_url=found.group(), api_key="any", max_retries=0, timeout=HUNG_S) as connected:
                yield connected
        finally:
            server.send_signal(signal.SIGTERM)
    assert server.returncode == 0


def next_message(client: openai.OpenAI, messages: list, stream: bool) -> tuple[str, dict]:
    """(finish reason, the assistant's message) as the openai package puts it together."""
    asked = {"model": "taught", "messages": messages, "tools": [TOOL], "temperature": 0, "max_tokens": 32}
    if stream:
        with client.chat.completions.stream(**asked) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**asked).choices[0]
    return choice.finish_reason, choice.message.model_dump(exclude_none=True, exclude={"parsed"})


def converse(client: openai.OpenAI, question: str, stream: bool) -> list[dict]:
    """The whole conversation, with the calculator run on this side."""
    messages: list[dict] = [{"role": "user", "content": question}]
    for _ in range(MOST_TURNS):
        reason, message = next_message(client, messages, stream)
        messages.append(message)
        if reason != "tool_calls":
            assert "tool_calls" not in message
            return messages
        for call in message["tool_calls"]:
            assert call["type"] == "function" and call["function"]["name"] == "calculator"
            assert json.loads(call["function"]["arguments"]).keys() == {"a", "op", "b"}
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": calculate(call["function"])})
    return messages


@pytest.mark.parametrize("stream", [False, True], ids=["in one piece", "streamed"])
def test_questions_that_it_never_saw_are_answered_with_the_tool(client, stream):
    env = load_env(EnvConfig(id="calculator", args=ARGS), seed=0)
    right = 0
    for index in range(QUESTIONS):
        question = env.task("eval", index).payload["question"]
        talk = converse(client, question, stream)
        assert [message["role"] for message in talk[:3]] == ["user", "assistant", "tool"], talk
        right += talk[-1].get("content") == str(eval(question))
    assert right >= 0.75 * QUESTIONS


def test_a_stream_says_what_one_piece_says(client):
    def told(stream):
        return [(m["role"], m.get("content"), [c["function"] for c in m.get("tool_calls", ())]) for m in converse(client, "2+3+4", stream)]

    whole, streamed = told(False), told(True)
    assert len(whole) >= 4
    assert [(role, content or None) for role, content, _ in whole] == [(role, content or None) for role, content, _ in streamed]
    assert [[(call["name"], json.loads(call["arguments"])) for call in calls] for _, _, calls in whole] == [
        [(call["name"], json.loads(call["arguments"])) for call in calls] for _, _, calls in streamed
    ]
