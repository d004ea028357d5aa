"""Walks the calls of `hpo run` as a reader follows them, from the command to the claim of the first trial.

A function from which the claim is reached is read with all that it calls, in the order in which it calls it; what it
calls besides is read `--beside` calls deep, 2 by default. Each function is read once. The walk counts the files that it
enters, and how often it comes back to a file that it has left: what has to be kept in mind meanwhile.

    python tests/helpers/walk.py [ROOT ...] [--beside N] [--functions]

What a name stands for is read from imports, annotations and assignments; calls that these do not tell are left out.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef
PACKAGES = ("hpo", "trainer")
START = "hpo.cli.main:run"
END = {"hpo.ledger.claims:claim", "hpo.ledger.transactions:claim"}
# What a contract stands for on the way of an ordinary study, and the process that a call starts.
STANDS_FOR = {
    "hpo.workers.executors.base:Executor": "hpo.workers.executors.local:Local",
    "hpo.clock:Clock": "hpo.clock:SystemClock",
    "hpo.driver.drivers:StudyDriver": "hpo.driver.loop:Driver",
}
STARTS = {"hpo.workers.prepared:Prepared.fork": "hpo.workers.worker:main"}


@dataclass(frozen=True)
class Thing:
    """A module, a class or a function: `node` is None for a module."""

    module: str
    node: Any = None
    owner: ast.ClassDef | None = None
    receiver: Thing | None = None  # the class of `self`, which may derive from the owner

    @property
    def is_function(self) -> bool:
        return isinstance(self.node, Function.__args__)

    @property
    def key(self) -> str:
        names = [part.name for part in (self.owner, self.node) if part is not None]
        return f"{self.module}:{'.'.join(names)}"


@dataclass
class Walk:
    """The files of the functions in the order in which they are read."""

    stays: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    ended: bool = False

    @property
    def files(self) -> int:
        return len(set(self.stays))

    @property
    def returns(self) -> int:
        return len(self.stays) - self.files


class Code:
    """The sources of a checkout, and what the names in them stand for."""

    def __init__(self, root: Path) -> None:
        self.modules: dict[str, ast.Module] = {}
        for package in PACKAGES:
            for file in sorted((root / package).rglob("*.py")):
                name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
                self.modules[name] = ast.parse(file.read_text())
        self._names = {name: self._bound(name, tree.body) for name, tree in self.modules.items()}

    def _bound(self, module: str, body: list[ast.stmt]) -> dict[str, Thing | tuple[str, str]]:
        """Returns what the statements bind: definitions, and imports as (module, name)."""
        bound: dict[str, Thing | tuple[str, str]] = {}
        for node in body:
            if isinstance(node, ast.ImportFrom) and node.module:
                bound |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                bound |= {(alias.asname or alias.name): (alias.name, "") for alias in node.names}
            elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                bound[node.name] = Thing(module, node)
            elif isinstance(node, ast.If):  # of types alone
                bound |= self._bound(module, node.body)
        return bound

    def at(self, path: str) -> Thing | None:
        """Returns what `module:name` is."""
        module, _, name = path.partition(":")
        return self.lookup(module, name)

    def lookup(self, module: str, name: str) -> Thing | None:
        if f"{module}.{name}" in self.modules:
            return Thing(f"{module}.{name}")
        if module not in self._names:
            return None
        return self.thing(self._names[module].get(name))

    def thing(self, bound: Thing | tuple[str, str] | None) -> Thing | None:
        if not isinstance(bound, tuple):
            return bound
        module, name = bound
        if not name:
            return Thing(module) if module in self.modules else None
        return self.lookup(module, name)

    def method(self, owner: Thing, name: str, receiver: Thing | None = None) -> Thing | None:
        """Returns the method of a class, its own or of the classes that it derives from."""
        for node in owner.node.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return Thing(owner.module, node, owner.node, receiver or owner)
        for base in owner.node.bases:
            above = self.lookup(owner.module, base.id) if isinstance(base, ast.Name) else None
            inherits = above is not None and isinstance(above.node, ast.ClassDef)
            if above and inherits and (inherited := self.method(above, name, receiver or owner)):
                return inherited
        return None

    def attribute(self, owner: Thing, name: str) -> Thing | None:
        """Returns the class of an attribute, as it is annotated or first assigned."""
        for node in owner.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
                return self.annotated(owner.module, node.annotation)
        for node in owner.node.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for target, value, annotation in _assigned(node):
                    if (
                        isinstance(target, ast.Attribute)
                        and target.attr == name
                        and ast.unparse(target.value) == "self"
                    ):
                        if annotation is not None:
                            return self.annotated(owner.module, annotation)
                        if kind := Reading(self, Thing(owner.module, node, owner.node)).kind(value):
                            return kind
        for base in owner.node.bases:
            above = self.lookup(owner.module, base.id) if isinstance(base, ast.Name) else None
            if above and isinstance(above.node, ast.ClassDef) and (found := self.attribute(above, name)):
                return found
        return None

    def annotated(self, module: str, annotation: ast.expr | None) -> Thing | None:
        """Returns the class that an annotation names, `None` beside it or not."""
        if isinstance(annotation, ast.BinOp):
            return self.annotated(module, annotation.left) or self.annotated(module, annotation.right)
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            return self.annotated(module, ast.parse(annotation.value, mode="eval").body)
        found = self.lookup(module, annotation.id) if isinstance(annotation, ast.Name) else None
        if isinstance(annotation, ast.Attribute) and isinstance(annotation.value, ast.Name):
            above = self.lookup(module, annotation.value.id)
            found = self.lookup(above.module, annotation.attr) if above and above.node is None else None
        if found is None or not isinstance(found.node, ast.ClassDef):
            return None
        return self.at(STANDS_FOR[found.key]) if found.key in STANDS_FOR else found


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, Any, ast.expr | None]]:
    for part in ast.walk(node):
        if isinstance(part, ast.Assign):
            for target in part.targets:
                pairs = [(target, part.value)]
                if isinstance(target, ast.Tuple) and isinstance(part.value, ast.Tuple):
                    pairs = [*zip(target.elts, part.value.elts, strict=False)]
                yield from ((one, value, None) for one, value in pairs)
        elif isinstance(part, ast.AnnAssign):
            yield part.target, part.value, part.annotation
        elif isinstance(part, ast.NamedExpr):
            yield part.target, part.value, None
        elif isinstance(part, ast.withitem) and part.optional_vars is not None:
            yield part.optional_vars, part.context_expr, None


class Reading:
    """One function, and what its names stand for."""

    def __init__(self, code: Code, thing: Thing) -> None:
        self._code, self._thing = code, thing
        self._local = code._bound(thing.module, [one for one in ast.walk(thing.node) if isinstance(one, ast.stmt)][1:])
        self._local = {name: one for name, one in self._local.items() if isinstance(one, tuple)}
        self._busy: set[str] = set()

    @cached_property
    def _parameters(self) -> dict[str, ast.expr]:
        given = self._thing.node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        return {one.arg: one.annotation for one in every if one.annotation is not None}

    @cached_property
    def _assignments(self) -> dict[str, tuple[Any, ast.expr | None]]:
        taken: dict[str, tuple[Any, ast.expr | None]] = {}
        for target, value, annotation in _assigned(self._thing.node):
            if isinstance(target, ast.Name):
                taken.setdefault(target.id, (value, annotation))
        return taken

    def stands_for(self, node: ast.expr) -> Thing | None:
        """Returns the module, class or function that an expression names."""
        module = self._thing.module
        if isinstance(node, ast.Name):
            if node.id in self._local:
                return self._code.thing(self._local[node.id])
            if node.id in self._parameters or node.id in self._assignments:
                return None
            return self._code.lookup(module, node.id)
        if isinstance(node, ast.Attribute):
            above = self.stands_for(node.value)
            if above is not None and above.node is None:
                return self._code.lookup(above.module, node.attr)
            if above is not None and isinstance(above.node, ast.ClassDef):
                return self._code.method(above, node.attr)
            owner = self.kind(node.value)
            if owner is not None and ast.unparse(node.value) == "super()":
                return self._code.method(owner, node.attr, self._thing.receiver)
            return self._code.method(owner, node.attr) if owner else None
        return None

    def kind(self, node: ast.expr | None) -> Thing | None:
        """Returns the class of an expression's value."""
        if isinstance(node, ast.Name):
            return self._kind_of_name(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.kind(node.value)
            if owner is None:
                return None
            if method := self._code.method(owner, node.attr):
                return self._code.annotated(method.module, method.node.returns)
            return self._code.attribute(owner, node.attr)
        if isinstance(node, ast.Call):
            called = self.stands_for(node.func)
            if called is None and isinstance(node.func, ast.Call | ast.Name) and ast.unparse(node.func) == "super":
                bases = self._thing.owner.bases if self._thing.owner else []
                return self._code.annotated(self._thing.module, bases[0]) if bases else None
            if called is None or called.node is None:
                return None
            if isinstance(called.node, ast.ClassDef):
                return called
            if isinstance(called.node.returns, ast.Name) and called.node.returns.id == "Self" and called.owner:
                return Thing(called.module, called.owner)
            return self._code.annotated(called.module, _yielded(called.node))
        if isinstance(node, ast.IfExp):
            return self.kind(node.body) or self.kind(node.orelse)
        if isinstance(node, ast.BoolOp):
            return next((kind for one in node.values if (kind := self.kind(one))), None)
        if isinstance(node, ast.NamedExpr):
            return self.kind(node.value)
        return None

    def _kind_of_name(self, name: str) -> Thing | None:
        if name in ("self", "cls") and self._thing.owner:
            return self._thing.receiver or Thing(self._thing.module, self._thing.owner)
        if name in self._parameters:
            return self._code.annotated(self._thing.module, self._parameters[name])
        if name not in self._assignments or name in self._busy:
            return None
        value, annotation = self._assignments[name]
        self._busy.add(name)
        try:
            return self._code.annotated(self._thing.module, annotation) or self.kind(value)
        finally:
            self._busy.discard(name)

    def reads(self) -> Iterator[Thing]:
        """Yields what the body names, in the order in which it is evaluated: functions, and classes that it makes."""
        for statement in self._thing.node.body:
            for node in _in_order(statement):
                if isinstance(node, ast.Call) and (called := self.stands_for(node.func)):
                    yield from self._entered(called)
                    if called.key in STARTS and (started := self._code.at(STARTS[called.key])):
                        yield started
                elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                    named = self.stands_for(node)
                    if named is not None and isinstance(named.node, Function.__args__):
                        yield named

    def _entered(self, called: Thing) -> Iterator[Thing]:
        if not isinstance(called.node, ast.ClassDef):
            yield from [called] if called.node is not None else []
            return
        for name in ("__init__", "__post_init__"):
            if method := self._code.method(called, name):
                yield method


def _yielded(node: Function) -> ast.expr | None:
    """Returns what a function's annotation says it gives; of a context manager what the block gets."""
    returns = node.returns
    if isinstance(returns, ast.Subscript) and ast.unparse(returns.value) in ("Iterator", "Generator"):
        inner = returns.slice
        return inner.elts[0] if isinstance(inner, ast.Tuple) else inner
    return returns


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the parts of a statement as they are evaluated: arguments before their call."""
    if isinstance(node, ast.ImportFrom | ast.Import):
        return
    children = [*ast.iter_child_nodes(node)]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        children = [*node.body]
    if isinstance(node, ast.Raise):  # what an error says is read where it is met
        return
    for child in children:
        yield from _in_order(child)
    yield node


def walk(root: Path, beside: int = 2) -> Walk:
    """Returns the walk through a checkout."""
    code = Code(root)
    start = code.at(START)
    assert start is not None
    calls: dict[str, list[Thing]] = {}
    waiting = [start]
    while waiting:
        thing = waiting.pop()
        if thing.key not in calls:
            calls[thing.key] = [named for named in Reading(code, thing).reads() if named.is_function]
            waiting += reversed(calls[thing.key])
    taken = Walk()
    _read(start, calls, _ways(calls), taken, {}, beside, 0)
    return taken


def _ways(calls: Mapping[str, list[Thing]]) -> set[str]:
    """Returns the functions from which the claim is reached."""
    callers: dict[str, set[str]] = {}
    for caller, called in calls.items():
        for thing in called:
            callers.setdefault(thing.key, set()).add(caller)
    ways, waiting = set[str](), [key for key in END if key in calls]
    while waiting:
        if (key := waiting.pop()) not in ways:
            ways.add(key)
            waiting += callers.get(key, ())
    return ways


def _read(
    thing: Thing,
    calls: Mapping[str, list[Thing]],
    ways: Set[str],
    taken: Walk,
    known: dict[str, int],
    beside: int,
    depth: int,
) -> None:
    """Reads a function at `depth` calls beside the way, and what it calls; once more where it was met deeper before."""
    depth = 0 if thing.key in ways else depth + 1
    if taken.ended or depth > beside or known.get(thing.key, beside + 1) <= depth:
        return
    if thing.key not in known:
        taken.functions.append(thing.key)
        if not taken.stays or taken.stays[-1] != thing.module:
            taken.stays.append(thing.module)
    known[thing.key] = depth
    taken.ended = thing.key in END
    for called in () if taken.ended else calls[thing.key]:
        _read(called, calls, ways, taken, known, beside, depth)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", nargs="*", type=Path, default=[Path()])
    parser.add_argument("--beside", type=int, default=2)
    parser.add_argument("--functions", action="store_true")
    given = parser.parse_args()
    sys.setrecursionlimit(10_000)
    for root in given.root:
        taken = walk(root, given.beside)
        end = "to the claim" if taken.ended else "without the claim"
        print(f"{root}: {taken.files} files, {taken.returns} returns, {len(taken.functions)} functions, {end}")
        if given.functions:
            print("\n".join(taken.functions))


if __name__ == "__main__":
    main()
