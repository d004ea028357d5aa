"""Defines named points where a test can make this process die, stop or fail.

    HPO_TESTING=1 HPO_FAILPOINTS="checkpoint.before_rename=kill@3;worker.after_claim=raise:ENOSPC@1"

At its n-th passing (`@n`, from 1; by default the first) `kill` sends SIGKILL and `stop` SIGSTOP to this process,
`raise:NAME` raises the OSError of that errno. With HPO_FAILPOINTS_FIRED=DIR a point fires once over all processes:
the process in which it fires leaves DIR/name. Without HPO_TESTING=1, read once at import, a point does nothing.
"""

from __future__ import annotations

import errno
import os
import signal

NAMES = (
    "driver.after_ask",
    "driver.before_ask_commit",
    "driver.after_tell",
    "driver.after_thaw",
    "driver.after_retire",
    "worker.after_claim",
    "worker.before_report_commit",
    "worker.after_report_commit",
    "worker.before_finish",
    "worker.after_finish",
    "checkpoint.after_copy",
    "checkpoint.after_files",
    "checkpoint.before_rename",
    "checkpoint.after_rename",
    "checkpoint.before_commit",
    "artifact.after_store",
    "retention.after_row",
    "retention.after_files",
    "reconcile.after_rows",
    "removal.after_set_aside",
    "removal.after_mark",
    "removal.after_runs",
    "removal.after_files",
    "removal.after_trial_mark",
    "removal.after_trial_runs",
    "removal.after_trial_files",
    "mirror.after_create_run",
    "mirror.after_send",
    "mirror.after_study",
    "mirror.after_cursor",
    "mirror.after_append",
    "promote.after_model",
    "promote.after_version",
    "promote.after_event",
    "promote.after_undone_alias",
    "alerts.after_write",
    "alerts.after_send",
)


def _parse(text: str) -> dict[str, tuple[str, int]]:
    """Parses `"a=kill@3;b=raise:EIO"` into `{"a": ("kill", 3), "b": ("raise:EIO", 1)}`."""
    points = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, rest = part.partition("=")
        action, _, hit = rest.partition("@")
        code = action.removeprefix("raise:")
        if name not in NAMES or not (action in ("kill", "stop") or (code != action and hasattr(errno, code))):
            raise ValueError(f"HPO_FAILPOINTS has {part!r}: give name=kill|stop|raise:ERRNO[@n], name one of {NAMES}.")
        points[name] = (action, int(hit or 1))
    return points


_TESTING = os.environ.get("HPO_TESTING") == "1"
_POINTS = _parse(os.environ.get("HPO_FAILPOINTS", "")) if _TESTING else {}
_passed: dict[str, int] = {}  # how often each point was passed; kept only while testing


def failpoint(name: str) -> None:
    """Acts on HPO_FAILPOINTS for `name` at this passing of it; does nothing outside tests."""
    if not _TESTING:
        return
    assert name in NAMES, name
    _passed[name] = _passed.get(name, 0) + 1
    action, hit = _POINTS.get(name, ("", 0))
    if _passed[name] != hit or not _first_of_all(name):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        code = getattr(errno, action.removeprefix("raise:"))
        raise OSError(code, os.strerror(code), f"failpoint {name}")


def _first_of_all(name: str) -> bool:
    directory = os.environ.get("HPO_FAILPOINTS_FIRED")
    if directory is None:
        return True
    try:
        os.close(os.open(os.path.join(directory, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
