# The stubs that pyright brings leave most of PyYAML's methods without types. This is what is used of it.
from collections.abc import Callable, Hashable, Sequence
from re import Pattern
from typing import Any, ClassVar, TypeVar

class Mark:
    line: int
    column: int

class YAMLError(Exception): ...

class MarkedYAMLError(YAMLError):
    problem: str | None
    problem_mark: Mark | None
    context_mark: Mark | None
    def __init__(self, *, problem: str | None = None, problem_mark: Mark | None = None) -> None: ...

class Event:
    start_mark: Mark

class AliasEvent(Event): ...

class Node:
    tag: str
    value: Any
    start_mark: Mark

class SafeLoader:
    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, Pattern[str]]]]]
    def __init__(self, stream: str) -> None: ...
    def peek_event(self) -> Event: ...
    def check_event(self, *choices: type[Event]) -> bool: ...
    def compose_node(self, parent: Node | None, index: Any) -> Node | None: ...
    def construct_object(self, node: Node, deep: bool = False) -> Any: ...
    def construct_mapping(self, node: Node, deep: bool = False) -> dict[Hashable, Any]: ...
    @classmethod
    def add_implicit_resolver(cls, tag: str, regexp: Pattern[str], first: Sequence[str] | None) -> None: ...
    @classmethod
    def add_constructor(cls, tag: str, constructor: Callable[[_Loader, Any], Any]) -> None: ...

_Loader = TypeVar("_Loader", bound=SafeLoader)

def load(stream: str, Loader: type[SafeLoader]) -> Any: ...
def safe_dump(data: Any, *, sort_keys: bool = True) -> str: ...
