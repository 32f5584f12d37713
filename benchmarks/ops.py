"""Native kernels against the torch references, at the sizes of a tiny MoE: `python benchmarks/ops.py [--json FILE]`.

Prints the best CPU time of each over a quarter of a second on one thread, and the largest difference relative to the largest value.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.ops import DocLayout, attention, doc_attention, experts, norm, paged_attention, rms_norm, rope
from slipstream.ops.attention import doc_attention_reference
from slipstream.ops.experts import experts_reference
from slipstream.ops.rope import rope_reference

DIM, INNER, EXPERTS, TOP_K, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 96, 96, 16, 2, 4, 2, 32, 16
Case = tuple[str, Callable[..., Any], Callable[..., Any], list[Any]]


def serving_cases() -> Iterator[Case]:
    """Decode batches of 1 to 128 and one prefill; contexts of 1 to 200 tokens."""
    for tokens in (1, 8, 32, 128):
        yield f"rms_norm T={tokens}", rms_norm, norm.rms_norm_reference, [torch.randn(tokens, DIM), torch.ones(DIM), 1e-6]
        heads = [torch.randn(tokens, n, HEAD_DIM) for n in (HEADS, KV_HEADS)]
        angles = [torch.randn(tokens, HEAD_DIM) for _ in range(2)]
        yield f"rope T={tokens}", rope, rope_reference, [*heads, *angles]
        yield f"experts T={tokens}", experts, experts_reference, expert_inputs(tokens)
        yield f"decode S={tokens}", paged_attention, attention.paged_attention_reference, paged_inputs([1] * tokens)
    yield "prefill T=256", paged_attention, attention.paged_attention_reference, paged_inputs([256])


def training_cases() -> Iterator[Case]:
    """Rows of 2048 tokens in documents of two lengths, forward and backward."""
    for length in (64, 250):
        starts = [*range(0, 2048, length), 2048]
        qkv = [torch.randn(2048, n, HEAD_DIM, requires_grad=True) for n in (HEADS, KV_HEADS, KV_HEADS)]
        arguments = [*qkv, DocLayout(starts), HEAD_DIM**-0.5]
        yield f"doc_attention docs of {length}, fwd+bwd", trained(doc_attention), trained(doc_attention_reference), arguments
    inputs = [x.requires_grad_(x.is_floating_point()) for x in expert_inputs(2048)]
    yield "experts T=2048, fwd+bwd", trained(experts), trained(experts_reference), inputs
    normed = [torch.randn(2048, DIM, requires_grad=True), torch.ones(DIM, requires_grad=True), 1e-6]
    yield "rms_norm T=2048, fwd+bwd", trained(rms_norm), trained(norm.rms_norm_reference), normed


def trained(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The op and its gradients: everything in one vector, for comparison."""

    def run(*arguments: Any) -> Tensor:
        leaves = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
        with torch.enable_grad():
            out = op(*arguments)
            grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        return torch.cat([x.detach().flatten() for x in (out, *grads)])

    return run


def expert_inputs(tokens: int) -> list[Tensor]:
    ids = torch.randn(tokens, EXPERTS).topk(TOP_K).indices
    weights = torch.randn(EXPERTS, DIM, 2 * INNER) / DIM**0.5, torch.randn(EXPERTS, INNER, DIM) / INNER**0.5
    return [torch.randn(tokens, DIM), ids, torch.rand(tokens, TOP_K), *weights]


def paged_inputs(queries: list[int]) -> list[Any]:
    contexts = [n if n > 1 else int(torch.randint(1, 200, ())) for n in queries]
    caches = torch.randn(2, 600, BLOCK, KV_HEADS, HEAD_DIM).unbind()
    table = torch.randint(0, 600, (len(queries), 16), dtype=torch.int32)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    q_THd = torch.randn(sum(queries), HEADS, HEAD_DIM)
    return [q_THd, *caches, table, starts, torch.tensor(contexts, dtype=torch.int32), HEAD_DIM**-0.5]


def microseconds(call: Callable[[], Any], budget_s: float = 0.25) -> float:
    call()
    clock = [time.thread_time()]
    while clock[-1] - clock[0] < budget_s:
        call()
        clock.append(time.thread_time())
    return min(b - a for a, b in pairwise(clock)) * 1e6


def flat(result: Any) -> Tensor:
    return torch.cat([x.flatten() for x in result]) if isinstance(result, tuple) else result.flatten()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results here")
    path = parser.parse_args().json
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    print(f"{'op':42}{'native us':>12}{'torch us':>12}{'speed-up':>10}{'difference':>12}")
    with torch.no_grad():
        for name, native, reference, arguments in (*serving_cases(), *training_cases()):
            ours, theirs = flat(native(*arguments)), flat(reference(*arguments))
            difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
            fast, slow = microseconds(partial(native, *arguments)), microseconds(partial(reference, *arguments))
            rows.append({"op": name, "native_us": fast, "torch_us": slow, "relative_difference": difference})
            print(f"{name:42}{fast:12.1f}{slow:12.1f}{slow / fast:10.1f}{difference:12.1e}", flush=True)
    if path:
        machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
        path.write_text(json.dumps({"benchmark": "ops", "machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
