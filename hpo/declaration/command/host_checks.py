"""Rejects a command that cannot run on this host, before a trial is claimed: directory, program, script or module."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from hpo.declaration.command.command import Command
from hpo.errors import StudyError
from hpo.text import near

_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_SHELL = re.compile(r"(ba|da|k|z)?sh")
# Programs with too many options to know them all: their script is the first word with such a suffix.
_SUFFIXES = {
    "torchrun": (".py",),
    "accelerate": (".py",),
    "deepspeed": (".py",),
    "uv": (".py",),
    "Rscript": (".R", ".r"),
    "julia": (".jl",),
    "node": (".js", ".mjs", ".cjs"),
    "perl": (".pl",),
    "ruby": (".rb",),
}


def check(command: Command) -> None:
    """Raises StudyError in one sentence with the file, what is missing and the fix.

    Words with a placeholder or an unknown option are left to the program.
    """
    where = command.file
    if not command.directory.is_dir():
        raise StudyError(f"{where}: directory={str(command.directory)!r} is not a directory: make it, or name another.")
    for path in command.code:
        if not path.exists():
            raise StudyError(f"{where}: code names {path}, which is not there: correct its path.")
    words = _after_env(command, [word.replace("{python}", sys.executable) for word in command.words])
    if not words or "{" in words[0]:
        return  # the trial decides which program it is
    _check_program(command, words[0])
    kind, word = _target(Path(words[0]).name, words[1:], own=words[0] == sys.executable)
    if kind == "script":
        _check_script(command, word, Path(words[0]).name)
    elif kind == "module" and words[0] == sys.executable and "PYTHONPATH" not in command.environ:
        _check_module(command, word)


def _after_env(command: Command, words: Sequence[str]) -> Sequence[str]:
    """Returns the words that `env NAME=value ...` runs, from the program on; none if env has options."""
    if Path(words[0]).name != "env":
        return words
    _check_program(command, words[0])
    begin = next((n for n, word in enumerate(words) if n and not re.match(r"[A-Za-z_]\w*=", word)), len(words))
    return [] if "".join(words[begin : begin + 1]).startswith("-") else words[begin:]


def _check_program(command: Command, program: str) -> None:
    by_path, path = os.sep in program, command.directory / program
    if by_path and path.is_file() and not os.access(path, os.X_OK):
        raise StudyError(
            f"{command.file}: command: {program!r} is a file that may not be executed: run `chmod +x {path}`, or name "
            "what runs it before it, such as {python}."
        )
    if shutil.which(str(path) if by_path else program, path=command.environ.get("PATH")) is None:
        beside = f", ./{program} for the file of that name there" if not by_path and path.is_file() else ""
        raise StudyError(
            f"{command.file}: command: {program!r} is not a program that this host can run: correct its name, or "
            f"write {{python}} for the Python that runs hpo{beside}."
        )


def _target(program: str, words: Sequence[str], *, own: bool) -> tuple[str, str]:
    """Returns what a known interpreter runs, `script` or `module`, and its name.

    Both are empty if it runs neither, such as code in an argument, or if that is unclear.
    """
    if suffixes := _SUFFIXES.get(program):
        named = [word for word in words if word.endswith(suffixes) and not word.startswith("-")]
        return ("script", named[0]) if named and "{" not in named[0] else ("", "")
    python = own or _PYTHON.fullmatch(program) is not None
    if not python and not _SHELL.fullmatch(program):
        return "", ""
    inline, valued = ("c", "WX") if python else ("cs", "oO")
    rest = iter(words)
    for word in rest:
        if "{" in word or word == "-" or word.startswith("--"):
            break
        if not word.startswith(("-", "+")):
            return "script", word
        for at, letter in enumerate(word[1:], 2):
            if letter in inline:
                return "", ""
            if letter == "m" and python:
                return "module", word[at:] or next(rest, "")
            if letter in valued:
                if not word[at:]:
                    next(rest, "")
                break
    return "", ""


def _check_script(command: Command, script: str, program: str) -> None:
    path = command.directory / script
    if path.is_file() or (path.is_dir() and (path / "__main__.py").is_file()):
        return
    if _SHELL.fullmatch(program) and os.sep not in script and shutil.which(script):
        return  # a shell also searches PATH
    if path.is_dir():
        raise StudyError(f"{command.file}: command: {script!r} is a directory: name the script in it.")
    beside = [path.name for path in command.directory.iterdir()]
    elsewhere = [directory for directory in (command.file.parent, Path.cwd()) if (directory / script).is_file()]
    fix = f"; it is in {elsewhere[0]}: say directory: {elsewhere[0]}" if elsewhere else near(script, beside)
    raise StudyError(
        f"{command.file}: command: the script {script!r} is missing in {command.directory}, where the command runs"
        f"{fix or ': correct its path, or name another directory'}{'' if fix.endswith('?') else '.'}"
    )


def _check_module(command: Command, name: str) -> None:
    """Checks that `python -m name` finds it: beside the command, or where this Python finds its own.

    Imports nothing.
    """
    parts, folders = name.split("."), [str(command.directory)]
    if "{" in name or not all(part.isidentifier() for part in parts):
        return
    missing, spec = parts[0], PathFinder.find_spec(parts[0], folders) or find_spec(parts[0])
    for n in range(2, len(parts) + 1):
        if spec is not None:
            missing, inside = ".".join(parts[:n]), spec.submodule_search_locations
            spec = PathFinder.find_spec(missing, inside) if inside is not None else None
    if spec is not None and spec.submodule_search_locations is not None:
        missing = f"{name}.__main__"
        spec = PathFinder.find_spec(missing, spec.submodule_search_locations)
    if spec is None:
        raise StudyError(
            f"{command.file}: command: this Python, {sys.executable}, finds no module {missing!r}, in "
            f"{command.directory} or where its packages are: correct the name, or install it."
        )
