from slipstream.trainer import memory
from slipstream.trainer.memory import Trimmer


def test_memory_is_given_back_between_steps_but_not_at_every_one(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr(memory.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(memory, "_malloc_trim", lambda: calls.append)
    trimmer = Trimmer()
    trimmed = []
    for now[0] in (1.0, 5.0, 6.0, 9.9, 10.1):
        trimmed.append(trimmer.trim())
    assert trimmed == [False, True, False, False, True]
    assert calls == [0, 0]


def test_a_library_without_it_is_no_error(monkeypatch):
    monkeypatch.setattr(memory, "_malloc_trim", lambda: None)
    monkeypatch.setattr(memory, "EVERY_S", 0.0)
    assert not Trimmer().trim()
