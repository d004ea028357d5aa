"""Failures that repeat: a task that fails in the same way again and again ends the study, and is said how to mend."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.engine import Connection, RowMapping

from hpo.errors import HpoError, UserError
from hpo.ledger.tables import events
from trainer.errors import TrainerError

MAX_EQUAL_FAILURES = 3  # in a row, with one and the same traceback
_HERE = Path(__file__).parents[2]
_NOT_A_STUDYS = (_HERE / "hpo", _HERE / "trainer", *map(Path, set(sysconfig.get_paths().values())))
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line .*\n(?:    .*\n)*', re.MULTILINE)
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")  # of an object: another one in every process
FORGIVEN = "failures_forgiven"  # the event of a resume after such an end


class Streak:
    """The failures in a row, in the order of tells, that share one traceback; trials below `forgiven` do not count."""

    def __init__(self, forgiven: int, rows: Iterable[RowMapping] = ()) -> None:
        self.forgiven = forgiven
        self.traces: list[str] = []
        for row in rows:
            self.note(row)

    def note(self, row: RowMapping) -> None:
        """Take in how a trial ended; once the streak is full it stays so."""
        if row["number"] < self.forgiven or self.full:
            return
        trace = {
            "user_error": row["traceback"] or row["error"],
            "bad_config": row["error"],
            "lost": (row["error"] or "").partition("; last:")[0],  # each by another pid
        }.get(row["outcome"])
        trace = _ADDRESS.sub("0x...", trace) if trace else None
        same = trace is not None and self.traces[-1:] == [trace]
        self.traces = [*self.traces, trace] if same and trace else [trace] if trace else []

    @property
    def full(self) -> bool:
        return len(self.traces) >= MAX_EQUAL_FAILURES

    def explain(self, resume: str) -> str:
        return f"{len(self.traces)} trials in a row failed in the same way:\n{own_part(self.traces[-1])}\n{resume}"


def place(error: BaseException) -> str:
    """`sine.py:31, in loss`: the innermost frame of the study's own code; empty where there is none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _studys(Path(frame.filename))]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}, in {own[-1].name}" if own else ""


@contextmanager
def own_code() -> Iterator[None]:
    """What the study's own code raises within becomes a UserError that says where."""
    try:
        yield
    except (HpoError, TrainerError):
        raise
    except Exception as error:
        if not (where := place(error)):
            raise
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error


def _studys(file: Path) -> bool:
    """Whether a study's code lies there: neither this platform's nor an installed library's."""
    if file.is_relative_to(_HERE / "studies"):
        return True
    return file.is_absolute() and not any(file.is_relative_to(one) for one in _NOT_A_STUDYS)


def own_part(trace: str) -> str:
    """A traceback without the frames of this package and the trainer, unless it is there that it ends."""
    frames = list(_FRAME.finditer(trace))
    for frame in reversed(frames[:-1]):
        if Path(frame["file"]).is_relative_to(_HERE / "hpo") or Path(frame["file"]).is_relative_to(_HERE / "trainer"):
            trace = trace[: frame.start()] + trace[frame.end() :]
    return trace.rstrip()


def forgiven(connection: Connection, study_id: int) -> int:
    """The number of the first trial whose failure counts: the user has resumed the study after those before it."""
    mine = (events.c.study_id == study_id) & events.c.trial_id.is_(None) & (events.c.kind == FORGIVEN)
    fields = connection.execute(select(events.c.fields).where(mine).order_by(events.c.id.desc()).limit(1)).scalar()
    return fields["first"] if fields else 0
