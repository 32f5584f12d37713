"""What every adapter is tried with: two sets of weights, published versions of them, and what one full forward pass says they do."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.models.maker import make_model
from slipstream.models.spec import ModelSpec
from slipstream.transport.weights import seal
from slipstream.types import Completion, GenerateRequest, PolicyVersion, Sampling
from tests.unit.engine.helpers import Reference

A, B, A_AGAIN = 1, 2, 3
SEQ_LEN = 512
CORPUS = ["the quick brown fox jumps over the lazy dog", "a calculator adds numbers"] * 3


@dataclass
class Material:
    """Versions 1 and 3 are the same weights A, version 2 is B. `other_shape` is a version of a wider model."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Material:
        for name, seed, hidden in (("a", 0, 64), ("b", 1, 64), ("wide", 0, 96)):
            # heads of 32: the smallest that every adapter has kernels for
            sizes = {"vocab_size": 400, "num_hidden_layers": 2, "head_dim": 32, "hidden_size": hidden}
            make_model(folder / name, "tiny-moe", CORPUS, seed=seed, **sizes)
        return cls(folder)

    @property
    def model(self) -> Path:
        """The model folder that an adapter starts from."""
        return self.folder / "a"

    @cached_property
    def versions(self) -> Mapping[int, PolicyVersion]:
        return {number: self._publish(name, number) for name, number in (("a", A), ("b", B), ("a", A_AGAIN))}

    @cached_property
    def other_shape(self) -> PolicyVersion:
        return self._publish("wide", 9)

    @cached_property
    def references(self) -> Mapping[int, Reference]:
        a, b = Reference(self.model), Reference(self.folder / "b")
        return {A: a, B: b, A_AGAIN: a}

    @cached_property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_folder(self.model)

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer.load(self.model)

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(self.spec.eos_ids) | self.tokenizer.eos_ids

    def logits(self, version: int, prompt_T: np.ndarray, completion: Completion) -> np.ndarray:
        """[N, V] log-softmax from which each token was sampled, teacher-forced, untempered."""
        logprobs_TV, _ = self.references[version].score(np.concatenate([prompt_T, completion.tokens_N]))
        return logprobs_TV[len(prompt_T) - 1 : -1]

    def check_logprobs(self, version: int, request: GenerateRequest, completion: Completion, atol: float) -> None:
        """They are those of the reference under the distribution that was asked for. Covers the tokens of the first segment of versions."""
        count = completion.versions[0][1]
        wanted_NV = sampled_from(self.logits(version, request.prompt_T, completion), request.sampling)[:count]
        wanted_N = wanted_NV[np.arange(count), completion.tokens_N[:count]]
        assert np.isfinite(wanted_N).all(), "a token was sampled that truncation excludes"
        np.testing.assert_allclose(completion.logprobs_N[:count], wanted_N, atol=atol, rtol=0)

    def _publish(self, name: str, number: int) -> PolicyVersion:
        temp = self.folder / f"temp-{number}"
        temp.mkdir()
        (self.folder / "weights").mkdir(exist_ok=True)
        shutil.copy(self.folder / name / "model.safetensors", temp)
        return seal(temp, self.folder / "weights", number, None)


def sampled_from(logprobs_NV: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Log-probabilities after temperature and one truncation, by their definition; -inf where a token cannot be sampled."""
    scaled_NV = logprobs_NV.astype(np.float64) / (sampling.temperature or 1.0)
    probs_NV = np.exp(scaled_NV - np.logaddexp.reduce(scaled_NV, -1, keepdims=True))
    order_NV = np.argsort(-probs_NV, -1)
    sorted_NV = np.take_along_axis(probs_NV, order_NV, -1)
    keep_NV = np.cumsum(sorted_NV, -1) - sorted_NV < sampling.top_p
    keep_NV[:, sampling.top_k or len(keep_NV[0]) :] = False
    keep_NV &= sorted_NV >= sampling.min_p * sorted_NV[:, :1]
    kept_NV = np.zeros_like(probs_NV)
    np.put_along_axis(kept_NV, order_NV, sorted_NV * keep_NV, -1)
    with np.errstate(divide="ignore"):
        return np.log(kept_NV / kept_NV.sum(-1, keepdims=True))


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(10, 250, length).astype(np.int32)
