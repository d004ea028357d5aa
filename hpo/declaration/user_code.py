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


def frame(error: BaseException) -> str:
    """Returns the innermost frame of the study's own code, `sine.py:31, in loss`; empty if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _studys(Path(frame.filename))]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""


@contextmanager
def own_code() -> Iterator[None]:
    """Converts an error of the study's own code within the block to a UserError that names its line."""
    try:
        yield
    except (HpoError, TrainerError):
        raise
    except BaseException as error:
        if is_stop(error) or not (where := frame(error)):
            raise
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error


def _studys(file: Path) -> bool:
    """Returns whether the file is a study's code: neither this platform's nor an installed library's."""
    if file.is_relative_to(_HERE / "studies"):
        return True
    return file.is_absolute() and not any(file.is_relative_to(root) for root in _NOT_A_STUDYS)


def own_part(trace: str) -> str:
    """Returns a traceback without the frames of this package and the trainer.

    It keeps them if another error ends it there. A message of the platform says what to do, and the frame above it is
    the line in the study.
    """
    frames = list(_FRAME.finditer(trace))
    of_platform = _OF_PLATFORM.match(trace.rstrip().rpartition("\n")[2]) is not None and len(frames) > 1
    for frame in reversed(frames if of_platform else frames[:-1]):
        if Path(frame["file"]).is_relative_to(_HERE / "hpo") or Path(frame["file"]).is_relative_to(_HERE / "trainer"):
            trace = trace[: frame.start()] + trace[frame.end() :]
    return trace.rstrip()
