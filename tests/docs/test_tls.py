"""The commands of the page on TLS make certificates that verify, for that name alone."""

from __future__ import annotations

import os
import re
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest
from places import ROOT

NAME = "ledger.test"


@pytest.fixture(scope="module")
def certified(tmp_path_factory) -> Path:
    [commands] = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/guide/tls.md").read_text(), re.S)
    directory = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["bash", "-e", "-c", commands], cwd=directory, check=True, capture_output=True, env=os.environ | {"HOST": NAME}
    )
    return directory


def handshake(directory: Path, name: str) -> str | None:
    """Returns the version of TLS that a client agrees on with a server, which it reaches as `name`."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(directory / "server.pem", directory / "server.key")
    trusting = ssl.create_default_context(cafile=directory / "ca.pem")
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    near, far = socket.socketpair()

    def serve() -> None:
        try:
            with far, serving.wrap_socket(far, server_side=True) as connection:
                connection.recv(1)
        except OSError:  # the client has refused
            pass

    server = threading.Thread(target=serve)
    server.start()
    try:
        with near, trusting.wrap_socket(near, server_hostname=name) as connection:
            return connection.version()
    finally:
        server.join()


def test_a_host_that_knows_the_authority_trusts_the_server(certified):
    assert handshake(certified, NAME) == "TLSv1.3"


def test_the_certificate_is_for_no_other_name(certified):
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(certified, "other.test")


def test_nobody_else_can_read_the_keys(certified):
    assert {file.stat().st_mode & 0o777 for file in certified.glob("*.key")} == {0o600}
