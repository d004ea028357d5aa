"""A server that nothing answers for is away, and waited for, whatever keeps it from answering."""

from __future__ import annotations

import socket
import time

import pytest

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
