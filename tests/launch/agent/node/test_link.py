"""Whether the cable is in: the interface by which the others are reached."""

import socket
import types

import pytest

from launch.agent.node import link as module
from launch.agent.node.link import Link, link_to


@pytest.fixture
def interfaces(monkeypatch):
    """A node with loopback, docker's bridge without a link, and eth0; returns what is up."""
    up = {"lo": True, "docker0": False, "eth0": True}
    addresses = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.1"}
    known = {name: [types.SimpleNamespace(address=address)] for name, address in addresses.items()}
    monkeypatch.setattr(module.psutil, "net_if_addrs", lambda: known)
    stats = types.SimpleNamespace
    monkeypatch.setattr(module.psutil, "net_if_stats", lambda: {name: stats(isup=each) for name, each in up.items()})

    class Probe(socket.socket):
        def connect(self, address):
            self.own = "10.0.0.1" if address[0].startswith("10.") else "127.0.0.1"

        def getsockname(self):
            return self.own, 1

    monkeypatch.setattr(module.socket, "socket", Probe)
    return up


def test_a_lost_link_is_said_by_its_own_node(interfaces):
    link = link_to(["no-such-host.invalid", "10.0.0.2"])
    assert link == Link("eth0") and link.lost() == []
    interfaces["eth0"] = False
    assert link.lost() == ["network interface eth0 has no link"]


def test_without_others_or_by_loopback_there_is_no_link_to_lose(interfaces):
    assert link_to([]) == link_to(["127.0.0.1"]) == Link(None)
    assert Link(None).lost() == []
    del interfaces["eth0"]
    assert Link("eth0").lost() == [], "one that is gone altogether was renamed or replaced, which ends no run"
