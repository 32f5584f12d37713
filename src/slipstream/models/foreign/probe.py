"""What a model of transformers is, found out by running it on the meta device: which shapes come to the seams, from which layers, under
which masks. What cannot be served as transformers would compute it is refused here, before any weight is loaded.

Everything is looked at in the modules themselves, so a new architecture of transformers needs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from slipstream.errors import ModelError
from slipstream.models.config_reader import Reader
from slipstream.models.foreign.head import check_head
from slipstream.models.foreign.modules import build, config_of, embedding_of, head_of, layers_of
from slipstream.models.foreign.names import HfNames
from slipstream.models.foreign.router import look_at_router, routers_of
from slipstream.models.foreign.seams import CONTEXT, LayerSeam, running_layer, seam
from slipstream.models.foreign.spec import HfSpec, refuse_features
from slipstream.models.spec import read_config

_PROBE = "slipstream_probe"
_TOKENS = 6
_KNOWN = {
    "sliding_window",
    "s_aux",
    "position_ids",
    "use_cache",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
}
"""Arguments of attention that change nothing here, or are honoured."""


def probe(folder: str | Path) -> HfSpec:
    """The spec of an HF folder that runs through transformers. Takes memory for no weight.

    Raises ModelError: transformers does not know the architecture, or it has a feature (named) that our seams cannot honour.
    """
    folder = Path(folder)
    source, raw = str(folder / "config.json"), read_config(folder)
    config = config_of(folder)
    refuse_features(config.to_dict(), source)
    with torch.device("meta"):
        inner = build(config, torch.float32, source, _PROBE)
    _check_modules(inner, source)
    layers = layers_of(inner, source)
    calls = _run(inner, layers, source)
    windows = [call.window for call in calls]
    if len({(call.heads, call.kv_heads, call.head_dim) for call in calls}) != 1:
        raise ModelError(f'{source}: with impl = "hf" all layers must have the same heads; here they differ')
    embedding, head = embedding_of(inner), head_of(inner, source)
    hidden = head.in_features
    routers = {index: look_at_router(router, hidden, source) for index, router in routers_of(inner, layers, source).items()}
    if len({*routers.values()}) > 1 or len({*windows} - {0}) > 1:
        raise ModelError(f'{source}: with impl = "hf" all routers (experts, top-k) and all windows must be the same; here they differ')
    HfNames(inner, "").check(source)
    check_head(inner, head, source)
    num_experts, top_k = next(iter(routers.values()), (0, 0))
    reader = Reader({**config.to_dict(), **raw, "max_position_embeddings": getattr(config, "max_position_embeddings", None)}, source)
    return HfSpec(
        family=str(config.model_type),
        vocab_size=embedding.shape[0],
        hidden=hidden,
        intermediate=0,
        num_layers=len(layers),
        num_heads=calls[0].heads,
        num_kv_heads=calls[0].kv_heads,
        head_dim=calls[0].head_dim,
        max_positions=reader.number("max_position_embeddings"),
        rope_theta=0.0,
        rms_eps=0.0,
        tie_embeddings=head.weight is embedding,
        window=max(windows),
        window_layers=tuple(index for index, window in enumerate(windows) if window),
        sinks=any(call.sinks for call in calls),
        moe_layers=tuple(routers),
        num_experts=num_experts,
        top_k=top_k,
        prediction_layers=reader.count("num_nextn_predict_layers"),
        eos_ids=reader.integers("eos_token_id"),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        total_params=sum(p.numel() for p in inner.parameters()),
        routed_params=sum(p.numel() for name, p in inner.named_parameters() if ".experts." in name),
    )


def _check_modules(inner: PreTrainedModel, source: str) -> None:
    """Tokens may see one another in attention only."""
    kind, problem = type(inner).__name__, ""
    convolution = next((name for name, m in inner.named_modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)
    if getattr(inner, "_is_stateful", False):
        problem = "it keeps a state other than keys and values (linear attention or a state-space layer)"
    elif convolution is not None:
        problem = f"{convolution} is a convolution over tokens"
    elif not getattr(inner.base_model, "_supports_attention_backend", False):
        problem = "it does not take its attention from transformers' attention interface"
    elif any(not buffer.is_floating_point() and name in inner.state_dict() for name, buffer in inner.named_buffers()):
        problem = "its checkpoint holds buffers of integers"
    if problem:
        raise ModelError(f'{source}: {kind} is not supported with impl = "hf": {problem}')


@dataclass(frozen=True, slots=True)
class _Call:
    """What came to attention in one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    """Of the larger of keys and values: what the cache holds."""
    window: int
    sinks: bool


