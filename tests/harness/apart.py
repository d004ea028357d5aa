"""The hosts of an episode whose study is driven on one and trained on another too, and the faults of their network."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from forwarder import Forwarder
from kill import Run
from namespaces import HOST
from network import Network
from servers import Servers

R = TypeVar("R", bound=Run)
LOST = "lost host"  # one whose network goes, and comes back when the study has ended
FAULTS = ("partition", "one way", "loss", "slow", "delay", "no names", LOST)
LAST = 120  # seconds in which a worker that has joined ends after its study


class Apart:
    """Two hosts, and what runs on them: the driver of `run` on one, `hpo worker --stay` on the other.

    A worker that is killed is begun again, as by a supervisor of services. One that has lost its trial goes on itself.
    """

    def __init__(self, fault: str, servers: Servers, network: Network, lease: float) -> None:
        self._fault, self._network, self._lease = fault, network, lease
        self._driver, self._worker = network.host("driver"), network.host("worker")
        self._forwarder = Forwarder(network.address, *servers.places()) if fault == "delay" else None
        self._servers, self._lost = servers, False
        self._run: Run | None = None
        self.joined: subprocess.Popen[str] | None = None

    def on_driver(self, run: R) -> R:
        """Returns the run as one of the driver's host; a worker joins its study, which need not have begun."""
        environ = self._servers.remote(run.environ, self._forwarder)
        self._run = replace(run, environ=environ | {HOST: self._worker.name})
        self._join()
        return replace(run, environ=environ | {HOST: self._driver.name})

    def supervise(self) -> None:
        """Begins the worker again if it has ended with nothing wrong but its trial's loss, or was killed."""
        if self.joined is not None and self.joined.poll() is not None and self.joined.returncode != 0:
            self._check()
            self._join()

    def strike(self, rng: random.Random, meanwhile: Callable[[], object]) -> str:
        """Lets the episode's fault fall, for shorter or longer than a lease; returns which, and of which host.

        Every other time something else falls as well.
        """
        if self._lost:
            self.heal()
            return "lost host is back"
        beyond = rng.random() < 0.5
        which, host = rng.choice((("driver", self._driver), ("worker", self._worker)))
        if self._fault == "partition":
            self._network.partition(host)
        elif self._fault == "one way":
            self._network.one_way(host, rng.choice(("in", "out")))
        elif self._fault == "loss":
            self._network.loss(host, rng.uniform(0.1, 0.4))
        elif self._fault == "slow":
            self._network.rate(host)
        elif self._fault == "no names":
            self._network.forget(host)
        elif self._forwarder:
            self._forwarder.delay(rng.uniform(0.02, 0.2), 0.2)
        else:
            self._network.partition(self._worker)
            self._lost = True
            return LOST
        end = time.monotonic() + self._lease * (1.4 if beyond else 0.4)
        if rng.random() < 0.5:
            meanwhile()
        time.sleep(max(end - time.monotonic(), 0.0))
        self.heal()
        where = "" if self._forwarder else f", {which}'s host"
        return f"{self._fault}{where}, {'beyond' if beyond else 'within'} a lease"

    def heal(self) -> None:
        self._network.heal()
        self._lost = False
        if self._forwarder:
            self._forwarder.delay(0.0)

    def finished(self) -> None:
        """Heals the network, and waits until the worker ends since its study has."""
        self.heal()
        assert self.joined is not None
        try:
            self.joined.wait(LAST)
        except subprocess.TimeoutExpired:
            self.joined.kill()
            raise AssertionError(f"a worker outlives its study: {self.joined.communicate()[0]}") from None
        self._check()

    def close(self) -> None:
        self._network.clear()
        if self._forwarder:
            self._forwarder.close()

    def _join(self) -> None:
        assert self._run is not None
        self.joined = self._run.start("worker", "--study", self._run.name, "--stay")

    def _check(self) -> None:
        assert self.joined is not None
        output, code = self.joined.communicate()[0], self.joined.returncode
        assert code in (0, -9) and "Traceback" not in output, f"a joined worker ends with {code}: {output}"
