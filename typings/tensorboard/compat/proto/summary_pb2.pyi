from collections.abc import Iterable, Sequence
from typing import Any

class Summary:
    class Value:
        tag: str
        simple_value: float
        def __init__(
            self, *, tag: str = ..., simple_value: float = ..., metadata: Any = ..., tensor: Any = ...
        ) -> None: ...
        def WhichOneof(self, name: str) -> str | None: ...

    value: Sequence[Value]
    def __init__(self, *, value: Iterable[Value] = ...) -> None: ...
