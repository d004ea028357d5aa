"""Parses rules between the fields of a configuration, such as `model.low <= model.high`, from text.

A rule is a comparison of dotted paths and numbers by + - * / // % ** and abs, min, max, or several joined by `and`,
`or`, `not`. A linear rule, such as an order or a bounded sum, gives the range of a field once the fields before it are
known (`narrowed`), so that a space keeps to it by construction. Other rules can only be checked afterwards (`fault`).
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.errors import SpaceError
from hpo.space.dimensions import Float, Int

Number = Float | Int

_FUNCTIONS: dict[str, Callable[..., Any]] = {"abs": abs, "min": min, "max": max}
_WORDS = {"and", "or", "not", "in", "True", "False", "None", *_FUNCTIONS}
_TOKEN = re.compile(r"""'[^']*'|"[^"]*"|(?<![\w.])[A-Za-z_]\w*(?:\.\w+)*""")
_NODES = (
    *(ast.Expression, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Constant, ast.Name, ast.Call, ast.Load),
    *(ast.Tuple, ast.List, ast.cmpop, ast.boolop, ast.unaryop, ast.operator),
)
_SWEEPS = 64  # over linear rules; a chain of n fields needs n
_GAP = 1e-6  # how far beyond a strict bound the next value lies, as a share of a step


@dataclass(frozen=True)
class Inequality:
    """The inequality: sum of coefficients[path] * value <= bound, or < if it is strict."""

    coefficients: Mapping[str, float]
    bound: float
    strict: bool


@dataclass(frozen=True)
class Rule:
    """A parsed rule: the paths that it names, in their order, and its inequalities if it is linear."""

    text: str
    paths: tuple[str, ...]
    inequalities: tuple[Inequality, ...]
    code: Any

    def fault(self, values: Mapping[str, Any]) -> str:
        """Returns a clause about how `values`, by path, break the rule; empty if they satisfy it, or lack a field that
        it names, since the rule does not apply then."""
        if not all(path in values for path in self.paths):
            return ""
        named = {_placeholder(index): values[path] for index, path in enumerate(self.paths)}
        shown = ", ".join(f"{path}={values[path]!r}" for path in self.paths)
        try:
            holds = eval(self.code, {"__builtins__": {}, **_FUNCTIONS}, named)
        except (ArithmeticError, TypeError, ValueError) as error:
            return f"rule {self.text!r} cannot be computed with {shown} ({type(error).__name__}: {error})"
        return "" if holds else f"rule {self.text!r} does not hold with {shown}"


def parsed(text: object) -> Rule:
    """Parses the text of a rule. Raises SpaceError in one sentence for any other text."""
    if not isinstance(text, str) or not text.strip():
        raise SpaceError(f"rule {text!r} must be a text such as 'model.low <= model.high'.")
    paths: dict[str, str] = {}

    def placed(match: re.Match[str]) -> str:
        token = match[0]
        if token[0] in "'\"" or token in _WORDS:
            return token
        return paths.setdefault(token, _placeholder(len(paths)))

    try:
        tree = ast.parse(_TOKEN.sub(placed, text.strip()), mode="eval")
    except (SyntaxError, ValueError, RecursionError) as error:
        raise SpaceError(f"rule {text!r} cannot be read: write it as in 'model.low <= model.high'.") from error
    for node in ast.walk(tree):
        names = {*paths.values(), *_FUNCTIONS}
        called = not isinstance(node, ast.Call) or (isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS)
        if not isinstance(node, _NODES) or not called or (isinstance(node, ast.Name) and node.id not in names):
            raise SpaceError(
                f"rule {text!r} may compare paths and numbers by + - * / // % **, abs, min and max, and join such "
                "comparisons by and, or, not; leave anything else out."
            )
    if not isinstance(tree.body, ast.Compare | ast.BoolOp) and not _negated(tree.body):
        raise SpaceError(f"rule {text!r} compares nothing: write it as in 'model.low <= model.high'.")
    if not paths:
        raise SpaceError(f"rule {text!r} names no field: write it as in 'model.low <= model.high'.")
    known = {placeholder: path for path, placeholder in paths.items()}
    linear = _inequalities(tree.body, known)
    return Rule(text, tuple(paths), tuple(linear or ()), compile(tree, f"<rule {text}>", "eval"))


def _placeholder(index: int) -> str:
    return f"_{index}"


def _negated(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


# --- Linear rules


def _inequalities(node: ast.expr, known: Mapping[str, str]) -> list[Inequality] | None:
    """Returns the inequalities of a comparison, or of several joined by `and`; None if one is not linear."""
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        parts = [_inequalities(value, known) for value in node.values]
        return None if None in parts else [inequality for part in parts for inequality in part or ()]
    if not isinstance(node, ast.Compare):
        return None
    inequalities: list[Inequality] = []
    sides = [node.left, *node.comparators]
    for left, right, op in zip(sides, sides[1:], node.ops, strict=False):
        less, more = _terms(left, known), _terms(right, known)
        if less is None or more is None or not isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE | ast.Eq):
            return None
        strict = isinstance(op, ast.Lt | ast.Gt)
        if not isinstance(op, ast.Gt | ast.GtE):
            inequalities.append(_at_most(less, more, strict))
        if not isinstance(op, ast.Lt | ast.LtE):
            inequalities.append(_at_most(more, less, strict))
    return inequalities


