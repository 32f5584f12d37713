"""What runs on a login node imports no torch: checked in a process in which importing torch fails."""

import subprocess
import sys

import pytest

from tests.waiting import HUNG_S

LIGHT = [
    "slipstream.types",
    "slipstream.ports",
    "slipstream.config",
    "slipstream.transport.codec",
    "slipstream.transport.folder",
    "slipstream.chat.tokenizer",
    "slipstream.models.spec",
    "slipstream.observe.summary",
    "slipstream.observe.report",
    "slipstream.observe.dashboard",
    "slipstream.observe.rollouts",
    "slipstream.launch.rl",
    "slipstream.planner.plan",
    "slipstream.jobs.drain",
    "slipstream.jobs.explain",
    "slipstream.envs.base",
    "slipstream.envs.play",
    "slipstream.orchestrator.service",
    "slipstream.serving.client",
    "slipstream.serving.pool",
    "slipstream.serving.gateway.server",
    "slipstream.algorithms.advantages",
    "slipstream.cli",
]


def test_light_modules_import_with_torch_blocked():
    code = "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n" + "\n".join(f"import {name}" for name in LIGHT)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HUNG_S, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize(
    "command",
    ["rl", "explain", "sft", "eval", "engine", "gateway", "trainer", "generate", "report", "summary", "rollouts", "make-model", "drain"],
)
def test_every_command_has_help_with_an_example(command):
    from typer.testing import CliRunner

    from slipstream.cli import app

    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0 and f"slipstream {command}" in result.output and "Example" in result.output
