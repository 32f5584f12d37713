"""Logprobs of prompts under published weights, by slipstream's own model on the CPU. Imports torch, so only where a canary is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from slipstream.errors import EngineError, ModelError
from slipstream.models.context import FullContext
from slipstream.models.fill import load_hf_tensors
from slipstream.models.hf import TensorFiles
from slipstream.models.impl import Impl
from slipstream.models.language_model import LanguageModel
from slipstream.models.load import load_model
from slipstream.ops.logprobs import token_logprobs

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float32}


class Reference:
    """One model in this process, filled anew for each version: as much host memory as the weights in the engine's type."""

    def __init__(self, folder: Path, dtype: str, impl: Impl = "auto"):
        """`folder` names the architecture. Loaded at the first call."""
        self._folder, self._dtype = folder, _DTYPES[dtype]
        self._impl: Impl = impl
        self._model: LanguageModel | None = None

    @torch.inference_mode()
    def __call__(self, weights: str, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Logprob of each token of each prompt but the first, under the weights in the folder. May run in any one thread.

        Raises EngineError: they do not fit the model.
        """
        try:
            if self._model is None:
                self._model = load_model(self._folder, self._dtype, impl=self._impl).eval().requires_grad_(False)
            tensors = TensorFiles(weights)
            load_hf_tensors(self._model, tensors, tensors.files)
        except ModelError as error:
            raise EngineError(f"no reference for the canary: {error}") from error
        return [_score(self._model, torch.from_numpy(prompt_T.astype(np.int64))) for prompt_T in prompts]


def _score(model: LanguageModel, tokens_T: torch.Tensor) -> np.ndarray:
    hidden_TD = model(tokens_T, torch.arange(len(tokens_T)), FullContext([0, len(tokens_T)]))
    logprobs_T, _ = token_logprobs(hidden_TD[:-1], model.head_weight, tokens_T[1:], torch.ones(len(tokens_T) - 1))
    return logprobs_T.float().numpy()
