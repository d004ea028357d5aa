"""Workers that are forked from a prepared process: what they have of their own, and what is not forked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from lane_studies import LANES
from processes import runs

from hpo.child_process import FAULT, NoAnswer, ask
from hpo.driver.request import request_of
from hpo.driver.resolve import declare
from hpo.storage.home import Home
from hpo.workers import prepared
from hpo.workers.prepared import Forked, Prepared

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def forking() -> Iterator[Prepared]:
    with closing(Prepared()) as process:
        until(lambda: process.finished_starting)
        assert not process.failure
        yield process


def forked(forking: Prepared, log: Path, home: str, **environ: str) -> Forked:
    arguments = ["--home", home, "--study-id", "1", "--executor", "local"]
    with log.open("ab") as output:
        worker = forking.fork(arguments, output, {"HPO_STORAGE": f"sqlite:///{home}/ledger.db"} | environ)
    assert worker is not None, forking.failure
    return worker


def test_it_ends_as_a_spawned_one_its_words_in_its_log(forking, tmp_path):
    worker = forked(forking, tmp_path / "log", str(tmp_path / "none"))
    assert worker.wait(120) == FAULT
    assert "ledger.db does not exist" in (tmp_path / "log").read_text()


@pytest.fixture
def waiting(forking, home, tmp_path) -> Iterator[Forked]:
    """A worker with nothing to train."""
    from hpo.ledger import Ledger

    home.create()
    ledger = Ledger(home.storage)
    worker = forked(forking, tmp_path / "log", str(home.root), OWN="its own")
    until(lambda: bool(_registered(ledger)))
    yield worker
    worker.kill()
    worker.wait(60)
    ledger.close()


def _registered(ledger) -> list[int]:
    from sqlalchemy import select

    from hpo.ledger.database.tables import workers

    with ledger.read() as connection:
        return [pid for (pid,) in connection.execute(select(workers.c.pid))]


def test_it_is_a_child_of_who_asked_with_a_session_and_name_of_its_own(forking, waiting):
    process = psutil.Process(waiting.pid)
    assert process.ppid() == os.getpid()
    assert os.getsid(waiting.pid) == waiting.pid
    assert Path(f"/proc/{waiting.pid}/comm").read_text() == "hpo-worker\n" and runs(process, "hpo.workers.worker")
    # The prepared process holds neither its log nor what it was asked by.
    inherited = {os.readlink(f"/proc/{waiting.pid}/fd/{fd}") for fd in ("1", "2")}
    assert len(inherited) == 1 and inherited.pop().endswith("/log")


def test_sigterm_lets_it_leave(waiting):
    waiting.terminate()
    assert waiting.wait(60) == 0


def test_sigkill_is_seen_as_its_end(waiting):
    waiting.kill()
    assert waiting.wait(60) == -signal.SIGKILL
    waiting.terminate()  # of one that has ended nobody is signalled


def test_a_dead_prepared_process_forks_nothing_and_says_so(tmp_path):
    with closing(Prepared()) as process:
        until(lambda: process.finished_starting)
        process._process.kill()
        with (tmp_path / "log").open("ab") as output:
            assert process.fork([], output, {}) is None
        assert "exit code -9" in process.failure


PROBE = "hpo.workers.lane_probe"


@pytest.fixture(scope="module")
def question(tmp_path_factory) -> str:
    """What lanes of a study may differ in."""
    home = Home(tmp_path_factory.mktemp("asked") / "home")
    spec = declare(request_of(home, reference=str(LANES)), None, workers=1).spec
    return json.dumps(
        {"spec": spec.to_json(), "home": str(home.root), "workers": 1, "share": 9, "widths": [], "worth": 0.0}
    )


def test_a_fork_answers_what_a_process_of_its_own_does(forking, question):
    said = forking.ask(PROBE, question, 120.0)
    assert said == ask(PROBE, question) and json.loads(said)["fields"] == ["model.dropout"]


def test_a_process_that_fails_or_is_too_slow_gives_no_answer(forking, question):
    for asked in (ask, forking.ask):
        with pytest.raises(NoAnswer, match="JSONDecodeError: Expecting value"):
            asked(PROBE, "what?")
        with pytest.raises(NoAnswer, match=r"it took more than 0\.001 s"):
            asked(PROBE, question, 0.001)
    until(lambda: not [one for one in psutil.Process().children() if runs(one, PROBE)])


def test_where_nothing_can_be_forked_a_process_is_asked(question):
    with closing(Prepared()) as process:
        until(lambda: process.finished_starting)
        process._process.kill()
        assert json.loads(process.ask(PROBE, question))["fields"] == ["model.dropout"]


def test_threads_or_cuda_are_not_forked(monkeypatch):
    import torch

    ending = threading.Event()
    thread = threading.Thread(target=ending.wait)
    thread.start()
    try:
        assert "has started threads" in prepared._unfit()
    finally:
        ending.set()
        thread.join()
    monkeypatch.setattr(
        prepared, "_OWN_THREADS", {p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm")}
    )
    assert prepared._unfit() == ""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "has initialised CUDA" in prepared._unfit()


def test_a_thread_that_ends_while_threads_are_listed_is_no_error():
    ending = threading.Event()

    def start_and_end():
        while not ending.is_set():
            short = [threading.Thread(target=lambda: None) for _ in range(20)]
            for thread in short:
                thread.start()
            for thread in short:
                thread.join()

    starting = threading.Thread(target=start_and_end)
    starting.start()
    try:
        reasons = {prepared._unfit() for _ in range(1000)}
    finally:
        ending.set()
        starting.join()
    assert all("has started threads" in reason for reason in reasons), "the thread that starts the others is one itself"


DRIVER = """
import sys, time
from hpo.workers.prepared import Prepared
process = Prepared()
while not process.finished_starting:
    time.sleep(0.02)
