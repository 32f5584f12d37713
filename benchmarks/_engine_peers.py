"""One generation engine in its own process, driven over stdin and stdout: what `benchmarks.engine` compares.

    python -m benchmarks._engine_peers slipstream|transformers|vllm|llama.cpp FOLDER FLOAT_TYPE

Says {"ready": ...} when the model is loaded, then answers each line {"prompts": [[id, ...], ...], "lengths": [n, ...], "concurrency": c}
with {"seconds": s, "cpu_s": s, "tokens": n, "cached": n}. All requests sample at temperature 1 from the whole vocabulary and run to their
own length.

slipstream, vLLM and llama.cpp are driven alike: `concurrency` requests in flight, and the next one enters when one ends. transformers has
no such door: it takes the requests in batches of `concurrency`, left-padded, and each batch runs to its longest request; only the wanted
tokens of each count. Every engine is imported inside its own class, because the environments differ.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Protocol, TextIO

MAX_LEN = 1152
"""Longest prompt and output together, in tokens."""
MAX_RUNNING = 128
KV_MIB = 1024
"""Room for MAX_RUNNING requests of MAX_LEN, for the models of this benchmark."""
LLAMA_BATCH = 2048
"""Tokens of one `llama_decode`, its default."""


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


class LlamaCpp:
    """llama.cpp through its C interface: continuous batching over `llama_decode`, one KV stream a sequence, its own sampler.

    A step decodes one token for each running sequence; prompts that have entered are processed before it, by themselves, because
    llama.cpp cuts a batch of mixed lengths into pieces anyway. The context is made for each concurrency: unused sequences cost time.
    """

    def __init__(self, folder: str, dtype: str) -> None:
        import pathlib

        import llama_cpp  # pyright: ignore[reportMissingImports]

        from benchmarks._gguf import convert

        self.api: Any = llama_cpp
        file = pathlib.Path(folder) / f"{dtype}.gguf"
        if not file.exists():
            convert(pathlib.Path(folder), file, dtype)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        self.batch = llama_cpp.llama_batch_init(LLAMA_BATCH, 0, 1)
        self.sampler = llama_cpp.llama_sampler_init_dist(0)
        self.context, self.streams = None, 0

    def describe(self) -> dict[str, Any]:
        return {"version": self.api.__version__, "threads": 1, "logprobs": False, "kv": "float16"}

    def run(self, prompts: list[list[int]], lengths: list[int], concurrency: int) -> dict[str, Any]:
        self._prepare(concurrency)
        started = time.perf_counter()
        todo, free, tokens = list(zip(prompts, lengths, strict=True))[::-1], list(range(concurrency)), 0
        running: dict[int, list[int]] = {}
        """By stream: [last token, its position, tokens still to sample]."""
        while todo or running:
            entered = [(free.pop(), *todo.pop()) for _ in range(min(len(free), len(todo)))]
            for stream, token, position, left in self._prefill(entered):
                running[stream] = [token, position, left]
                tokens += 1
            done = [stream for stream, (_, _, left) in running.items() if left == 0]
            for stream in done:
                del running[stream]
                self.api.llama_memory_seq_rm(self.memory, stream, -1, -1)
                free.append(stream)
            if not done and running:
                self._decode([(stream, token, position, True) for stream, (token, position, _) in running.items()])
                for row, state in enumerate(running.values()):
                    state[:] = self.api.llama_sampler_sample(self.sampler, self.context, row), state[1] + 1, state[2] - 1
                tokens += len(running)
        return {"seconds": time.perf_counter() - started, "tokens": tokens, "cached": 0}

    def _prepare(self, concurrency: int) -> None:
        if self.streams != concurrency:
            if self.context is not None:
                self.api.llama_free(self.context)
            options = self.api.llama_context_default_params()
            options.n_ctx, options.n_seq_max, options.kv_unified = MAX_LEN * concurrency, concurrency, False
            options.n_batch, options.n_threads, options.n_threads_batch = LLAMA_BATCH, 1, 1
            self.context, self.streams = self.api.llama_init_from_model(self.model, options), concurrency
        self.memory = self.api.llama_get_memory(self.context)

    def _prefill(self, entered: list[tuple[int, list[int], int]]) -> list[tuple[int, int, int, int]]:
        """Prompts in as few batches as they fit in. (stream, first sampled token, its position, tokens still to sample) of each."""
        started: list[tuple[int, int, int, int]] = []
        rows: list[tuple[int, int, int, bool]] = []
        ends: list[tuple[int, int, int, int]] = []
        for number, (stream, prompt, length) in enumerate(entered):
            rows += [(stream, token, i, i + 1 == len(prompt)) for i, token in enumerate(prompt)]
            ends.append((len(rows) - 1, stream, len(prompt), length - 1))
            if number + 1 == len(entered) or len(rows) + len(entered[number + 1][1]) > LLAMA_BATCH:
                self._decode(rows)
                for row, stream_, position, left in ends:
                    started.append((stream_, self.api.llama_sampler_sample(self.sampler, self.context, row), position, left))
                rows, ends = [], []
        return started

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        for i, (stream, token, position, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = stream
        batch.n_tokens = len(rows)
        code = self.api.llama_decode(self.context, batch)
        assert code == 0, f"llama_decode: {code}"


PEERS = {"slipstream": Slipstream, "transformers": Transformers, "vllm": Vllm, "llama.cpp": LlamaCpp}


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
