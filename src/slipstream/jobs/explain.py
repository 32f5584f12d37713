"""`slipstream explain`: a plan as tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slipstream.planner.figures import Figure, in_bytes, total
from slipstream.planner.layout import Layout, ranks_text
from slipstream.planner.plan import Plan


def print_plan(plan: Plan, verbose: bool, console: Console | None = None) -> None:
    """Model, layout, batch, memory, communication. What speaks against the run is left to the caller."""
    console = console or Console()
    need, name = plan.memory, escape(plan.config.name)
    console.print(_figures(f"{name}: model", plan.model, verbose))
    console.print(_layout(plan.layout, verbose))
    console.print(_figures("batch", plan.batch, verbose))
    place = "each GPU" if need.process_limit is not None else "each trainer process"
    console.print(_sum(f"memory of {place}", need.process, need.process_limit, verbose))
    console.print(_sum("memory of each node", need.node, need.node_limit, verbose))
    if plan.communication:
        console.print(_figures("communication of a step: received by a process, or published", plan.communication, verbose))


def _figures(title: str, figures: Iterable[Figure], verbose: bool) -> Table:
    table = _table(title, verbose)
    for figure in figures:
        table.add_row(escape(figure.name), figure.text, *([escape(figure.formula)] if verbose else []))
    return table


def _sum(title: str, figures: tuple[Figure, ...], limit: float | None, verbose: bool) -> Table:
    """With the sum below, and what there is."""
    table = _figures(title, figures, verbose)
    table.add_section()
    needed = total(figures)
    colour = "red" if limit is not None and needed > limit else "green"
    empty = [""] if verbose else []
    table.add_row("together", f"[{colour}]{in_bytes(needed)}[/]", *empty)
    if limit is not None:
        table.add_row("may be filled (cluster.usable_frac)", in_bytes(limit), *empty)
    return table


def _layout(layout: Layout, verbose: bool) -> Table:
    table = Table(title="trainer processes", title_justify="left")
    for column in ("what", "size", "groups", "ranks"):
        table.add_column(column, justify="left" if column in ("what", "ranks") else "right")
    factors = f"dp_replicate {layout.dp_replicate} x dp_shard {layout.dp_shard} x cp {layout.cp}; ep {layout.ep} of dp_shard x cp"
    table.add_row("all", str(layout.processes), "", f"{factors}; {layout.nodes} nodes x {layout.processes_per_node}")
    for name, groups in layout.groups().items():
        shown = groups if verbose else groups[:2]
        more = "" if len(shown) == len(groups) else f" | ... {ranks_text(groups[-1])}"
        nodes = layout.nodes_of(groups)
        where = f"; {nodes} nodes each" if nodes > 1 else "; within a node" if layout.nodes > 1 else ""
        table.add_row(name, str(len(groups[0])), str(len(groups)), " | ".join(map(ranks_text, shown)) + more + where)
    if layout.ep > 1:
        shards = [f"{first}-{last}" for first, last in (layout.experts_of(rank) for rank in range(layout.ep))]
        table.add_row("experts of ep rank 0, 1, ...", str(layout.num_experts // layout.ep), str(layout.ep), " | ".join(shards))
    return table


def _table(title: str, verbose: bool) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right", no_wrap=True)
    if verbose:
        table.add_column("formula", overflow="fold", style="dim")
    return table
