"""What router replay costs on the wire and on the event loop.

Size: routing rows that the engine captured while the quickstart's warm model played (a trained mixture of experts), as bytes per token: as
they are, with each id in as few bits as it needs, and as they are sent (one zstandard frame a completion). Speed: GB of rows per second
through `encode_completion` and `decode_completion`, for these rows and for synthetic ones of a large model.

Event loop: rollouts of 131,072 tokens x 75 MoE layers x 8 experts (GLM-5's shape; 79 MB each) pass from an engine server in one process to
an orchestrator in another: HTTP, decoding, merging into samples, packing, the batch file. The rows are synthetic: uniform over 256 experts,
which compresses worse than anything real. Everything on the way is the code of a run; the engine alone is scripted, and answers with one
ready-made completion. A ticker in each process wakes every 5 ms; `loop_stall_ms_max` is the latest that it woke in either. A third process
has a loop with nothing but such a ticker: `control_stall_ms_max` is how late the machine made that one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._runs import run_config, warm_model
from benchmarks.harness import finish, median
from benchmarks.replay_kl import sample_rows
from slipstream.orchestrator.pack import make_batch, routing_bytes
from slipstream.orchestrator.samples import rollout_samples
from slipstream.serving.client import HttpEngine
from slipstream.transport.codec import decode_completion, encode_completion
from slipstream.transport.folder import FolderTrainer, batch_path
from slipstream.transport.threads import off_loop
from slipstream.types import Completion, EngineState, GenerateRequest, Outcome, Rollout, Routing, Sampling, Task, Turn

TICK_S = 0.005
COLUMNS = (
    "what",
    "rollouts",
    "mb_each",
    "seconds",
    "mb_per_s",
    "stall_ms_max",
    "stall_ms_p99",
    "bytes_per_token",
    "encode_gb_s",
    "decode_gb_s",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=131_072, help="of each rollout")
    parser.add_argument("--layers", type=int, default=75)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--in-flight", type=int, default=4, help="rollouts under way at once (each holds several copies of its rows)")
    parser.add_argument("--quick", action="store_true", help="4 rollouts of 16,384 tokens")
    args = parser.parse_args()
    rollouts, tokens = (4, 16_384) if args.quick else (args.rollouts, args.tokens)
    real = measure_real(2_000 if args.quick else 20_000)
    large = {"what": "synthetic rows", **speed(synthetic(tokens, args.layers, args.top_k))}
    server, client, control = asyncio.run(pass_through(rollouts, tokens, args.layers, args.top_k, args.in_flight))
    headline = {
        "bytes_per_token_raw": real["raw"],
        "bytes_per_token_packed": real["packed"],
        "bytes_per_token_sent": real["bytes_per_token"],
        "encode_gb_s": large["encode_gb_s"],
        "decode_gb_s": large["decode_gb_s"],
        "loop_stall_ms_max": max(server["stall_ms_max"], client["stall_ms_max"]),
        "control_stall_ms_max": control["stall_ms_max"],
    }
    finish("replay_payload", headline, [real, large, server, client, control], vars(args), COLUMNS)


# ---- size and speed ----


def measure_real(tokens: int) -> dict[str, Any]:
    """Of rows as the engine captured them. The system prompt and the few tools make them repeat, as those of agents do."""
    config = run_config("bench-payload", warm_model(), {})
    rows = asyncio.run(sample_rows(config, {"dtype": "float32"}, tokens))
    known = [row.routing_TLK[row.routing_valid_T] for row in rows if row.routing_TLK is not None and row.routing_valid_T is not None]
    ids_TLK = np.concatenate(known)
    bits = int(ids_TLK.max()).bit_length()
    each = ids_TLK[0].size
    return {"what": "captured rows", "raw": each * ids_TLK.itemsize, "packed": each * bits / 8, **speed(ids_TLK)}


def speed(ids_TLK: np.ndarray) -> dict[str, Any]:
    """Bytes per token as sent, and GB of rows per second each way: medians of five."""
    completion = completion_of(ids_TLK)
    message = b"".join(encode_completion(completion))
    return {
        "bytes_per_token": (len(message) - 8 * len(ids_TLK)) / len(ids_TLK),  # without the ids and logprobs of the tokens
        "encode_gb_s": ids_TLK.nbytes / 1e9 / median([timed(lambda: encode_completion(completion)) for _ in range(5)]),
        "decode_gb_s": ids_TLK.nbytes / 1e9 / median([timed(lambda: decode_completion(message)) for _ in range(5)]),
    }


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def synthetic(tokens: int, layers: int, top_k: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (tokens, layers, top_k), np.uint8)


def completion_of(ids_TLK: np.ndarray, name: str = "r/0") -> Completion:
    """One prompt token, all the others sampled; the last one has no row."""
    num = len(ids_TLK)
    routing = Routing(0, ids_TLK, np.ones(num, np.bool_))
    return Completion(name, np.arange(num, dtype=np.int32), np.zeros(num, np.float32), ((0, num),), "stop", routing)


# ---- the event loop ----


async def pass_through(rollouts: int, tokens: int, layers: int, top_k: int, in_flight: int) -> tuple[dict[str, Any], ...]:
    """What each process measured: (engine, orchestrator, the idle one)."""
    with beside(serve, tokens, layers, top_k) as engine, beside(idle) as control:
        url, _ = await asyncio.to_thread(engine.recv), await asyncio.to_thread(control.recv)
        client = await consume(url, rollouts, tokens, in_flight)
        for pipe in (engine, control):
            pipe.send("stop")
        server, idled = await asyncio.to_thread(engine.recv), await asyncio.to_thread(control.recv)
    each = {"rollouts": rollouts, "mb_each": tokens * layers * top_k / 1e6}
    return (
        {"what": "engine's loop", **each, **server},
        {"what": "orchestrator's loop", **each, "mb_per_s": rollouts * each["mb_each"] / client["seconds"], **client},
        {"what": "idle loop", **idled},
    )


@contextmanager
def beside(target: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """`target(pipe, *args)` in a process of its own while the block runs; the other end of the pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.terminate()


