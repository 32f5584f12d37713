"""docs/support.md: what goes with what, asked of the checks that a run has to pass (`config`, `planner.checks`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.config import RunConfig, validate
from slipstream.config.base import merge
from slipstream.errors import SlipstreamError
from slipstream.models.spec import ModelSpec
from slipstream.planner.checks import problems

Settings = Mapping[str, Any]
PROCESSES = 8


@dataclass(frozen=True)
class Side:
    """A part of a run, and what one may ask of it."""

    title: str
    features: Mapping[str, Settings]
    """Keys of the run file."""
    base: Settings
    """Beneath them."""


def _of(section: str, features: Mapping[str, Settings]) -> dict[str, Settings]:
    return {name: {section: settings} for name, settings in features.items()}


TRAINER = Side(
    "The trainer. Anything of `parallel` is asked of 8 processes, all else of one",
    _of(
        "trainer",
        {
            "processes": {"parallel": {}},
            "dp_replicate": {"parallel": {"dp_replicate": 2}},
            "ep": {"parallel": {"ep": 2}},
            "cp all_gather": {"parallel": {"cp": 2, "cp_method": "all_gather"}},
            "cp ulysses": {"parallel": {"cp": 2, "cp_method": "ulysses"}},
            "bfloat16": {"dtype": "bfloat16"},
            "float8": {"dtype": "float8"},
            "muon": {"optim": {"type": "muon"}},
            "bfloat16 moments": {"optim": {"moments": "bfloat16"}},
            "recompute": {"recompute": "layer"},
            "router_replay": {"router_replay": True},
            "balance_rate": {"balance_rate": 0.001},
            "freeze_router": {"freeze_router": True},
            "aux_loss": {"aux_loss": 0.001},
        },
    ),
    {},
)
_UPDATES: Mapping[str, Settings] = {f"update: {how}": {"on_update": how} for how in ("keep", "recompute", "abort")}
_OURS: Mapping[str, Settings] = {
    "RAM tier": {"tiers": {"ram_mib": 64}},
    "disk tier": {"tiers": {"disk_path": "kv", "disk_mib": 64}},
    "shared tier": {"tiers": {"shared_path": "kv-of-all", "shared_mib": 64}},
    "P/D": {"replicas": 2, "disaggregation": {"prefill_replicas": 1}},
    "wide EP": {"replicas": 2, "ep": {"ranks": 2}},
    "speculation": {"speculation": {"type": "prompt_lookup"}},
    "max_kv_age": {"max_kv_age": 2},
}
EMBEDDED = Side(
    'The embedded engine (`engine.type = "embedded"`). P/D: prefill and decode in processes of their own. Wide EP: processes that share '
    "experts",
    _of(
        "engine",
        {
            "bfloat16": {"dtype": "bfloat16"},
            "FP8 weights": {"dtype": "float8"},
            "FP8 KV": {"kv_dtype": "float8"},
            **_OURS,
            "routing capture": {"capture_routing": True},
            "no prefix cache": {"prefix_cache": False},
            **_UPDATES,
        },
    )
    | {"published in FP8": {"trainer": {"publish": "float8"}, "engine": {"dtype": "float8"}}},
    {"trainer": {"router_replay": False}, "engine": {"capture_routing": False}},
)
VLLM = Side(
    'vLLM (`engine.type = "vllm"`). What vLLM itself refuses is not asked; what was tried is in [conformance.md](conformance.md)',
    _of(
        "engine",
        {
            "bfloat16": {"dtype": "bfloat16"},
            "FP8 weights": {"quantization": "fp8"},
            "FP8 KV": {"kv_cache_dtype": "fp8_e4m3"},
            "KV offload": {"kv_offload_mib": 64},
            "KV connector": {"kv_transfer": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
            "tensor parallel": {"tensor_parallel": 2},
            "expert parallel": {"expert_parallel": True},
            "compiled": {"enforce_eager": False},
            **{name: _OURS[name] for name in ("RAM tier", "P/D", "wide EP", "speculation")},
            "routing capture": {"capture_routing": True},
            "no prefix cache": {"prefix_cache": False},
            **_UPDATES,
        },
    )
    | {"published in FP8": {"trainer": {"publish": "float8"}}},
    {"trainer": {"router_replay": False}, "engine": {"type": "vllm", "python": "python", "capture_routing": False}},
)
SIDES = (TRAINER, EMBEDDED, VLLM)


def obstacle(features: Iterable[str], spec: ModelSpec, side: Side = TRAINER) -> str:
    """Why a run with these features is refused, with the nearest that fits; '' when it is not."""
    run: dict[str, Any] = {"model": {"path": spec.family}, "envs": [{"id": "any"}], "cluster": {"host_memory_gb": 1000}, **side.base}
    for feature in features:
        run = merge(run, side.features[feature])
    if "parallel" in (trainer := run.get("trainer", {})):
        run["trainer"] = {**trainer, "parallel": {"processes": PROCESSES, **trainer["parallel"]}}
    try:
        return "; ".join(str(problem) for problem in problems(validate(RunConfig, run), spec))
    except SlipstreamError as error:
        return str(error)


def matrix(specs: Mapping[str, ModelSpec]) -> str:
    """The page. `specs`: a small model of each family."""
    notes: dict[str, int] = {}
    parts = [line for side in SIDES for line in _part(side, specs, notes)]
    return "\n".join([_HEAD, *parts, "## Reasons", "", *(f"{number}. {note}" for note, number in notes.items())])


def _part(side: Side, specs: Mapping[str, ModelSpec], notes: dict[str, int]) -> list[str]:
    families = [[f"`{family}`", *(_cell(obstacle([name], spec, side), notes) for name in side.features)] for family, spec in specs.items()]
    pairs = [[first, *(_pair(first, second, side, specs, notes) for second in side.features)] for first in side.features]
    title, _, more = side.title.partition(". ")
    return [f"## {title}", "", *([f"{more}.", ""] if more else []), *_table(side, families), "", _PAIRS, *_table(side, pairs), ""]


_HEAD = """# What goes with what

