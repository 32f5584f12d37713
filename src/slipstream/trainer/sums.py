"""What the loss tokens of a batch say about the policy: mismatch with the engine, entropy, lag. Metrics only; no gradient.

Shape: N loss tokens of a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.algorithms.losses import LossOutput, k3
from slipstream.parallel.mesh import Mesh


class TokenSums:
    """Sums over the loss tokens of a batch, in float64."""

    def __init__(self) -> None:
        self.loss = 0.0
        self._count = self._fresh_count = 0
        self._kl = self._fresh_kl = self._entropy = self._lag = 0.0
        self._extreme = self._masked = self._lag_max = 0

    @torch.no_grad()
    def add(self, output: LossOutput, logprobs_N: Tensor, engine_N: Tensor, entropy_N: Tensor, lag_N: Tensor) -> None:
        kl_N, log_ratio_N, fresh_N = k3(logprobs_N, engine_N), logprobs_N - engine_N, lag_N == 0
        self.loss += float(output.loss_T.sum(dtype=torch.float64))
        self._count += len(kl_N)
        self._kl += float(kl_N.sum(dtype=torch.float64))
        self._fresh_count += int(fresh_N.sum())
        self._fresh_kl += float(kl_N[fresh_N].sum(dtype=torch.float64))
        self._extreme += int((log_ratio_N.abs() > math.log(2.0)).sum())
        self._masked += int(output.masked_T.sum())
        self._entropy += float(entropy_N.sum(dtype=torch.float64))
        self._lag += float(lag_N.sum())
        self._lag_max = max(self._lag_max, int(lag_N.max()))

    def combine(self, mesh: Mesh) -> None:
        """Add up over all processes."""
        sums = [self.loss, self._count, self._fresh_count, self._kl, self._fresh_kl, self._entropy, self._lag, self._extreme, self._masked]
        total = mesh.add_up(torch.tensor(sums, dtype=torch.float64)).tolist()
        self.loss, self._count, self._fresh_count = total[0], int(total[1]), int(total[2])
        self._kl, self._fresh_kl, self._entropy, self._lag = total[3:7]
        self._extreme, self._masked = int(total[7]), int(total[8])
        self._lag_max = int(mesh.largest(torch.tensor(self._lag_max)))

    def metrics(self) -> dict[str, float]:
        """Means; the split of the mismatch KL names only the parts that have tokens."""
        count, stale = self._count, self._count - self._fresh_count
        if not count:
            return {}
        metrics = {
            "trainer/mismatch_kl/mean": self._kl / count,
            "trainer/ratio/extreme_frac": self._extreme / count,
            "trainer/ratio/masked_frac": self._masked / count,
            "trainer/entropy/mean": self._entropy / count,
            "trainer/lag/mean": self._lag / count,
            "trainer/lag/max": float(self._lag_max),
        }
        if self._fresh_count:
            metrics["trainer/mismatch_kl/fresh"] = self._fresh_kl / self._fresh_count
        if stale:
            metrics["trainer/mismatch_kl/stale"] = (self._kl - self._fresh_kl) / stale
        return metrics