class _Recorder:
    """Stands for a context while attention is probed."""

    def __init__(self) -> None:
        self.calls: dict[int, _Call] = {}


def _run(inner: PreTrainedModel, layers: Sequence[nn.Module], source: str) -> list[_Call]:
    """One forward pass on the meta device. Raises ModelError: a layer attends never, twice or in a way that is not known here."""
    recorder = _Recorder()
    for index, layer in enumerate(layers):
        seam(layer, LayerSeam, seam_index=index, seam_window=0)
    tokens_1T = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    try:
        # the mask of ones keeps transformers from looking for packed documents in positions that are not there
        mask_1T = torch.ones(1, _TOKENS, dtype=torch.long, device="meta")
        with torch.no_grad():
            inner.base_model(input_ids=tokens_1T, position_ids=tokens_1T, attention_mask=mask_1T, use_cache=False, **{CONTEXT: recorder})
    except ModelError as error:
        raise ModelError(f'{source}: not supported with impl = "hf": {error}') from None
    except Exception as error:  # whatever modules raise that do more than the interfaces say
        raise ModelError(f'{source}: impl = "hf" cannot run {type(inner).__name__}: {type(error).__name__}: {error}') from error
    silent = [index for index in range(len(layers)) if index not in recorder.calls]
    if silent:
        kind = type(layers[silent[0]]).__name__
        raise ModelError(f'{source}: not supported with impl = "hf": layer {silent[0]} ({kind}) has no attention through the interface')
    return [recorder.calls[index] for index in range(len(layers))]


class _Mask:
    """What the mask function is asked for: stands for the mask."""

    def __init__(self, window: int, causal: bool) -> None:
        self.window, self.causal = window, causal


def _mask(*args: Any, mask_function: Callable[..., Any], local_size: int | None = None, use_vmap: bool = False, **kwargs: Any) -> _Mask:
    """In place of a mask: how far it lets see. Some models ask for masks that no layer uses, so that refusing is left to `_attend`."""
    window = int(local_size or 0)
    return _Mask(window, causal=not use_vmap and _is_causal(mask_function, window))


def _is_causal(mask_function: Callable[..., Any], window: int) -> bool:
    """Asked at queries around the edges of the window."""
    keys_K = torch.arange(3 * window + 8, device="cpu")
    for query in {0, 1, 5, max(0, window - 1), window, window + 1, 2 * window + 3}:
        query_K = torch.full_like(keys_K, query)
        zero_K = torch.zeros_like(keys_K)
        seen_K = torch.as_tensor(mask_function(zero_K, zero_K, query_K, keys_K)).expand(keys_K.shape).bool()
        wanted_K = (keys_K <= query) & ((keys_K > query - window) if window else True)
        if not torch.equal(seen_K, wanted_K):
            return False
    return True


def _attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: _Mask | None, **given: Any) -> tuple[Tensor, None]:
    """Notes shapes and what is asked for. The value of `dropout` counts in training only, where the config was looked at."""
    index, recorder = running_layer()
    assert isinstance(recorder, _Recorder)
    if index in recorder.calls:
        raise ModelError(f"layer {index} attends more than once")
    if not isinstance(mask, _Mask):
        raise ModelError(f"layer {index} attends under a mask of its own ({type(mask).__name__})")
    if not mask.causal:
        raise ModelError(f"layer {index} sees other tokens than its past, or the last few of it")
    unknown = sorted(
        key for key, value in given.items() if value is not None and value is not False and key not in {*_KNOWN, "scaling", "dropout"}
    )
    if unknown:
        raise ModelError(f"layer {index} asks attention for {', '.join(unknown)}")
    head_dim = max(q.shape[-1], v.shape[-1])
    recorder.calls[index] = _Call(q.shape[1], k.shape[1], head_dim, mask.window, given.get("s_aux") is not None)
    return q.new_empty(1, q.shape[2], q.shape[1], v.shape[-1]), None


AttentionInterface.register(_PROBE, _attend)
AttentionMaskInterface.register(_PROBE, _mask)
