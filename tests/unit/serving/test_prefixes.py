"""The router's picture of the replicas' caches, compared with the engine's own cache and with a plain model."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.serving.routing.prefixes import PrefixIndex


def chain(family: int, length: int) -> list[bytes]:
    return [b"%d/%d" % (family, i) for i in range(length)]


def test_a_lookup_tells_the_leading_blocks_of_every_replica():
    index = PrefixIndex()
    index.use("a", chain(1, 4), 100, certain=True)
    index.use("b", chain(1, 2), 100, certain=True)
    index.use("c", chain(2, 9), 100, certain=True)
    assert index.match(chain(1, 6)) == {"a": 4, "b": 2}
    assert index.match(chain(3, 6)) == {} and index.match([]) == {}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.sampled_from("ab")), max_size=40), st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_each_replica_has_what_a_least_recently_used_cache_of_its_size_has(uses, capacity):
    index, model = PrefixIndex(), {"a": OrderedDict(), "b": OrderedDict()}
    for family, length, replica in uses:
        keys = chain(family, length)
        index.use(replica, keys, capacity, certain=True)
        for key in reversed(keys):
            model[replica][key] = None
            model[replica].move_to_end(key)
        while len(model[replica]) > capacity:
            model[replica].popitem(last=False)
    for family in range(4):
        keys, found = chain(family, 6), index.match(chain(family, 6))
        for replica, held in model.items():
            leading = next((i for i, key in enumerate(keys) if key not in held), len(keys))
            assert found.get(replica, 0) == leading
    assert all(index.size(replica) == len(held) for replica, held in model.items())


def test_a_block_that_was_reclaimed_takes_everything_older_with_it():
    index = PrefixIndex()
    index.use("a", chain(1, 2), 100, certain=True)
    index.use("a", chain(2, 2), 100, certain=True)
    index.use("a", chain(3, 2), 100, certain=True)
    last_use = index.use("a", chain(2, 2), 100, certain=False)[1]
    index.reclaimed("a", last_use)
    assert index.match(chain(1, 2)) == {} and index.match(chain(2, 2)) == {"a": 2} and index.match(chain(3, 2)) == {"a": 2}


def test_what_only_an_unfinished_request_vouches_for_is_marked_as_such():
    index = PrefixIndex()
    index.use("a", chain(1, 2), 100, certain=False)
    assert index.use("a", chain(1, 3), 100, certain=False) == [-1, -1, 0]
    index.use("a", chain(1, 2), 100, certain=True)
    assert index.use("a", chain(1, 3), 100, certain=False) == [3, 3, -2]


def test_a_replica_that_restarts_is_forgotten_and_its_place_can_be_taken():
    index = PrefixIndex()
    for name in "abc":
        index.use(name, chain(1, 3), 100, certain=True)
    index.forget("b")
    index.use("d", chain(2, 1), 100, certain=True)
    assert index.match(chain(1, 3)) == {"a": 3, "c": 3} and index.match(chain(2, 1)) == {"d": 1}
    index.forget("never known")
