"""Serves optuna-dashboard, protected by the gate, over an export of a home's studies that is kept up to date.

    python -m hpo.analysis.plots.dashboard --home DIR --host HOST --port PORT [--study NAME], the ledger in HPO_STORAGE

The export has the content of `hpo export --to FILE.db`, in memory. It is rebuilt within a second of a change in the
ledger. A change to the export would be lost then, so every request that does more than read is refused.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

import optuna
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection

from hpo.analysis.plots.optuna_study import fill
from hpo.analysis.study_handle import StudyHandle
from hpo.errors import DamagedLedger, HpoError
from hpo.ledger import Ledger, queries
from hpo.ledger.database.changes import Changes
from hpo.ledger.rows import Connection
from hpo.ledger.views import alerts as alert_queries
from hpo.search.samplers.optuna_sampler import quiet_optuna
from hpo.storage.home import Home
from hpo.terminal import print
from hpo.tracking.ui.gate import App, Gate, Receive, Send, answer, token_of

POLL = 1.0  # seconds between looks at the ledger
_SHARE = 4  # the pause after a refresh, in lengths of the refresh, so that pages of large studies cost little
_READING = ("GET", "HEAD")
_REFUSED = b"These pages show the ledger: nothing can be changed here.\n"
_Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Export:
    """Holds the studies of a ledger, those of `names` or all but derived ones, as an Optuna storage in memory.

    A study keeps its id for the lifetime of the export, because the pages' addresses contain it.
    """

    def __init__(self, ledger: Ledger, home: Home, names: Sequence[str] = ()) -> None:
        self._ledger, self._home, self._names = ledger, home, names
        self._versions: dict[str, tuple[str, int, int]] = {}  # uid -> name and revisions when last read
        self._studies: dict[str, optuna.Study | None] = {}
        self._said: dict[str, str] = {}

    def refresh(self) -> bool:
        """Reads the studies that have changed and returns whether any has.

        A study that cannot be read, for example because its declaration is gone, stays as it was and is named on
        standard output.
        """
        versions = self._ledger.look(self._now)
        changed = {uid for uid in {**self._versions, **versions} if self._versions.get(uid) != versions.get(uid)}
        for uid in changed:
            self._studies[uid] = self._read(versions[uid][0], uid) if uid in versions else None
        self._versions = dict(versions)
        return bool(changed)

    def storage(self) -> InMemoryStorage:
        """Returns a storage of the studies as last read."""
        storage = InMemoryStorage()
        for study in self._studies.values():
            if study is None:  # its id stays unused
                storage.delete_study(storage.create_new_study([StudyDirection.MINIMIZE]))
                continue
            with quiet_optuna():
                copy = optuna.create_study(directions=study.directions, storage=storage, study_name=study.study_name)
                fill(copy, study)
        return storage

    def _now(self, connection: Connection) -> dict[str, tuple[str, int, int]]:
        derived = queries.derived(connection)
        names = self._names or [name for name in queries.study_names(connection) if name not in derived]
        rows = [queries.study_row(connection, name) for name in names]
        return {row.uid: (row.name, row.revision, alert_queries.revisions(connection, row.id)) for row in rows}

    def _read(self, name: str, uid: str) -> optuna.Study | None:
        try:
            return StudyHandle(self._ledger, name, self._home).to_optuna()
        except DamagedLedger:
            raise
        except HpoError as error:
            if self._said.get(uid) != str(error):
                self._said[uid] = str(error)
                print(f"{name}: {error}", flush=True)
            return self._studies.get(uid)


class Pages:
    """Serves optuna-dashboard as a WSGI application over the newest export, which a thread refreshes until `stop`.

    `failed` is called with the error if the thread cannot continue.
    """

    def __init__(self, export: Export, ledger: Ledger, failed: Callable[[BaseException], None]) -> None:
        self._export, self._ledger, self._failed = export, ledger, failed
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="export", daemon=True)
        export.refresh()
        self._app = _dashboard(export)

    def __call__(self, environ: dict[str, Any], respond: Callable[..., object]) -> Iterable[bytes]:
        return self._app(environ, respond)

    def start(self) -> Pages:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._leave.set()
        self._thread.join()

    def _follow(self) -> None:
        try:
            with closing(Changes(self._ledger, POLL)) as changes:
                while not self._leave.wait(POLL):
                    began = time.monotonic()
                    if changes() and self._export.refresh():
                        self._app = _dashboard(self._export)
                    self._leave.wait(_SHARE * (time.monotonic() - began))
        except BaseException as error:
            self._failed(error)
            raise


def _dashboard(export: Export) -> _Wsgi:
    """Returns a new application, because an application's cache would show the trials of the previous storage."""
    from optuna_dashboard import wsgi

    return wsgi(export.storage())


class ReadOnly:
    """An ASGI application that answers health checks, passes read requests on to `app`, and refuses all others."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Mapping[str, object], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return None
        if scope["path"] == "/health":
            return await answer(send, 200, b"OK")
        if scope["method"] not in _READING:
            return await answer(send, 405, _REFUSED)
        return await self._app(scope, receive, send)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM. `hpo.tracking.ui.supervise` ends the process with its parent."""
    parser = argparse.ArgumentParser(prog="python -m hpo.analysis.plots.dashboard")
    parser.add_argument("--home", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--study")
    options = parser.parse_args(argv)
    home, port = Home.at(options.home), options.port

    import uvicorn
    from a2wsgi import WSGIMiddleware

    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    ledger = Ledger(os.environ.get("HPO_STORAGE") or home.storage, create=False)
    pages = Pages(Export(ledger, home, [options.study] if options.study else []), ledger, failed)
    app: Any = WSGIMiddleware(pages)  # pyright: ignore[reportArgumentType]
    origins = [f"http://{name}:{port}" for name in dict.fromkeys((options.host, "localhost"))]
    gate = Gate(ReadOnly(app), token_of(home), origins, f"hpo-{port}")
    # An access log would contain the token.
    server = uvicorn.Server(
        uvicorn.Config(gate, host=options.host, port=port, access_log=False, log_level="warning", lifespan="off")
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises the signal again after it has ended
        signal.signal(number, lambda *_: None)
    pages.start()
    try:
        server.run()
    finally:
        pages.stop()
        ledger.close()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
