"""The servers that all episodes of chaos share: PostgreSQL, one that speaks S3, and MLflow's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import s3_server
import sqlalchemy as sa
from forwarder import Forwarder
from network import SERVICES, Network

from trainer.files.s3 import Bucket

AWAY = 3.0  # seconds for which a server does not answer


class Servers:
    """Makes PostgreSQL by `postgres` and MLflow by `mlflow` when they are first needed.

    With a `network` they listen at its address, which the hosts know by a name; `s3` is an endpoint and its process.
    """

    def __init__(
        self,
        postgres: Callable[[], Any],
        s3: tuple[str, psutil.Process],
        mlflow: Callable[[], str],
        scratch: Path,
        network: Network | None = None,
    ) -> None:
        self._make, self._s3, self._mlflow, self._scratch, self.network = postgres, s3, mlflow, scratch, network
        self._postgres: Any = None
        self._url = sa.URL.create("postgresql")

    def environ(self, name: str, *, postgres: bool, bucket: bool) -> dict[str, str]:
        """Returns the environment of an episode on this host."""
        environ = {"HPO_OUTAGE_WAIT": "2m", "MLFLOW_DISABLE_TELEMETRY": "true"}
        environ |= s3_server.environ(self._s3[0], self._scratch) if bucket else {}
        return environ | ({"HPO_STORAGE": self._database(name)} if postgres else {})

    def remote(self, environ: Mapping[str, str], forwarder: Forwarder | None = None) -> dict[str, str]:
        """Returns the environment with MLflow's server besides, for the hosts of the network: by the servers' name,
        and with a forwarder through its ports."""
        paths = self._scratch / "aws-config"  # buckets by path: hosts cannot resolve a name with the bucket's before it
        paths.write_text("[default]\ns3 =\n    addressing_style = path\n")
        remote = {**environ, "HPO_TRACKING_URI": self._mlflow(), "AWS_CONFIG_FILE": str(paths)}
        places = self.places()
        ports = forwarder.ports if forwarder else [place.rpartition(":")[2] for place in places]
        for place, port in zip(places, ports, strict=True):
            remote = {name: text.replace(place, f"{SERVICES}:{port}") for name, text in remote.items()}
        return remote

    def places(self) -> list[str]:
        """Returns `ADDRESS:PORT` of PostgreSQL, S3 and MLflow."""
        return [
            f"{self._url.host}:{self._url.port}",
            *(uri.rpartition("//")[2] for uri in (self._s3[0], self._mlflow())),
        ]

    def _database(self, name: str) -> str:
        if self._postgres is None:
            self._postgres = self._make()
            self._url = self._postgres.url
            if self.network:
                self._url = self._postgres.listen(self.network.address, self.network.subnet)
        engine = sa.create_engine(self._postgres.url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.exec_driver_sql(f'CREATE DATABASE "{name}"')
        engine.dispose()
        return self._url.set(database=name).render_as_string(hide_password=False)

    def bucket(self, name: str) -> str:
        with mock.patch.dict(os.environ, s3_server.environ(self._s3[0], self._scratch)):
            Bucket(f"s3://{name}")._asked(lambda client: client.create_bucket(Bucket=name))
        return f"s3://{name}/checkpoints"

    def crash_postgres(self) -> None:
        self._postgres.stop()
        time.sleep(AWAY)
        self._postgres.start()

    def stop_s3(self) -> None:
        self._s3[1].suspend()
        time.sleep(AWAY)
        self._s3[1].resume()
