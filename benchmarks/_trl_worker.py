"""TRL's GRPOTrainer on the job that `benchmarks.rl_vs_trl` describes; runs in TRL's own environment.

    python -m benchmarks._trl_worker JOB.json

JOB.json: {"model", "out", "threads", "experts", "steps", "snapshot_every", "tasks": [{"prompt", "prompt_ids", "answer"}], "batch", "group",
"max_tokens", "optim", "seed"}. Writes OUT/step_000012/ (weights as an HF folder) every `snapshot_every` steps and
OUT/result.json: {"step_ends_s": [...], "success": [...], "versions"}: seconds since training began, without the time for snapshots.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import trl  # pyright: ignore[reportMissingImports]
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, __version__


class Clock(TrainerCallback):
    """When each step ended, and the weights now and then; saving them stops the clock."""

    def __init__(self, out: Path, every: int) -> None:
        self.out, self.every = out, every
        self.step_ends_s: list[float] = []
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.step_ends_s.append(now - self._began)
        if state.global_step % self.every == 0:
            kwargs["model"].save_pretrained(self.out / f"step_{state.global_step:06d}")
            self._began += time.perf_counter() - now


def main(file: str) -> None:
    job = json.loads(Path(file).read_text())
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    for task in job["tasks"][:64]:
        assert tokenizer(task["prompt"])["input_ids"] == task["prompt_ids"], f"{task['prompt']!r}: TRL would see other tokens"
    clock, success = Clock(Path(job["out"]), job["snapshot_every"]), []

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        rewards = [float(said.strip() == wanted) for said, wanted in zip(completions, answer, strict=True)]
        success.append(sum(rewards) / len(rewards))
        return rewards

    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, experts_implementation=job["experts"]),
        processing_class=tokenizer,
        args=_settings(job),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": task["prompt"], "answer": task["answer"]} for task in job["tasks"]]),
        callbacks=[clock],
    )
    trainer.train()
    versions = {"trl": trl.__version__, "transformers": __version__, "torch": torch.__version__}
    result = {"step_ends_s": clock.step_ends_s, "success": success, "versions": versions}
    (Path(job["out"]) / "result.json").write_text(json.dumps(result))


def _settings(job: dict[str, Any]) -> Any:
    """The batch in one piece, KV cache on, no recomputation, nothing logged or saved: as fast as TRL goes on a CPU without vLLM.

    The algorithm is slipstream's: group mean without division by the deviation, no KL term, no auxiliary loss, loss over the tokens of
    the batch.
    """
    optim = job["optim"]
    return trl.GRPOConfig(
        output_dir=job["out"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        use_cache=True,
        per_device_train_batch_size=job["batch"],
        num_generations=job["group"],
        max_completion_length=job["max_tokens"],
        temperature=1.0,
        loss_type="dapo",
        scale_rewards="none",
        beta=0.0,
        router_aux_loss_coef=0.0,
        max_steps=job["steps"],
        learning_rate=optim["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=optim["warmup_steps"],
        adam_beta1=optim["beta1"],
        adam_beta2=optim["beta2"],
        adam_epsilon=optim["eps"],
        weight_decay=optim["weight_decay"],
        max_grad_norm=optim["clip_norm"],
        seed=job["seed"],
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


if __name__ == "__main__":
    main(sys.argv[1])
