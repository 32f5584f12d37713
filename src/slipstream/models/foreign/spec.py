"""Architectures that run through transformers' own modules (`impl = "hf"`): their spec, and the features that are refused by name.

Torch-free. What the modules really do is looked at by `hf_probe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ModelError
from slipstream.models.config_reader import Reader, off
from slipstream.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HfSpec(ModelSpec):
    """What is to know of such a model outside of its modules. Options of our own layers (`intermediate`, `rope_theta`, `rms_eps`, ...) are
    transformers' business and hold nothing here."""

    total_params: int
    routed_params: int
    """Of all experts of all layers."""

    @property
    def expert_params(self) -> int:
        return self.routed_params // max(1, self.num_experts * len(self.moe_layers))

    def layer_params(self, layer: int) -> int:
        """All layers alike."""
        return (self.total_params - self.routed_params - self.end_params) // self.num_layers

    def _params(self, experts: int) -> int:
        return self.total_params - self.expert_params * (self.num_experts - experts) * len(self.moe_layers)


def refuse_features(config: Mapping[str, Any], source: str) -> None:
    """`config`: all options, those that config.json leaves to the class among them.

    Raises ModelError, which names the option: it changes the numbers and neither trainer nor engine would honour it.
    """
    for key, value in config.items():
        for named, wrong, reason in _REFUSED:
            if named(key) and wrong(value):
                raise ModelError(f'{source}: {key} = {_short(value)} is not supported with impl = "hf": {reason}')
    kinds = sorted(set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"})
    if kinds:
        raise ModelError(
            f'{source}: layer_types has {", ".join(kinds)}; with impl = "hf" layers may have full_attention or sliding_attention'
        )
    for kind in _rope_kinds(config):
        if kind in ("dynamic", "longrope"):
            raise ModelError(
                f'{source}: rope_type = {kind!r} is not supported with impl = "hf": angles depend on the longest sequence of a pass, so a '
                "token would depend on what it is batched with"
            )
    Reader(config, source).refuse_quantised()


def _rope_kinds(config: Mapping[str, Any]) -> Iterator[str]:
    for key in ("rope_parameters", "rope_scaling"):
        options = config.get(key) or {}
        for given in (options, *(value for value in options.values() if isinstance(value, dict))):
            yield given.get("rope_type", given.get("type", "default"))


def _neither(*accepted: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in accepted


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


_DROPOUT = "nothing is dropped in training here; set it to 0"
_LOGITS = "the logits must be the head times the last hidden state"
_TEXT = "only models of text alone"
_REFUSED: tuple[tuple[Callable[[str], bool], Callable[[Any], bool], str], ...] = (
    (lambda key: key == "is_encoder_decoder", lambda value: not off(value), "only decoders"),
    (lambda key: key.endswith(("vision_config", "audio_config")), lambda value: not off(value), _TEXT),
    (lambda key: "softcap" in key and "final" not in key, lambda value: not off(value), "attention here has no soft cap"),
    (lambda key: "softcap" in key, lambda value: not off(value), _LOGITS),
    (lambda key: key in ("logit_scale", "logits_scaling", "lm_head_multiplier"), _neither(1), _LOGITS),
    (lambda key: key == "use_bidirectional_attention", lambda value: not off(value), "tokens here see their past only"),
    (lambda key: key == "alibi", lambda value: not off(value), "attention here has no biases by distance"),
    (lambda key: key.endswith(("dropout", "pdrop")) and not key.startswith(("classifier", "summary")), _positive, _DROPOUT),
    (lambda key: key.endswith("jitter_noise"), _positive, "routers here get no noise; set it to 0"),
)
"""(which keys, which values, why not)."""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
