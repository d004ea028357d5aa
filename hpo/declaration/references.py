"""Finds a study by its reference, the text by which any process can load it, and finds a study's reference."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from hpo.declaration import imported
from hpo.declaration.command import file as command_file
from hpo.declaration.loading import file_of, load_module
from hpo.declaration.study import Study
from hpo.door import NOTEBOOK, option
from hpo.errors import StudyError
from hpo.text import near
from trainer.files.paths import expanded

_in_notebook: dict[str, Study] = {}


def load(reference: str) -> Study:
    """Returns the study that a reference names.

    It is `atft`, `path/to/my_study.py` or either with `:NAME`, the attribute (STUDY), or `train.yaml`, the file of a
    command. Raises StudyError in one sentence: an unknown name with similar ones, a file that raises with its line, no
    such attribute.
    """
    if reference.startswith(f"{NOTEBOOK}:"):
        return _of_notebook(reference)
    if reference.startswith(imported.REFERENCE):
        raise imported.refuse(reference.removeprefix(imported.REFERENCE))
    if reference.endswith(command_file.SUFFIXES):
        path = expanded(reference).absolute()
        return replace(command_file.load(path), reference=str(path))
    module, attribute, stable = load_module(reference)
    studies = [key for key, value in vars(module).items() if isinstance(value, Study)]
    if not hasattr(module, attribute) and len(studies) == 1 and not stable.endswith(f":{attribute}"):
        [attribute] = studies
        stable = f"{stable}:{attribute}"
    study = getattr(module, attribute, None)
    if study is None:
        hint = f"it has {', '.join(studies)}{near(attribute, studies)}".rstrip(".?")
        if studies and not stable.endswith(f":{attribute}"):
            hint += f": give {option('study', f'{reference}:{studies[0]}')}, or another of them"
        elif not studies:
            hint = (
                f"write {attribute} = Study(...), or @hpo.study(space=..., minimize=...) above a function, where an "
                "import of the file runs it: not below `if __name__`"
            )
        raise StudyError(f"{module.__file__} has no {attribute}; {hint}.")
    if not isinstance(study, Study):
        raise StudyError(f"{attribute} in {module.__file__} is a {type(study).__name__}, not an hpo.Study.")
    return replace(study, reference=stable, module=module.__name__)


def reference_file(reference: str) -> Path | None:
    """Returns the file that a reference names; None for a bundled study, or one of a notebook."""
    if reference.endswith(command_file.SUFFIXES):
        return Path(reference)
    stem, dot, _ = reference.partition(".py")
    return Path(stem + dot) if dot else None


def reference_of(study: Study) -> tuple[str, bool]:
    """Returns the reference that `load` takes for a study object, and whether any process can load it.

    No other process can load one that is defined in a notebook or at a prompt. Raises StudyError for a study that no
    module holds under a name. If several modules hold it, the file of its function or task wins, then any but the
    running script, which has imported it: the importing script does not belong to the study's code.
    """
    if study.reference:
        return study.reference, True
    modules = [sys.modules["__main__"], *list(sys.modules.values())]
    named_by = [(module, key) for module in modules for key, value in list(vars(module).items()) if value is study]
    if not named_by:
        raise StudyError(f"study {study.name!r} is a value without a name: assign it to one at the top of its file.")
    defining = study.task.partition(":")[0] if isinstance(study.task, str) else study.task.__module__

    def imports_it(named: tuple[ModuleType, str]) -> tuple[bool, bool, bool]:
        module, _ = named
        return module.__name__ != defining, file_of(module) is None, module is sys.modules["__main__"]

    module, attribute = min(named_by, key=imports_it)
    if file := file_of(module):
        return f"{file.absolute()}:{attribute}", True
    reference = f"{NOTEBOOK}:{attribute}"
    _in_notebook[reference] = replace(study, reference=reference, module=module.__name__)
    return reference, False


def is_unknown_cell(reference: str) -> bool:
    """Tells whether a reference names a cell of a notebook that this process has not run."""
    return reference.startswith(f"{NOTEBOOK}:") and reference not in _in_notebook


def _of_notebook(reference: str) -> Study:
    if is_unknown_cell(reference):
        name = reference.partition(":")[2]
        raise StudyError(
            f"study {name!r} is defined in a notebook, which no other process can import: run its cells again, then "
            f"hpo.run({name}) goes on with it there."
        )
    return _in_notebook[reference]
