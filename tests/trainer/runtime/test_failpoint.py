"""Points that fail when a test asks for it, and only then."""

from __future__ import annotations

import errno
import os
import re
import signal
from pathlib import Path

import pytest

from trainer.runtime import failpoint as module
from trainer.runtime.failpoint import NAMES, _parse, failpoint


@pytest.fixture
def arm(monkeypatch):
    def arm(text: str, testing: bool = True) -> None:
        monkeypatch.setattr(module, "_TESTING", testing)
        monkeypatch.setattr(module, "_POINTS", _parse(text))
        monkeypatch.setattr(module, "_passed", {})

    return arm


def test_it_raises_at_the_passing_asked_for(arm):
    arm("checkpoint.after_files=raise:ENOSPC@2; worker.after_claim=raise:EIO")
    failpoint("checkpoint.after_files")
    with pytest.raises(OSError) as error:
        failpoint("checkpoint.after_files")
    assert error.value.errno == errno.ENOSPC
    failpoint("checkpoint.after_files")
    with pytest.raises(OSError):
        failpoint("worker.after_claim")
    assert module._passed == {"checkpoint.after_files": 3, "worker.after_claim": 1}


@pytest.mark.parametrize(("action", "status"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_it_signals_its_own_process(action, status, arm):
    arm(f"driver.after_ask={action}")
    child = os.fork()
    if child == 0:
        failpoint("driver.after_ask")
        os._exit(0)
    _, found = os.waitpid(child, os.WUNTRACED)
    if action == "stop":
        assert os.WIFSTOPPED(found)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    else:
        assert os.waitstatus_to_exitcode(found) == -status


def test_nothing_happens_unless_testing(arm):
    arm("driver.after_ask=kill", testing=False)
    failpoint("driver.after_ask")
    assert module._passed == {}


@pytest.mark.parametrize("text", ["nowhere=kill", "driver.after_ask=explode", "driver.after_ask=raise:NOSUCH", "x"])
def test_a_misspelt_failpoint_is_refused(text):
    with pytest.raises(ValueError, match="HPO_FAILPOINTS has"):
        _parse(text)


def test_every_name_stands_in_the_code_and_every_point_has_a_name():
    root = Path(module.__file__).parents[2]
    code = "\n".join(file.read_text() for part in ("hpo", "trainer") for file in (root / part).rglob("*.py"))
    used = set(re.findall(r'failpoint\("([a-z._]+)"\)', code))
    assert used == set(NAMES)
