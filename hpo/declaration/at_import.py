"""Recognises a study's file that does its work while it is imported, as each worker imports it, and says what to do."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

_GUARD = 'under `if __name__ == "__main__":`'
# The call that begins a search -> names of which a file uses one where the call is that.
_SEARCHES = {"optimize": {"create_study", "load_study"}, "fmin": {"hyperopt"}, "agent": {"wandb"}}


class _NoArguments(SystemExit):
    """An ArgumentParser does not take the arguments of `hpo` or of a worker."""


@contextmanager
def no_command_line() -> Iterator[None]:
    """Within the block an ArgumentParser that refuses its arguments ends the import without printing its usage."""

    def error(self: argparse.ArgumentParser, message: str) -> NoReturn:
        raise _NoArguments(2)

    before: Any = argparse.ArgumentParser.error
    argparse.ArgumentParser.error = error
    try:
        yield
    finally:
        argparse.ArgumentParser.error = before


def left(error: SystemExit, at: str) -> str:
    """The sentence on a file that has left Python at the place `at` while it was imported."""
    if isinstance(error, _NoArguments):
        return (
            f"{at}: the file reads a command line while it is imported, and each worker imports it: put "
            f"`parse_args()` {_GUARD}, and search what it reads as parameters of the study."
        )
    code = f": {text.rstrip('.')}" if (text := " ".join(str(error).split())) else ""
    return f"{at}: SystemExit{code}: the file leaves Python while it is imported: put what it runs {_GUARD}."


def search_at_import(text: bytes, file: str) -> str:
    """The sentence on a file that begins a search of another library while it is imported; empty where it does not."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # which its import will tell
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