_ONE = ""  # the path of the constant among the terms of a sum
_Terms = dict[str, float]


def _at_most(less: _Terms, more: _Terms, strict: bool) -> Inequality:
    terms = _sum(less, more, -1.0)
    bound = -terms.pop(_ONE, 0.0)
    return Inequality({path: factor for path, factor in terms.items() if factor}, bound, strict)


def _sum(first: _Terms, second: _Terms, factor: float) -> _Terms:
    return {path: first.get(path, 0.0) + factor * second.get(path, 0.0) for path in {**first, **second}}


def _terms(node: ast.expr, known: Mapping[str, str]) -> _Terms | None:
    """Returns a sum as path -> factor; None for an expression that is not a linear sum."""
    if isinstance(node, ast.Constant):
        value = node.value
        return {_ONE: float(value)} if isinstance(value, int | float) and not isinstance(value, bool) else None
    if isinstance(node, ast.Name):
        return {known[node.id]: 1.0} if node.id in known else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _terms(node.operand, known)
        return None if inner is None else _sum({}, inner, -1.0 if isinstance(node.op, ast.USub) else 1.0)
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _terms(node.left, known), _terms(node.right, known)
    if left is None or right is None:
        return None
    if isinstance(node.op, ast.Add | ast.Sub):
        return _sum(left, right, 1.0 if isinstance(node.op, ast.Add) else -1.0)
    if isinstance(node.op, ast.Mult) and left.keys() <= {_ONE}:
        left, right = right, left
    if not right.keys() <= {_ONE} or not isinstance(node.op, ast.Mult | ast.Div):
        return None
    factor = right.get(_ONE, 0.0)
    if isinstance(node.op, ast.Div) and not factor:
        return None
    return _sum({}, left, factor if isinstance(node.op, ast.Mult) else 1.0 / factor)


def narrowed(
    path: str, rules: Sequence[Rule], dimensions: Mapping[str, Number], known: Mapping[str, Any]
) -> Number | None:
    """Returns the part of the dimension at `path` for which all dimensions not yet `known` can still satisfy the linear
    rules; None if it is empty.

    It uses bounds propagation (Apt 2003, "Principles of Constraint Programming", section 6.4), which is exact for
    orders and for a sum by itself.
    """
    free: dict[str, Number] = {other: dimension for other, dimension in dimensions.items() if other not in known}
    inequalities = [
        inequality
        for rule in rules
        for inequality in rule.inequalities
        if all(other in free or isinstance(known.get(other), int | float) for other in inequality.coefficients)
    ]
    for _ in range(_SWEEPS):
        before = dict(free)
        for inequality in inequalities:
            for other, low, high in _bounds(inequality, free, known):
                if (part := free[other].between(low, high)) is None:
                    return None
                if (part.low, part.high) != (free[other].low, free[other].high):
                    free[other] = part
        if free == before:
            break
    return free[path]


def _bounds(
    inequality: Inequality, free: Mapping[str, Number], known: Mapping[str, Any]
) -> Iterator[tuple[str, float, float]]:
    """Yields (path, low, high) for each free field of an inequality: the range that the other fields leave for it."""
    least = {
        path: factor * (known[path] if path not in free else free[path].low if factor > 0 else free[path].high)
        for path, factor in inequality.coefficients.items()
    }
    for path, factor in inequality.coefficients.items():
        if path not in free:
            continue
        limit = (inequality.bound - sum(value for other, value in least.items() if other != path)) / factor
        if inequality.strict:
            limit = _inside(free[path], limit, -math.inf if factor > 0 else math.inf)
        yield (path, -math.inf, limit) if factor > 0 else (path, limit, math.inf)


def _inside(dimension: Number, limit: float, towards: float) -> float:
    """Returns the value next to `limit` on one side, at the resolution of the dimension's steps."""
    if dimension.step is None:
        return math.nextafter(limit, towards)
    return limit + math.copysign(_GAP * max(dimension.step, abs(limit) * 1e-2), towards)


def members(rules: Sequence[Rule], dimensions: Mapping[str, Any]) -> dict[str, list[Rule]]:
    """Returns path -> linear rules that hold by construction and affect the dimension there: the rules that name it and
    those that share dimensions with these.

    In such a rule each dimension is a range of numbers, not the multiple of another field, and all are active under the
    same conditions.
    """
    deciding: dict[str, list[Rule]] = {}
    for rule in rules:
        paths = [path for path in rule.paths if path in dimensions]
        plain = all(isinstance(dimensions[path], Float | Int) and dimensions[path].divisor is None for path in paths)
        same = all(dimensions[path].conditions == dimensions[paths[0]].conditions for path in paths)
        if rule.inequalities and plain and same and paths:
            together = [rule, *(other for path in paths for other in deciding.get(path, ()))]
            together = list({id(other): other for other in together}.values())
            for path in {path for other in together for path in other.paths if path in dimensions}:
                deciding[path] = together
    return deciding


def nearest(value: float, low: float, high: float, keeps: Callable[[float], bool]) -> float:
    """Returns `value`, unless rounding has broken a rule: then a float that differs in the last bits and for which
    `keeps` is true, if there is one."""
    for towards in (low, high):
        tried = value
        for _ in range(16):
            if keeps(tried):
                return tried
            tried = math.nextafter(tried, towards)
    return value
