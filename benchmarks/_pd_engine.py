"""One engine of `benchmarks.pd_disagg` in a process of its own, driven over stdin and stdout.

    python -m benchmarks._pd_engine FOLDER mixed|prefill|decode MAX_STEP_TOKENS FLOAT_TYPE TOKEN

Says {"handoff": address} when the model is loaded, then answers each line {"start": seconds since the epoch, "requests": [{"at": seconds
after it, "prompt": [id, ...], "tokens": n, "prefill_at": address}, ...]} with {"gaps_s": [...], "ttft_s": [...], "end": seconds since
the epoch, "tokens": n, "handed": prompt tokens that came from a prefill engine}. Gaps are those between the tokens of a request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from typing import Any

import numpy as np

from slipstream.config.disaggregation import DisaggregationConfig
from slipstream.config.serve import EngineConfig
from slipstream.engine.driver import EngineDriver
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.handoff.listener import HandoffListener
from slipstream.engine.handoff.roles import decode_role, form_of
from slipstream.engine.local import local_engine
from slipstream.types import GenerateRequest, Sampling, TokenPiece

SEQ_LEN = 2304
NAMES = itertools.count()


async def main() -> None:
    folder, role, step_tokens, dtype, token = sys.argv[1:6]
    config = EngineConfig.model_validate({"dtype": dtype, "max_running": 32, "max_step_tokens": int(step_tokens), "kv_memory_mib": 256})
    engine = EmbeddedEngine(folder, config, SEQ_LEN)
    split, address = DisaggregationConfig(), ""
    async with local_engine(engine) as driver:
        if role == "prefill":
            listener = HandoffListener(driver, form_of(engine), SEQ_LEN, token, split, driver.handoffs)
            address = listener.start("127.0.0.1", 0)
        if role == "decode":
            decode_role(driver, engine, token, split)
        print(json.dumps({"handoff": address}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await play(driver, json.loads(line))), flush=True)


async def play(driver: EngineDriver, job: dict[str, Any]) -> dict[str, Any]:
    handed = driver.handoffs["tokens"]
    times = await asyncio.gather(*(one(driver, job["start"], request) for request in job["requests"]))
    if driver.handoffs["failures"]:
        raise RuntimeError(f"a handoff failed: {driver.handoffs}")
    return {
        "gaps_s": [gap for _, tokens in times for gap in np.diff(tokens).tolist()],
        "ttft_s": [tokens[0] - arrived for arrived, tokens in times],
        "tokens": sum(len(tokens) for _, tokens in times),
        "end": max(tokens[-1] for _, tokens in times),
        "handed": driver.handoffs["tokens"] - handed,
    }


async def one(driver: EngineDriver, start: float, request: dict[str, Any]) -> tuple[float, list[float]]:
    """When it arrived, and when each of its tokens came."""
    arrived, times = start + request["at"], list[float]()
    await asyncio.sleep(arrived - time.time())

    def hear(piece: TokenPiece) -> None:
        times.extend([time.time()] * len(piece.tokens_N))

    sampling = Sampling(max_tokens=request["tokens"], seed=0)
    prompt_T = np.array(request["prompt"], np.int32)
    call = GenerateRequest(f"r{next(NAMES)}", prompt_T, sampling, prefill_at=request["prefill_at"])
    completion = await driver.stream(call, hear)
    return arrived, [*times, *[time.time()] * (len(completion.tokens_N) - len(times))]  # the last step's come with the completion


if __name__ == "__main__":
    asyncio.run(main())
