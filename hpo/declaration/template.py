"""Writes the study file of `hpo init`: hpo/declaration/my_study.py under another name."""

from __future__ import annotations

import keyword
import re
from importlib.util import find_spec
from pathlib import Path

from hpo.declaration.loading import shipped
from hpo.declaration.naming import check_name
from hpo.door import step
from hpo.errors import UserError

_TEMPLATE = Path(__file__).with_name("my_study.py")


def write(name: str, directory: Path) -> Path:
    """Writes NAME.py, a study called NAME, into `directory`.

    Raises UserError, writing nothing, if that is impossible.
    """
    file = directory / f"{_checked(name)}.py"
    if not file.exists() and _importable(name):
        raise UserError(f"{name!r} is a module already, which {file.name} would hide: give another name.")
    text = _TEMPLATE.read_text(encoding="utf-8").replace(_TEMPLATE.stem, name)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError as error:
        raise UserError(f"{file.name} is here already and stays as it is: give another name.") from error
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}): choose another directory.") from error
    return file


def _checked(name: str) -> str:
    """Returns `name` if it is valid for a module, and for a study, and not yet taken."""
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
        likely = re.sub(r"\W+", "_", name.removesuffix(".py"), flags=re.ASCII).strip("_")
        valid = likely.isidentifier() and not keyword.iskeyword(likely)
        raise UserError(
            f"{name!r} is not a Python module name: give letters, digits and underscores, such as "
            f"{likely if valid else 'my_study'!r}."
        )
    if name in shipped():
        raise UserError(f"{name!r} is a study that comes along (`{step(f'run --study {name}')}`): give another name.")
    return check_name(name)


def _importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return True
