"""`slipstream sft`: teach a model the format of its environments before RL teaches it to be right."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console

from slipstream.chat.tokenizer import ChatTokenizer
from slipstream.config import RunConfig
from slipstream.envs.base import load_env
from slipstream.envs.demonstrations import demonstration_samples
from slipstream.errors import ConfigError
from slipstream.models.folders import check_replaceable

WAIT_S = 1800.0
"""How long the other trainer processes wait for the first one, which makes the demonstrations before it leads."""


def warm_up(config: RunConfig, out: Path) -> dict[str, float]:
    """Train on demonstrations of every environment, by weight; write `out` as an HF folder. Returns the last metrics.

    Of several trainer processes (`trainer.parallel`) the first one does this, the others help it and return nothing.

    Raises ConfigError: no [sft] table, an environment without demonstrations, or something else than a model at `out`.
    """
    import torch

    from slipstream.models.peft import CONFIG
    from slipstream.parallel.mesh import joined
    from slipstream.trainer.sft import adapter_folder, assist, train

    if config.sft is None:
        raise ConfigError("sft: the run file has no [sft] table; add one (an empty table takes every default)")
    check_replaceable(out)
    if config.trainer.lora is not None:
        check_replaceable(adapter_folder(out), holds=CONFIG)
    _check_writable(out)
    torch.set_num_threads(config.trainer.threads)
    with joined(config.trainer.parallel, config.trainer.stall_timeout_s, WAIT_S) as mesh:
        if not mesh.leads:
            mesh.hear()  # that the demonstrations are there
            assist(config.model.path, config, mesh)
            return {}
        console = Console(stderr=True)
        samples = demonstrations(config)
        mesh.tell(b"ready")
        console.print(f"sft: {len(samples)} demonstrations, {np.mean([len(tokens) for tokens, _ in samples]):.0f} tokens on average")
        metrics = train(
            config.model.path, samples, config, out, on_step=lambda step, values: _show(console, config, step, values), mesh=mesh
        )
        console.print(f"sft: wrote {out}" + ("" if config.trainer.lora is None else f" and {adapter_folder(out)}"))
    return metrics


def _check_writable(out: Path) -> None:
    """Where nothing can be written, now is the time to say so. Raises ConfigError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent):
            pass
    except OSError as error:
        raise ConfigError(f"--out {out}: no folder can be made there ({error.strerror}); name another one") from None


def demonstrations(config: RunConfig) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens_T, loss_mask_T) of each demonstration, in a seeded order."""
    assert config.sft is not None
    tokenizer = ChatTokenizer.load(config.model.path)
    total = sum(env.weight for env in config.envs)
    samples = []
    for env_config in config.envs:
        count = max(1, round(config.sft.num_demonstrations * env_config.weight / total))
        env = load_env(env_config, config.seed)
        samples += demonstration_samples(env, tokenizer, count, config.seed, config.sft.noise)
    random.Random(config.seed).shuffle(samples)
    return samples


def _show(console: Console, config: RunConfig, step: int, values: dict[str, float]) -> None:
    assert config.sft is not None
    if step % config.sft.log_every == 0 or step in (1, config.sft.steps):
        console.print(
            f"sft: step {step}/{config.sft.steps}  loss {values['loss']:.4f}  {values['tokens_per_s']:.0f} tokens/s", highlight=False
        )
