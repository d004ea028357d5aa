"""optuna-dashboard behind the gate, on a storage that is kept in step with the ledger, as one process.

    python -m hpo.tracking.gated_dashboard --home DIR --host HOST --port PORT [--study NAME], the ledger in HPO_STORAGE

What is shown is the ledger's, and the next send would undo it or fail on it if it were changed here: a request that is
not to read is refused.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.storage.home import Home
from hpo.tracking.gate import App, Gate, Receive, Send, answer, token_of
from hpo.tracking.keeper import Keeper, storage_file, tracker_of

_READING = ("GET", "HEAD")
_REFUSED = b"These pages show the ledger: nothing can be changed here.\n"


class ReadOnly:
    """An ASGI application that says that it is up, passes on to `app` what only reads, and refuses all else."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return None
        if scope["path"] == "/health":
            return await answer(send, 200, b"OK")
        if scope["method"] not in _READING:
            return await answer(send, 405, _REFUSED)
        return await self._app(scope, receive, send)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM. `hpo.tracking.supervise` ends it with its parent."""
    parser = argparse.ArgumentParser(prog="python -m hpo.tracking.gated_dashboard")
    parser.add_argument("--home", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--study")
    options = parser.parse_args(argv)
    home, port = Home.at(options.home), options.port

    import uvicorn
    from a2wsgi import WSGIMiddleware
    from optuna_dashboard import wsgi

    from hpo.ledger import Ledger

    storage = os.environ.get("HPO_STORAGE") or home.storage
    shown = tracker_of(Ledger(storage, create=False), storage_file(home))
    app: Any = WSGIMiddleware(wsgi(shown.storage))  # pyright: ignore[reportArgumentType]
    origins = [f"http://{name}:{port}" for name in dict.fromkeys((options.host, "localhost"))]
    gate = Gate(ReadOnly(app), token_of(home), origins, f"hpo-{port}")
    # Without a log of accesses, which would hold the token.
    server = uvicorn.Server(
        uvicorn.Config(gate, host=options.host, port=port, access_log=False, log_level="warning", lifespan="off")
    )
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    keeper = Keeper(home, storage, [options.study] if options.study else [], failed).start()
    try:
        server.run()
    finally:
        keeper.stop()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
