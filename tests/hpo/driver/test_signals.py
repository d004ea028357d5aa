"""What a signal says: trials wait for a resume, or only MLflow is behind."""

from __future__ import annotations

import os
import signal

import pytest

from hpo.driver.signals import Signals


class Asked:
    """A driver that keeps what it was asked."""

    def __init__(self) -> None:
        self.stops = 0

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
    assert capfd.readouterr().err.strip() == said and driver.stops == 1 and signals.first == number
    assert signal.getsignal(number) == before
