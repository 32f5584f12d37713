"""A step of the embedded engine that raises: what is lost, what goes on, and that nothing half-written is ever read."""

from __future__ import annotations

import pytest
import torch

from slipstream.engine import postprocess, runner
from tests.unit.engine.helpers import Reference, ask, make_engine, prompt, run

PROMPTS = [prompt(seed, 20) for seed in range(6)]


def fail_once(monkeypatch: pytest.MonkeyPatch, owner, name: str) -> None:
    """The next call does its work, then raises."""
    real = getattr(owner, name)

    def failing(*args, **kwargs):
        monkeypatch.setattr(owner, name, real)
        real(*args, **kwargs)
        raise FloatingPointError("overflow")

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("where", ["forward", "sample"])
@pytest.mark.parametrize("steps", [0, 1, 5], ids=["in prefill", "in decode", "later"])
def test_running_requests_are_lost_waiting_ones_go_on_and_the_books_balance(moe_folder, monkeypatch, where, steps):
    engine = make_engine(moe_folder, max_running=2)
    for i, prompt_T in enumerate(PROMPTS):
        engine.add(ask(f"r{i}", prompt_T))
    before = {completion.id for _ in range(steps) for completion in engine.step().finished}
    engine.abort(["r5"])  # ends in the step that fails: must be handed out all the same
    fail_once(monkeypatch, *((runner.Runner, "run") if where == "forward" else (postprocess, "sample")))
    with pytest.raises(FloatingPointError):
        engine.step()
    lost = engine.recover()
    assert len(lost) == 2 and engine.state().running == 0 and engine.state().kv_used_frac == 0
    done = run(engine, [])
    assert before | set(lost) | done.keys() == {f"r{i}" for i in range(6)} and len(before) + len(lost) + len(done) == 6
    assert done.pop("r5").finish_reason == "abort" and done
    for name, completion in done.items():
        Reference(moe_folder).check_greedy(PROMPTS[int(name[1:])], completion)


def test_blocks_of_the_failed_step_are_not_found_again(moe_folder, monkeypatch):
    """They are findable from the moment the step is planned, but their KV may be wrong."""
    engine = make_engine(moe_folder)
    engine.add(ask("a", PROMPTS[0]))

    def spoil(*args):
        for keys in engine._cache.keys:
            keys.fill_(7.0)
        raise FloatingPointError("overflow")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", spoil)
        with pytest.raises(FloatingPointError):
            engine.step()
    engine.recover()
    done = run(engine, [ask("a", PROMPTS[0])])
    assert done["a"].cached_tokens == 0
    Reference(moe_folder).check_greedy(PROMPTS[0], done["a"])


def test_a_failure_in_planning_that_unbalances_the_books_is_not_papered_over(moe_folder, monkeypatch):
    engine = make_engine(moe_folder)
    run(engine, [ask("a", PROMPTS[0])])
    engine.add(ask("b", PROMPTS[1]))
    engine._scheduler.pool.allocate(1)  # held by nobody
    with pytest.raises(Exception, match="reference counts"):
        engine.recover()
    assert torch.is_inference_mode_enabled() is False
