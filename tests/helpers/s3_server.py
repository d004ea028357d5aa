"""Starts moto's server, which speaks S3 and keeps objects in its memory, and names what its clients need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from certificates import Pair


@contextmanager
def serving(directory: Path, pair: Pair | None = None, address: str = "127.0.0.1") -> Iterator[str]:
    """Yields the endpoint of a server, by its address, or over TLS by localhost with the certificate `pair`."""
    started = "import sys; from moto.server import main; main(sys.argv[1:])"
    words = ["-H", address, "-p", "0"]
    words += ["-s", "-c", str(pair.certificate), "-k", str(pair.key)] if pair else []
    log = directory / "log"
    with open(log, "w") as output:
        environ = os.environ | {"S3_IGNORE_SUBDOMAIN_BUCKETNAME": "true"}  # whatever its name is, it is no bucket's
        server = subprocess.Popen([sys.executable, "-c", started, *words], stdout=output, stderr=output, env=environ)
    while not (found := re.search(rf"https?://{re.escape(address)}:\d+", log.read_text())):
        assert server.poll() is None, log.read_text()
        time.sleep(0.05)
    yield found[0].replace(address, "localhost") if pair else found[0]
    server.kill()
    server.wait()


def environ(endpoint: str, directory: Path) -> dict[str, str]:
    """Returns the variables by which a client finds the server and its credentials, and nothing of this host's."""
    given = {
        "AWS_ACCESS_KEY_ID": "AKIATESTKEY",
        "AWS_SECRET_ACCESS_KEY": "secret-of-s3",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    given |= {"AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "2"}
    return given | {name: str(directory / "no-file") for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")}