with open(sys.argv[1] + "/log", "ab") as output:
    worker = process.fork(["--home", sys.argv[1], "--study-id", "1", "--executor", "local"], output,
                          {"HPO_STORAGE": "sqlite:///" + sys.argv[1] + "/ledger.db"})
print(process._process.pid, worker.pid, flush=True)
time.sleep(600)
"""


def test_all_die_with_a_driver_that_is_killed(home):
    from hpo.ledger import Ledger

    Ledger(home.create().storage).close()
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(home.root)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
    driver.kill()
    driver.wait()
    driver.stdout.close()
    until(lambda: not any(map(psutil.pid_exists, pids)))


RANDOM = """
import os, sys
from hpo.workers import prepared, worker
def main():
    import numpy, random
    print(numpy.random.random(), random.random(), os.environ["OWN"], flush=True)
    return 0
worker.main = main
prepared.main()
"""


def test_each_draws_numbers_of_its_own_and_has_its_own_environment(forking, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "start", _started_as(RANDOM))
    with closing(Prepared()) as process:
        until(lambda: process.finished_starting)
        assert not process.failure
        for name in "ab":
            assert forked(process, tmp_path / name, str(tmp_path), OWN=name).wait(60) == 0
    drawn = [(tmp_path / name).read_text().split() for name in "ab"]
    assert [words[2] for words in drawn] == ["a", "b"]
    assert not {*drawn[0]} & {*drawn[1]}


def _started_as(code: str):
    def start(module: str, arguments, output, environ, descriptors):
        environ = os.environ | {"HPO_PARENT_PID": str(os.getpid())} | environ
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.Popen(command, stdout=output, stderr=output, pass_fds=descriptors, env=environ)

    return start


@pytest.mark.parametrize("early", [True, False], ids=["while it imports", "later"])
def test_one_that_is_stopped_is_ended_and_forks_nothing(monkeypatch, tmp_path, early):
    with closing(Prepared()) as process:
        if not early:
            until(lambda: process.finished_starting)
        assert process._process is not None
        child = psutil.Process(process._process.pid)
        child.suspend()
        monkeypatch.setattr(prepared, "_ANSWER", 0.5)
        until(lambda: process.finished_starting, 10)
        with (tmp_path / "log").open("ab") as output:
            assert process.fork([], output, {}) is None
        assert process.failure == "the process that workers are forked from does not answer"
        until(lambda: not psutil.pid_exists(child.pid) or child.status() == psutil.STATUS_ZOMBIE, 10)
