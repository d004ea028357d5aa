"""Reads YAML strictly: 1.2's core scalars, no tags, few aliases, and string keys that occur once."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any, ClassVar

import yaml


class StrictLoader(yaml.SafeLoader):
    """Loads YAML 1.2 core scalars, without tags, with few aliases, and with string keys that occur once.

    YAML 1.1 as PyYAML reads it turns `no` into False, leaves `1e-3` a string, takes the last of two equal keys and
    expands a few hundred bytes of aliases into billions of items.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}
    max_aliases, max_depth = 10, 32
    merges = "key '<<' merges nothing in YAML 1.2; write out the keys that it stands for"

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.aliases = self.depth = 0
        self.within: list[str | None] = []  # the anchors of the nodes being composed

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        alias = self.check_event(yaml.AliasEvent)
        self.aliases += alias
        if self.aliases > self.max_aliases:
            raise yaml.MarkedYAMLError(problem=f"more than {self.max_aliases} aliases", problem_mark=event.start_mark)
        anchor = getattr(event, "anchor", None)
        if alias and anchor in self.within:
            problem = f"alias {anchor!r} stands within what it names"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        if (tag := getattr(event, "tag", None)) is not None:
            raise yaml.MarkedYAMLError(problem=f"tag {tag!r} is not allowed", problem_mark=event.start_mark)
        if self.depth >= self.max_depth:
            problem = f"nested deeper than {self.max_depth} levels"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        self.within.append(None if alias else anchor)
        node = super().compose_node(parent, index)
        self.within.pop()
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key, mark = self.construct_object(key_node, deep=True), key_node.start_mark
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is not a string; quote it", problem_mark=mark)
            problem = f"key {key!r} already stands in line {lines[key]}" if key in lines else ""
            if problem := self.merges if key == "<<" and not key_node.style else problem:
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
            lines[key] = mark.line + 1
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: Any) -> int:
        try:
            return int(node.value, 0 if node.value[:2] in ("0x", "0o") else 10)
        except ValueError as error:  # Python's limit on digits
            problem = f"a number of {len(node.value)} digits"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error

    def construct_number(self, node: Any) -> float:
        return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))


# YAML 1.2.2, section 10.3.2: tag, pattern, the characters a match may begin with.
_NUMBER = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    ("float", rf"{_NUMBER}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", [*"-+.0123456789"]),
):
    StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)
StrictLoader.add_constructor("tag:yaml.org,2002:int", StrictLoader.construct_integer)
StrictLoader.add_constructor("tag:yaml.org,2002:float", StrictLoader.construct_number)
