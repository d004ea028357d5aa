"""`hpo watch`: beside a study that another process really runs, through a terminal and through a pipe."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from fcntl import ioctl
from pathlib import Path

import pytest
from crafted import open_crafted, put_trial
from sqlalchemy import select as rows_of
from sqlalchemy import update
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.ledger import Ledger
from hpo.ledger.database import tables
from hpo.storage.home import Home

STUDY = """
import time
from pathlib import Path
import hpo

@hpo.study(space={"x": hpo.Float(0.0, 1.0)}, minimize="loss", num_epochs=2, strategy="none")
def slow(trial):
    for epoch in range(1, 3):
        while not Path(__file__).with_name("go").exists():
            time.sleep(0.05)
        trial.report(epoch, {"loss": trial.params.x / epoch})
"""


def hpo(*words: str, home: Home):
    return CliRunner().invoke(app, [*words, "--home", str(home.root)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(STUDY)
    return tmp_path / "slow.py"


@contextmanager
def started(*words: str, home: Home) -> Iterator[subprocess.Popen]:
    """`hpo` with these words as a process, which does not outlive the block."""
    line = [sys.executable, "-m", "hpo", *words, "--home", str(home.root)]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def driver(file: Path, home: Home, process: None) -> Iterator[subprocess.Popen]:
    """A study of four trials whose reports wait for the file `go`."""
    with started("run", "--study", str(file), "--trials", "4", "--executor", "inline", home=home) as driving:
        while "slow" not in hpo("status", "--study", "slow", home=home).stdout:
            assert driving.poll() is None
            time.sleep(0.1)
        yield driving


class Terminal:
    """`hpo watch` at a terminal of 80 columns."""

    def __init__(self, home: Home, kind: str) -> None:
        ours, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": kind}
        line = [sys.executable, "-m", "hpo", "watch", "--study", "slow", "--home", str(home.root)]
        self.process = subprocess.Popen(line, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        self.fd, self.seen = ours, ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)

    def until(self, expected: str, seconds: float = 90.0) -> str:
        end = time.monotonic() + seconds
        while expected not in self.plain:
            assert time.monotonic() < end, f"{expected!r} is not in {self.plain!r}"
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:  # a terminal whose other end is closed
                    assert expected in self.plain, f"it ended without {expected!r}: {self.plain!r}"
        return self.plain

    @property
    def plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen)


@pytest.mark.whole
def test_a_running_study_at_a_terminal(driver, file, home):
    with Terminal(home, "xterm") as watching:
        shown = watching.until("running")
        assert "0/4 trials" in shown and "\x1b[" in watching.seen
        assert all(len(line) <= 80 for line in shown.replace("\r", "\n").split("\n"))
        driver.send_signal(signal.SIGKILL)
        watching.until("nobody drives it: `hpo resume --study slow")
        with started("resume", "--study", "slow", home=home) as resumed:
            watching.until("the study is driven again.")
            file.with_name("go").touch()
            watching.until("slow: complete, 4 of 4 trials ended")
            assert watching.process.wait(60) == 0
            assert resumed.wait(120) == 0


@pytest.mark.whole
def test_ctrl_c_leaves_the_study_alone(driver, file, home):
    with Terminal(home, "dumb") as watching:
        shown = watching.until("4 trials")
        ledger = Ledger(home.storage, create=False)
        with closing(ledger), ledger.read() as connection:
            held = connection.execute(rows_of(tables.leases.c.name, tables.leases.c.pid)).all()
        assert watching.process.pid not in {pid for _, pid in held}, "it takes no lease"
        watching.process.send_signal(signal.SIGINT)
        shown = watching.until("the study goes on without being watched.")
        assert watching.process.wait(60) == 130
    assert "\x1b" not in shown, "a terminal that can nothing gets lines"
    file.with_name("go").touch()
    assert driver.wait(120) == 0
    assert json.loads(hpo("status", "--study", "slow", "--json", home=home).stdout)["trials"]["complete"] == 4


def test_once_and_studies_that_are_over(home):
    ledger = open_crafted(home.create().root / "ledger.db")
    put_trial(ledger, 0, "complete", (0.1, 0.25))
    ledger.close()
    said = hpo("watch", "--once", home=home)
    assert said.exit_code == 0 and "nobody drives it: `hpo resume --study crafted --home" in said.stdout
    for state, code in (("complete", 0), ("stopped", 1)):
        ledger = Ledger(home.storage)
        with closing(ledger), ledger.write() as connection:
            connection.execute(update(tables.studies).values(state=state))
        said = hpo("watch", home=home)
        assert (said.exit_code, f"crafted: {state}, 1 of" in said.stdout) == (code, True), said.output
    assert hpo("watch", "--study", "nobody", home=home).exit_code == 2
