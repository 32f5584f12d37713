"""Expert parallelism in chunks: exchanges go on while experts compute, forward and backward. Here with exchanges that only log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.ops import experts
from slipstream.parallel import comm, expert


class Log(list[str]):
    """Stands in for the exchange with nobody else: what leaves comes."""

    def all_to_all_single(self, out: torch.Tensor, x: torch.Tensor, *_: Any, async_op: bool = False, **__: Any) -> Any:
        out.copy_(x)
        if not async_op:
            return None
        self.append("start")
        return SimpleNamespace(wait=lambda: self.append("wait"))


@pytest.mark.parametrize("chunks", [1, 3])
def test_exchanges_go_on_while_experts_compute_and_the_sums_are_the_same(monkeypatch: pytest.MonkeyPatch, chunks: int):
    log, generator = Log(), torch.Generator().manual_seed(0)
    monkeypatch.setattr(comm.dist, "all_to_all_single", log.all_to_all_single)
    x_TD, gate_up, down = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((7, 8), (4, 8, 16), (4, 8, 8)))
    ids_TK, gates_TK = torch.rand(7, 4, generator=generator).topk(2).indices, torch.rand(7, 2, generator=generator)

    def compute(x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        log.append("compute")
        y = experts(x, ids, gates, gate_up, down)
        y.register_hook(lambda grad: log.append("gradient"))
        return y

    mesh: Any = SimpleNamespace(expert_group=None, config=SimpleNamespace(ep=1, ep_chunks=chunks))
    y_TD = expert.ExpertExchange(compute, 4, mesh)(x_TD, ids_TK, gates_TK)
    expected_TD = experts(x_TD, ids_TK, gates_TK, gate_up, down)
    torch.testing.assert_close(y_TD, expected_TD)
    forward = list(log)
    log.clear()
    grads, expected = (torch.autograd.grad(y.square().sum(), (x_TD, gate_up, down)) for y in (y_TD, expected_TD))
    torch.testing.assert_close(grads, expected)
    one = ["wait", "compute", "start"]
    assert forward == ["start"] * chunks + one * chunks + ["wait"] * chunks
    assert log == ["start"] * chunks + ["wait", "gradient", "start"] * chunks + ["wait"] * chunks
