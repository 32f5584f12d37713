"""Who passes what: runs the kit, keeps the results, and writes docs/conformance.md from them.

    python -m tests.conformance.table                                         # fake and embedded
    python -m tests.conformance.table --vllm-python VENV/bin/python           # and vLLM (minutes)
    python -m tests.conformance.table --render                                # only write the page again

Results of adapters that are not run stay as they were, with their date.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "conformance.json"
PAGE = ROOT / "docs" / "conformance.md"
ORDER = ("fake", "embedded", "vllm")
SIGNS = {"passed": "pass", "failed": "**FAIL**", "skipped": "–"}
TITLES = {
    "test_tokens": "Tokens and the ends of a reply",
    "test_logprobs": "Logprob contract",
    "test_salt": "Prefix cache and salt",
    "test_weights": "Policy versions",
    "test_control": "Abort, overload, bad requests, restart",
    "test_routing": "Routing capture",
}
INTRODUCTION = """# Conformance of the engines

One suite, `tests/conformance`, for every adapter of the Engine port (`slipstream.ports.Engine`): the fake that the simulations use, the
embedded engine, and vLLM behind its adapter. All adapters but the fake sample from the same small MoE in float32 and are held to one full
forward pass of the same weights; two sets of weights, A and B, are swapped in every order. A case with several parameters passes when all
do. `–`: the adapter does not offer what the case needs (the fake has no model).

    pytest tests/conformance                                              # fake, embedded: part of `make test`
    pytest tests/conformance --engine=vllm --vllm-python VENV/bin/python  # the real vLLM, two to ten minutes
    python -m tests.conformance.table --vllm-python VENV/bin/python       # all, and this page

Generated from `benchmarks/results/conformance.json`.
"""


def run(engines: list[str], vllm_python: str | None) -> dict:
    """Results by engine. A failing case is a result, not an error."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        command = [sys.executable, "-m", "pytest", "tests/conformance", "-q", f"--conformance-json={out}"]
        command += [f"--engine={name}" for name in engines]
        command += [f"--vllm-python={vllm_python}"] if vllm_python else []
        subprocess.run(command, cwd=ROOT, check=False)
        return json.loads(out.read_text())


def merge(old: dict, new: dict) -> dict:
    """The new results beside those of adapters that were not run."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    about = {"date": now, "commit": commit.stdout.strip(), "machine": machine}
    return {**old, **{name: {"version": new["versions"][name], **about, "cases": cases} for name, cases in new["results"].items()}}


def render(results: dict) -> str:
    """The page."""
    engines = [name for name in ORDER if name in results]
    parts = [INTRODUCTION, "| | " + " | ".join(engines) + " |\n|---|" + "---|" * len(engines)]
    for row, key in (("version", "version"), ("date", "date"), ("commit", "commit")):
        parts.append(f"| {row} | " + " | ".join(results[name][key] for name in engines) + " |")
    counts = [list(results[name]["cases"].values()) for name in engines]
    parts.append("| cases passed | " + " | ".join(f"{c.count('passed')} of {len(c) - c.count('skipped')}" for c in counts) + " |")
    for module, title in TITLES.items():
        parts.append(f"\n## {title}\n\n| case | " + " | ".join(engines) + " |\n|---|" + "---|" * len(engines))
        for case in cases_of(module):
            found = [SIGNS[results[name]["cases"].get(f"{module}::{case}", "skipped")] for name in engines]
            parts.append(f"| {case.removeprefix('test_').replace('_', ' ')} | " + " | ".join(found) + " |")
    return "\n".join(parts) + "\n"


def cases_of(module: str) -> list[str]:
    """The test functions of a file, in its order."""
    tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef) and node.name.startswith("test_")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="interpreter that has vLLM")
    parser.add_argument("--engine", action="append", choices=ORDER, help="only these")
    parser.add_argument("--render", action="store_true", help="run nothing")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not args.render:
        engines = args.engine or ["fake", "embedded", *(["vllm"] if args.vllm_python else [])]
        results = merge(results, run(engines, args.vllm_python))
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(render(results))


if __name__ == "__main__":
    main()