async def consume(url: str, rollouts: int, tokens: int, in_flight: int) -> dict[str, Any]:
    """Each rollout becomes a batch of its own on disk, and is then forgotten."""
    gate, shipping, begun = asyncio.Semaphore(in_flight), asyncio.Lock(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer, task = FolderTrainer(Path(folder)), Task("e/train/0", "e", 0)
        prompt_T, sampling = np.zeros(1, np.int32), Sampling(max_tokens=tokens)

        async def one(engine: HttpEngine, number: int) -> None:
            async with gate:
                completion = await engine.generate(GenerateRequest(f"r{number}/0", prompt_T, sampling))
                turns = (Turn(prompt_T, completion, sampling),)
                rollout = Rollout(f"r{number}", task, "g", Outcome.completed, turns, reward=1.0)
                samples = rollout_samples(rollout, 1.0)
                async with shipping:  # the orchestrator ships one batch after the other
                    batch = await off_loop(routing_bytes(samples), lambda: make_batch(number, samples, tokens + 1, {}))
                    await trainer.stage(batch)
                    await asyncio.to_thread(trainer.discard, number)
                print(f"{number}/{rollouts} rollouts", end="\r", flush=True)

        async with HttpEngine(url) as engine:
            gc.freeze()  # as the orchestrator does
            ticks = Ticker()
            await asyncio.gather(*(one(engine, 1 + i) for i in range(rollouts)))
            assert batch_path(Path(folder), 1).parent.exists()
            return {"seconds": time.perf_counter() - begun, **ticks.stop()}


def idle(pipe: Connection) -> None:
    """The control's process."""
    asyncio.run(ticking(pipe, "ready"))


async def ticking(pipe: Connection, ready: str) -> None:
    """Says that it is ready, and on a word how late the loop was meanwhile."""
    pipe.send(ready)
    ticks = Ticker()
    await asyncio.to_thread(pipe.recv)
    pipe.send(ticks.stop())
    await asyncio.sleep(1)


def serve(pipe: Connection, tokens: int, layers: int, top_k: int) -> None:
    """The engine's process."""
    asyncio.run(_serve(pipe, tokens, layers, top_k))


async def _serve(pipe: Connection, tokens: int, layers: int, top_k: int) -> None:
    from slipstream.chat.tokenizer import ChatTokenizer
    from slipstream.engine.driver import EngineDriver
    from slipstream.engine.server import serving

    driver = EngineDriver(Scripted(synthetic(tokens, layers, top_k)))
    model = warm_model()
    ChatTokenizer.load(model, need_template=False)
    async with serving(driver, model, "127.0.0.1", 0, "token") as (url, _):
        await ticking(pipe, url)


class Scripted:
    """A `SteppedEngine` whose every request is done after one step, with the same rows."""

    seq_len = 1 << 20
    tokens_prefilled = tokens_cached = preemptions = kv_age_max = 0
    expert_load = np.zeros((0, 0), np.int64)
    idle_s = None

    def __init__(self, ids_TLK: np.ndarray) -> None:
        self._ids_TLK = ids_TLK
        self._waiting: list[GenerateRequest] = []
        self.finished: list[Completion] = []
        self.tokens: list[Any] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def add(self, request: GenerateRequest, export: None = None) -> None:
        self._waiting.append(request)

    def step(self) -> Scripted:
        self.finished = [completion_of(self._ids_TLK, request.id) for request in self._waiting]
        self._waiting = []
        return self

    def abort(self, request_ids: Any) -> None: ...

    def state(self) -> EngineState:
        return EngineState(live_version=0, fingerprint="f")


class Ticker:
    """How late the running event loop is, while other things run on it."""

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._task = asyncio.get_running_loop().create_task(self._tick())

    def stop(self) -> dict[str, float]:
        self._task.cancel()
        late_ms = 1e3 * np.array(self._late_s)
        return {"stall_ms_max": float(late_ms.max()), "stall_ms_p99": float(np.quantile(late_ms, 0.99))}

    async def _tick(self) -> None:
        while True:
            wanted = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self._late_s.append(time.perf_counter() - wanted)


if __name__ == "__main__":
    main()
