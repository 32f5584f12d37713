import pytest

from slipstream.envs import checks
from slipstream.envs.checks import INSTRUCTIONS
from slipstream.envs.constraints import Constraints
from slipstream.types import Task


@pytest.mark.parametrize(
    ("check", "parameters", "good", "bad"),
    [
        (checks.lower_case, {}, ["all small, 3 of them"], ["One capital", "", "123"]),
        (checks.all_caps, {}, ["ALL BIG, 3!"], ["ONE small", "", "123"]),
        (
            checks.bullets,
            {"n": 2},
            ["- a\n- b", "Here:\n- a\n- b\nend"],
            ["- a", "- a\n- b\n- c", "-\n- b", "-a\n- b", "* a\n* b", "• a\n  - b", ""],
        ),
        (checks.sentences, {"n": 2}, ["One. Two!", "It costs 3.50 now. Really?", "Wait... No."], ["One.", "One. Two", "A. B. C.", ""]),
        (
            checks.json_object,
            {"keys": ["title", "mood"]},
            ['{"mood": "x", "title": "y"}', '```json\n{"title": "a", "mood": "b"}\n```'],
            ['{"title": "a"}', '{"title": "a", "mood": ""}', '{"title": 1, "mood": "b"}', "[]", "", 'so: {"title": "a", "mood": "b"}'],
        ),
        (checks.json_object, {"keys": ["a"]}, ['{"a": "x"}'], ['{"a": "x", "b": "y"}', "[" * 100_000]),
        (checks.no_commas, {}, ["none here; none"], ["one, here"]),
        (checks.closing, {"phrase": "that is all"}, ["Yes. That is all.", "that is all\n"], ["that is all folks", "all", ""]),
        (checks.at_most, {"n": 3}, ["one two three", "don't stop now", ""], ["one two three four"]),
        (checks.includes, {"word": "water"}, ["Water!", "the water, yes"], ["waters", ""]),
    ],
)
def test_a_check_tells_good_replies_from_bad_ones(check, parameters, good, bad):
    assert [reply for reply in good if not check(reply, **parameters)] == []
    assert [reply for reply in bad if check(reply, **parameters)] == []


def test_exclusion_is_mutual():
    for kind, instruction in INSTRUCTIONS.items():
        assert all(kind in INSTRUCTIONS[other].excludes for other in instruction.excludes)


def test_tasks_ask_for_one_to_three_compatible_instructions_and_use_every_kind():
    env = make()
    seen, counts = set(), set()
    for index in range(300):
        entries = env.task("train", index).payload["instructions"]
        kinds = [entry["kind"] for entry in entries]
        counts.add(len(kinds))
        seen |= set(kinds)
        assert len(set(kinds)) == len(kinds)
        assert not any(INSTRUCTIONS[kind].excludes & set(kinds) for kind in kinds)
    assert counts == {1, 2, 3}
    assert seen == set(INSTRUCTIONS)


async def test_every_prompt_names_the_topic_and_leaves_no_placeholder():
    env = make()
    for index in range(200):
        task = env.task("eval", index)
        (message,) = await env.prompt(task)
        assert task.payload["topic"] in message["content"]
        assert not set("{}[]") & set(message["content"])


def make() -> Constraints:
    return Constraints(seed=4)


TASK = Task(
    "c/train/0",
    "c",
    0,
    {"topic": "the sea", "instructions": [{"kind": "lower_case", "parameters": {}}, {"kind": "at_most", "parameters": {"n": 10}}]},
)


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("the sea is wide and deep and blue today", 1.0),
        ("The sea is wide and deep and blue today", 0.5),
        ("The sea is wide and deep and blue today and so on and on", 0.0),
        ("the sea", 0.0),
        ("", 0.0),
    ],
)
async def test_the_reward_is_the_share_fulfilled_and_zero_for_a_reply_that_says_nothing(reply, reward):
    parts = await make().score(TASK, [{"role": "user", "content": ""}, {"role": "assistant", "content": reply}])
    assert parts["reward"] == reward


async def test_a_conversation_without_a_reply_earns_nothing():
    assert (await make().score(TASK, [{"role": "user", "content": "in lower case and long enough to be a reply"}]))["reward"] == 0.0
