"""Parameters of transformers' modules as views under the names of the checkpoint: transformers' own conversion, run backwards on views."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from slipstream.errors import ModelError
from slipstream.models.names import Entry
from slipstream.models.spec import ModelSpec


class HfNames:
    """The table of one model; see `models.names.Names`."""

    layer: tuple[Entry, ...] = ()

    def __init__(self, inner: PreTrainedModel, prefix: str) -> None:
        """`prefix`: what our parameter names have before transformers'."""
        self._inner, self._prefix = inner, prefix

    def views(self, spec: ModelSpec | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = {name.removeprefix(self._prefix): tensor for name, tensor in tensors.items()}
        with _NoCopies():
            return revert_weight_conversion(self._inner, own)

    def cut(self, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
        """Parameter by parameter, since transformers does not say of which one it made a tensor."""
        for name, tensor in tensors.items():
            yield from ((name, hf, view) for hf, view in self.views(spec, {name: tensor}).items())

    def check(self, source: str) -> None:
        """Raises ModelError: the checkpoint's tensors are not views that cover each parameter once."""
        covered: dict[int, int] = {}
        parameters = {name: p.detach() for name, p in self._inner.named_parameters()}
        for view in self.views(None, parameters).values():
            base = view if view._base is None else view._base
            covered[id(base)] = covered.get(id(base), 0) + view.numel()
        for name, parameter in parameters.items():
            if covered.get(id(parameter if parameter._base is None else parameter._base)) != parameter.numel():
                raise ModelError(
                    f'{source}: impl = "hf" needs checkpoint tensors that are parts of the modules\' parameters, and transformers makes '
                    f"{name} of them in another way"
                )


class _NoCopies(TorchFunctionMode):
    """Cutting, squeezing and transposing give views; transformers then makes them contiguous, which would copy."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))
