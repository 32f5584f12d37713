"""What runs in vLLM's own processes: loads published policy versions, and records what the experts do. The one module that imports vLLM.

vLLM finds `register` through the entry point `vllm.general_plugins` (see `child.plugin_folder`). It is called in every process, and changes
nothing but the registry of weight-transfer backends. Tried with vLLM 0.32; see `support`.

Shape suffixes: T tokens of a step, S slots of the KV cache, L MoE layers, K experts a token.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory  # pyright: ignore[reportMissingImports]
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from slipstream.serving.vllm.args import BACKEND
from slipstream.transport.weights import TENSORS_FILE, fingerprint_file

KEPT = 4096
"""Requests whose rows are kept until they are asked for; those that were cancelled are asked for by nobody."""


def register() -> None:
    """Idempotent: vLLM calls it in each of its processes, sometimes twice."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FolderWeights)


@dataclass
class NoInfo(WeightTransferInitInfo):
    """There is nothing to agree on: a version is a folder."""


@dataclass
class VersionInfo(WeightTransferUpdateInfo):
    folder: str
    fingerprint: str


class FolderWeights(WeightTransferEngine[NoInfo, VersionInfo]):
    """Loads a published version through vLLM's layerwise reload. Nothing is touched before the fingerprint of the file was verified."""

    init_info_cls, update_info_cls = NoInfo, VersionInfo

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def receive_weights(self, update_info: VersionInfo) -> None:
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        path = Path(update_info.folder) / TENSORS_FILE
        found, _ = fingerprint_file(path)
        if found != update_info.fingerprint:
            raise ValueError(f"{path} has fingerprint {found}, not {update_info.fingerprint}")
        initialize_layerwise_reload(self.model)
        self.model.load_weights(_tensors(path))
        finalize_layerwise_reload(self.model, self.model_config)
        self.pack_experts()
        self.pack_tied_heads()

    def pack_tied_heads(self) -> None:
        """vLLM 0.32 on a CPU multiplies with a packed copy of the head. One that is tied to the embedding has no weights of its own to
        load, so its copy would stay that of the weights before (layerwise.finalize_layerwise_processing)."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead  # pyright: ignore[reportMissingImports]

        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def pack_experts(self) -> None:
        """vLLM 0.32 packs expert weights for its CPU kernels at the first load only (UnquantizedFusedMoEMethod._setup_kernel): after any
        other they would be taken for packed and are not. On GPUs there is nothing to pack."""
        for module in self.model.modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None and hasattr(module, "w13_weight"):
                kernel.fused_experts.process_weights_after_loading(module)


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(str(path), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  not a dict
            yield name, file.get_tensor(name)


@dataclass
class _Rows:
    """Of one request: what its experts did, by position."""

    internal: str
    pieces: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)
    """(first position, ids [T, L, K], whether known [T]), in the order of computation: later ones hold."""


class RoutingCapture:
    """Mixed into vLLM's worker (--worker-extension-cls); its methods are called through collective_rpc.

    Rows are kept by slot of the KV cache as well, so that a request which finds its prefix there finds what the experts did with it.
    """

    model_runner: Any

    def slipstream_capture(self) -> list[int]:
        """Begin. Returns [MoE layers]. Raises ValueError: another model runner than the one whose batches are read here."""
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter  # pyright: ignore[reportMissingImports]

        if not hasattr(self.model_runner, "query_start_loc"):
            raise ValueError(
                "engine.capture_routing = true needs vLLM's first model runner, and this is another; leave VLLM_USE_V2_MODEL_RUNNER out "
                "of engine.env, or set engine.capture_routing = false"
            )
        model = self.model_runner.get_model()
        routers = [module.router for module in model.modules() if isinstance(getattr(module, "router", None), BaseRouter)]
        routers = list({id(router): router for router in routers}.values())
        self._slipstream_rows: dict[str, _Rows] = {}
        self._slipstream_slots: tuple[np.ndarray, np.ndarray] | None = None
        seen: list[np.ndarray | None] = [None] * len(routers)
        for layer, router in enumerate(routers):

            def note(ids_TK: torch.Tensor, layer: int = layer) -> None:
                seen[layer] = ids_TK.cpu().numpy()

            router.set_capture_fn(note)
        if routers:
            model.register_forward_hook(lambda _model, _args, kwargs, _out: self._slipstream_step(seen, kwargs), with_kwargs=True)
        return [len(routers)]

    def slipstream_rows(self, wanted: str) -> dict[str, Any]:
        """`wanted`: JSON {request id: first position}. The rows of those that are known here, which are then forgotten."""
        found = {}
        for name, start in json.loads(wanted).items():
            rows = self._slipstream_rows.pop(f"generate-tokens-{name}", None)
            if rows is not None and rows.pieces:
                found[name] = _packed(rows, start)
        return found

    def _slipstream_step(self, seen: list[np.ndarray | None], kwargs: dict[str, Any]) -> None:
        """After every forward pass: whose tokens they were, and what was done with them."""
        from vllm.forward_context import get_forward_context  # pyright: ignore[reportMissingImports]

        context = get_forward_context()
        if not context.attn_metadata or any(ids is None for ids in seen):  # a pass without requests, to measure memory
            return
        runner = self.model_runner
        batch, starts = runner.input_batch, runner.query_start_loc.np
        count = batch.num_reqs
        total = int(starts[count])
        if any(len(ids) < total for ids in seen):  # type: ignore[arg-type]
            return  # tokens were spread over ranks: none of them has a row for each
        ids_TLK = np.stack([ids[:total] for ids in seen], 1)  # type: ignore[index]
        kind = np.uint8 if ids_TLK.max(initial=0) < 256 else np.uint16
        positions_T = kwargs["positions"][:total].cpu().numpy()
        table = batch.block_table[0]
        ids_SLK, known_S = self._slots(ids_TLK)
        for i, internal in enumerate(batch.req_ids[:count]):
            first, last = int(starts[i]), int(starts[i + 1])
            position = int(positions_T[first])
            rows = self._rows_of(internal, batch.req_ids)
            if not rows.pieces and position:  # its beginning was found in the prefix cache
                slots = _slots_of(table, i, 0, position)
                rows.pieces.append((0, ids_SLK[slots].astype(kind), known_S[slots]))
            slots, ids = _slots_of(table, i, position, position + last - first), ids_TLK[first:last]
            ids_SLK[slots], known_S[slots] = ids, True
            rows.pieces.append((position, ids.astype(kind), np.ones(last - first, np.bool_)))
        seen[:] = [None] * len(seen)

    def _slots(self, ids_TLK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._slipstream_slots is None:
            cache = self.model_runner.kv_cache_config
            slots = cache.num_blocks * cache.kv_cache_groups[0].kv_cache_spec.block_size
            self._slipstream_slots = np.zeros((slots, *ids_TLK.shape[1:]), np.uint16), np.zeros(slots, np.bool_)
        return self._slipstream_slots

    def _rows_of(self, internal: str, running: list[str]) -> _Rows:
        name = internal.rpartition("-")[0]  # vLLM adds eight random characters
        rows = self._slipstream_rows.get(name)
        if rows is None or rows.internal != internal:
            rows = self._slipstream_rows[name] = _Rows(internal)
            if len(self._slipstream_rows) > KEPT:
                self._forget_oldest(set(running))
        return rows

    def _forget_oldest(self, running: set[str]) -> None:
        for name in [name for name, rows in self._slipstream_rows.items() if rows.internal not in running][: KEPT // 4]:
            del self._slipstream_rows[name]


def _slots_of(table: Any, row: int, first: int, last: int) -> np.ndarray:
    position_T = np.arange(first, last)
    return table.block_table.np[row, position_T // table.block_size].astype(np.int64) * table.block_size + position_T % table.block_size


def _packed(rows: _Rows, start: int) -> dict[str, Any]:
    """Positions from `start` on as JSON."""
    end = max(first + len(known) for first, _, known in rows.pieces)
    ids_TLK = np.zeros((end, *rows.pieces[0][1].shape[1:]), rows.pieces[0][1].dtype)
    known_T = np.zeros(end, np.bool_)
    for first, ids, known in rows.pieces:
        ids_TLK[first : first + len(known)], known_T[first : first + len(known)] = ids, known
    ids_TLK, known_T = ids_TLK[start:], known_T[start:]
    return {
        "start": start,
        "shape": list(ids_TLK.shape),
        "dtype": str(ids_TLK.dtype),
        "ids": base64.b64encode(ids_TLK.tobytes()).decode(),
        "valid": base64.b64encode(known_T.tobytes()).decode(),
    }
