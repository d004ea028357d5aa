"""Many values of a parameter in one case, where a case for each would only be more names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any


def rounds(names: str | Sequence[str], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, but all values are tried in one case, whose failure names the values.

    Each round has a directory of its own as `tmp_path`. Other fixtures are shared by the rounds.
    """
    names, values = [names] if isinstance(names, str) else list(names), list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def in_rounds(**fixtures: Any) -> None:
            for number, value in enumerate(values):
                own = dict(zip(names, [value] if len(names) == 1 else value, strict=True))
                if "tmp_path" in fixtures:
                    own["tmp_path"] = Path(fixtures["tmp_path"], f"round-{number}")
                    own["tmp_path"].mkdir()
                try:
                    test(**fixtures | own)
                except BaseException as error:
                    error.add_note(f"in the round of {', '.join(f'{name}={own[name]!r}' for name in names)}")
                    raise

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in names]
        in_rounds.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return in_rounds

    return decorate
