"""Finds a study by its reference, the text by which any process loads it again, and the reference of a study."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

from hpo.declaration import imported
from hpo.declaration.command import file as command_file
from hpo.declaration.loading import file_of, load_module
from hpo.declaration.study import Study
from hpo.errors import StudyError
from hpo.text import near
from trainer.files.paths import expanded

NOTEBOOK = "notebook"  # stands for a file in the reference of a study that only this process knows
_in_notebook: dict[str, Study] = {}


def load(reference: str) -> Study:
    """The study a reference names: `atft`, `path/to/my_study.py` or either with `:NAME`, the attribute (STUDY), or
    `train.yaml`, the file of a command.

    Raises StudyError in one sentence: unknown name with near ones, a file that raises with its line, no such attribute.
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
            hint += f": give --study {reference}:{studies[0]}, or another of them"
        elif not studies:
            hint = (
                f"write {attribute} = Study(...), or @hpo.study(space=..., minimize=...) above a function, where an "
                "import of the file runs it: not below `if __name__`"
            )
        raise StudyError(f"{module.__file__} has no {attribute}; {hint}.")
    if not isinstance(study, Study):
        raise StudyError(f"{attribute} in {module.__file__} is a {type(study).__name__}, not an hpo.Study.")
    return replace(study, reference=stable, module=module.__name__)


def reference_of(study: Study) -> tuple[str, bool]:
    """The reference that `load` takes for a study in hand, and whether any process can load it: not where it is defined
    in a notebook or at a prompt. Raises StudyError for one that no module has by a name.

    Where several modules have it by a name, its own file is that of its function or task, or else any but the script
    that runs, which has imported it: who calls is no part of the study's code.
    """
    if study.reference:
        return study.reference, True
    modules = [sys.modules["__main__"], *list(sys.modules.values())]
    named_by = [(one, key) for one in modules for key, value in list(vars(one).items()) if value is study]
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


def _of_notebook(reference: str) -> Study:
    if reference not in _in_notebook:
        name = reference.partition(":")[2]
        raise StudyError(
            f"study {name!r} is defined in a notebook, which no other process can import: run its cells again, then "
            f"hpo.run({name}) goes on with it there."
        )
    return _in_notebook[reference]
