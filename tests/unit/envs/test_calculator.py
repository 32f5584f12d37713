import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.envs.calculator import Calculator, calculate, intermediate_values, question
from slipstream.errors import ConfigError
from slipstream.types import Task

numbers = st.lists(st.integers(1, 99), min_size=3, max_size=6)


@given(numbers, st.data())
def test_a_question_in_ordinary_notation_has_the_last_intermediate_value_as_its_answer(values, data):
    operations = data.draw(st.lists(st.sampled_from("+-*"), min_size=len(values) - 1, max_size=len(values) - 1))
    assert eval(question(values, operations)) == intermediate_values(values, operations)[-1]


def test_brackets_stand_only_where_precedence_needs_them():
    assert question([12, 7, 5], ["+", "-"]) == "12+7-5"
    assert question([12, 7, 5], ["+", "*"]) == "(12+7)*5"
    assert question([12, 7, 5], ["*", "+"]) == "12*7+5"
    assert question([1, 2, 3, 4], ["+", "*", "*"]) == "(1+2)*3*4"


def call(**arguments):
    return {"name": "calculator", "arguments": json.dumps(arguments)}


@pytest.mark.parametrize(("a", "op", "b", "result"), [(2, "+", 3, "5"), (2, "-", 3, "-1"), (-2, "*", 3, "-6")])
def test_the_tool_computes(a, op, b, result):
    assert calculate(call(a=a, op=op, b=b)) == result


@pytest.mark.parametrize(
    "function",
    [
        call(a=1, op="+"),
        call(a=1, op="/", b=2),
        call(a="1", op="+", b=2),
        call(a=True, op="+", b=2),
        call(a=1.5, op="+", b=2),
        call(a=1, op=["+"], b=2),
        call(a=1, op="+", b=2, c=3),
        call(a=10**13, op="*", b=2),
        {"name": "calc", "arguments": '{"a": 1, "op": "+", "b": 2}'},
        {"name": "calculator", "arguments": "not json"},
        {"name": "calculator", "arguments": "[1, 2]"},
    ],
)
def test_a_malformed_call_gets_an_error_from_the_tool(function):
    assert calculate(function) == "error"


def task(values=(12, 7, 5), operations=("+", "-")) -> Task:
    return Task("c/train/0", "c", 0, {"question": "", "numbers": list(values), "operations": list(operations)})


def said(*results: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": ""}, *({"role": "tool", "content": r} for r in results), {"role": "assistant", "content": answer}]


@pytest.mark.parametrize("answer", ["14", " 14 ", "Answer: 14", "answer: 14.", "Answer = 14"])
async def test_the_answer_may_be_bare_or_introduced(answer):
    assert (await Calculator().score(task(), said("19", "14", answer=answer)))["reward"] == 1.0


@pytest.mark.parametrize(
    ("results", "answer"),
    [
        (("19", "14"), "15"),
        (("19", "14"), ""),
        (("19", "14"), "14 or 15"),
        (("19",), "14"),
        ((), "14"),
        (("14", "19"), "14"),
        (("error", "14"), "14"),
    ],
)
async def test_a_wrong_answer_or_one_without_the_dependent_calls_earns_nothing(results, answer):
    assert (await Calculator().score(task(), said(*results, answer=answer)))["reward"] == 0.0


async def test_an_error_on_the_way_is_forgiven_and_calls_may_be_optional():
    assert (await Calculator().score(task(), said("error", "19", "3", "14", answer="14")))["reward"] == 1.0
    assert (await Calculator(require_calls=False).score(task(), said(answer="14")))["reward"] == 1.0


async def test_a_conversation_that_stops_at_a_tool_result_or_call_earns_nothing():
    messages = said("19", "14", answer="14")
    assert (await Calculator().score(task(), messages[:-1]))["reward"] == 0.0
    messages[-1]["tool_calls"] = [{"id": "1", "function": call(a=1, op="+", b=1)}]
    assert (await Calculator().score(task(), messages))["reward"] == 0.0


async def test_every_call_of_a_message_is_answered_and_an_unreadable_one_too():
    calls = [{"id": i, "function": call(a=i, op="+", b=1)} for i in range(2)]
    answers = await Calculator().respond(task(), [{"role": "assistant", "content": "", "tool_calls": calls}])
    assert [(m["tool_call_id"], m["content"]) for m in answers] == [(0, "1"), (1, "2")]
    assert await Calculator().respond(task(), [{"role": "assistant", "content": "<tool_call>{oops</tool_call>"}])
    assert not await Calculator().respond(task(), [{"role": "assistant", "content": "14"}])


@pytest.mark.parametrize("mistake", ["digit", "order", "early"])
def test_each_kind_of_mistake_uses_the_tool_truthfully(mistake):
    env, rng = Calculator(mistakes=[mistake]), np.random.default_rng(0)
    for index in range(50):
        task = env.task("train", index)
        messages = env.demonstration(task, rng, 1.0)
        calls = [m["tool_calls"][0] for m in messages if m.get("tool_calls")]
        results = [m["content"] for m in messages if m["role"] == "tool"]
        assert [calculate(c["function"]) for c in calls] == results
        assert len(calls) == (1 if mistake == "early" else 2)
        assert messages[-1]["content"] == results[-1]
        assert messages != env.demonstration(task, rng)


def test_the_tool_can_be_left_out_of_the_prompt():
    assert Calculator(show_tools=False).tools == ()
    assert Calculator().tools[0]["function"]["name"] == "calculator"


@pytest.mark.parametrize("text", ["12+7-5", " (12 + 7) * 5 ", "(1+2)*3*4-5", "2+3"])
def test_a_typed_question_is_a_task_like_the_generated_ones(text):
    payload = Calculator().task_from_prompt(text).payload
    assert payload["question"] == text.replace(" ", "")
    assert intermediate_values(payload["numbers"], payload["operations"])[-1] == eval(text.strip())


@pytest.mark.parametrize("text", ["", "12", "12+7*5", "12/7+5", "what is 2+2", "12+", "(12+7)-5", "12-(7+5)"])
def test_a_question_that_is_no_chain_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="such as 12"):
        Calculator().task_from_prompt(text)
