"""How the processes of a group find each other: at the address in MASTER_ADDR, and listening nowhere else.

torch alone would have rank 0 listen on every interface of its machine for the store in which all ranks say where they are, without a
secret; and each rank for the others' connections on the interface that the machine's name belongs to. Here rank 0 listens at MASTER_ADDR,
and every rank on the interface that leads there: loopback where all are on one machine, as `slipstream` starts them.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

INTERFACE = "GLOO_SOCKET_IFNAME"


def meet(timeout_s: float) -> None:
    """Join the group: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment, as torchrun sets them. Waits for all ranks.

    GLOO_SOCKET_IFNAME is kept where it is set. Raises OSError: the address is none of this machine, or taken; RuntimeError or ValueError:
    the others did not come, or a variable is missing.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    rank, world = int(os.environ.get("RANK", "-1")), int(os.environ.get("WORLD_SIZE", "-1"))
    if not host or not port or rank < 0 or world < 1:
        raise ValueError(f"MASTER_ADDR = {host!r}, MASTER_PORT = {port}, RANK = {rank}, WORLD_SIZE = {world}: torchrun sets all four")
    if INTERFACE not in os.environ and (name := interface_to(host)):
        os.environ[INTERFACE] = name
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun listens
    listening = _listen(host, port) if hosts else None
    store = TCPStore(host, port, world, hosts, timeout, master_listen_fd=listening)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def interface_to(host: str) -> str:
    """The name of the network interface whose address is used to reach `host`; '' where that cannot be told."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # nothing is sent
            own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.family == family and each.address.partition("%")[0] == own for each in addresses):
                return name
    return ""


def _listen(host: str, port: int) -> int:
    """The descriptor of a socket that the store takes over."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        return listener.detach()
