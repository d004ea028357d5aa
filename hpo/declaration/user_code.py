"""Finds the frames of a traceback that are the study's own code."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpo.errors import HpoError, UserError
from trainer.errors import TrainerError, is_stop

_HERE = Path(__file__).parents[2]
_NOT_A_STUDYS = (_HERE / "hpo", _HERE / "trainer", *map(Path, set(sysconfig.get_paths().values())))
_OF_PLATFORM = re.compile(r"(trainer|hpo)\.errors\.\w+: ")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line .*\n(?:    .*\n)*', re.MULTILINE)


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
    except BaseException as error:
        if is_stop(error) or not (where := place(error)):
            raise
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error


def _studys(file: Path) -> bool:
    """Whether a study's code lies there: neither this platform's nor an installed library's."""
    if file.is_relative_to(_HERE / "studies"):
        return True
    return file.is_absolute() and not any(file.is_relative_to(one) for one in _NOT_A_STUDYS)


def own_part(trace: str) -> str:
    """A traceback without the frames of this package and the trainer, unless it is there that it ends, by an error that
    is none of theirs: a sentence of the platform's says what to do, and where in the study the frame above it is."""
    frames = list(_FRAME.finditer(trace))
    of_platform = _OF_PLATFORM.match(trace.rstrip().rpartition("\n")[2]) is not None and len(frames) > 1
    for frame in reversed(frames if of_platform else frames[:-1]):
        if Path(frame["file"]).is_relative_to(_HERE / "hpo") or Path(frame["file"]).is_relative_to(_HERE / "trainer"):
            trace = trace[: frame.start()] + trace[frame.end() :]
    return trace.rstrip()
