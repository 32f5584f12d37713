"""Short forms for engine tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from slipstream.config.serve import EngineConfig
from slipstream.engine.engine import EmbeddedEngine
from slipstream.models import hf
from slipstream.models.context import FullContext
from slipstream.models.impl import Impl
from slipstream.models.load import build_model, load_model
from slipstream.models.spec import ModelSpec
from slipstream.types import Completion, GenerateRequest, Sampling

VOCAB = 61
SEQ_LEN = 128


def write_model(folder: Path, moe: bool, seed: int = 1, **overrides) -> Path:
    """A model of three layers (the last two with experts when `moe`), without a tokenizer; token 60 ends a reply."""
    config = {
        "model_type": "qwen3_moe" if moe else "qwen3",
        "architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "eos_token_id": 60,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
        **overrides,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = build_model(ModelSpec.from_folder(folder), seed=seed)
    for i, parameter in enumerate(model.parameters()):
        if parameter.dim() == 1:  # norms of 1 and biases of 0 would hide a forgotten one
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
    hf.write_tensors(folder, hf.hf_tensors(model))
    return folder


def make_engine(folder: Path, version: int = 0, seq_len: int = SEQ_LEN, impl: Impl = "auto", **config) -> EmbeddedEngine:
    """An engine with blocks of 4 tokens and 1 MiB of KV: about 170 blocks, so that a dozen long sequences fill it."""
    values = {"block_tokens": 4, "kv_memory_mib": 1, "max_running": 64, "max_step_tokens": 256, **config}
    return EmbeddedEngine(folder, EngineConfig(**values), seq_len, version=version, impl=impl)


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB - 1, length).astype(np.int32)


def ask(name: str, tokens_T: np.ndarray, salt: int = 0, routing_from: int = 0, **sampling) -> GenerateRequest:
    """Greedy and 12 tokens unless told otherwise."""
    values = {"temperature": 0.0, "max_tokens": 12, **sampling}
    return GenerateRequest(name, tokens_T, Sampling(**values), salt, routing_from)


def run(engine: EmbeddedEngine, requests: Iterable[GenerateRequest], each_step: Callable[[int], None] = lambda step: None):
    """Add all, step until idle, check the books after each step. Completions by id."""
    for request in requests:
        engine.add(request)
    done: dict[str, Completion] = {}
    step = 0
    while engine.has_work:
        for completion in engine.step().finished:
            assert completion.id not in done
            done[completion.id] = completion
        engine.check_integrity()
        step += 1
        each_step(step)
        assert step < 5000
    return done


class Reference:
    """The model without an engine: one full forward pass over a whole sequence."""

    def __init__(self, folder: Path, impl: Impl = "auto") -> None:
        self.model = load_model(folder, impl=impl)

    @torch.no_grad()
    def score(self, tokens_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(log-softmax [T, V] after each token, expert ids [T, L, K])."""
        tokens = torch.from_numpy(np.asarray(tokens_T, np.int64))
        context = FullContext([0, len(tokens)], record=True)
        hidden = self.model(tokens, torch.arange(len(tokens)), context)
        logprobs = torch.log_softmax(self.model.logits(hidden), -1).numpy()
        return logprobs, context.ids_TLK.numpy() if self.model.spec.moe_layers else np.zeros((len(tokens), 0, 0))

    def check_greedy(self, prompt_T: np.ndarray, completion: Completion) -> None:
        """Each token is the argmax of the full pass, its logprob within 1e-5, the routing rows the same."""
        expected_N, logprob_gap, same_routing = self.compare(prompt_T, completion)
        assert completion.tokens_N.tolist() == expected_N.tolist()
        assert logprob_gap <= 1e-5
        assert same_routing

    def compare(self, prompt_T: np.ndarray, completion: Completion) -> tuple[np.ndarray, float, bool]:
        """(argmax of the full pass in place of each token, largest |logprob difference|, whether all routing rows are the same)."""
        tokens_T = np.concatenate([prompt_T, completion.tokens_N])
        logprobs_TV, ids_TLK = self.score(tokens_T)
        at = slice(len(prompt_T) - 1, len(tokens_T) - 1)
        scored_N = np.take_along_axis(logprobs_TV[at], completion.tokens_N[:, None].astype(np.int64), 1)[:, 0]
        routing = completion.routing
        same_routing = routing is None or (
            bool(routing.valid_T.all()) and np.array_equal(np.sort(routing.ids_TLK), np.sort(ids_TLK[routing.start : -1]))
        )
        return logprobs_TV[at].argmax(-1), float(np.abs(completion.logprobs_N - scored_N).max()), same_routing
