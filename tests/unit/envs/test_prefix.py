import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.chat.branches import Branches
from slipstream.chat.prefix import TurnTokens
from slipstream.errors import ModelError, RequestError
from tests.unit.envs.made import SPECIAL, TEMPLATE, write_tokenizer

LLAMA = """\
{{- '<|endoftext|>' }}
{%- for message in messages %}
    {{- '[' + message.role + ']\\n\\n' + message.content | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]\\n\\n' }}{%- endif %}
"""
SPACED_END = TEMPLATE.replace("{{- '<|im_end|>\\n' }}\n    {%- elif", "{{- ' <|im_end|>\\n' }}\n    {%- elif")
FORGETFUL = """\
{%- for message in messages %}
    {%- set text = message.content.split('</think>')[-1] if not loop.last and message.role == 'assistant' else message.content %}
    {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

text = st.text(st.characters(blacklist_categories=("Cs",)), max_size=20).map(str.strip).filter(lambda t: not any(s in t for s in SPECIAL))
message = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "system"]), "content": text})
round_of_talk = st.tuples(st.lists(message, min_size=1, max_size=3), text, st.booleans())


def talk(tokenizer, rounds):
    """Play the rounds through a Branches; each is (new messages, reply text, whether the reply ends its turn itself)."""
    prefix, messages, sampled = Branches(TurnTokens(tokenizer)), [], []
    so_far_T = np.zeros(0, np.int32)
    for new, reply_text, ends in rounds:
        messages = [*messages, *new]
        prompt = prefix.prompt(messages)
        prompt_T, known = prompt.tokens_T, prompt.known
        assert known == len(so_far_T)
        assert np.array_equal(prompt_T[:known], so_far_T)
        assert tokenizer.decode(prompt_T) == tokenizer.render(messages)
        completion_T = tokenizer.encode(reply_text + ("<|im_end|>" if ends else ""))
        reply = {"role": "assistant", "content": reply_text}
        prefix.add(prompt, completion_T, reply)
        messages.append(reply)
        so_far_T = np.concatenate([prompt_T, completion_T])
        sampled.append(completion_T)
    return messages, so_far_T


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("llama"), template=LLAMA)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(rounds=st.lists(round_of_talk, min_size=1, max_size=4))
def test_token_by_token_the_conversation_reads_as_the_whole_rendering(tokenizer, llama, rounds):
    for each in (tokenizer, llama):
        talk(each, rounds)


def test_a_conversation_that_goes_on_without_a_new_message_is_a_prefix_too(tokenizer):
    user, reply = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    prefix = Branches(TurnTokens(tokenizer))
    prompt = prefix.prompt([user])
    prompt_T = prompt.tokens_T
    prefix.add(prompt, tokenizer.encode("b<|im_end|>"), reply)
    after = prefix.prompt([user, reply])
    next_T, known = after.tokens_T, after.known
    assert known == len(prompt_T) + 2
    assert tokenizer.decode(next_T) == tokenizer.render([user, reply])


@pytest.mark.parametrize("edit", ["first", "reply", "dropped", "reply in place", "first in place"])
def test_an_edited_conversation_is_rendered_afresh(tokenizer, edit):
    user, reply = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    prefix = Branches(TurnTokens(tokenizer))
    prompt = prefix.prompt([user])
    prefix.add(prompt, tokenizer.encode("b<|im_end|>"), reply)
    if edit.endswith("in place"):
        (reply if edit.startswith("reply") else user)["content"] = "other"
    messages = {
        "first": [{"role": "user", "content": "x"}, reply],
        "reply": [user, {"role": "assistant", "content": "x"}],
        "dropped": [user],
    }.get(edit, [user, reply])
    after = prefix.prompt(messages)
    next_T, known = after.tokens_T, after.known
    assert known == 0
    assert tokenizer.decode(next_T) == tokenizer.render(messages)


def test_tokens_that_were_sampled_stay_although_the_template_would_write_them_otherwise(tokenizer, tmp_path):
    forgetful = write_tokenizer(tmp_path, template=FORGETFUL)
    user, more = {"role": "user", "content": "a"}, {"role": "user", "content": "c"}
    reply = {"role": "assistant", "content": "hm</think>b"}
    for each, sampled, content in ((forgetful, "hm</think>b", None), (tokenizer, '<tool_call>{"name":"f"}</tool_call>', "")):
        prefix = Branches(TurnTokens(each))
        prompt = prefix.prompt([user])
        said = reply if content is None else {"role": "assistant", "content": content}
        prefix.add(prompt, each.encode(f"{sampled}<|im_end|>"), said)
        after = prefix.prompt([user, said, more])
        next_T, known = after.tokens_T, after.known
        assert known
        assert each.decode(next_T).startswith(each.render([user]) + sampled + "<|im_end|>\n<|im_start|>user\nc<|im_end|>")


def test_what_a_template_writes_before_the_end_of_turn_is_not_added_after_it(tmp_path):
    tokenizer = write_tokenizer(tmp_path, template=SPACED_END)
    turns = TurnTokens(tokenizer)
    more = [{"role": "user", "content": "c"}]
    ended, cut = tokenizer.encode("b<|im_end|>"), tokenizer.encode("b")
    assert tokenizer.decode(turns.link(ended, more)).startswith("\n<|im_start|>user\nc")
    assert tokenizer.decode(turns.link(cut, more)).startswith(" <|im_end|>\n<|im_start|>user\nc")


def test_another_end_of_sequence_token_is_kept_and_the_turn_ended_after_it(tokenizer):
    more = [{"role": "user", "content": "c"}]
    link_T = TurnTokens(tokenizer).link(tokenizer.encode("b<|endoftext|>"), more)
    assert tokenizer.decode(link_T).startswith("<|im_end|>\n")


def test_a_template_without_an_end_of_turn_token_cannot_give_demonstrations(tmp_path):
    template = LLAMA.replace("<|im_end|>", "\\n")
    tokenizer = write_tokenizer(tmp_path, template=template)
    turns = TurnTokens(tokenizer)
    assert tokenizer.decode(turns.link(tokenizer.encode("b"), [{"role": "user", "content": "c"}])).startswith("\n[user]")
    with pytest.raises(ModelError, match="end-of-sequence"):
        turns.reply({"role": "assistant", "content": "b"})


def test_a_template_that_hides_replies_is_refused(tmp_path):
    tokenizer = write_tokenizer(tmp_path, template="{{ messages[0].content }}")
    with pytest.raises(ModelError, match="does not show the content"):
        TurnTokens(tokenizer)


def test_messages_that_the_template_refuses_are_refused(tokenizer):
    turns = TurnTokens(tokenizer)
    bad = [{"role": "narrator", "content": ""}]
    with pytest.raises(RequestError, match="narrator"):
        turns.prompt(bad, ())
    with pytest.raises(RequestError, match="narrator"):
        turns.link(tokenizer.encode("b"), bad)


def test_what_was_rendered_is_remembered_by_its_messages_and_tools(tokenizer, monkeypatch):
    turns, rendered = TurnTokens(tokenizer), []
    render = tokenizer.render
    monkeypatch.setattr(tokenizer, "render", lambda messages, *args, **kwargs: rendered.append(1) or render(messages, *args, **kwargs))
    ask, tool = [{"role": "user", "content": "a"}], {"type": "function", "function": {"name": "f"}}
    first = turns.prompt(ask, ())
    assert np.array_equal(turns.prompt([dict(ask[0])], ()), first) and len(rendered) == 1
    ask[0]["content"] = "b"
    assert tokenizer.decode(turns.prompt(ask, ())) == render(ask)
    assert tokenizer.decode(turns.prompt(ask, [tool])) == render(ask, [tool])
    assert len(rendered) == 3
    answer = [{"role": "tool", "content": "14"}]
    ended, cut = (turns.link(tokenizer.encode(text), answer) for text in ("b<|im_end|>", "b"))
    assert len(rendered) == 4 and np.array_equal(cut[1:], ended)
    assert not np.array_equal(turns.link(tokenizer.encode("b"), [{"role": "tool", "content": "15"}]), cut)
