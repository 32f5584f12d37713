"""What an error in an exchange is called, and that nothing is exchanged after it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.config.wide import WideConfig
from slipstream.errors import ConfigError, EngineUnavailable, StateError
from slipstream.parallel.placement import Placement
from slipstream.parallel.wide import WideExperts, WideGroup, _ways, joined


@pytest.fixture
def group() -> WideGroup:
    """The second of four, without the others."""
    group = WideGroup.__new__(WideGroup)
    group.rank, group.size, group.timeout_s, group.broken = 1, 4, 30.0, None
    return group


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("[gloo/unbound_buffer.cc:78] Timed out waiting 30000ms for recv"),
            "rank 1 of 4 .* waited 30 s in vain .*engine.ep.timeout_s",
        ),
        (
            RuntimeError("[gloo/pair.cc:1] Connection closed by peer [127.0.0.1]:3. gloo says"),
            r"rank 1 of 4 .* lost another one \(Connection closed",
        ),
        (MemoryError("no room"), "rank 1 of 4 .* failed amidst the others: MemoryError: no room"),
    ],
)
def test_an_error_in_an_exchange_says_what_happened_and_breaks_the_group(group, error, said):
    with pytest.raises(EngineUnavailable, match=said), group.whole():
        raise error
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match=said), group.whole():
            pytest.fail("nothing is exchanged any more")


def test_started_as_another_number_of_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"engine.ep.ranks = 4, but this process was started as one of 3"), joined(WideConfig(ranks=4)):
        pass


def test_a_layer_out_of_turn_is_refused_before_anything_is_sent(group):
    shared = WideExperts(group, Placement(np.array([[[0], [1], [2], [3]]] * 2)), 4)
    shared.begin()
    with pytest.raises(StateError, match="MoE layer 1 asks for its experts when it is the turn of layer 0"):
        shared.exchange(1, lambda *args: args[0], torch.ones(1, 8), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1))
    assert group.broken is None and shared.done == 0


def test_copies_take_turns_and_each_gets_its_share(group):
    shared = WideExperts(group, Placement(np.array([[[0, 1], [0, 2], [0, 3], [1, 0]]])), 4)
    shared.begin()
    ids_TK = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1]])
    first = shared._choose(0, ids_TK).view(4, 2)
    assert sorted(first[:, 0].tolist()) == [0, 2, 4, 7], "four pairs of an expert with four copies"
    assert sorted([int(first[0, 1]), int(first[3, 1])]) == [1, 6] and (int(first[1, 1]), int(first[2, 1])) == (3, 5)
    shared.begin()
    assert shared._choose(0, ids_TK[:1])[0] != first[0, 0], "a single token does not take the same copy in every step"
    assert shared.load_LE.tolist() == [[5, 3, 1, 1]]


def test_an_expert_that_moves_comes_from_the_rank_itself_if_it_is_there_else_from_the_lowest():
    old_RS, new_RS = np.array([[0, 1], [2, 3], [1, 0]]), np.array([[0, 3], [1, 3], [1, 1]])
    assert _ways(old_RS, new_RS) == [(1, 1, 0, 1), (0, 1, 1, 0), (2, 0, 2, 1)]
