"""One trainer in its own process, driven over stdin and stdout: what `benchmarks.trainer` compares.

    python -m benchmarks._sft_peers slipstream|hf|trl FOLDER DTYPE

Says {"versions": ...} when its libraries are loaded, then answers each line {"documents": [[id, ...], ...], "samples": n, "max_tokens": m,
"optim": {...}, "settings": {...}} with {"seconds": s, "cpu_s": s, "tokens": n, "steps": n, "loss": x}: the model of FOLDER trained on every
document once, `samples` a step (of packed rows: as many as hold their tokens). The clock runs from the start of training, with the model
loaded, the data prepared and the optimizer made, to the end of the last step. Loss is on every token but the first of a document.

`settings` is for the two of Hugging Face: "experts" (an implementation), "rows" a forward pass, and "layout": "packed" (TRL's best-fit
packing into rows of `max_tokens`, flattened), "flat" (whole documents end to end, without padding), "padded", or "grouped" (padded, with
documents of similar length together).
Every trainer is imported inside its own class, because the environments differ.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any, Protocol, TextIO

import torch


class Peer(Protocol):
    def versions(self) -> dict[str, str]: ...

    def train(self, job: dict[str, Any], clock: Clock) -> float:
        """Mean loss of the steps. Tells the clock what it trains on."""
        ...


class Clock:
    """Starts with the first step, stops after the last one; counts tokens that are no padding, and steps."""

    def __init__(self) -> None:
        self.tokens = self.steps = 0

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def step_ended(self) -> None:
        self.steps += 1
        self.seconds, self.cpu_s = time.perf_counter() - self._wall, time.process_time() - self._cpu


class Slipstream:
    """The step of `slipstream sft`, rows packed as it packs them."""

    def __init__(self, folder: str, dtype: str) -> None:
        self.folder, self.dtype = folder, dtype

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

    def train(self, job: dict[str, Any], clock: Clock) -> float:
        import numpy as np

        from slipstream.config import validate
        from slipstream.config.train import OptimConfig, TrainerConfig
        from slipstream.models.load import load_model
        from slipstream.trainer.sft import demonstration_batch
        from slipstream.trainer.step import Learner

        config = validate(TrainerConfig, {"dtype": self.dtype, "loss": {"type": "policy_gradient"}})
        documents = [np.array(ids, np.int32) for ids in job["documents"]]
        samples = [(tokens_T, np.arange(len(tokens_T)) > 0) for tokens_T in documents]
        steps = [samples[i : i + job["samples"]] for i in range(0, len(samples), job["samples"])]
        learner, losses = Learner(load_model(self.folder), config, validate(OptimConfig, job["optim"]), len(steps)), []
        clock.start()
        for number, chosen in enumerate(steps, 1):
            outcome = learner.step(demonstration_batch(number, chosen, config.row_tokens))
            clock.tokens += int(outcome.metrics["trainer/tokens/trained"])
            losses.append(outcome.metrics["trainer/loss/mean"])
            clock.step_ended()
        return float(np.mean(losses))


class HuggingFace:
    """transformers' Trainer. In bfloat16: float32 weights under autocast, its own way (`bf16=True`)."""

    def __init__(self, folder: str, dtype: str) -> None:
        self.folder, self.dtype = folder, dtype

    def versions(self) -> dict[str, str]:
        import accelerate
        import transformers

        return {"torch": torch.__version__, "transformers": transformers.__version__, "accelerate": accelerate.__version__}

    def train(self, job: dict[str, Any], clock: Clock) -> float:
        from datasets import Dataset  # pyright: ignore[reportMissingImports]

        with tempfile.TemporaryDirectory() as out:
            trainer = self.trainer(job, Dataset.from_dict({"input_ids": job["documents"]}), out)
            trainer.add_callback(_callback(clock))
            _count_tokens(trainer, clock)
            return trainer.train().training_loss

    def trainer(self, job: dict[str, Any], data: Any, out: str) -> Any:
        from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

        flat = job["settings"]["layout"] == "flat"
        return Trainer(
            model=self.model(job["settings"]),
            args=TrainingArguments(**self.arguments(job, out)),
            train_dataset=data,
            data_collator=DataCollatorWithFlattening() if flat else _pad,
        )

    def model(self, settings: dict[str, Any]) -> Any:
        from transformers import AutoModelForCausalLM

        experts = {"experts_implementation": settings["experts"]} if settings.get("experts") else {}
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32, attn_implementation="sdpa", **experts)
        model.config.use_cache = False  # with a cache documents laid end to end would see one another
        return model

    def arguments(self, job: dict[str, Any], out: str) -> dict[str, Any]:
        """No recomputation, nothing logged or saved, torch's fused AdamW: as fast as it goes on a CPU."""
        settings, optim = job["settings"], job["optim"]
        rows = settings["rows"]
        a_step = -(-self.step_tokens(job) // job["max_tokens"]) if settings["layout"] == "packed" else job["samples"]
        return {
            "output_dir": out,
            "use_cpu": True,
            "bf16": self.dtype == "bfloat16",
            "gradient_checkpointing": False,
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": max(1, a_step // rows),
            "train_sampling_strategy": "group_by_length" if settings["layout"] == "grouped" else "random",
            "num_train_epochs": 1,
            "optim": "adamw_torch_fused",
            "learning_rate": optim["lr"],
            "lr_scheduler_type": "constant",
            "adam_beta1": optim["beta1"],
            "adam_beta2": optim["beta2"],
            "adam_epsilon": optim["eps"],
            "weight_decay": optim["weight_decay"],
            "max_grad_norm": optim["clip_norm"],
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }

    def step_tokens(self, job: dict[str, Any]) -> int:
        """Of a step of average length."""
        return sum(map(len, job["documents"])) * job["samples"] // len(job["documents"])


class Trl(HuggingFace):
    """TRL's SFTTrainer."""

    def versions(self) -> dict[str, str]:
        import trl  # pyright: ignore[reportMissingImports]

        return {**super().versions(), "trl": trl.__version__}

    def trainer(self, job: dict[str, Any], data: Any, out: str) -> Any:
        import trl  # pyright: ignore[reportMissingImports]
        from transformers import AutoTokenizer

        layout = job["settings"]["layout"]
        kinds = {
            "packed": {"packing": True, "packing_strategy": "bfd", "max_length": job["max_tokens"]},
            "flat": {"padding_free": True, "max_length": None},
            "padded": {"max_length": job["max_tokens"]},
            "grouped": {"max_length": job["max_tokens"]},
        }
        return trl.SFTTrainer(
            model=self.model(job["settings"]),
            args=trl.SFTConfig(**self.arguments(job, out), **kinds[layout], router_aux_loss_coef=0.0),
            processing_class=AutoTokenizer.from_pretrained(self.folder),
            train_dataset=data,
        )


def _callback(clock: Clock) -> Any:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.step_ended()

    return Watch()


def _count_tokens(trainer: Any, clock: Clock) -> None:
    inner = trainer.training_step

    def training_step(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        mask = inputs.get("attention_mask")
        clock.tokens += int(inputs["input_ids"].numel() if mask is None else mask.sum())
        return inner(model, inputs, *args, **kwargs)

    trainer.training_step = training_step


def _pad(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = [torch.tensor(feature["input_ids"]) for feature in features]
    pad = torch.nn.utils.rnn.pad_sequence
    mask_BT = pad([torch.ones_like(x) for x in ids], batch_first=True)
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": mask_BT,
        "labels": pad(ids, batch_first=True).masked_fill(mask_BT == 0, -100),
    }


def serve(peer: Peer, out: TextIO) -> None:
    print(json.dumps({"versions": peer.versions()}), file=out, flush=True)
    for line in sys.stdin:
        clock = Clock()
        loss = peer.train(json.loads(line), clock)
        answer = {"seconds": clock.seconds, "cpu_s": clock.cpu_s, "tokens": clock.tokens, "steps": clock.steps, "loss": loss}
        print(json.dumps(answer), file=out, flush=True)


def main(name: str, folder: str, dtype: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    torch.set_num_threads(1)
    serve({"slipstream": Slipstream, "hf": HuggingFace, "trl": Trl}[name](folder, dtype), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
