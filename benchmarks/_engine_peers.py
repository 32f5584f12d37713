"""One generation engine in its own process, driven over stdin and stdout: what `benchmarks.engine` compares.

    python -m benchmarks._engine_peers slipstream|transformers|vllm FOLDER FLOAT_TYPE

Says {"ready": ...} when the model is loaded, then answers each line {"prompts": [[id, ...], ...], "lengths": [n, ...], "concurrency": c}
with {"seconds": s, "cpu_s": s, "tokens": n, "cached": n}. All requests sample at temperature 1 from the whole vocabulary and run to their
own length.

slipstream and vLLM are driven alike: `concurrency` requests in flight, and the next one enters when one ends. transformers has no such
door: it takes the requests in batches of `concurrency`, left-padded, and each batch runs to its longest request; only the wanted tokens
of each count. Every engine is imported inside its own class, because the environments differ.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Protocol, TextIO

MAX_LEN = 512
"""Longest prompt and output together, in tokens."""
MAX_RUNNING = 128
KV_MIB = 384
"""Room for MAX_RUNNING requests of average length several times over, for the models of this benchmark."""


class Peer(Protocol):
    def describe(self) -> dict[str, Any]: ...

    def run(self, prompts: list[list[int]], lengths: list[int], concurrency: int) -> dict[str, Any]: ...


class Slipstream:
    """The embedded engine as a run uses it: logprobs and routing of every token are captured."""

    def __init__(self, folder: str, dtype: str) -> None:
        import numpy as np

        from slipstream.config.serve import EngineConfig
        from slipstream.engine.engine import EmbeddedEngine
        from slipstream.types import GenerateRequest, Sampling

        config = EngineConfig.model_validate({"dtype": dtype, "max_running": MAX_RUNNING, "kv_memory_mib": KV_MIB, "threads": 1})
        self.engine = EmbeddedEngine(folder, config, MAX_LEN)
        self.names = 0
        self._request = lambda name, prompt, length: GenerateRequest(name, np.array(prompt, np.int32), Sampling(max_tokens=length))

    def describe(self) -> dict[str, Any]:
        return {"logprobs": True, "routing": True}

    def run(self, prompts: list[list[int]], lengths: list[int], concurrency: int) -> dict[str, Any]:
        engine, todo = self.engine, list(zip(prompts, lengths, strict=True))[::-1]
        cached, tokens, started = engine.tokens_cached, 0, time.perf_counter()
        for _ in range(min(concurrency, len(todo))):
            self._add(*todo.pop())
        while engine.has_work:
            for completion in engine.step().finished:
                tokens += len(completion.tokens_N)
                if todo:
                    self._add(*todo.pop())
        return {"seconds": time.perf_counter() - started, "tokens": tokens, "cached": engine.tokens_cached - cached}

    def _add(self, prompt: list[int], length: int) -> None:
        self.names += 1
        self.engine.add(self._request(str(self.names), prompt, length))


class Transformers:
    """`generate`, batched. SDPA attention; of the experts' implementations the fastest at each batch size, measured first.

    `batched_mm` gathers a copy of the weights for every token: gigabytes in the prefill of a batch, so it is tried for one prompt only.
    """

    def __init__(self, folder: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.experts: dict[int, str] = {}

    def describe(self) -> dict[str, Any]:
        import transformers

        return {"version": transformers.__version__, "logprobs": False}

    def run(self, prompts: list[list[int]], lengths: list[int], concurrency: int) -> dict[str, Any]:
        if concurrency not in self.experts:
            self.experts[concurrency] = self._fastest_experts(prompts[:concurrency])
        self.model.set_experts_implementation(self.experts[concurrency])
        cpu, started = time.process_time(), time.perf_counter()
        for first in range(0, len(prompts), concurrency):
            self._generate(prompts[first : first + concurrency], max(lengths[first : first + concurrency]))
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        return {"seconds": seconds, "cpu_s": cpu_s, "tokens": sum(lengths), "cached": 0, "experts": self.experts[concurrency]}

    def _generate(self, prompts: list[list[int]], length: int) -> None:
        torch, width = self.torch, max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
            out = self.model.generate(ids, attention_mask=mask, min_new_tokens=length, max_new_tokens=length, **options)
        assert out.shape[1] == width + length, "transformers stopped early: the checkpoint names an end-of-sequence token"

    def _fastest_experts(self, prompts: list[list[int]]) -> str:
        seconds = {}
        for name in ("grouped_mm", "eager", *(("batched_mm",) if len(prompts) == 1 else ())):
            self.model.set_experts_implementation(name)
            self._generate(prompts, 2)
            started = time.perf_counter()
            self._generate(prompts, 8)
            seconds[name] = time.perf_counter() - started
        return min(seconds, key=lambda name: seconds[name])


class Vllm:
    """vLLM's engine in this process, stepped directly (no server, no other process), without returning logprobs."""

    def __init__(self, folder: str, dtype: str) -> None:
        from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

        self.llm = LLM(
            model=folder,
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=MAX_LEN,
            max_num_seqs=MAX_RUNNING,
            distributed_executor_backend="uni",
            disable_log_stats=True,
        )
        self.names = 0
        self._sampling = lambda length: SamplingParams(
            temperature=1.0, top_p=1.0, top_k=0, max_tokens=length, ignore_eos=True, detokenize=False
        )

    def describe(self) -> dict[str, Any]:
        import torch
        from vllm.version import __version__  # pyright: ignore[reportMissingImports]

        return {"version": __version__, "threads": torch.get_num_threads(), "logprobs": False}

    def run(self, prompts: list[list[int]], lengths: list[int], concurrency: int) -> dict[str, Any]:
        engine, todo, tokens = self.llm.llm_engine, list(zip(prompts, lengths, strict=True))[::-1], 0
        started = time.perf_counter()
        for _ in range(min(concurrency, len(todo))):
            self._add(*todo.pop())
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    tokens += len(output.outputs[0].token_ids)
                    if todo:
                        self._add(*todo.pop())
        return {"seconds": time.perf_counter() - started, "tokens": tokens, "cached": 0}

    def _add(self, prompt: list[int], length: int) -> None:
        from vllm.inputs import TokensPrompt  # pyright: ignore[reportMissingImports]

        self.names += 1
        self.llm.llm_engine.add_request(str(self.names), TokensPrompt(prompt_token_ids=prompt), self._sampling(length))


PEERS = {"slipstream": Slipstream, "transformers": Transformers, "vllm": Vllm}


def main(name: str, folder: str, dtype: str) -> None:
    answers = _claim_stdout()
    started = time.perf_counter()
    peer: Peer = PEERS[name](folder, dtype)
    _say(answers, {"ready": name, "load_s": time.perf_counter() - started, **peer.describe()})
    for line in sys.stdin:
        cpu = time.process_time()
        answer = peer.run(**json.loads(line))
        _say(answers, {"cpu_s": time.process_time() - cpu, **answer})


def _claim_stdout() -> TextIO:
    """The real stdout, for answers alone: whatever the libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, value: dict[str, Any]) -> None:
    print(json.dumps(value), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
