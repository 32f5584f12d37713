"""What the choice of the replica is worth: a seeded agent trace under every policy, on 4 replicas and on 64 simulated ones.

    sim64       virtual time, three seeds: the real router and, in each of 64 replicas, the embedded engine's real scheduler, block pool and
                prefix cache; the model's arithmetic is a cost (`Costs`). No sockets, so nothing of this machine is in the figures.
    http4       wall time, one seed: 4 processes with the same engine, whose steps sleep, behind the real server; the real EnginePool over
                HTTP. Real: sockets, routing, scheduling, caching. Not real: the arithmetic and its time.
    embedded4   wall time, one seed: 4 real embedded engines with a tiny MoE. Everything is real; the processes share the cores of this
                machine, so the hit rates say something and the times say how busy it was.

The policies place the first turn of a session and later turns stay (sticky, as in a run), except those called '..._each', which place
every request anew. Weights of kv_aware are the defaults; they were chosen on seeds 100 to 102, and the figures are of seeds 0 to 2.

    hit_rate    prompt tokens found in the KV cache / prompt tokens
    ttft        from the request to its first token; over HTTP: as the caller sees it, less the time that the engine decoded
    spread      busiest replica / mean, by seconds busy
    moves       turns that went elsewhere than the one before
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._router_engine import Costs, ModelledEngine
from benchmarks._router_sim import Simulation, figures
from benchmarks._router_trace import Session, TraceShape, make_trace
from benchmarks.harness import finish
from slipstream.config.router import RouterConfig
from slipstream.config.serve import EngineConfig
from slipstream.engine.driver import EngineDriver
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.server import serving, write_endpoint
from slipstream.jobs.make_model import make
from slipstream.serving.pool import EnginePool
from slipstream.types import GenerateRequest, Sampling

POLICIES = {
    "kv_aware": RouterConfig(),
    "consistent_hash": RouterConfig(policy="consistent_hash"),
    "least_loaded": RouterConfig(policy="least_loaded"),
    "two_choices": RouterConfig(policy="two_choices"),
    "round_robin": RouterConfig(policy="round_robin"),
    "least_loaded_each": RouterConfig(policy="least_loaded", sticky=False),
    "two_choices_each": RouterConfig(policy="two_choices", sticky=False),
    "round_robin_each": RouterConfig(policy="round_robin", sticky=False),
}
LIVE_POLICIES = ("kv_aware", "consistent_hash", "least_loaded", "two_choices", "round_robin", "round_robin_each")
SEEDS = (0, 1, 2)
SIM_REPLICAS, HTTP_REPLICAS = 64, 4
SIM_COSTS = Costs(step_s=0.05, kv_tokens=28 * 1024)
SIM_TRACE = TraceShape(sessions=192, groups_a_burst=4, bursts_a_second=0.4, output_tokens=12)
HTTP_COSTS = Costs(step_s=0.01, kv_tokens=56 * 1024)
HTTP_TRACE = TraceShape(sessions=32, groups_a_burst=1, bursts_a_second=1.0, output_tokens=12, think_s=0.15)
TINY_CONTEXT = 2048
TINY_TRACE = TraceShape(
    sessions=32, groups_a_burst=1, bursts_a_second=1.0, system_tokens=192, task_tokens=96, tool_tokens=16, output_tokens=8, think_s=0.15
)
TINY = EngineConfig(kv_memory_mib=8, max_running=32, block_tokens=16)
COLUMNS = ("setting", "policy", "seed", "requests", "hit_rate", "predicted", "ttft_p50_s", "ttft_p99_s", "spread", "moves", "decision_us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few and short sessions: to see that it works")
    parser.add_argument("--only", choices=("sim64", "http4", "embedded4"), action="append", help="some of the settings")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at once")
    parser.add_argument("--serve", choices=("http4", "embedded4"), help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve, args.model, args.endpoint))
        return
    chosen = args.only or ["sim64", "http4", "embedded4"]
    rows = simulate(args.quick, args.jobs) if "sim64" in chosen else []
    for setting in ("http4", "embedded4"):
        if setting in chosen:
            rows += measure(setting, args.quick)
    report(rows, args.quick)


def report(rows: list[dict[str, Any]], quick: bool) -> None:
    headline: dict[str, Any] = {"ttft_p99_by_policy": {}, "hit_rate_by_policy": {}}
    verdicts = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        ran = dict.fromkeys(row["policy"] for row in rows if row["setting"] == setting)
        p99, hits = ({name: _median(rows, setting, name, key) for name in ran} for key in ("ttft_p99_s", "hit_rate"))
        headline["ttft_p99_by_policy"][setting], headline["hit_rate_by_policy"][setting] = p99, hits
        others = {name: seconds for name, seconds in p99.items() if name != "kv_aware"}
        best = min(others, key=others.__getitem__)
        verdicts.append(
            f"{setting}: kv_aware's TTFT p99 is {p99['kv_aware'] / others[best]:.2f} of the best other's ({best}); its hit rate is "
            f"{hits['kv_aware'] / max(hits.values()):.3f} of the best"
        )
    config = {
        "quick": quick,
        "sim64": [SIM_REPLICAS, asdict(SIM_COSTS), asdict(SIM_TRACE)],
        "http4": [HTTP_REPLICAS, asdict(HTTP_COSTS), asdict(HTTP_TRACE)],
        "embedded4": [HTTP_REPLICAS, TINY.model_dump(), asdict(TINY_TRACE)],
        "weights": RouterConfig().weights.model_dump(),
    }
    finish("router", headline, rows, config, COLUMNS, "\n".join(verdicts))


def _median(rows: Sequence[dict[str, Any]], setting: str, policy: str, key: str) -> float:
    return round(statistics.median(row[key] for row in rows if (row["setting"], row["policy"]) == (setting, policy)), 4)


# ---- simulated ----


def simulate(quick: bool, jobs: int) -> list[dict[str, Any]]:
    tasks = [(name, seed, quick) for seed in (SEEDS[:1] if quick else SEEDS) for name in POLICIES]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return pool.starmap(_simulate_one, tasks, chunksize=1)


def _simulate_one(name: str, seed: int, quick: bool) -> dict[str, Any]:
    shape, replicas = (replace(SIM_TRACE, sessions=16, turns=(2, 4)), 4) if quick else (SIM_TRACE, SIM_REPLICAS)
    sessions = make_trace(shape, seed, SIM_COSTS.seq_len - 64)
    found = Simulation(sessions, replicas, SIM_COSTS, POLICIES[name]).run()
    print(f"sim64 {name} seed {seed}: {found}", flush=True)
    return {"setting": "sim64", "policy": name, "seed": seed, **found}


# ---- over HTTP ----


def measure(setting: str, quick: bool) -> list[dict[str, Any]]:
    """Every policy on fresh processes, one after the other."""
    shape, context = (HTTP_TRACE, HTTP_COSTS.seq_len - 64) if setting == "http4" else (TINY_TRACE, TINY_CONTEXT - 64)
    if quick:
        shape = replace(shape, sessions=8, turns=(2, 3))
    names = ("kv_aware", "round_robin_each") if quick else LIVE_POLICIES
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make(model, "tiny-moe", ["calculator"], seed=0)
        for seed in SEEDS[:1]:
            for name in names:
                rows.append(
                    {"setting": setting, "policy": name, "seed": seed, **play(setting, model, make_trace(shape, seed, context), name)}
                )
                print(rows[-1], flush=True)
    return rows


def play(setting: str, model: Path, sessions: Sequence[Session], policy: str) -> dict[str, Any]:
    """All sessions at their times, on 4 new processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.router", "--serve", setting, "--model", str(model), "--endpoint"]
        processes = [subprocess.Popen([*command, f"{folder}/endpoints/engine-{i}.json"]) for i in range(HTTP_REPLICAS)]
        try:
            return asyncio.run(drive(Path(folder), sessions, policy))
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                process.wait()


