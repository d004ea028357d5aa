"""Nodes that torchrun has started: the workers of one trial whose ranks are on several of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
from kill import wait_until
from namespaces import HOST
from network import Host

from hpo.storage.home import Home


class Nodes:
    """The torchruns of a home's worker, each with its output in a file; `shared` as torchrun has it by itself.

    They run on this host over loopback or, one after another, on the `hosts` of a network.
    """

    shared = False

    def __init__(self, home: Path, storage: str = "", hosts: Sequence[Host] = (), study: str = "tiny") -> None:
        self._addresses = [host.address for host in hosts] or ["127.0.0.1"]
        self._environs = [{HOST: host.name} for host in hosts] or [{}]
        with socket.socket() as taken:  # a port that is free here is free on a host that has nothing yet
            taken.bind(("127.0.0.1", 0))
            self._endpoint = self._addresses[0], taken.getsockname()[1]
        self._home, self._storage, self._study = home, storage or Home(home).storage, study
        self._begun: list[tuple[subprocess.Popen[bytes], Path]] = []

    def begin(self) -> subprocess.Popen[bytes]:
        number = len(self._begun)
        place, (host, port) = number % len(self._addresses), self._endpoint
        # A host does not know its address by its name, by which torchrun finds out where it is to serve. Of two nodes
        # on one host none is cut off, so that a short timeout finds those that were killed.
        conf = f"is_host={place == 0}" if self._environs[place] else "read_timeout=5"
        launch = f"--nnodes=2 --nproc-per-node=1 --max-restarts=20 --rdzv-backend=c10d --rdzv-endpoint={host}:{port}"
        launch += f" --rdzv-conf=join_timeout=60,{conf} --rdzv-id={self._study}"
        launch += f" --local-addr={self._addresses[place]} --no-python"
        worker = f"-m hpo worker --study {self._study} --home {self._home} --storage {self._storage}"
        command = [sys.executable, "-m", "torch.distributed.run", *launch.split(), sys.executable]
        log = self._home.with_suffix(f".node-{number}.log")
        environ = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0" if self.shared else "1"}
        environ |= self._environs[place]
        with log.open("wb") as output:
            process = subprocess.Popen([*command, *worker.split()], stdout=output, stderr=output, env=environ)
        self._begun.append((process, log))
        wait_until(self._has_host, process)
        return process

    def _has_host(self) -> bool:
        """Returns true once a torchrun, the first that was begun, serves the rendezvous."""
        with socket.socket() as asking:
            return asking.connect_ex(self._endpoint) == 0

    def end(self) -> None:
        for process, _ in self._begun:
            end(process)

    def said(self) -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()}" for _, log in self._begun)


def end(torchrun: subprocess.Popen[bytes]) -> None:
    """Ends a node at once, with all that it runs."""
    if torchrun.poll() is None:
        for process in (psutil.Process(torchrun.pid), *psutil.Process(torchrun.pid).children(recursive=True)):
            process.kill()
        torchrun.wait()
