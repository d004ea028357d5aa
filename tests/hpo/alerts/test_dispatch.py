"""Alerts out of the ledger: each event once by its id, whoever is killed, and whatever a server does."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from mirrored import ME, Made
from receivers import Receiver, receiver, refusing, silent
from sqlalchemy import update

from hpo.alerts import dispatch, rules, senders
from hpo.alerts.dispatch import PER_MINUTE, Dispatcher
from hpo.alerts.process import Alerting
from hpo.clock import FakeClock, SystemClock
from hpo.errors import Busy
from hpo.ledger import leases, transactions
from hpo.ledger.database import tables
from hpo.ledger.process_id import Process
from hpo.ledger.views import alerts as alert_queries

ALL = "end,failure,lost,no_progress,disk=100%,best,target=0.15,spike,nan,oom"


@pytest.fixture
def made(home):
    study = Made(home)
    yield study
    study.ledger.close()


class Telling:
    """The dispatcher of a study in this process, by a clock that is moved by hand."""

    def __init__(self, made: Made, *alerts: str) -> None:
        self.made, self.clock = made, FakeClock(1000.0)
        declared = rules.parse_all(alerts)
        targets = [rule.target for rule in declared]
        made.ledger.transact(lambda connection: alert_queries.begin(connection, made.id, targets))
        self.lease = leases.acquire(made.ledger, f"alerts:{made.id}", "s", ME, self.clock, 5)
        self.dispatcher = Dispatcher(made.ledger, "s", made.home, declared, self.lease, self.clock)

    def look(self, *, leaving: bool = False) -> int:
        """Look and send once; how many wait then."""
        self.dispatcher.look(leaving=leaving)
        return self.dispatcher.deliver(leaving=leaving)


@pytest.fixture
def hook(tmp_path) -> Callable[..., str]:
    """Writes a URL into a file; the rule that names it."""

    def write(url: str, on: str = ALL, name: str = "url") -> str:
        (tmp_path / name).write_text(url)
        return f"webhook:@{tmp_path / name} on {on}"

    return write


@pytest.fixture
def server() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


def names(made: Made, server: Receiver) -> list[str]:
    """The events that a server got, by their names within the study."""
    assert all(one.startswith(made.uid + "/") for one in server.ids)
    return [one.removeprefix(made.uid + "/") for one in server.ids]


def record(made: Made, taken, kind: str, uid: str, **fields) -> None:
    made.ledger.transact(lambda connection: transactions.record(connection, taken, kind, fields, uid))


def ended(made: Made, kind: str, value: float | None = None, error: str = "") -> None:
    made.ask()
    made.finish(made.claim(), kind, 1, None if value is None else [value], error)


def test_each_thing_that_happens_is_told_under_its_own_name(made, hook, server):
    telling = Telling(made, hook(server.url))
    ended(made, "complete", 0.5)
    ended(made, "user_error", error="ZeroDivisionError at task.py:7")
    ended(made, "complete", 0.7)
    telling.look()
    assert names(made, server) == ["trial/1/failure", "best/0"]
    assert server.got[0].body["text"] == "ZeroDivisionError at task.py:7" and server.got[0].body["trial"] == 1
    assert server.got[1].body["values"] == {"val/loss": 0.5}
    made.ask(5)
    spiking, nan, oom, lost, best = (made.claim() for _ in range(5))
    record(made, spiking, "loss_jumped", "jump-1", step=40, loss=9.5, action="rolled back to step 20")
    made.report(nan, 3, {"train/loss": float("nan"), "val/loss": 1.0})
    record(made, oom, "out_of_memory", "oom-1", step=0, micro_batch_size=16)
    made.ledger.transact(lambda c: transactions.lose(c, lost.trial_id, lost.fence, "killed by signal 9"))
    made.finish(nan, "nonfinite", 3, error="the loss is NaN")
    made.finish(oom, "out_of_memory", 0, error="16 GB are not enough")
    made.finish(best, "complete", 5, [0.1])
    server.got.clear()
    telling.look()
    expected = {
        "loss_jumped/jump-1", "trial/4/nan", "out_of_memory/oom-1", "trial/5/oom",
        f"worker_lost/{lost.trial_id}.1.worker_lost", "best/7", "target/0.15",
    }  # fmt: skip
    assert set(names(made, server)) == expected and len(server.got) == len(expected)
    kinds = {got.body["event"] for got in server.got}
    assert kinds == {"spike", "nan", "oom", "lost", "best", "target"}
    server.got.clear()
    made.artifact(spiking, "late.txt", "x")  # a change that is no news
    telling.clock.now += 60
    assert telling.look() == 0 and server.got == []


def test_steps_skipped_under_fp16_are_no_news(made, hook, server):
    telling = Telling(made, hook(server.url, "nan"))
    made.ask(1, train={"precision": "fp16"})
    made.ask(1, train={"precision": "fp32"})
    for taken in (made.claim(), made.claim()):
        made.report(taken, 10, {"train/skipped_steps": 3.0})
        made.report(taken, 20, {"train/skipped_steps": 4.0})
    telling.look()
    assert names(made, server) == ["trial/1/nan"]
    assert server.got[0].body["text"] == "3 steps were skipped up to step 10."


def test_a_target_hears_only_of_what_it_asked_for(made, hook, server):
    with receiver() as other:
        telling = Telling(made, hook(server.url, "failure"), hook(other.url, "best", "other"))
        ended(made, "complete", 0.5)
        ended(made, "bad_config", error="no such optimizer")
        telling.look()
        assert (names(made, server), names(made, other)) == (["trial/1/failure"], ["best/0"])


def test_the_end_of_a_study_is_told_once_however_often_it_is_looked_at(made, hook, server):
    rule = hook(server.url, "end")
    telling = Telling(made, rule)
    ended(made, "complete", 0.5)
    made.end()
    telling.look()
    assert server.got == []  # its driver has yet to leave
    for _ in range(2):
        telling.look(leaving=True)
    telling.lease.release()
    telling = Telling(made, rule)
    telling.look(leaving=True)
    assert names(made, server) == ["end/complete/1"]
    assert server.got[0].body["text"] == "The best is trial 0, val/loss 0.5."
    with made.ledger.write() as connection:  # more trials are asked for
        connection.execute(update(tables.studies).values(state="open"))
    ended(made, "complete", 0.4)
    made.end()
    telling.look(leaving=True)
    assert names(made, server)[1:] == ["end/complete/2"]


def test_no_progress_and_a_full_disk_are_told_once(made, hook, server, monkeypatch):
    driver = leases.acquire(made.ledger, f"driver:{made.id}", "s", ME, FakeClock(), 5)
    telling = Telling(made, hook(server.url, "no_progress=10m,disk=80%"))
    free = [30]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=100, free=free[0]))
    made.ask()
    taken = made.claim()
    telling.look()
    for _ in range(3):
        telling.clock.now += 300
        telling.look()
    total = made.ledger.look(lambda connection: alert_queries.revisions(connection, made.id))
    assert names(made, server) == [f"silence/{total}"]
    free[0] = 19
    made.report(taken, 1, {"val/loss": 1.0})
    for _ in range(3):
        telling.clock.now += 31
        telling.look()
    assert names(made, server)[1:] == [f"disk/{driver.fence}"]
    assert server.got[1].body["title"] == "the disk of study s is 81% full"


def test_the_quota_of_checkpoints_is_told(made, hook, server):
    driver = leases.acquire(made.ledger, f"driver:{made.id}", "s", ME, FakeClock(), 5)
    telling = Telling(made, hook(server.url, "disk=99.9999%"))
    made.ask()
    taken = made.claim()
    saved = made.checkpoint(taken, 1)
    made.report(taken, 1, {"val/loss": 1.0}, checkpoint=saved)
    environment = tables.studies.c.environment
    with made.ledger.write() as connection:
        row = connection.execute(tables.studies.select()).mappings().one()
        connection.execute(update(tables.studies).values({environment: row["environment"] | {"max_bytes": saved.size}}))
    telling.look()
    assert names(made, server) == [f"quota/{driver.fence}"]


def test_what_came_before_is_not_told(made, hook, server):
    ended(made, "user_error", error="old")
    ended(made, "complete", 0.5)
    telling = Telling(made, hook(server.url))
    telling.look()
    made.ask(1)
    ended(made, "complete", 0.9)
    telling.look()
    assert server.got == []


def test_what_is_not_taken_is_sent_until_it_is(made, hook):
    """A server that answers 500, then 429 with a wish, then takes it: the same id each time, at growing distances."""
    answers = [(500, {}), (500, {}), (429, {"Retry-After": "100"}), (200, {})]
    with receiver(lambda n: answers[n]) as server:
        telling = Telling(made, hook(server.url, "failure"))
        ended(made, "user_error", error="bug")
        times = []
        while telling.look():
            if len(server.got) > len(times):
                times.append(telling.clock.now)
            telling.clock.now += 1
            assert telling.clock.now < 2000
        times.append(telling.clock.now)
    assert names(made, server) == ["trial/0/failure"] * 4
    assert [round(b - a) for a, b in itertools.pairwise(times)] == [2, 4, 100]


def test_a_server_that_hangs_holds_up_no_other(made, hook, server, monkeypatch):
    monkeypatch.setattr(senders, "TIMEOUT", 30.0)
    monkeypatch.setattr(dispatch, "DEADLINE", 0.5)
    with silent() as url:
        hanging, gone = hook(url, "failure", "hanging"), hook(refusing(), "failure", "gone")
        telling = Telling(made, hanging, gone, hook(server.url, "failure"))
        ended(made, "user_error", error="bug")
        assert telling.look() == 2
    assert names(made, server) == ["trial/0/failure"]
    found = made.ledger.look(lambda connection: alert_queries.troubles(connection, made.id))
    why = {Path(target.partition("@")[2]).name: trouble.error for target, trouble in found.items()}
    assert why == {
        "hanging": "it does not answer within 0.5 seconds",
        "gone": "it cannot be reached (Connection refused)",
    }
    assert all(trouble.waiting == 1 for trouble in found.values())
    # Who is leaving tries once more at once.
    telling.dispatcher.hurry()
    with receiver() as back:
        hook(back.url, "failure", "hanging")
        hook(back.url, "failure", "gone")
        assert telling.look(leaving=True) == 0
    assert names(made, back) == ["trial/0/failure"] * 2


def test_what_is_refused_for_good_does_not_stop_the_rest(made, hook):
    with receiver(lambda n: (400, {}) if n == 0 else (200, {})) as server:
        telling = Telling(made, hook(server.url, "failure"))
        ended(made, "user_error", error="a")
        ended(made, "user_error", error="b")
        assert telling.look() == 0
    assert names(made, server) == ["trial/0/failure", "trial/1/failure"]
    [(_target, trouble)] = made.ledger.look(lambda c: alert_queries.troubles(c, made.id)).items()
    assert trouble.describe("x") == "1 alert to x was refused for good: it answers 400: no."


def test_no_more_than_ten_a_minute_and_the_rest_is_summed_up(made, hook, server):
    telling = Telling(made, hook(server.url, "failure"))
    for _ in range(25):
        ended(made, "user_error", error="bug")
    assert telling.look() == 0
    assert len(server.got) == PER_MINUTE
    last = server.got[-1].body
    single = [got.id for got in server.got[:-1]]
    assert single + last["events"] == [f"{made.uid}/trial/{n}/failure" for n in range(25)]
    assert last["title"] == "study s: 16 events (16 failure)" and len(last["text"].splitlines()) == 16
    ended(made, "user_error", error="bug")
    assert telling.look() == 1 and len(server.got) == PER_MINUTE
    telling.clock.now += 61
    assert telling.look() == 0 and server.ids[-1] == f"{made.uid}/trial/25/failure"
    for _ in range(30):
        ended(made, "user_error", error="bug")
    telling.look()
    before = len(server.got)
    ended(made, "user_error", error="the last")
    assert telling.look(leaving=True) == 0 and len(server.got) == before + 1  # nobody is there to send it later


def test_a_message_that_sums_up_is_the_same_when_sent_again(made, hook):
    """More has happened between the two tries; it goes with another message."""
    fails = {PER_MINUTE - 1}
    with receiver(lambda n: (500, {}) if n in fails else (200, {})) as server:
        telling = Telling(made, hook(server.url, "failure"))
        for _ in range(15):
            ended(made, "user_error", error="bug")
        assert telling.look() == 6
        ended(made, "user_error", error="bug")
        telling.clock.now += 61
        assert telling.look() == 0
    first, again, other = server.got[PER_MINUTE - 1 :]
    assert first == again and len(first.body["events"]) == 6
    assert other.id == f"{made.uid}/trial/15/failure"


def test_what_waits_for_a_target_that_is_gone_is_dropped(made, hook, server):
    rule = hook(refusing(), "failure")
    telling = Telling(made, rule)
    ended(made, "user_error", error="bug")
    assert telling.look() == 1
    telling.lease.release()
    telling = Telling(made, hook(server.url, "failure", "other"))
    assert telling.look() == 0 and server.got == []
    assert made.ledger.look(lambda connection: alert_queries.troubles(connection, made.id)) == {}


# The process


def alerts_process(made: Made, **environ: str) -> subprocess.Popen[bytes]:
    words = ["-m", "hpo.alerts.process", "--study", "s", "--home", str(made.home.root)]
    with (made.home.root / "alerts.log").open("ab") as log:
        return subprocess.Popen([sys.executable, *words], env=os.environ | environ, stdout=log, stderr=log)


def declare(made: Made, *alerts: str) -> None:
    """As `hpo run --alert` does."""
    with made.ledger.write() as connection:
        row = connection.execute(tables.studies.select()).mappings().one()
        values = {"environment": row["environment"] | {"alerts": list(alerts)}}
        connection.execute(update(tables.studies).values(**values))
        alert_queries.begin(connection, made.id, [rule.target for rule in rules.parse_all(alerts)])


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("point", ["alerts.after_send", "alerts.after_write"])
def test_killed_at_any_event_every_id_arrives_and_none_is_new(made, hook, server, point):
    """Killed again and again, between writing down and sending, and between the answer and the mark."""
    declare(made, hook(server.url, "failure,best,end"))
    for n in range(3):
        ended(made, "user_error", error="bug")
        ended(made, "complete", 0.5 - 0.1 * n)
    made.end()
    expected = {f"trial/{n}/failure" for n in (0, 2, 4)} | {"best/5", "end/complete/6"}
    kills = 0
    while True:
        testing = {"HPO_TESTING": "1", "HPO_FAILPOINTS": f"{point}=kill@1"}
        process = alerts_process(made, **(testing if kills < 2 else {}))
        code = leave(process, made)
        kills += code == -signal.SIGKILL
        if code == 0:
            break
        assert code == -signal.SIGKILL, (made.home.root / "alerts.log").read_text()
    assert kills >= 1
    assert set(names(made, server)) == expected
    assert len(server.got) == len(expected) + (kills if point == "alerts.after_send" else 0)
    assert made.ledger.look(lambda connection: alert_queries.waiting(connection, made.id)) == []
    assert made.ledger.look(lambda connection: leases.holder(connection, f"alerts:{made.id}")) is None


def leave(process: subprocess.Popen[bytes], made: Made) -> int:
    """Ask it to leave once it holds its lease, unless it dies before."""
    deadline = time.monotonic() + 60
    while process.poll() is None:
        row = made.ledger.look(lambda connection: leases.holder(connection, f"alerts:{made.id}"))
        if row is not None and row.pid == process.pid:
            process.terminate()
            return process.wait(60)
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process.returncode


def killed_driver(made: Made, alerts: list[str], tmp_path: Path) -> None:
    """A driver with a process that sends, killed once that has its lease."""
    script = tmp_path / "driver.py"
    script.write_text(f"""
