"""A worker process by itself: how it waits, and how it is told to leave."""

from __future__ import annotations

import sys
import threading
from typing import Any

from hpo.ledger import Ledger
from hpo.storage.home import Home
from hpo.workers import worker as module
from hpo.workers.worker import Worker


def test_told_to_leave_at_any_instant_of_its_rest_a_worker_leaves(tmp_path, monkeypatch):
    """A signal's handler runs between two instructions of the thread that waits, whatever that holds."""
    monkeypatch.setattr(module, "REST", 0.02)
    home = Home(tmp_path / "home").create()
    ledger = Ledger(home.storage)
    worker, left = Worker(ledger, home, "local"), 0

    def rest(lines: int) -> None:
        def handler(frame: Any, event: str, _: Any) -> Any:
            nonlocal lines
            lines -= event == "line"
            if lines == 0:
                worker.preempt()
            return handler

        sys.settrace(handler)
        worker.rest([1])
        sys.settrace(None)

    for lines in range(1, 60):
        worker.leaving = False
        thread = threading.Thread(target=rest, args=(lines,), daemon=True)
        thread.start()
        thread.join(20.0)
        assert not thread.is_alive(), f"it waits forever, told at line {lines}"
        left += worker.leaving
    assert left > 20
    worker.close()
    ledger.close()
