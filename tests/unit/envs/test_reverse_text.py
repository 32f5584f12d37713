import numpy as np
import pytest

from slipstream.envs.reverse_text import ReverseText
from slipstream.types import Task

TASK = Task("r/train/0", "r", 0, {"text": "abcd", "answer": "dcba"})


def said(text: str) -> list[dict]:
    return [{"role": "user", "content": ""}, {"role": "assistant", "content": text}]


@pytest.mark.parametrize(("text", "reward"), [("dcba", 1.0), (" dcba\n", 1.0), ("dcb", 0.0), ("abcd", 0.0), ("", 0.0)])
async def test_only_the_exact_reversal_is_rewarded(text, reward):
    assert await ReverseText().score(TASK, said(text)) == reward


async def test_partial_credit_grows_with_similarity_and_is_full_only_when_exact():
    env = ReverseText(partial_credit=True)
    none, little, much, exact = [await env.score(TASK, said(text)) for text in ("xyz", "d", "dcb", "dcba")]
    assert 0.0 == none < little < much < exact == 1.0


async def test_a_conversation_without_a_reply_earns_nothing():
    assert await ReverseText(partial_credit=True).score(TASK, said("")[:1]) == 0.0


def test_texts_have_the_asked_for_words_in_lower_case():
    env = ReverseText(num_words=3, word_len=5)
    for index in range(100):
        payload = env.task("train", index).payload
        words = payload["text"].split(" ")
        assert len(words) == 3
        assert all(2 <= len(word) <= 5 and word.isascii() and word.islower() for word in words)
        assert payload["answer"] == payload["text"][::-1]


def test_a_wrong_demonstration_has_the_same_letters():
    env, rng = ReverseText(), np.random.default_rng(0)
    for index in range(50):
        task = env.task("train", index)
        assert sorted(env.demonstration(task, rng, 1.0)[-1]["content"]) == sorted(task.payload["answer"])


@pytest.mark.parametrize("text", ["abc", "reverse: abc"])
def test_a_typed_text_is_a_task_with_or_without_the_instruction(text):
    assert ReverseText().task_from_prompt(text).payload == {"text": "abc", "answer": "cba"}
