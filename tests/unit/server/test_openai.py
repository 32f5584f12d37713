"""The openai package talks to the server as it talks to OpenAI."""

from __future__ import annotations

import json

import openai
import pytest

from slipstream.types import Sampling
from tests.unit.server.scripted import ScriptedEngine
from tests.waiting import until

ASK = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "text": "é"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}}


@pytest.fixture
async def connect(serve):
    """`await connect(text or engine)` -> (served, an OpenAI client)."""
    clients = []

    async def start(engine):
        served = await serve(engine)
        clients.append(openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0))
        return served, clients[-1]

    yield start
    for client in clients:
        await client.close()


async def chunks_of(stream) -> list:
    return [chunk async for chunk in stream]


async def test_a_chat_answers_with_text_reason_and_usage(connect):
    served, client = await connect("Hi there 😀")
    answer = await client.chat.completions.create(model="any", messages=ASK, temperature=0.5, top_p=0.9, seed=7, max_completion_tokens=50)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hi there 😀", "stop")
    [request] = served.engine.added
    assert request.prompt_T.tolist() == served.tokenizer.prompt_ids(ASK).tolist()
    assert request.sampling == Sampling(0.5, 0.9, max_tokens=50, seed=7)
    assert answer.usage.prompt_tokens == len(request.prompt_T)
    assert answer.usage.completion_tokens == len(served.tokenizer.encode("Hi there 😀")) + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.model == "scripted-model"


async def test_a_streamed_chat_joins_to_the_blocking_one_and_breaks_no_character(connect):
    _, client = await connect("Hi 漢字 😀 there")
    options = {"include_usage": True}
    chunks = await chunks_of(await client.chat.completions.create(model="m", messages=ASK, stream=True, stream_options=options))
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Hi 漢字 😀 there"
    assert not any("\ufffd" in (delta.content or "") for delta in deltas) and len(chunks) > 6
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens > 0


async def test_tool_calls_come_back_in_the_message(connect):
    served, client = await connect(f"Let me add.\n{CALL}")
    answer = await client.chat.completions.create(model="m", messages=ASK, tools=[TOOL], tool_choice="auto")
    [choice] = answer.choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me add.")
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "add", {"a": 1, "text": "é"})
    assert '"name": "add"' in served.tokenizer.decode(served.engine.added[0].prompt_T)


async def test_tool_calls_come_back_in_a_stream_without_their_markup_in_the_content(connect):
    _, client = await connect(f"Let me add.\n{CALL}\n{CALL}")
    async with client.chat.completions.stream(model="m", messages=ASK, tools=[TOOL]) as stream:
        final = await stream.get_final_completion()
    [choice] = final.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me add.")
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"a": 1, "text": "é"}] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2


async def test_the_result_of_a_tool_goes_back_to_the_model(connect):
    served, client = await connect(CALL)
    first = await client.chat.completions.create(model="m", messages=ASK, tools=[TOOL])
    message = first.choices[0].message
    assert message.content is None
    messages = [*ASK, message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}]
    await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    text = served.tokenizer.decode(served.engine.added[1].prompt_T)
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "text": "é"}}' in text
    assert "<tool_response>\n3\n</tool_response>" in text


async def test_with_tool_choice_none_the_model_sees_no_tools_and_its_text_is_left_alone(connect):
    served, client = await connect(CALL)
    answer = await client.chat.completions.create(model="m", messages=ASK, tools=[TOOL], tool_choice="none")
    assert answer.choices[0].message.content == CALL and answer.choices[0].message.tool_calls is None
    assert "add" not in served.tokenizer.decode(served.engine.added[0].prompt_T)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_text_ends_before_a_stop_string_streamed_or_not(connect, stream):
    _, client = await connect("one two STOP three")
    answer = await client.chat.completions.create(model="m", messages=ASK, stop=["never", " STOP"], stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in await chunks_of(answer))
    else:
        text = answer.choices[0].message.content
    assert text == "one two"


async def test_n_choices_sample_with_seeds_of_their_own_and_the_prompt_counts_once(connect):
    served, client = await connect("x")
    answer = await client.chat.completions.create(model="m", messages=ASK, n=3, seed=10)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [request.sampling.seed for request in served.engine.added] == [10, 11, 12]
    assert answer.usage.prompt_tokens == len(served.engine.added[0].prompt_T)
    chunks = await chunks_of(await client.chat.completions.create(model="m", messages=ASK, n=3, stream=True))
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1, 2}


async def test_logprobs_are_those_of_the_sampled_tokens(connect):
    served, client = await connect("fox")
    answer = await client.chat.completions.create(model="m", messages=ASK, logprobs=True)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == "fox" and all(entry.logprob == -0.5 for entry in entries)
    assert len(entries) == len(served.tokenizer.encode("fox"))


async def test_max_tokens_ends_with_length_and_is_bounded_by_the_context(connect):
    served, client = await connect("a long answer that is cut")
    answer = await client.chat.completions.create(model="m", messages=ASK, max_tokens=2)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 2)
    await client.chat.completions.create(model="m", messages=ASK, max_tokens=10_000)
    request = served.engine.added[-1]
    assert request.sampling.max_tokens == served.engine.seq_len - len(request.prompt_T)


async def test_completions_take_text_lists_and_token_ids(connect):
    served, client = await connect(" fox")
    assert (await client.completions.create(model="m", prompt="the quick")).choices[0].text == " fox"
    assert served.engine.added[0].sampling.max_tokens == 16
    answer = await client.completions.create(model="m", prompt=[[5, 6], [7]], max_tokens=50, logprobs=0)
    assert [request.prompt_T.tolist() for request in served.engine.added[1:]] == [[5, 6], [7]]
    assert answer.usage.prompt_tokens == 3
    assert "".join(answer.choices[1].logprobs.tokens) == " fox"
    chunks = await chunks_of(await client.completions.create(model="m", prompt=["a", "b"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices[0].index == 1) == " fox"


async def test_models_lists_the_one_model_with_its_context(connect):
    _, client = await connect("x")
    [model] = (await client.models.list()).data
    assert (model.id, model.max_model_len) == ("scripted-model", 512)


async def test_a_prompt_longer_than_the_context_is_a_400_that_says_by_how_much(connect):
    _, client = await connect("x")
    with pytest.raises(openai.BadRequestError, match=r"messages: \d+ tokens; the context is 512") as caught:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "fox " * 600}])
    assert caught.value.body["param"] == "messages"


async def test_a_full_queue_is_a_429_and_leaves_nothing_behind(connect):
    served, client = await connect(ScriptedEngine(lambda _: [1] * 100, max_waiting=2))
    with pytest.raises(openai.RateLimitError, match="waiting already"):
        await client.chat.completions.create(model="m", messages=ASK, n=3)
    assert len(served.engine.aborted) == 2 and not served.engine.running


async def test_leaving_a_stream_early_aborts_the_request(connect):
    served, client = await connect(ScriptedEngine(lambda _: [5] * 200, seq_len=10_000))
    stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
    async for _ in stream:
        await client.chat.completions.create(model="m", messages=ASK, max_tokens=1)
        served.driver.pause()
        break
    await stream.close()
    await until(lambda: served.engine.aborted)


async def test_an_engine_that_fails_in_mid_stream_says_so_in_the_stream(connect):
    served, client = await connect(ScriptedEngine(lambda _: [5] * 200, seq_len=10_000))
    stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
    with pytest.raises(openai.APIError, match="overflow"):
        async for _ in stream:
            served.engine.failures = [FloatingPointError("overflow")]
