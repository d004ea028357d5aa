"""Serves the live pages of a home until Ctrl-C."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import uvicorn

from hpo.analysis.serve.app import Pages
from hpo.analysis.serve.guard import LOOPBACK, Below, Guard, check_host, check_prefix
from hpo.analysis.serve.metrics import HomeMetrics, MetricsRoute
from hpo.door import option
from hpo.errors import StorageError, UserError
from hpo.storage import metrics_text
from hpo.terminal import print
from hpo.tracking.ui.gate import PARAMETER, App, Gate, opening_page, token_of
from trainer.quote import quoted

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.storage.home import Home


def check_mlflow(given: str | None) -> str:
    """Returns the address of MLflow's pages. Raises UserError if it is not one."""
    try:
        parts = urlsplit(given or "")
    except ValueError:
        parts = urlsplit("")
    if given and (parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment):
        raise UserError(
            f"{option('mlflow', quoted(given))} is not the address of a page: give http://HOST:PORT and no more."
        )
    return given or ""


def bound(host: str, port: int, allowed: Sequence[str]) -> socket.socket:
    """Returns a socket that listens at the address.

    Raises UserError if the port is taken, for a bad name, or if other hosts can reach the address and no name is
    allowed.
    """
    for name in allowed:
        check_host(name)
    if host not in LOOPBACK and not allowed:
        raise UserError(
            f"{option('host', quoted(host))} is not loopback: say by {option('allowed_host')} what browsers call it, "
            "and let a proxy "
            "encrypt what is sent."
        )
    opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
        opened.listen(128)
    except OSError as error:
        opened.close()
        why = error.strerror or error
        raise UserError(f"port {port} on {host} cannot be used ({why}): give another with {option('port')}.") from error
    return opened


class Server(uvicorn.Server):
    """Serves the pages of a home on a socket: `run` blocks until a signal, or until `should_exit` is set."""

    def __init__(
        self,
        ledger: Ledger,
        home: Home,
        opened: socket.socket,
        *,
        allowed: Sequence[str] = (),
        prefix: str = "",
        mlflow: str = "",
        metrics: bool = False,
    ) -> None:
        self._socket, self._pages = opened, Pages(ledger, home, mlflow)
        host, port = opened.getsockname()[:2]
        names = [*LOOPBACK, host, *(check_host(name) for name in allowed)]
        origins = [f"http://{_in_address(name)}:{port}" for name in names]
        origins += [f"{scheme}://{name.lower()}" for name in allowed for scheme in ("http", "https")]
        try:
            token = token_of(home)
        except OSError as error:
            raise StorageError(f"{home.root} cannot be written ({error.strerror}): make it writable.") from error
        self.address = f"http://{_in_address(host)}:{port}/?{PARAMETER}={token}"
        app: App = Gate(Below(self._pages.app, prefix), token, origins, f"hpo-{port}", strictly=prefix or "/")
        if metrics:
            app = MetricsRoute(app, HomeMetrics(ledger), metrics_text.token_of(home), prefix)
        # An access log would contain the token.
        super().__init__(
            uvicorn.Config(
                Guard(app, {*names}),
                access_log=False,
                log_level="warning",
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=3,
            )
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets or [self._socket])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the streams, which never end by themselves, before uvicorn waits for all responses."""
        self._pages.close()
        await super().shutdown(sockets)


def _in_address(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def serve(
    ledger: Ledger,
    home: Home,
    *,
    host: str = "127.0.0.1",
    port: int = 5001,
    allowed: Sequence[str] = (),
    prefix: str = "",
    mlflow: str | None = None,
    metrics: bool = False,
    open_browser: bool = False,
) -> int:
    """Serves until Ctrl-C and returns the exit code. Raises HpoError, in one sentence, if it cannot begin."""
    known, below = check_mlflow(mlflow), check_prefix(prefix)
    if metrics:
        metrics_text.check_installed()
    with bound(host, port, allowed) as opened:
        server = Server(ledger, home, opened, allowed=allowed, prefix=below, mlflow=known, metrics=metrics)
        print(f"the studies of this home are at {server.address} (Ctrl-C stops it)", flush=True)
        if open_browser:
            import webbrowser

            webbrowser.open(opening_page(home, server.address).as_uri())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # uvicorn raises it again too: it ends the process
        with suppress(KeyboardInterrupt):  # uvicorn raises it again after it has ended
            server.run()
    return 0
