"""A host that vanishes in the middle of a transaction gives up its locks, and one that is cut off notices it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import sqlalchemy as sa
from network import Network, missing

from hpo.ledger import Ledger
from hpo.ledger.database.tables import leases

pytestmark = [pytest.mark.usefixtures("process"), pytest.mark.timeout(120)]

# The seconds after which a connection counts as broken, shorter than a user would have them.
SOON = {"keepalives_idle": "1", "keepalives_interval": "1", "keepalives_count": "2", "tcp_user_timeout": "3000"}
HOLD = """
import sys, time
from hpo.ledger import Ledger
from hpo.ledger.database.tables import leases
ledger = Ledger(sys.argv[1], create=False)
with ledger.write() as connection:
    connection.execute(leases.select().with_for_update())
    print("holds", flush=True)
    sys.stdin.readline()
    connection.execute(leases.select())
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := missing():
        pytest.skip(f"runs where a network of namespaces can be made, as root with iproute2 and iptables: {reason}")
    with closing(Network()) as network:
        yield network


@pytest.fixture(scope="module")
def storage(network, postgres_server) -> str:
    server = postgres_server()
    url = server.listen(network.address, network.subnet).update_query_dict(SOON)
    text = url.render_as_string(hide_password=False)
    with closing(Ledger(text)) as ledger, ledger.write() as connection:
        connection.execute(leases.insert().values(name="driver:1"))
    return text


@pytest.fixture
def holder(network, storage) -> Iterator[subprocess.Popen[str]]:
    """A process of another host that holds a lock in its transaction, and goes on when it reads a line."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = network.host("holder").run([sys.executable, "-c", HOLD, storage], environ, **pipes)
    if process.stdout.readline() != "holds\n":
        pytest.fail(process.communicate()[1])
    yield process
    network.clear()
    process.communicate()


def test_the_locks_of_a_lost_host_are_freed(network, storage, holder):
    network.partition(network.hosts[0])
    begun = time.monotonic()
    with closing(Ledger(storage)) as ledger, ledger.write() as connection:
        connection.execute(sa.text("SET LOCAL lock_timeout = '30s'"))
        assert connection.execute(leases.select().with_for_update()).all()
    assert time.monotonic() - begun > 0.5, "nobody held the lock"


def test_a_host_that_is_cut_off_in_a_transaction_notices_it(network, holder):
    network.partition(network.hosts[0])
    _, errors = holder.communicate("go on\n", timeout=30)
    assert "StorageAway" in errors and "does not answer" in errors, errors


def test_both_ends_give_a_silent_connection_up_after_a_minute(storage):
    names = [f"tcp_{name.removeprefix('tcp_')}" for name in SOON]
    usual = sa.make_url(storage).set(query={}).render_as_string(hide_password=False)
    with closing(Ledger(usual)) as ledger, ledger.read() as connection:
        client = connection.connection.dbapi_connection.info.get_parameters()
        assert [client[name] for name in SOON] == ["30", "10", "3", "60000"]
        assert [connection.exec_driver_sql(f"SHOW {name}").scalar_one() for name in names] == ["30", "10", "3", "60000"]
