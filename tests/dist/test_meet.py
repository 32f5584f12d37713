"""Processes of a group listen at the address that they were told, and nowhere else: on one machine that is loopback."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import psutil
import pytest

from slipstream.launch.topology import ranks
from slipstream.parallel.meet import interface_to, meet
from tests.dist.conftest import finish, start

WORLD = 2


def listening(kind: str, folder: Path, **env: str) -> list[list[tuple[str, int]]]:
    """Of each rank."""
    finish(start(WORLD, "-m", "tests.dist.meet_worker", kind, str(folder), env=env), timeout=300)
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD)]
    assert [rank["total"] for rank in found] == [WORLD] * WORLD
    return [[(ip, port) for ip, port in rank["listening"]] for rank in found]


@pytest.mark.parametrize("kind", ["trainer", "engine"])
def test_a_group_on_one_machine_listens_on_loopback_only(kind, tmp_path):
    assert ranks(0, WORLD, 1)["MASTER_ADDR"] == "127.0.0.1", "as a run starts them"
    found = listening(kind, tmp_path)
    assert all(rank for rank in found), "the store, and gloo's own connections"
    assert {ip for rank in found for ip, _ in rank} == {"127.0.0.1"}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no second loopback address by themselves")
def test_the_store_listens_at_the_address_that_was_configured(tmp_path):
    found = listening("trainer", tmp_path, MASTER_ADDR="127.0.0.2")
    assert [ip for ip, _ in found[0]].count("127.0.0.2") == 1 and {ip for rank in found for ip, _ in rank} <= {"127.0.0.1", "127.0.0.2"}


def test_the_interface_is_the_one_that_leads_there():
    name = interface_to("127.0.0.1")
    assert any(address.address == "127.0.0.1" for address in psutil.net_if_addrs()[name])
    assert interface_to("no.such.host.invalid") == ""


def test_an_address_that_is_taken_or_not_of_this_machine_is_said_at_once(monkeypatch):
    for name, value in ranks(0, WORLD, 1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "untouched")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(OSError, match="in use"):
            meet(1)
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # of documentation: nobody's
    with pytest.raises(OSError, match="assign"):
        meet(1)
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ValueError, match=r"MASTER_ADDR = ''.*torchrun"):
        meet(1)
