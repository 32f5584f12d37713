"""The cases that tests and worker processes both know: a model, batches, and how to spread them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.config import validate
from slipstream.config.train import TrainerConfig
from slipstream.models.decoder import Decoder
from slipstream.models.load import build_model
from slipstream.models.lora import Adapters
from slipstream.models.spec import ModelSpec
from slipstream.ops import fp8_weight
from slipstream.parallel.comm import all_gather
from slipstream.parallel.mesh import ALONE, Mesh
from slipstream.parallel.pieces import gather
from slipstream.trainer.optim import optimizer_tensors
from slipstream.trainer.step import Learner
from slipstream.types import Batch, MicroBatch
from tests.unit.trainer.helpers import HF_CONFIG, _pack, _sample

WIDE = {**HF_CONFIG, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
LATENT = {
    **WIDE,
    "model_type": "deepseek_v3",
    "architectures": None,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
MODELS = {
    "qwen3_moe": WIDE,
    "tied": {**WIDE, "tie_word_embeddings": True},
    "glm4_moe": {  # five layers, of which the first two are dense: MoE layers are counted from another start than layers; routing biases
        **WIDE,
        "model_type": "glm4_moe",
        "architectures": None,
        "num_hidden_layers": 5,
        "first_k_dense_replace": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "use_qk_norm": True,
    },
    "two kv heads": {**WIDE, "num_key_value_heads": 2},
    "deepseek_v3": LATENT,
    "glm_moe_dsa": {  # the second layer takes the choice of the first; most documents are longer than what is chosen
        **LATENT,
        "model_type": "glm_moe_dsa",
        "n_group": 1,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 8,
        "indexer_types": ["full", "shared"],
    },
    "gpt_oss": {  # the window of the first layer is shorter than a chunk of most rows, and longer than one of the shortest
        **WIDE,
        "model_type": "gpt_oss",
        "architectures": None,
        "num_local_experts": 8,
        "intermediate_size": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {"rope_type": "default"},
    },
    "ragged": {**HF_CONFIG, "hidden_size": 136, "moe_intermediate_size": 72, "tie_word_embeddings": False},
    "whole blocks": {**WIDE, "hidden_size": 256, "head_dim": 32, "moe_intermediate_size": 72},
}
"""ragged: blocks of 128 that are cut by the edges between processes, and smaller blocks at the end of every dimension."""
SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "muon": {"optim": {"type": "muon", "weight_decay": 0.1}},
    "bfloat16 moments": {"optim": {"moments": "bfloat16"}},
    "sgd": {"optim": {"type": "sgd", "lr": 0.1}},
    "sign_sgd": {"optim": {"type": "sign_sgd"}},
    "balance": {"balance_rate": 0.01},
    "frozen": {"freeze_router": True},
    "auxiliary": {"aux_loss": 0.03},
    "offload": {"recompute": "layer", "offload": {"moments": True, "activations": True}},
    "fp8 all-gather": {"parallel": {"fp8_all_gather": True}},
}
ROW_TOKENS = 64
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "fsdp": {},
        "hsdp": {"dp_replicate": 2},
        "ep": {"ep": 2},
        "ep in chunks": {"ep": 2, "ep_chunks": 3},
        "cp all-gather": {"cp": 2},
        "cp ring": {"cp": 2, "cp_method": "ring"},
        "cp ulysses": {"cp": 2, "cp_method": "ulysses"},
        "ep x cp": {"ep": 2, "cp": 2},
        "pp": {"pp": 2},
        "pp gpipe": {"pp": 2, "pp_schedule": "gpipe"},
        "pp interleaved": {"pp": 2, "pp_schedule": "interleaved_1f1b", "pp_stages": 2},
    },
    4: {
        "fsdp": {},
        "hsdp": {"dp_replicate": 2},
        "ep": {"ep": 4},
        "ep x fsdp": {"ep": 2},
        "ep x hsdp": {"ep": 2, "dp_replicate": 2},
        "cp all-gather": {"cp": 4},
        "cp ring": {"cp": 4, "cp_method": "ring"},
        "cp ulysses": {"cp": 4, "cp_method": "ulysses"},
        "cp x fsdp": {"cp": 2},
        "ep x cp": {"ep": 4, "cp": 2},
        "ep x cp x fsdp": {"ep": 2, "cp": 2},
        "pp": {"pp": 4},
        "pp x fsdp": {"pp": 2},
        "pp x hsdp": {"pp": 2, "dp_replicate": 2},
        "pp x ep": {"pp": 2, "ep": 2},
        "pp x cp": {"pp": 2, "cp": 2},
        "pp gpipe x cp": {"pp": 2, "cp": 2, "cp_method": "ulysses", "pp_schedule": "gpipe"},
        "pp interleaved x ep": {"pp": 2, "ep": 2, "pp_schedule": "interleaved_1f1b", "pp_stages": 2},
    },
    8: {"pp x ep x cp": {"pp": 2, "ep": 2, "cp": 2}},
}
FAMILIES = {
    2: {"cp all-gather": ("deepseek_v3", "glm_moe_dsa", "gpt_oss"), "cp ulysses": ("deepseek_v3", "gpt_oss")},
    4: {"cp all-gather": ("glm_moe_dsa",), "cp ring": ("glm_moe_dsa", "gpt_oss"), "cp ulysses": ("two kv heads",)},
}
"""What context parallelism is also tested with: latent and sparse attention, windows and sinks, fewer key/value heads than processes.
Ring with recomputation for two processes, see `cases`."""


SPARSE = {2: ("pp gpipe", "pp interleaved"), 4: ("pp", "pp x hsdp", "pp gpipe x cp", "pp interleaved x ep")}


@dataclass(frozen=True)
class Case:
    layout: str
    replay: bool = True
    recompute: bool = False
    documents: str = "across"
    """Where documents end: 'on' the edges between processes, or 'across' them; 'dealt': rows can be dealt out without splitting any; 'one':
    there is one document, so most rows are empty."""
    model: str = ""
    """'': glm4_moe for pipelines, qwen3_moe for others."""
    loss: str = "dppo"
    dtype: str = "float32"
    lora: bool = False
    settings: str = ""

    def __post_init__(self) -> None:
        if not self.model:
            object.__setattr__(self, "model", "glm4_moe" if "pp" in self.layout else "qwen3_moe")

    def __str__(self) -> str:
        defaults = ((self.model, ""), (self.loss, "dppo"), (self.dtype, "float32"), (self.settings, ""))
        extras = [value for value, default in defaults if value != default]
        extras += ["lora"] * self.lora
        flags = ["replay" if self.replay else "native", *["recompute"] * self.recompute, f"documents {self.documents}"]
        return ", ".join([self.layout, *flags, *extras])


def cases(world: int) -> list[Case]:
    """All of layout x replay x recompute x documents, and a few with another model, loss or dtype.

    Four processes are slow: of each layout they run the half of the grid in which every pair of settings occurs, and so do pipelines, of
    which SPARSE layouts run two cases. Eight run one.
    """
    if world == 8:
        return [Case(layout, recompute=True) for layout in LAYOUTS[world]]
    grid = [Case(*values) for values in product(LAYOUTS[world], (True, False), (False, True), ("on", "across"))]
    grid = [case for case in grid if (world == 2 and "pp" not in case.layout) or _in_half(case)]
    grid = [case for case in grid if case.layout not in SPARSE[world] or case.replay == case.recompute]
    extra = [Case(layout, loss="gspo") for layout in LAYOUTS[world] if "cp" in layout and layout not in SPARSE[world]]
    extra += [Case("fsdp", model="tied"), Case("ep", model="tied"), Case("cp all-gather", model="tied", recompute=True)]
    extra += [Case(layout, model=model) for layout, models in FAMILIES[world].items() for model in models]
    if world == 2:
        extra += [Case("cp ring", model=model, recompute=True) for model in ("deepseek_v3", "glm_moe_dsa", "gpt_oss")]
        extra += [Case("cp ring", model="deepseek_v3", dtype="bfloat16")]
    extra += [Case(layout, dtype="bfloat16") for layout in LAYOUTS[world] if "pp" not in layout or layout in ("pp gpipe", "pp x ep")]
    extra += [Case(layout, documents="one") for layout in LAYOUTS[world] if layout in ("pp interleaved", "pp", "pp x ep")]
    extra += [Case(layout, lora=True) for layout in LAYOUTS[world] if "pp" not in layout] + [Case("ep", dtype="bfloat16", lora=True)]
    return grid + extra + SPECIAL.get(world, [])


_FP8 = {"model": "ragged", "dtype": "float8", "documents": "dealt"}
SPECIAL = {
    2: [
        *(Case(layout, **_FP8) for layout in ("fsdp", "hsdp", "ep", "cp all-gather", "ep x cp")),
        Case("fsdp", recompute=True, **_FP8),
        *(Case(layout, settings="fp8 all-gather", **{**_FP8, "model": "whole blocks"}) for layout in ("fsdp", "ep")),
        *(Case(layout, settings="muon") for layout in ("fsdp", "hsdp", "ep")),
        Case("ep", settings="offload"),
        *(Case("ep", settings=settings) for settings in ("bfloat16 moments", "sgd", "sign_sgd", "frozen")),
        *(Case("ep", replay=False, recompute=recompute, model="gpt_oss") for recompute in (False, True)),
        Case("ep", model="gpt_oss", settings="muon"),
        *(Case(layout, recompute=True, settings="auxiliary") for layout in ("fsdp", "ep")),
        Case("cp all-gather", replay=False, settings="auxiliary"),
        Case("ep x cp", recompute=True, model="glm4_moe", settings="balance"),
        *(Case("pp", recompute=True, settings=settings) for settings in ("muon", "auxiliary")),
        Case("pp", dtype="float8", documents="dealt"),
    ],
    4: [
        *(Case(layout, **_FP8) for layout in ("ep x fsdp", "ep x hsdp", "cp x fsdp")),
        Case("ep x hsdp", settings="fp8 all-gather", recompute=True, **{**_FP8, "model": "whole blocks"}),
        *(Case(layout, settings="muon") for layout in ("fsdp", "ep x fsdp", "ep x hsdp")),
        *(Case("fsdp", settings=settings) for settings in ("bfloat16 moments", "sgd", "sign_sgd")),
        Case("ep x hsdp", model="gpt_oss"),
        Case("ep x fsdp", model="gpt_oss", dtype="float8", documents="dealt"),
        Case("ep x cp", recompute=True, settings="auxiliary"),
        Case("ep x hsdp", recompute=True, model="glm4_moe", settings="balance"),
    ],
}
"""What is not in the grid: of each pair of a layout and a thing that could fail there, one case."""
RESUMED = {
    2: [Case("ep", settings="muon"), Case("fsdp", settings="bfloat16 moments"), Case("ep", settings="sign_sgd"), Case("fsdp", **_FP8)],
    4: [Case("ep x fsdp", settings="muon")],
}


def resumed(world: int) -> list[Case]:
    """Those of which a checkpoint is gone back to."""
    return [
        *(Case(layout, lora=lora) for layout in LAYOUTS[world] for lora in (False, True) if not (lora and "pp" in layout)),
        *RESUMED.get(world, []),
    ]


def _in_half(case: Case) -> bool:
    return (case.replay + case.recompute + (case.documents == "on")) % 2 == 0


def batch(case: Case, step: int) -> Batch:
    """Five rows: no number of processes divides them ('dealt': four). With 'on' a document ends at each eighth of a row."""
    lengths = [[8] * 8, [8, 8, 4, 4, 8, 8, 8, 8, 8], [8] * 8, [3] * 16, [6] * 8]
    if case.documents == "across":
        lengths = [[61], [7, 50, 6], [3, 21, 22, 18], [30, 31], [2, 4, 5]]
    elif case.documents == "dealt":
        lengths = lengths[:4]
    elif case.documents == "one":
        lengths = [[61]]
    rng, rows, index = np.random.default_rng(step), [], 0
    for row in lengths:
        samples = []
        for length in row:
            samples.append(_of_length(rng, index, step, length, len(ModelSpec.from_config(MODELS[case.model]).moe_layers)))
            index += 1
        rows.append(_pack(samples))
    loss_tokens = sum(int(row.loss_mask_T.sum()) for row in rows)
    zeros = np.zeros(index, dtype=np.float32)
    return Batch(step, tuple(rows), loss_tokens, tuple(f"r{i}" for i in range(index)), zeros, zeros)


def _of_length(rng: np.random.Generator, index: int, step: int, length: int, moe_layers: int) -> MicroBatch:
    """Tokens of random samples laid end to end, as one sample; every token but the first carries loss."""
    pieces: list[MicroBatch] = []
    while sum(p.num_tokens for p in pieces) < length:
        pieces.append(_sample(rng, index, step))
    joined = _pack(pieces)
    parts = {name: getattr(joined, name)[:length] for name in MicroBatch.__dataclass_fields__ if name != "doc_starts_D"}
    mask = np.arange(length) > 0
    parts |= {
        "positions_T": np.arange(length, dtype=np.int32),
        "loss_mask_T": mask,
        "logprobs_T": np.where(mask, -3.9 + 0.3 * rng.standard_normal(length), 0).astype(np.float32),
        "versions_T": np.where(mask, step - 1, -1).astype(np.int32),
        "advantages_T": np.full(length, rng.standard_normal(), dtype=np.float32),
        "routing_TLK": np.argsort(rng.random((length, moe_layers, 8)), axis=2)[..., :2].astype(np.uint8),
    }
    return MicroBatch(**parts, doc_starts_D=np.array([0, length], dtype=np.int32))


def learner(case: Case, mesh: Mesh = ALONE, **changes: Any) -> Learner:
    values = {"row_tokens": ROW_TOKENS, "router_replay": case.replay, "recompute": "layer" if case.recompute else "none", "dtype": case.dtype}
    values |= {"balance_rate": 1e-2} if case.model == "glm4_moe" else {}
    # eps: AdamW would make whole steps of gradients that are rounding noise
    settings = SETTINGS[case.settings]
    optim = {"lr": 1e-3, "eps": 1e-6, "clip_norm": 0.1, **settings.get("optim", {})}
    values |= {"loss": {"type": case.loss}, **settings, "optim": optim, **changes}
    values |= {"lora": {"rank": 3, "alpha": 6.0}} if case.lora else {}
    config = validate(TrainerConfig, values)
    subject = Learner(model(case.model), config, config.optim, max_steps=10, mesh=mesh)
    if subject.adapters is not None:
        _as_after_some_training(subject.adapters)
        subject.weights.sync()
    return subject


@torch.no_grad()
def _as_after_some_training(adapters: Adapters) -> None:
    """Fresh adapters have B = 0, and so no gradient of A."""
    generator = torch.Generator().manual_seed(1)
    for parameter in adapters.parameters.values():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def moments(subject: Learner) -> dict[str, Tensor]:
    """Whole, in the leading process."""
    return gather(optimizer_tensors(subject.optimizer, subject.names), subject.mesh)


def model(name: str) -> Decoder:
    return build_model(ModelSpec.from_config(MODELS[name]), seed=1)


@contextmanager
def multiplied(model: Decoder, mesh: Mesh) -> Iterator[dict[str, Tensor]]:
    """Collects, of every weight that is multiplied in FP8 in the block, '<our name>/<part>/<codes or scales>': of all experts."""
    found: dict[str, Tensor] = {}
    apply = fp8_weight._Product.apply

    def watched(x: Tensor, weight: fp8_weight.Fp8Weight, ends: tuple[int, ...]) -> Any:
        name = next(name for name, p in model.named_parameters() if p is weight)
        for i, part in enumerate(weight.parts):
            found.setdefault(f"{name}/{i}/codes", part.codes.view(torch.uint8).clone())
            found.setdefault(f"{name}/{i}/scales", part.scales.clone())
        return apply(x, weight, ends)

    fp8_weight._Product.apply = watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        fp8_weight._Product.apply = apply  # type: ignore[method-assign]
    if mesh.config.ep > 1:
        found |= {key: all_gather(tensor, mesh.expert_group) for key, tensor in found.items() if ".experts." in key}


def outcome(case: Case, mesh: Mesh = ALONE) -> dict[str, Tensor]:
    """Everything that must not depend on the number of processes: gradients of one batch, then two steps with their metrics, moments and
    weights, whole. Only the leading process has it."""
    subject = learner(case, mesh)
    with multiplied(subject.weights.compute, mesh) as codes:
        sums, routing = subject.accumulate(batch(case, 1))
    gradients = {f"gradient/{name}": p.grad for name, p in subject.weights.trained.items() if p.grad is not None}
    result = {name: tensor.clone() for name, tensor in gather(gradients, mesh).items()}
    metrics = {"loss": sums.loss, **sums.metrics(), **routing.metrics()}
    for step in (1, 2):
        metrics |= {f"{step}/{key}": value for key, value in subject.step(batch(case, step)).metrics.items()}
    if case.dtype == "float8":
        with multiplied(subject.weights.compute, mesh) as trained:
            subject.accumulate(batch(case, 3))
        result |= {f"codes/{key}": tensor for key, tensor in codes.items()} | {f"trained/{key}": tensor for key, tensor in trained.items()}
    result |= {f"parameter/{name}": tensor.clone() for name, tensor in subject.masters().items()}
    result |= {f"published/{name}": tensor.float() for name, tensor in subject.published().items()}
    result |= {f"moment/{name}": tensor.clone() for name, tensor in moments(subject).items()}
    result |= {f"load/{kind}": torch.from_numpy(counts) for kind, counts in (("used", routing.load_LE), ("native", routing.native_LE))}
    return result | {f"metric/{key}": torch.tensor(float(value), dtype=torch.float64) for key, value in metrics.items()}
