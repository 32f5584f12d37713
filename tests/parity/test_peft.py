"""Our adapters against PEFT's: the same folder, the same logits, the same training. Left out where peft is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from slipstream.config import validate
from slipstream.config.train import TrainerConfig
from slipstream.models.load import load_model
from slipstream.models.lora import Adapters
from slipstream.models.peft import read_adapter, write_adapter
from slipstream.trainer.sft import demonstration_batch
from slipstream.trainer.step import Learner
from tests.parity.test_models import our_logits, reference, tokens

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

RANK, ALPHA = 3, 7.5
FAMILIES = ["llama", "qwen3_moe-dense-first", "glm4_moe", "minimax_m2", "deepseek_v3-whole-queries", "glm_moe_dsa", "gpt_oss"]
TARGETS = [("all",), ("attention",), ("experts",), ("dense",), ("dense", "o_proj"), ("down_proj",)]
MISSING = {"llama": {"experts"}, "minimax_m2": {"dense", "down_proj"}, "gpt_oss": {"dense", "experts", "down_proj"}}
PAIRS = [(name, targets) for name in FAMILIES for targets in TARGETS if not MISSING.get(name, set()) & {*targets}]
LORA = {"rank": RANK, "alpha": ALPHA}
RATE = 1e-2


def their_model(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize(("name", "targets"), PAIRS)
def test_peft_reads_our_adapters_and_computes_what_our_merged_model_does(name: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    reference(name, tmp_path / "model")
    ours, ids_T = load_model(tmp_path / "model"), tokens()
    adapters = Adapters(ours, RANK, ALPHA, targets, seed=0)
    with torch.no_grad():
        before = our_logits(ours, ids_T)
        for parameter in adapters.parameters.values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
        for name in adapters.within:
            adapters.merge(name, ours.get_parameter(name).detach())
        write_adapter(tmp_path / "adapter", adapters, tmp_path / "model")
        theirs = peft.PeftModel.from_pretrained(their_model(tmp_path / "model"), tmp_path / "adapter")
        logits = our_logits(ours, ids_T)
        assert float((logits - before).abs().max()) > 0.5
        torch.testing.assert_close(theirs(ids_T[None]).logits[0], logits, atol=2e-5, rtol=0)
        torch.testing.assert_close(theirs.merge_and_unload()(ids_T[None]).logits[0], logits, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("name", "targets"), [("llama", ("all",)), ("deepseek_v3-whole-queries", ("attention",))])
def test_training_takes_the_same_steps_from_the_same_adapter_of_peft(name: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """Five AdamW steps on tokens with the mean negative log-likelihood; the adapter that both start from was written by PEFT."""
    reference(name, tmp_path / "model")
    last = sorted({site.last for site in Adapters(load_model(tmp_path / "model"), 1, 1.0, targets, 0).sites})
    options = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=last, task_type="CAUSAL_LM", init_lora_weights=False)
    theirs = peft.get_peft_model(their_model(tmp_path / "model"), options)
    theirs.save_pretrained(tmp_path / "start")
    config = validate(
        TrainerConfig,
        {
            "row_tokens": 64,
            "optim": {"lr": RATE, "clip_norm": 1e9},
            "loss": {"type": "policy_gradient"},
            "lora": {**LORA, "targets": targets, "path": tmp_path / "start"},
        },
    )
    ours = Learner(load_model(tmp_path / "model"), config, config.optim, max_steps=10)
    options = {"lr": RATE, "betas": (config.optim.beta1, config.optim.beta2), "eps": config.optim.eps, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], **options)
    for step in range(1, 6):
        ids_T = tokens(step)
        loss = F.cross_entropy(theirs(ids_T[None]).logits[0, :-1], ids_T[1:])
        batch = demonstration_batch(step, [(ids_T.numpy().astype(np.int32), np.arange(len(ids_T)) > 0)], 64)
        assert ours.step(batch).metrics["trainer/loss/mean"] == pytest.approx(float(loss.detach()), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    theirs.save_pretrained(tmp_path / "end")
    start, end = (read_adapter(tmp_path / at).tensors for at in ("start", "end"))
    assert ours.adapters is not None
    found = ours.adapters.tensors()
    assert found.keys() == end.keys()
    for key, tensor in end.items():
        torch.testing.assert_close(found[key], tensor, atol=2e-2 * RATE, rtol=0)
        assert float((tensor - start[key]).abs().max()) > RATE
