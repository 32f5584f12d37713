"""A number of a plan: what it is, its unit, and how it was computed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

GB = 10**9


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a plan."""

    name: str
    value: float
    unit: str
    """'bytes', 'tokens', 'rows', ..."""
    formula: str
    """With the numbers in it where that helps; the symbols are those of the module that made it."""

    @property
    def text(self) -> str:
        """'62.0 GB', '33,554,432 tokens'."""
        if self.unit == "bytes":
            return in_bytes(self.value)
        value = f"{self.value:,.0f}" if self.value == int(self.value) else f"{self.value:,.2f}"
        return f"{value} {self.unit}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def in_bytes(value: float) -> str:
    """In the largest unit of 10^3, 10^6, 10^9, 10^12 bytes that leaves a digit before the point."""
    for size, unit in ((10**12, "TB"), (GB, "GB"), (10**6, "MB"), (10**3, "kB")):
        if value >= size:
            return f"{value / size:,.1f} {unit}" if value < 100 * size else f"{value / size:,.0f} {unit}"
    return f"{value:,.0f} B"


def total(figures: tuple[Figure, ...]) -> float:
    return sum(figure.value for figure in figures)
