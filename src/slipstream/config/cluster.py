"""[cluster]: the machines that a run is planned for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from slipstream.config.base import Section


class ClusterConfig(Section):
    """What `slipstream explain` plans for; left out: this machine, without GPUs. GB are 10^9 bytes, as vendors count."""

    nodes: int = Field(default=1, ge=1)
    """Nodes that the trainer's processes are spread over, equally many on each."""
    gpus_per_node: int = Field(default=0, ge=0)
    """One trainer process has one GPU. 0: processes compute on CPUs and share the memory of their node."""
    gpu_memory_gb: float | None = Field(default=None, gt=0)
    """Of one GPU."""
    host_memory_gb: float | None = Field(default=None, gt=0)
    """Of one node. None: that of this machine."""
    usable_frac: float = Field(default=0.9, gt=0, le=1)
    """Share of the memory that a plan may fill. The rest is for what it does not count: the runtime, buffers of the network, fragments."""
    engines: Literal["beside", "elsewhere"] = "beside"
    """beside: the engines of [engine] run on the trainer's node. elsewhere: on nodes of their own, which are not planned."""

    @model_validator(mode="after")
    def _gpus_have_memory(self):
        if bool(self.gpus_per_node) != (self.gpu_memory_gb is not None):
            raise ValueError(
                f"cluster.gpus_per_node = {self.gpus_per_node} and cluster.gpu_memory_gb = {self.gpu_memory_gb}: set both, or neither "
                "(processes on CPUs)"
            )
        return self

    def seats(self, processes: int) -> str:
        """Why so many trainer processes cannot be spread over the nodes; '' when they can."""
        if processes % self.nodes:
            fits = max(1, round(processes / self.nodes)) * self.nodes
            return (
                f"trainer.parallel.processes = {processes} cannot be spread evenly over cluster.nodes = {self.nodes}. The nearest that "
                f"fits: processes = {fits}"
            )
        if self.gpus_per_node and processes > self.nodes * self.gpus_per_node:
            return (
                f"trainer.parallel.processes = {processes}, and cluster.nodes x gpus_per_node = {self.nodes} x {self.gpus_per_node} = "
                f"{self.nodes * self.gpus_per_node} GPUs: one process needs one. The nearest that fits: processes = "
                f"{self.nodes * self.gpus_per_node}, or nodes = {-(-processes // self.gpus_per_node)}"
            )
        return ""
