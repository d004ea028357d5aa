"""The body of `hpo run` and `hpo resume`: from what the user gave to a driver that runs, with its mirror beside it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from hpo.driver import LEASE_SECONDS, Driver, Options
from hpo.errors import UserError
from hpo.executors.base import Executor
from hpo.executors.inline import Inline
from hpo.executors.local import Local
from hpo.home import Home, check_name
from hpo.ledger import Ledger, reads
from hpo.search.samplers import SAMPLERS
from hpo.search.strategy import STRATEGIES
from hpo.study import Study, StudySpec, load

EXECUTORS: dict[str, Callable[[int], Executor]] = {"inline": Inline, "local": Local}
ORDERS = ("ordered", "async")


@dataclass(frozen=True)
class Request:
    """What the user gave. None means: what the ledger has stored, else the declaration's, else the default."""

    home: Home
    reference: str | None = None  # a study's name or file; None: the stored one
    name: str | None = None
    trials: int | None = None
    executor: str | None = None
    workers: int | None = None
    sampler: str | None = None
    strategy: str | None = None
    order: str | None = None
    window: int | None = None
    seed: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    storage: str | None = None
    tracking_uri: str | None = None
    allow_drift: bool = False
    lease_timeout: float | None = None


@dataclass(frozen=True)
class Result:
    """How a run ended: `state` complete, stopped or interrupted; `behind` rows MLflow does not have yet."""

    study: str
    state: str
    reason: str
    behind: int
    signal: int | None


def run(request: Request, watch: Callable[[Ledger, str], Callable[[], None]]) -> Result:
    """Drive the study to its end or its interruption. `watch(ledger, name)` gives what is called at every tick."""
    executor_name, workers = _executor(request)
    ledger = Ledger(request.storage or request.home.create().storage)
    study, spec = _declare(request, ledger, workers)
    study.check()
    options = Options(
        home=request.home.create(),
        storage=ledger.url,
        tracking_uri=request.tracking_uri or request.home.tracking_uri,
        trials=request.trials,
        allow_drift=request.allow_drift,
        lease_timeout=request.lease_timeout or float(os.environ.get("HPO_LEASE_SECONDS", LEASE_SECONDS)),
    )
    driver = Driver(ledger, study, spec, options, EXECUTORS[executor_name](workers))
    driver.acquire()
    try:
        return _drive(driver, ledger, spec, options, watch(ledger, spec.name))
    finally:
        driver.release()


def _drive(driver: Driver, ledger: Ledger, spec: StudySpec, options: Options, on_tick: Callable[[], None]) -> Result:
    from hpo import mirror

    mirroring = mirror.spawn(options.home, options.storage, options.tracking_uri, spec.name)
    signals = _Signals(driver, mirroring.kill)
    with signals:
        state = driver.run(on_tick)
        behind = mirror.finish(mirroring, ledger, options.tracking_uri, spec.name)
    on_tick()
    return Result(spec.name, state, driver.stopped_because, behind, signals.first)


class _Signals:
    """The first SIGINT, SIGTERM or SIGHUP stops gracefully, the second at once; 130 for SIGINT, as shells have it."""

    def __init__(self, driver: Driver, kill_mirror: Callable[[], None]) -> None:
        self._driver, self._kill_mirror = driver, kill_mirror
        self.first: int | None = None

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._handle) for number in _STOPPING}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.first is None:
            self.first = number
            self._driver.request_stop()
        else:
            self._driver.kill()
            self._kill_mirror()
            os._exit(128 + number)


_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _executor(request: Request) -> tuple[str, int]:
    """The executor's name and number of workers: two local processes by default, one where it is inline."""
    name = request.executor or "local"
    _one_of("--executor", name, tuple(EXECUTORS))
    workers = request.workers if request.workers is not None else (1 if name == "inline" else 2)
    if workers < 1:
        raise UserError(f"--workers {workers}: give 1 or more.")
    return name, workers


def _declare(request: Request, ledger: Ledger, workers: int) -> tuple[Study, StudySpec]:
    """The study as asked for: flags first, then what the ledger has stored for its name, then the declaration."""
    study = load(request.reference) if request.reference else None
    name = check_name(request.name or (study.name if study else ""))
    with ledger.read() as connection:
        known = name in reads.study_names(connection)
        stored = StudySpec.from_json(reads.study_row(connection, name)["spec"]) if known or study is None else None
    if study is None:
        assert stored is not None
        study = load(stored.reference)
    spec = StudySpec(
        reference=study.reference,
        name=name,
        overrides=dict(request.overrides) or (dict(stored.overrides) if stored else {}),
        sampler=request.sampler or (stored.sampler if stored else study.sampler),
        strategy=_strategy(request, stored, study),
        order=request.order or (stored.order if stored else "ordered"),
        window=request.window or (stored.window if stored else 2 * workers),
        seed=request.seed if request.seed is not None else (stored.seed if stored else 0),
        objectives=[objective.to_json() for objective in study.objectives],
        metrics=list(study.metrics),
    )
    _one_of("--sampler", spec.sampler, tuple(SAMPLERS))
    _one_of("--order", spec.order, ORDERS)
    if spec.window < 1:
        raise UserError(f"--window {spec.window}: give 1 or more.")
    return study.configure(spec.overrides), spec


def _strategy(request: Request, stored: StudySpec | None, study: Study) -> dict[str, Any]:
    if request.strategy is not None:
        _one_of("--strategy", request.strategy, tuple(STRATEGIES))
        declared = study.strategy
        return declared if declared["name"] == request.strategy else {"name": request.strategy}
    return stored.strategy if stored else study.strategy


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    from hpo.config import near

    if value not in known:
        raise UserError(f"{flag} {value!r} is not known: choose one of {', '.join(known)}{near(value, known)}")
