"""What a signal says: trials wait for a resume, or only MLflow is behind."""

from __future__ import annotations

import os
import signal

import pytest

from hpo.driver.signals import Signals


class Asked:
    """A driver that keeps what it was asked."""

    def __init__(self, *, ended: bool = False) -> None:
        self.stops, self.ended = 0, ended

    def all_ended(self) -> bool:
        return self.ended

    def request_stop(self) -> None:
        self.stops += 1


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        (False, "stopping: trials are saved and wait for `hpo resume`; once more stops at once."),
        (True, "trials have ended and MLflow takes the rest; once more leaves that to `hpo resume`."),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_says_what_is_left(capfd, number, trained, said):
    driver, before = Asked(), signal.getsignal(number)
    with Signals(driver, lambda: None, "hpo resume") as signals:  # type: ignore[arg-type]
        signals.trained = trained
        os.kill(os.getpid(), number)
    at_once, later = capfd.readouterr().err.strip(), signals.untold()
    assert (at_once, later) == ((said, "") if trained else ("", said)), "the view says it, with what is waited for"
    assert signals.untold() == "" and driver.stops == 1 and signals.first == number
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(("out", "err", "at_once"), [(True, True, 0), (False, False, 0), (False, True, 1)])
def test_who_looks_at_stderr_alone_is_told_at_once(capfd, monkeypatch, out, err, at_once):
    monkeypatch.setattr("sys.stdout.isatty", lambda: out)
    monkeypatch.setattr("sys.stderr.isatty", lambda: err)
    with Signals(Asked(), lambda: None, "hpo resume") as signals:  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err.count("stopping: trials are saved") == at_once
    assert signals.untold().startswith("stopping: trials are saved")


def test_once_all_trials_have_ended_none_is_said_to_wait(capfd):
    with Signals(Asked(ended=True), lambda: None, "hpo resume") as signals:  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGINT)
    said = capfd.readouterr().err + signals.untold()
    assert "all trials have ended, and the study with them" in said and "wait" not in said
