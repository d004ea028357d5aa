"""Connects to Ray: to the cluster of RAY_ADDRESS, else to a Ray of this host that lives as long as it is needed."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpo.declaration import content
from hpo.declaration.loading import CARRIED
from hpo.declaration.study import Study
from hpo.door import option
from hpo.errors import UserError
from hpo.ledger.database.store import backend
from hpo.workers.executors.base import WorkerContext
from hpo.workers.executors.resources import Resources, devices, gpus_each, needs
from trainer.runtime.threads import ONE

_STORE = 80 * 2**20  # bytes of the object store of a Ray started here: little more than Ray's minimum
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def prepare(executor: str) -> None:
    """Sets the variables that Ray reads at import, without importing it. Raises UserError if it is not installed.

    A Ray started here has its own token: nobody else is let in, and no token is written to the user's home. Its workers
    have this process's priority: with Ray's default, a niceness of 15, other processes here would starve trials.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"{option('executor', executor)} needs Ray: pip install 'hpo[ray]'.")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if not os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_worker_niceness", "0")


class Cluster:
    """A connection from `open` to `close`. Everything started for it is gone after `close`, or with this process."""

    def __init__(self) -> None:
        self.address = os.environ.get("RAY_ADDRESS", "")
        self.carried: Path | None = None  # the directory whose code every process of the cluster has received
        self._scratch: str | None = None

    def open(self, context: WorkerContext, workers: int, resources: Resources) -> tuple[int, float]:
        """Connects, giving a Ray of this host the CPUs of so many workers; returns the CPUs and the GPUs of each.

        The GPUs are shares of those of all nodes together. Raises UserError if workers could not reach the ledger or
        get the requested GPUs.
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

        shared: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
        if not self.address:
            sizes: dict[str, Any] = {"num_cpus": cpus, "num_gpus": len(devices()), "object_store_memory": _STORE}
            ray.init(address="local", _temp_dir=self._scratch, _node_ip_address="127.0.0.1", **sizes, **shared)
            return
        _check_listens(self.address)
        environment: dict[str, object] = {"env_vars": ONE | _STAYS}
        if (code_root := carry(study, Path(str(self._scratch), "code"))) is not None:
            self.carried, environment["working_dir"] = code_root, str(Path(str(self._scratch), "code"))
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
    """Raises UserError if nothing listens at HOST:PORT, which Ray would retry for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10.0).close()
    except OSError as error:
        raise UserError(f"RAY_ADDRESS={address!r}: nothing listens there ({error}): name a cluster's head.") from error


def last_line(error: object) -> str:
    """Returns the last line of a Ray error, which holds its cause."""
    return next((line for line in map(str.strip, reversed(str(error).splitlines())) if line), "nothing is said of why")


def check_reach(storage: str, hosts: set[str], address: str) -> None:
    """Raises UserError if there are workers on other hosts, and the ledger is a file of this one."""
    elsewhere = sorted(hosts - {socket.gethostname()})
    if elsewhere and backend(storage) == "sqlite":
        raise UserError(
            f"the Ray cluster of {address} has nodes on other hosts ({', '.join(elsewhere[:3])}), and the ledger is a "
            f"file of this one: give {option('storage', 'postgresql+psycopg://...')} and a {option('home')} that all "
            "of them see, "
            f"or {option('checkpoints', 's3://BUCKET/PREFIX')}."
        )


def carry(study: Study, to: Path) -> Path | None:
    """Copies the declaration, if it is a user's file, and the modules that it imports from its directory; returns the
    directory of the copy."""
    if not study.reference.rpartition(":")[0].endswith(".py") and not study.reference.endswith(".py"):
        return None  # installed with the platform on every host
    parts = content.code(study)
    directory = parts[""].parent
    for path in parts.values():
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if file.is_relative_to(directory):
                copy = to / file.relative_to(directory)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
    return directory


def carried_environ(directory: Path | None) -> dict[str, str]:
    """Returns the environment with which a process of the cluster finds the copied code of the study."""
    return {} if directory is None else {CARRIED: f"{directory}{os.pathsep}{Path.cwd()}"}


_STAYS = {"RAY_CHDIR_TO_TRIAL_DIR": "0"}  # Tune's processes also begin where Ray has put the code


@contextmanager
def _handlers_kept() -> Generator[None, None, None]:
    """Restores the handlers of signals, since Ray replaces SIGTERM's."""
    before = {number: signal.getsignal(number) for number in _HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