Generated by `make docs` from the checks that refuse a run before it starts. `slipstream explain RUN.toml` applies them to a run file, with
the sizes of its model. "yes" says that nothing refuses it. A number is the reason at the end, with the nearest combination that fits where
there is one. "-": two values of one key.
"""
_PAIRS = """Two at a time, for the family that allows most:
"""


def _pair(first: str, second: str, side: Side, specs: Mapping[str, ModelSpec], notes: dict[str, int]) -> str:
    if first == second:
        return ""
    if _same_key(side.features[first], side.features[second]):
        return "-"
    asked = ([first], [second], [first, second])  # what nobody can have alone is said as such
    reasons = (min((obstacle(names, spec, side) for spec in specs.values()), key=len) for names in asked)
    return _cell(next(filter(None, reasons), ""), notes)


def _same_key(first: Settings, second: Settings) -> bool:
    """Whether both set one key, to different values: nothing to ask."""
    shared = first.keys() & second.keys()
    return any(_same_key(first[key], second[key]) if isinstance(first[key], Mapping) else first[key] != second[key] for key in shared)


def _cell(reason: str, notes: dict[str, int]) -> str:
    return f"({notes.setdefault(reason, len(notes) + 1)})" if reason else "yes"


def _table(side: Side, rows: Iterable[Iterable[str]]) -> list[str]:
    lines = ["| | " + " | ".join(side.features) + " |", "|---|" + "---|" * len(side.features)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def page() -> str:
    """With the small models that `slipstream make-model` makes, and a llama. Needs torch, as they do."""
    from slipstream.models.maker import PRESETS

    llama = {**PRESETS["tiny-dense"], "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return matrix({config["model_type"]: ModelSpec.from_config(config) for config in (*PRESETS.values(), llama)})


if __name__ == "__main__":
    print(page())
