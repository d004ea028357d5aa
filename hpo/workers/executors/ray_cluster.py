"""Connects to Ray: to the cluster of RAY_ADDRESS, else to a Ray of this host that lives as long as it is needed."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpo.declaration.loading import CARRIED
from hpo.declaration.study import Study
from hpo.errors import UserError
from hpo.ledger.store import backend
from hpo.workers.executors.base import WorkerContext
from hpo.workers.executors.resources import Resources, devices, gpus_each, needs
from trainer.runtime.threads import ONE

_STORE = 80 * 2**20  # bytes of the object store of a Ray of our own: little more than Ray's least
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def prepare(executor: str) -> None:
    """Set what Ray reads when it is imported, which this does not do. Raises UserError where it is not installed.

    A Ray of our own has a token of its own: nobody else is let in, and none is written to the user's home. Its workers
    have this process's priority: by Ray's own choice, a niceness of 15, whatever else runs here would starve trials.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"--executor {executor} needs Ray: pip install 'hpo[ray]'.")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if not os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_worker_niceness", "0")


class Cluster:
    """Connected from `open` to `close`. What is started for it is gone after `close`, or with this process."""

    def __init__(self) -> None:
        self.address = os.environ.get("RAY_ADDRESS", "")
        self.carried: Path | None = None  # the directory whose code every process of the cluster has been given
        self._scratch: str | None = None

    def open(self, context: WorkerContext, workers: int, resources: Resources) -> tuple[int, float]:
        """Connect; a Ray of this host gets the CPUs of so many workers. The CPUs and the GPUs of each of them, by the
        GPUs of all nodes together.

        Raises UserError where workers could not reach the ledger, or cannot have the GPUs that are asked for.
        """
        wanted = needs(context.study)
        cpus = resources.cpus or wanted.ranks * wanted.threads
        self._scratch = tempfile.mkdtemp(prefix="hpo-ray-", dir=os.environ.get("RAY_TMPDIR"))
        try:
            with _handlers_kept():
                self._connect(context.study, workers * cpus)
            check_reach(context.storage, self._hosts(), self.address)
            return cpus, gpus_each(resources.gpus, wanted, workers, self._gpus())
        except BaseException:
            self.close()
            raise

    def _connect(self, study: Study, cpus: int) -> None:
        import ray

        shared = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
        if not self.address:
            sizes = {"num_cpus": cpus, "num_gpus": len(devices()), "object_store_memory": _STORE}
            ray.init(address="local", _temp_dir=self._scratch, _node_ip_address="127.0.0.1", **sizes, **shared)
            return
        _check_listens(self.address)
        environment: dict[str, object] = {"env_vars": ONE | _STAYS}
        if (found := carry(study, Path(str(self._scratch), "code"))) is not None:
            self.carried, environment["working_dir"] = found, str(Path(str(self._scratch), "code"))
        try:
            ray.init(address=self.address, runtime_env=environment, **shared)
        except ConnectionError as error:
            first = str(error).partition("\n")[0].rstrip(".")
            raise UserError(
                f"RAY_ADDRESS={self.address!r}: no Ray cluster lets this process in ({first}): check the address, and "
                "that RAY_AUTH_MODE and RAY_AUTH_TOKEN are those of its head."
            ) from error

    def _hosts(self) -> set[str]:
        import ray

        return {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}

    def _gpus(self) -> int:
        import ray

        return int(ray.cluster_resources().get("GPU", 0))

    def close(self) -> None:
        import ray

        ray.shutdown()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)  # Ray's last processes may still be writing their logs
            self._scratch = None


def _check_listens(address: str) -> None:
    """Raise UserError where nothing listens at HOST:PORT, for which Ray would look for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10.0).close()
    except OSError as error:
        raise UserError(f"RAY_ADDRESS={address!r}: nothing listens there ({error}): name a cluster's head.") from error


def last_line(error: object) -> str:
    """Of what Ray says of an error, where its cause stands."""
    return next((line for line in map(str.strip, reversed(str(error).splitlines())) if line), "nothing is said of why")


def check_reach(storage: str, hosts: set[str], address: str) -> None:
    """Raise UserError where there are workers on other hosts, and the ledger is a file of this one."""
    elsewhere = sorted(hosts - {socket.gethostname()})
    if elsewhere and backend(storage) == "sqlite":
        raise UserError(
            f"the Ray cluster of {address} has nodes on other hosts ({', '.join(elsewhere[:3])}), and the ledger is a "
            "file of this one: give --storage postgresql+psycopg://... and a --home that all of them see, "
            "or --checkpoints s3://BUCKET/PREFIX."
        )


def carry(study: Study, to: Path) -> Path | None:
    """Copy the declaration, if it is a file of the user's, and what it imports from beside it; where that stands."""
    if not study.reference.rpartition(":")[0].endswith(".py") and not study.reference.endswith(".py"):
        return None  # installed with the platform, here as there
    parts = study.code()
    directory = parts[""].parent
    for place in parts.values():
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            if file.is_relative_to(directory):
                copy = to / file.relative_to(directory)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
    return directory


def carried_environ(directory: Path | None) -> dict[str, str]:
    """For a process of the cluster: the environment by which it finds the study's code where Ray has put it."""
    return {} if directory is None else {CARRIED: f"{directory}{os.pathsep}{Path.cwd()}"}


_STAYS = {"RAY_CHDIR_TO_TRIAL_DIR": "0"}  # Tune's processes too begin where Ray has put the code


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Put back the handlers of signals, of which Ray takes SIGTERM's."""
    before = {number: signal.getsignal(number) for number in _HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
