"""A model of transformers behind the interface of our decoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.models.context import Context
from slipstream.models.fill import load_hf_tensors
from slipstream.models.foreign.modules import build, config_of, embedding_of, head_of, layers_of
from slipstream.models.foreign.names import HfNames
from slipstream.models.foreign.probe import probe
from slipstream.models.foreign.router import routers_of
from slipstream.models.foreign.seams import CONTEXT, LayerSeam, RouterSeam, seam
from slipstream.models.foreign.spec import HfSpec
from slipstream.models.hf import TensorFiles
from slipstream.models.language_model import LanguageModel


def load_hf_model(folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> HfDecoder:
    """The model of an HF folder as transformers' modules, converted to `dtype`. Raises ModelError, see `probe` and `load_hf_tensors`."""
    model, tensors = empty_hf_model(folder, dtype, device), TensorFiles(folder)
    load_hf_tensors(model, tensors, tensors.files)
    return model


def empty_hf_model(folder: str | Path, dtype: torch.dtype, device: torch.device | str) -> HfDecoder:
    """Without the weights of the folder. Raises ModelError, see `probe`."""
    folder = Path(folder)
    spec = probe(folder)
    with torch.device(device):
        return HfDecoder(build(config_of(folder), dtype, str(folder / "config.json")), spec)


class HfDecoder(LanguageModel):
    """`inner` is a causal language model of transformers, in evaluation mode for good: nothing is dropped in training."""

    def __init__(self, inner: PreTrainedModel, spec: HfSpec) -> None:
        """Puts the seams into `inner`."""
        super().__init__()
        self.inner, self.spec, self.names = inner, spec, HfNames(inner, "inner.")
        self._layers = layers_of(inner, spec.family)
        for index, layer in enumerate(self._layers):
            seam(layer, LayerSeam, seam_index=index, seam_window=spec.window if index in spec.window_layers else 0)
        self._routers = list(routers_of(inner, self._layers, spec.family).values())
        for index, router in enumerate(self._routers):
            seam(router, RouterSeam, seam_moe_layer=index, seam_experts=spec.num_experts, seam_top_k=spec.top_k)
        strict = getattr(inner, "_keep_in_fp32_modules_strict", None) or ()
        named = [(name, t) for name, t in (*inner.named_parameters(), *inner.named_buffers()) if t.is_floating_point()]
        self._float32 = {name for name, t in named if not t.requires_grad or any(part in name for part in strict)}
        """What is float32 whatever the model: tables of angles, routing biases, and the parameters that transformers keeps so."""
        for parameter in self._kept():
            parameter.data = parameter.data.float()

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, ctx: Context) -> Tensor:
        """See `LanguageModel.forward`."""
        ids_1T, positions_1T = token_ids_T.long()[None], positions_T.long()[None]
        output = self.inner.base_model(input_ids=ids_1T, position_ids=positions_1T, use_cache=False, **{CONTEXT: ctx})
        return output.last_hidden_state[0]

    @property
    def head_weight(self) -> Tensor:
        return head_of(self.inner, self.spec.family).weight

    @property
    def dtype(self) -> torch.dtype:
        return embedding_of(self.inner).dtype

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        return self._layers

    @property
    def router_parameters(self) -> Sequence[nn.Parameter]:
        return [p for router in self._routers for p in router.parameters() if p.requires_grad]

    @property
    def tied_names(self) -> Mapping[str, str]:
        return dict(self.inner._tied_weights_keys or {}) if self.spec.tie_embeddings else {}

    def train(self, mode: bool = True) -> HfDecoder:
        """Stays in evaluation mode."""
        return super().train(False)

    def _kept(self) -> list[Tensor]:
        return [t for name, t in (*self.inner.named_parameters(), *self.inner.named_buffers()) if name in self._float32]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HfDecoder:
        """What `to` and `to_empty` go through. Seen as integers, kept tensors look like nothing that a change of dtype concerns."""
        kept = {id(t) for t in self._kept()}
        return super()._apply(lambda t: fn(t.view(torch.int32)).view(torch.float32) if id(t) in kept else fn(t), recurse)
