"""What is heard of a streamed request while versions change."""

from __future__ import annotations

from typing import Any

from slipstream.serving.vllm.told import Told
from slipstream.types import TokenPiece
from tests.unit.serving.vllm.stub import ask


class Scene:
    """A request that began under version 1, and a server that says `spans`."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self.asked, self.heard = 0, list[tuple[int, list[int]]]()
        self.told = Told(ask("a"), self._hear, self._ask, 1, 1)

    def _hear(self, piece: TokenPiece) -> None:
        self.heard.append((piece.version, piece.tokens_N.tolist()))

    async def _ask(self, _: str) -> list[tuple[int, int]]:
        self.asked += 1
        return self.spans

    async def sampled(self, *tokens: int, live: int, update: int, finish: str | None = None) -> None:
        """They arrive in one piece, at a moment when all that was loaded is verified."""
        self.told.add(piece(*tokens, finish=finish))
        await self.told.tell(live, update)


def piece(*tokens: int, finish: str | None = None) -> dict[str, Any]:
    content = [{"logprob": -1.0} for _ in tokens]
    return {"choices": [{"token_ids": list(tokens), "logprobs": {"content": content}, "finish_reason": finish}]}


async def test_one_version_is_never_asked_for():
    scene = Scene()
    await scene.sampled(10, 11, live=1, update=1)
    await scene.sampled(12, live=1, update=1)
    assert scene.heard == [(1, [10, 11]), (1, [12])] and scene.asked == 0


async def test_a_piece_over_an_update_is_cut_where_the_weights_changed_and_the_server_is_asked_once():
    scene = Scene()
    await scene.sampled(10, live=1, update=1)
    scene.spans = [(1, 0), (2, 3)]
    await scene.sampled(11, 12, 13, 14, live=2, update=2)
    await scene.sampled(15, live=2, update=2)
    assert scene.heard == [(1, [10]), (1, [11, 12]), (2, [13, 14]), (2, [15])] and scene.asked == 1


async def test_the_server_is_asked_again_until_the_new_version_has_sampled():
    scene = Scene()
    scene.spans = [(1, 0)]
    await scene.sampled(10, live=2, update=2)
    scene.spans = [(1, 0), (2, 1)]
    await scene.sampled(11, live=2, update=2)
    await scene.sampled(12, live=2, update=2)
    assert scene.heard == [(1, [10]), (2, [11]), (2, [12])] and scene.asked == 2


async def test_versions_that_come_back_are_told_apart_by_the_update():
    scene = Scene()
    scene.spans = [(1, 0), (2, 1), (1, 2)]
    scene.told.add(piece(10))
    scene.told.add(piece(11))
    await scene.sampled(12, live=1, update=3)
    assert scene.heard == [(1, [10]), (2, [11]), (1, [12])]


async def test_what_a_version_without_a_verdict_has_sampled_is_not_mistaken_for_the_live_one():
    scene = Scene()
    scene.spans = [(1, 0), (2, 1), (3, 2)]  # the next update began while the server was asked
    scene.told.add(piece(10))
    await scene.sampled(11, live=2, update=2)
    assert scene.heard == [(1, [10]), (2, [11])]
    scene.spans = [(1, 0), (2, 1), (3, 3)]
    await scene.sampled(12, 13, live=3, update=3)
    assert scene.heard[2:] == [(2, [12]), (3, [13])] and scene.asked == 2


async def test_a_request_that_has_ended_is_heard_no_further():
    scene = Scene()
    await scene.sampled(10, live=2, update=2)
    await scene.sampled(11, finish="length", live=2, update=2)
    assert not scene.heard and scene.asked == 1 and len(scene.told.pieces) == 2
