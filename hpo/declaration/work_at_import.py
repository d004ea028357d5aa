"""Recognizes a study file that does its work at import, which would happen in each worker, and explains the fix."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_GUARD = 'under `if __name__ == "__main__":`'
# The call that begins a search -> names of which a file must use one for that call to count.
_SEARCHES = {"optimize": {"create_study", "load_study"}, "fmin": {"hyperopt"}, "agent": {"wandb"}}


class _NoArguments(SystemExit):
    """Raised when an ArgumentParser rejects the arguments of `hpo` or of a worker."""


@contextmanager
def no_command_line() -> Iterator[None]:
    """Ends the import without printing usage if an ArgumentParser in the file rejects its arguments."""

    def error(self: argparse.ArgumentParser, message: str) -> NoReturn:
        raise _NoArguments(2)

    before = argparse.ArgumentParser.error
    argparse.ArgumentParser.error = error
    try:
        yield
    finally:
        argparse.ArgumentParser.error = before


def left(error: SystemExit, at: str) -> str:
    """Returns the sentence about a file that exited Python at line `at` while it was imported."""
    if isinstance(error, _NoArguments):
        return (
            f"{at}: the file reads a command line while it is imported, and each worker imports it: put "
            f"`parse_args()` {_GUARD}, and search what it reads as parameters of the study."
        )
    code = "" if error.code is None else f": {' '.join(str(error).split()).rstrip('.')}"
    return f"{at}: SystemExit{code}: the file leaves Python while it is imported: put what it runs {_GUARD}."


def search_at_import(text: bytes, file: str) -> str:
    """Returns the sentence about a file that begins another library's search at import; empty if it does not."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # its import will report it
        return ""
    used = {name for node in ast.walk(tree) for name in _names(node)}
    searches = {call for call, users in _SEARCHES.items() if users & used}
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    waiting: list[ast.AST] = [*tree.body]
    seen: set[str] = set()
    while waiting and searches:
        node = waiting.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "__name__" in {name for part in ast.walk(node.test) for name in _names(part)}:
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        name = called.rpartition(".")[2]
        if called in functions and called not in seen:
            seen.add(called)
            waiting += functions[called].body
        elif name in searches and called not in functions:
            return (
                f"{file}:{node.lineno}: {called}() begins a search while the file is imported, and each worker "
                f"imports it: put it {_GUARD}."
            )
    return ""


def _names(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return [name]
        case ast.alias(name=name):
            return name.split(".")
        case ast.ImportFrom(module=str(name)):
            return name.split(".")
    return []
