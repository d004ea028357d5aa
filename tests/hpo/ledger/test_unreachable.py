"""A server that nothing answers for is away, and waited for, whatever keeps it from answering."""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing

import pytest
from sqlalchemy import event, select
from sqlalchemy.engine.interfaces import DBAPIConnection

from hpo.errors import StorageAway
from hpo.ledger import Ledger
from trainer.files import outage


def test_a_connection_that_times_out_is_an_outage():
    """As behind a cut cable or a firewall that drops packets, where no error comes back."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # which never answers
        port = silent.getsockname()[1]
        begun = time.monotonic()
        with outage.waiting(2.5), pytest.raises(StorageAway, match=r"does not answer .connection timeout expired"):
            Ledger(f"postgresql+psycopg://someone@127.0.0.1:{port}/some?connect_timeout=2")
        assert time.monotonic() - begun > 3.5, "it was tried once more"


def test_a_connection_that_is_lost_at_its_start_is_tried_again(postgres_database):
    """As when the server crashes between its greeting and the first statement, where psycopg has no SQLSTATE."""
    lost = []

    def lose(connection: DBAPIConnection, _: object) -> None:
        if not lost:
            with socket.socket(fileno=os.dup(connection.pgconn.socket)) as end:
                end.shutdown(socket.SHUT_RDWR)
            lost.append(connection)

    with closing(Ledger(postgres_database())) as ledger:
        ledger.engine.dispose()
        event.listen(ledger.engine, "connect", lose, insert=True)
        assert ledger.look(lambda connection: connection.scalar(select(1))) == 1
    assert len(lost) == 1
