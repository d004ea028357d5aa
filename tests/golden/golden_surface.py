"""What users and their scripts hold on to: help texts, exit codes, failpoints, and the names they import."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer
from pydantic import BaseModel
from typer.main import get_command
from typer.testing import CliRunner

import hpo
import trainer.errors
from hpo import errors
from hpo.child_process import AFRESH, FAULT
from hpo.cli.commands import Commands
from hpo.cli.main import app
from hpo.driver.signals import Signals
from hpo.workers.worker import FENCED
from trainer.runtime.failpoint import NAMES

ROOT = Path(__file__).parents[2]
_IMPORT = re.compile(r"^\s*from ((?:hpo|trainer)[\w.]*) import (\([^)]*\)|[\w, ]+)", re.MULTILINE)


def surface() -> dict[str, Any]:
    """Returns file name -> content."""
    return {**helps(), "exits.json": exits(), "failpoints.json": sorted(NAMES), "names.json": names()}


# --- Help


def helps() -> dict[str, str]:
    """Returns the help of `hpo` and of each command, 100 columns wide."""
    group = get_command(app)
    commands = {"hpo": [], **{f"hpo-{name}": [name] for name in group.commands}}  # pyright: ignore
    return {f"help/{title}.txt": _help(group, command) for title, command in commands.items()}


def _help(group: Any, command: list[str]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        group.main([*command, "--help"], prog_name="hpo", standalone_mode=False)
    return printed.getvalue()


# --- Exit codes


def exits() -> dict[str, int]:
    """Returns what happens -> the exit code that it gives."""
    raised = {name: error for module in (errors, trainer.errors) for name, error in _errors(module)}
    codes = {
        "a command that is done": CliRunner().invoke(app, ["--version"]).exit_code,
        "a command that is unknown": CliRunner().invoke(app, ["nosuch"]).exit_code,
        "a value that an option does not take": CliRunner().invoke(app, ["compare", "--top", "0"]).exit_code,
        "a home without a ledger": CliRunner().invoke(app, ["status", "--home", "nowhere"]).exit_code,
        "Ctrl-C in a command": _of_a_command(KeyboardInterrupt()),
        "the reader of a pipe has left": _of_a_closed_pipe(),
        "a worker whose trial belongs to another": FENCED,
        "a worker that cannot go on": FAULT,
        "a worker that another is to replace": AFRESH,
    }
    codes |= {f"a second {name} in a run": _of_a_second(getattr(signal, name)) for name in ("SIGINT", "SIGTERM")}
    return codes | {f"{name} in a command": _of_a_command(error("no")) for name, error in sorted(raised.items())}


def _errors(module: types.ModuleType) -> Iterator[tuple[str, Callable[[str], BaseException]]]:
    for name, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == module.__name__:
            yield name, lambda text, of=value: of(text, 1) if of.__name__ == "OutOfMemory" else of(text)


def _of_a_command(error: BaseException) -> int:
    raising = typer.Typer(cls=Commands, add_completion=False)

    @raising.callback()
    def _common() -> None:
        pass

    @raising.command()
    def fail() -> None:
        raise error

    return CliRunner().invoke(raising, ["fail"]).exit_code


def _of_a_closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        return subprocess.run(
            [sys.executable, "-m", "hpo", "--help"], stdout=closed, stderr=subprocess.DEVNULL
        ).returncode


def _of_a_second(number: signal.Signals) -> int:
    """Returns the exit code of a process that gets the signal twice while a study runs."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        driver = types.SimpleNamespace(request_stop=lambda: None, kill=lambda: None)
        with Signals(driver, lambda: None, "resume"):  # pyright: ignore[reportArgumentType]
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# --- Names


def names() -> dict[str, Any]:
    """Returns what `hpo` exports, and what declarations import from hpo and the trainer, each with how it is called.

    Where a name is imported from is left out, because modules move. Of a class there are the methods that a guide
    calls or asks for, and of a configuration every field.
    """
    guides = _text(ROOT / "README.md", *(ROOT / "docs/guide").glob("*.md")) + _starter()
    exported = {name: getattr(hpo, name) for name in hpo.__all__ if name != "__version__"}
    by_guides = {name: value for name, value in _imported(guides) if name not in exported}
    return {
        "exported by hpo": sorted(hpo.__all__),
        "of hpo": _shapes(exported, guides),
        "imported by the guides and by the file of `hpo init`": _shapes(by_guides, guides),
        "imported by the studies": sorted({name for name, _ in _imported(_text(*(ROOT / "studies").rglob("*.py")))}),
    }


def _text(*files: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(files))


def _starter() -> str:
    """Returns the file that `hpo init` writes."""
    with TemporaryDirectory() as directory, contextlib.chdir(directory):
        result = CliRunner().invoke(app, ["init", "my_study"])
        assert result.exit_code == 0, result.output
        return Path("my_study.py").read_text()


def _imported(text: str) -> Iterator[tuple[str, Any]]:
    """Yields each name that the text imports from hpo or the trainer, with what it stands for; that is None for a
    module that nothing has imported yet, such as the one that needs Ray, whose import takes long."""
    for module, several in _IMPORT.findall(text):
        if module.startswith("hpo.integrations.") and find_spec(module):  # which needs a library, and is one of five
            yield f"{module}.{several}", None
            continue
        for name in re.findall(r"\w+", re.sub(r"#.*|\bas \w+", "", several)):
            value = getattr(import_module(module), name, None)
            assert value is not None or find_spec(f"{module}.{name}"), f"{module} has no {name}"
            yield name, value


def _shapes(named: Mapping[str, Any], guides: str) -> list[str]:
    return sorted({line for name, value in named.items() for line in _shape(name, value, guides)})


def _shape(name: str, value: Any, guides: str) -> Iterator[str]:
    """Yields how the name is called and what it has, a line each."""
    if isinstance(value, types.ModuleType):
        yield name
        for inner in getattr(value, "__all__", ()):
            yield from _shape(f"{name}.{inner}", getattr(value, inner), guides)
    elif isinstance(value, type) and issubclass(value, BaseModel):
        yield from (name, *(f"{name}.{field}" for field in value.model_fields))
    elif isinstance(value, type):
        yield f"{name}{_parameters(value)}"
        for inner, member in _members(value):
            if inspect.isroutine(member) and re.search(rf"\b{inner}\(", guides):
                yield f"{name}.{inner}{_parameters(member)}"
    elif callable(value):
        yield f"{name}{_parameters(value)}"
    elif value is None and "." in name:
        yield name
    else:
        yield name
        yield from (f"{name}[{key!r}]" for key in value) if isinstance(value, Mapping) else ()


def _members(owner: Any) -> list[tuple[str, Any]]:
    return [(name, member) for name, member in inspect.getmembers(owner) if not name.startswith("_")]


def _parameters(value: Any) -> str:
    """Returns the parameters as they are written in a call, without annotations; empty where there is no signature."""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return ""
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    plain = [one.replace(default=_Shown(one.default)) if one.default is not one.empty else one for one in plain]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


class _Shown:
    """A default that is written without the place of its class or its address."""

    def __init__(self, value: Any) -> None:
        plain = isinstance(value, str | int | float | bool | tuple | None) or repr(value) == "<factory>"
        self._text = repr(value) if plain else getattr(value, "__name__", type(value).__name__)

    def __repr__(self) -> str:
        return self._text
