"""Writes metrics in the text format of Prometheus, and hands them to whoever brings the home's token for them.

What is measured comes as `Family` values, so that prometheus_client, an optional package, is imported here alone.
Labels are `study` and `state`: a label by trial would make a new time series for each.
"""

from __future__ import annotations

import hmac
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, NamedTuple

from hpo.errors import HpoError, StorageError, UserError
from hpo.storage.home import Home
from hpo.storage.port import Answer, answered
from hpo.storage.token_file import token_in

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Kind = Literal["gauge", "counter", "histogram"]
PATH = "/metrics"
_REFUSED = b"The metrics ask for the token that stands in metrics.token of the home, as a bearer's.\n"
CONTENT = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    """A value with its labels; `suffix` is that of its name."""

    value: float
    labels: Mapping[str, str] = {}
    suffix: str = ""


class Family(NamedTuple):
    """The values of one metric: its name without a suffix, its type, its meaning and its samples."""

    name: str
    kind: Kind
    meaning: str
    samples: Iterable[Sample]


Measure = Callable[[], Iterable[Family]]


def check_installed() -> None:
    """Raises UserError if the extra is missing."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise UserError("metrics need prometheus_client: pip install 'hpo[metrics]'.")


def text_of(measure: Measure) -> bytes:
    """Returns what is measured, as Prometheus reads it."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

    class Measured(Collector):
        def collect(self) -> Iterator[Metric]:
            for name, kind, meaning, samples in measure():
                metric = Metric(name, meaning, kind)
                for value, labels, suffix in samples:
                    metric.add_sample(name + (suffix or {"counter": "_total"}.get(kind, "")), dict(labels), value)
                yield metric

    registry = CollectorRegistry()
    registry.register(Measured())
    return generate_latest(registry)


def token_of(home: Home) -> str:
    """Returns the token that opens the metrics of a home and nothing else, from its file `metrics.token`.

    Raises StorageError if there is none and it cannot be written.
    """
    path = home.root / "metrics.token"
    try:
        return token_in(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be used ({error.strerror}): make it readable to this user.") from error


def answer_with(measure: Measure, token: str, authorization: str) -> Answer:
    """Returns the answer to a request for metrics with this header `Authorization`."""
    kind, _, brought = authorization.partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(brought.strip().encode(), token.encode()):
        return Answer(401, _REFUSED, "text/plain")
    try:
        return Answer(200, text_of(measure), CONTENT)
    except HpoError as error:
        return Answer(503, f"{error}\n".encode(), "text/plain; charset=utf-8")


def exposed(address: str | None, home: Home, measure: Measure) -> AbstractContextManager[None]:
    """Answers `/metrics` on `[HOST:]PORT`, of this host's loopback by default, within the block.

    Does nothing without an address. Raises UserError if the address cannot be used or the extra is missing.
    """
    token = ""
    if address is not None:
        check_installed()
        token = token_of(home)

    def answer(path: str, headers: Mapping[str, str]) -> Answer:
        return answer_with(measure, token, headers.get("authorization", "")) if path == PATH else Answer(404)

    return answered("metrics", address, answer)
