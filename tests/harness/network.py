"""Hosts of one machine that a network joins: network namespaces, each with a cable (veth) into one bridge.

What runs outside of them, such as a server, listens at the bridge's `address`, which the hosts also know by the name
SERVICES. Faults are of a host's cable: packets are dropped (iptables), or held back (tc). Every name carries the pid of
this process, and what a process that has died left behind is removed by the next `Network`.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import psutil
from namespaces import HOST

SERVICES = "services.test"
CABLE = "eth0"  # as a host sees it
PROGRAMS = ("ip", "iptables", "tc")
_NAME = re.compile(r"hpo(\d+)-")  # of a bridge, of a cable's end outside, and of a namespace
_FILES = Path("/etc/netns")
_numbers = itertools.count()


class Impossible(Exception):
    """Raised when a network cannot be made or changed here; the text is a clause."""


@dataclass(frozen=True)
class Host:
    """A host: the name of its namespace, which is its hostname, its address, and its cable's end outside."""

    name: str
    address: str
    cable: str

    def run(self, command: Sequence[str], environ: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
        """Starts a command on it, whose children are there too."""
        return subprocess.Popen(command, env={**environ, HOST: self.name}, text=True, **options)


class Network:
    """A bridge with its hosts. All faults of a host last until `heal`, and fall together if there are several."""

    def __init__(self) -> None:
        number = next(_numbers)
        remove_stale()
        self._name = f"hpo{os.getpid()}-{number}"
        subnet = (os.getpid() * 8 + number) % 512
        self._prefix = f"198.{18 + subnet // 256}.{subnet % 256}"  # of 198.18.0.0/15, which is for tests
        self.address, self.subnet = f"{self._prefix}.1", f"{self._prefix}.0/24"
        self.hosts: list[Host] = []
        _call("ip", "link", "add", self._name, "type", "bridge")
        _call("ip", "address", "add", f"{self.address}/24", "dev", self._name)
        _call("ip", "link", "set", self._name, "up")

    def host(self, name: str) -> Host:
        """Makes a host, which reaches the bridge and all other hosts."""
        number = len(self.hosts) + 2
        host = Host(f"{self._name}-{name}", f"{self._prefix}.{number}", f"{self._name}.{number}")
        _call("ip", "netns", "add", host.name)
        self.hosts.append(host)
        _call("ip", "link", "add", host.cable, "type", "veth", "peer", "name", CABLE, "netns", host.name)
        _call("ip", "link", "set", host.cable, "master", self._name, "up")
        _inside(host, "ip", "address", "add", f"{host.address}/24", "dev", CABLE)
        for link in ("lo", CABLE):
            _inside(host, "ip", "link", "set", link, "up")
        (_FILES / host.name).mkdir(parents=True)
        # Nobody listens there on port 53, so a name that is not in the file cannot be resolved for now.
        (_FILES / host.name / "resolv.conf").write_text(f"nameserver {self.address}\noptions timeout:1 attempts:1\n")
        self._names(host, f"{self.address} {SERVICES}\n")
        return host

    def partition(self, host: Host) -> None:
        """Cuts a host off: whatever it sends and is sent is lost."""
        for chain in ("INPUT", "OUTPUT"):
            _drop(host, chain)

    def one_way(self, host: Host, lost: Literal["in", "out"] = "out") -> None:
        """Loses all that a host is sent (`in`), or all that it sends (`out`)."""
        _drop(host, {"in": "INPUT", "out": "OUTPUT"}[lost])

    def loss(self, host: Host, share: float) -> None:
        """Loses this share of the packets, in both directions."""
        for chain in ("INPUT", "OUTPUT"):
            _drop(host, chain, "-m", "statistic", "--mode", "random", "--probability", str(share))

    def rate(self, host: Host, rate: str = "256kbit") -> None:
        """Lets no more than `rate` pass, in each direction."""
        slow = ("root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
        _inside(host, "tc", "qdisc", "replace", "dev", CABLE, *slow)
        _call("tc", "qdisc", "replace", "dev", host.cable, *slow)

    def forget(self, host: Host) -> None:
        """Lets a host resolve no name any more; connections that it has stay."""
        self._names(host, "")

    def heal(self) -> None:
        """Ends all faults."""
        for host in self.hosts:
            _inside(host, "iptables", "-w", "-F")
            self._names(host, f"{self.address} {SERVICES}\n")
            with suppress(Impossible):  # it was not slow
                _inside(host, "tc", "qdisc", "delete", "dev", CABLE, "root")
                _call("tc", "qdisc", "delete", "dev", host.cable, "root")

    def clear(self) -> None:
        """Removes all hosts, and kills what still runs there."""
        while self.hosts:
            host = self.hosts.pop()
            _remove(host.name)
            with suppress(Impossible):  # it may have gone with its host by now
                _call("ip", "link", "delete", host.cable)

    def close(self) -> None:
        self.clear()
        _call("ip", "link", "delete", self._name)

    def _names(self, host: Host, known: str) -> None:
        # Written in place, since a process of the host has mounted this very file.
        (_FILES / host.name / "hosts").write_text(f"127.0.0.1 localhost {host.name}\n{known}")


@cache
def missing() -> str:
    """Returns why no network can be made here, as a clause; an empty text if it can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "only root may make a network namespace"
    if absent := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"{' and '.join(absent)} cannot be run"
    try:
        with closing(Network()) as network:
            host = network.host("try")
            network.loss(host, 0.5)
            network.rate(host)
            network.heal()
    except (Impossible, OSError) as error:
        remove_stale(os.getpid())
        return str(error)
    return ""


def remove_stale(*pids: int) -> None:
    """Removes what processes left behind that have died, and what those with these pids have made."""
    spaces = [path.name for path in Path("/run/netns").glob("hpo*")]
    links = [path.name for path in Path("/sys/class/net").glob("hpo*")]
    for names, remove in ((spaces, _remove), (links, lambda name: _call("ip", "link", "delete", name))):
        for name in names:
            match = _NAME.match(name)
            if match and (int(match[1]) in pids or not psutil.pid_exists(int(match[1]))):
                with suppress(Impossible):  # another process removes it too, or a cable went with its host
                    remove(name)


def _remove(space: str) -> None:
    """Removes a namespace, once all in it are killed: it would live as long as one of them."""
    for pid in _call("ip", "netns", "pids", space).split():
        with suppress(psutil.NoSuchProcess):
            psutil.Process(int(pid)).kill()
    _call("ip", "netns", "delete", space)
    shutil.rmtree(_FILES / space, ignore_errors=True)


def _drop(host: Host, chain: str, *which: str) -> None:
    cable = ("-i", CABLE) if chain == "INPUT" else ("-o", CABLE)
    _inside(host, "iptables", "-w", "-A", chain, *cable, *which, "-j", "DROP")


def _inside(host: Host, *command: str) -> str:
    return _call("ip", "netns", "exec", host.name, *command)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Impossible(f"`{' '.join(command)}` fails: {done.stderr.strip()}")
    return done.stdout
