"""Where a pipeline cuts the layers. Torch-free: the launcher plans with it.

The rule: of all ways to cut the layers into runs, the one whose heaviest stage is lightest, of those the most even (smallest sum of
squares), of those the one with the fewest layers in early stages, which hold the most rows in flight. A layer weighs the parameters that
a token is multiplied with (of the experts the chosen ones), the last stage the head on top; an embedding is looked up and weighs nothing.
Exact for matmuls if every token carries loss; attention scores are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from slipstream.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers first ... end - 1 of a model: stage `number` of `count`. The embedding is the first stage's, norm and head the last's."""

    number: int
    count: int
    first: int
    end: int

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1


def layer_work(spec: ModelSpec, layer: int) -> int:
    """Parameters of the layer that take part in one token."""
    return spec.layer_params(layer) + spec.expert_params * spec.top_k * (layer in spec.moe_layers)


def stages(spec: ModelSpec, count: int) -> list[Stage]:
    """The model in `count` stages, at most as many as it has layers."""
    work = [layer_work(spec, layer) for layer in range(spec.num_layers)]
    work[-1] += spec.vocab_size * spec.hidden
    before = list(accumulate(work, initial=0))

    @cache
    def best(end: int, parts: int) -> tuple[int, int, tuple[int, ...]]:
        """(heaviest stage, sum of squares, edges) of the layers before `end` in so many parts."""
        if parts == 1:
            return before[end], before[end] ** 2, (0, end)
        options = []
        for start in range(parts - 1, end):
            heaviest, squares, edges = best(start, parts - 1)
            own = before[end] - before[start]
            options.append((max(heaviest, own), squares + own**2, (*edges, end)))
        return min(options)

    edges = best(spec.num_layers, count)[2]
    return [Stage(number, count, first, end) for number, (first, end) in enumerate(pairwise(edges))]