async def drive(folder: Path, sessions: Sequence[Session], policy: str) -> dict[str, Any]:
    async with EnginePool.of_run(folder, HTTP_REPLICAS, POLICIES[policy]) as pool:
        await pool.fleet.until(lambda: all(replica.ready for replica in pool.fleet.replicas))
        began, ttft_s = time.perf_counter(), []
        await asyncio.gather(*(live(session, pool, began, ttft_s) for session in sessions))
        busy_s = [(await replica.engine.state()).busy_s for replica in pool.fleet.replicas]
        return figures(ttft_s, pool.router, busy_s)


async def live(session: Session, pool: EnginePool, began: float, ttft_s: list[float]) -> None:
    """One session: ask, use the tool, ask again."""
    await asyncio.sleep(max(0.0, session.start_s - (time.perf_counter() - began)))
    prompt_T = session.first_T
    for turn in range(session.turns):
        asked = time.perf_counter()
        completion = await pool.generate(
            GenerateRequest(f"{session.name}/{turn}", prompt_T, Sampling(max_tokens=session.outputs[turn], seed=turn))
        )
        ttft_s.append(time.perf_counter() - asked - completion.timings.decode_s)
        prompt_T = np.concatenate([prompt_T, completion.tokens_N, session.tools[turn]]).astype(np.int32)
        await asyncio.sleep(session.thinks_s[turn])


async def serve(setting: str, model: Path, endpoint: Path) -> None:
    """One replica, until it is told to stop."""
    engine = ModelledEngine(HTTP_COSTS) if setting == "http4" else EmbeddedEngine(model, TINY, TINY_CONTEXT, version=0)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with serving(EngineDriver(engine), model, "127.0.0.1", 0, "token") as (url, _):
        write_endpoint(endpoint, url, "token")
        await stop.wait()


if __name__ == "__main__":
    main()