import sys, time
from hpo.alerts.process import Alerting
from hpo.clock import SystemClock
from hpo.ledger import Ledger, leases
from hpo.ledger.process_id import Process
from hpo.storage.home import Home
home = Home.at({str(made.home.root)!r})
ledger = Ledger(home.storage, create=False)
leases.acquire(ledger, "driver:{made.id}", "s", Process.current(), SystemClock(), 5)
alerting = Alerting.of(home, ledger, "s", {alerts!r})
print(alerting._process.process.pid, flush=True)
time.sleep(1000)
""")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environ)
    assert driver.stdout is not None
    sender, deadline = int(driver.stdout.readline()), time.monotonic() + 60
    while (row := made.ledger.look(lambda c: leases.holder(c, f"alerts:{made.id}"))) is None or row.pid != sender:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.kill()
    driver.wait()
    driver.stdout.close()


@pytest.mark.usefixtures("process")
def test_a_driver_that_is_killed_is_told_of_by_those_it_leaves(made, hook, server, tmp_path):
    """The process that sends outlives its driver by as long as it takes to say so."""
    declare(made, alert := hook(server.url, "lost,end"))
    killed_driver(made, [alert], tmp_path)
    deadline = time.monotonic() + 60
    while made.ledger.look(lambda connection: leases.holder(connection, f"alerts:{made.id}")) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert names(made, server) == ["driver/1"]
    assert server.got[0].body["title"] == "the driver of study s was lost"
    assert f"`hpo resume --study s --home {made.home.root}` goes on" in server.got[0].body["text"]


@pytest.mark.usefixtures("process")
def test_a_run_that_begins_at_once_tells_of_its_own_end(made, hook, server, tmp_path):
    """What the killed run has left still holds on to a target that takes nothing, and has no word on the new run."""
    alerts = [hook(server.url, "lost,end"), f"slack:@{tmp_path / 'not-there'} on lost"]
    declare(made, *alerts)
    killed_driver(made, alerts, tmp_path)
    lease = leases.acquire(made.ledger, f"driver:{made.id}", "s", Process.current(), SystemClock(), 5)
    alerting = Alerting.of(made.home, made.ledger, "s", alerts)
    assert alerting is not None
    with made.ledger.write() as connection:
        connection.execute(update(tables.studies).values(state="complete"))
    alerting.finish()
    lease.release()
    told = [got.id.partition("/")[2] for got in server.got]
    assert sorted(told) == ["driver/1", "end/complete/0"]


def test_one_process_at_a_time_sends(made, hook, server):
    """One that was taken for dead and goes on after all writes nothing down."""
    telling = Telling(made, hook(server.url, "failure"))
    other = Process("another", "elsewhere", 1, "x")
    with made.ledger.write() as connection:
        connection.execute(update(tables.leases).values(owner=other.id, fence=tables.leases.c.fence + 1))
    ended(made, "user_error", error="bug")
    with pytest.raises(Busy):
        telling.look()
    assert server.got == []
