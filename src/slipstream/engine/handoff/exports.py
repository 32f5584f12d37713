"""The prefill side of handoffs inside the engine: copies the blocks of some running sequences out while they are filled.

The blocks that a step completes are known when it is planned. Their keys and values are copied layer by layer, each as soon as the forward
pass has written it where the pass lets one look in between (the fused kernel does not), their routing rows and version after the pass. What
becomes of the copies is the listener's business: it hears of each with a call that must not block.

The sequences are ordinary ones: the prefix cache and everything below it serve them. They are given one token more than is wanted, so that
they sample one token, which nobody gets, and end. Used by the engine's thread only, except `rows` and what `tell` puts somewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from slipstream.engine.blocks import Blocks
from slipstream.engine.handoff.messages import Piece
from slipstream.engine.scheduler import Plan
from slipstream.engine.sequence import Sequence, SlotTable


@dataclass(eq=False)
class Export:
    """Blocks `first .. first + len(rows) - 1` of one sequence, wanted as payloads in `rows` [count, block bytes]. The last may be the one
    that the prompt but for its last token ends in: then it is complete with that."""

    first: int
    rows: np.ndarray
    tell: Callable[[Piece | int], None]
    """Called with the piece of `rows` that was filled, then with the number of complete blocks."""
    complete: int = 0
    sequence: Sequence | None = None


@dataclass
class Exports:
    """All exports of an engine. `begin`, `layer` for some layers in order, `end`: one round a step."""

    blocks: Blocks
    table: SlotTable
    _all: dict[str, Export] = field(default_factory=dict)
    _due: list[tuple[Export, list[int]]] = field(default_factory=list)
    _layers_done: int = 0

    def add(self, export: Export, sequence: Sequence) -> None:
        export.sequence = sequence
        self._all[sequence.id] = export

    def drop(self, request_id: str) -> bool:
        """The sequence has ended. Whether it was one of these."""
        return self._all.pop(request_id, None) is not None

    def begin(self, plan: Plan) -> Callable[[int], None] | None:
        """Find the blocks that this step completes. Returns what is to be called with each layer that has been written, if anything."""
        self._due, self._layers_done = [], 0
        if not self._all:
            return None
        planned = dict(zip(plan.slots_S.tolist(), plan.counts_S.tolist(), strict=True))
        for export in self._all.values():
            sequence = export.sequence
            if sequence is None or sequence.slot not in planned:
                continue
            end, processed = export.first + len(export.rows), int(self.table.context_R[sequence.slot]) + planned[sequence.slot]
            filled = end if processed >= sequence.prompt_tokens - 1 else processed // self.table.block_tokens
            due = sequence.blocks[export.first + export.complete : min(filled, end)]
            if due:
                self._due.append((export, due))
        return self._layer if self._due else None

    def _layer(self, layer: int) -> None:
        start = sum(self.blocks.layer_bytes[:layer])
        for export, due in self._due:
            self._copy(export, self.blocks.read_layer(layer, due), start)
        self._layers_done = layer + 1

    def end(self) -> None:
        """The pass is over: copy what is left of the due blocks; they are complete."""
        if not self._due:
            return
        for layer in range(self._layers_done, self.blocks.num_layers):
            self._layer(layer)
        for export, due in self._due:
            self._copy(export, self.blocks.read_tails(due), self.blocks.block_bytes - self.blocks.tail_bytes)
            export.complete += len(due)
            export.tell(export.complete)
        self._due = []

    def _copy(self, export: Export, bytes_N: np.ndarray, start: int) -> None:
        piece = Piece(export.complete, len(bytes_N), start, start + bytes_N.shape[1])
        export.rows[piece.first : piece.first + piece.count, piece.start : piece.stop] = bytes_N
        export.tell(piece)
