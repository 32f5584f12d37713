"""Which modules are routers, and whether the choice of experts can be forced on them: tried on a copy with random weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from slipstream.errors import ModelError
from slipstream.models.foreign.seams import RouterSeam, seam, top_k_call, within_layer

_TOKENS = 5


def routers_of(inner: PreTrainedModel, layers: list[nn.Module], source: str) -> dict[int, nn.Module]:
    """The router of each layer that has experts. Raises ModelError: a layer has experts and no router that transformers exposes."""
    kinds = _router_kinds(inner)
    found: dict[int, nn.Module] = {}
    for index, layer in enumerate(layers):
        routers = [module for module in layer.modules() if kinds and isinstance(module, kinds)]
        experts = [name for name, module in layer.named_modules() if name.endswith("experts") or type(module).__name__.endswith("Experts")]
        if len(routers) > 1 or bool(routers) != bool(experts):
            what = "several routers" if len(routers) > 1 else "a router without experts" if routers else "experts without a router"
            raise ModelError(
                f'{source}: with impl = "hf" layer {index} has {what} that transformers exposes (its _can_record_outputs lists '
                f"{[kind.__name__ for kind in kinds] or 'none'}): choices of experts could be neither recorded nor replayed"
            )
        if routers:
            found[index] = routers[0]
    return found


def _router_kinds(inner: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    recorded: list[Any] = []
    for model in (inner, inner.base_model):
        entry = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits", [])
        recorded += entry if isinstance(entry, list) else [entry]
    return tuple({kind.target_class if isinstance(kind, OutputRecorder) else kind for kind in recorded})


def look_at_router(router: nn.Module, hidden: int, source: str) -> tuple[int, int]:
    """(experts, how many of them a token takes).

    Raises ModelError: the router does not choose by one top-k over all experts, or does not compute gate weights at ids that are forced.
    """

    def refuse(problem: str) -> ModelError:
        return ModelError(f'{source}: the router {type(router).__name__} cannot be replayed with impl = "hf": {problem}')

    tried = copy.deepcopy(router).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*tried.parameters(), *tried.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else torch.zeros_like(tensor))
    x_TD = torch.randn(_TOKENS, hidden, generator=generator)
    watch = _Watch()
    try:
        with watch:
            tried(x_TD)
    except Exception as error:
        raise refuse(f"it takes more than hidden states ({type(error).__name__}: {error})") from error
    if not watch.calls:
        raise refuse("it makes no top-k choice")
    num_experts, top_k = watch.calls[-1]
    if watch.calls.count((num_experts, top_k)) != 1:
        raise refuse(f"it takes the best {top_k} of {num_experts} more than once")
    forced = _Forced(torch.rand(_TOKENS, num_experts, generator=generator).argsort(-1)[:, :top_k])
    seam(tried, RouterSeam, seam_moe_layer=0, seam_experts=num_experts, seam_top_k=top_k)
    with within_layer(forced):  # pyright: ignore[reportArgumentType]
        outputs = tried(x_TD)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if not any(_is_ids(output, forced.ids_TK) for output in outputs):
        raise refuse("it does not hand over the ids of the experts that were chosen")
    gates = [output for output in outputs if output.is_floating_point() and output.shape == forced.ids_TK.shape]
    if len(gates) != 1 or not gates[0].requires_grad or not bool(gates[0].detach().all()):
        raise refuse("it does not give every chosen expert a weight with a gradient, whichever they are")
    return num_experts, top_k


def _is_ids(output: Tensor, ids_TK: Tensor) -> bool:
    return not output.is_floating_point() and output.shape == ids_TK.shape and torch.equal(output.long(), ids_TK)


class _Forced:
    """A context that forces the same ids whatever the scores."""

    def __init__(self, ids_TK: Tensor) -> None:
        self.ids_TK = ids_TK

    def route(self, moe_layer: int, scores_TE: Tensor, top_k: int) -> Tensor:
        return self.ids_TK


class _Watch(TorchFunctionMode):
    """Notes (width, k) of every top-k."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int]] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if (call := top_k_call(func, args, kwargs or {})) is not None:
            self.calls.append(call[1:])
        return func(*args, **(kwargs or {}))
