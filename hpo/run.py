"""The body of `hpo run` and `hpo resume`: from what the user gave to a driver that runs, with its mirror beside it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpo import warm
from hpo.driver import Driver
from hpo.errors import NoLedger, StudyError, UserError
from hpo.ledger import Ledger, queries
from hpo.opening import LEASE_SECONDS, Options
from hpo.search.samplers.registry import SAMPLERS, sampler_spec
from hpo.search.strategies.base import STRATEGIES, by_default, make_strategy
from hpo.signals import Signals
from hpo.space.config import Raw, as_json, flatten
from hpo.space.trial_config import lanes_of
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.storage.metrics_json import Results
from hpo.study import compatibility, preflight
from hpo.study.budget import Budget, spelled
from hpo.study.declaration import Study, load
from hpo.study.enqueue import within
from hpo.study.loading import shipped
from hpo.study.naming import check_name
from hpo.study.spec import StudySpec
from hpo.tracking.mlflow import silence
from hpo.tracking.uri import check_uri, tracker_name, tracking_uri_of
from hpo.words import command, counted
from hpo.workers.executors.placement import Placement, Settled, elsewhere, one_of
from hpo.workers.executors.resources import NOTHING_SAID, Resources

ORDERS = ("ordered", "async")
WINDOW = 4  # trials open at a time, at least
MIRROR_REVIVAL = 5.0  # seconds between starts of a mirror that keeps dying


@dataclass(frozen=True)
class Request:
    """What the user gave. None means: what the ledger has stored, else the declaration's, else the default."""

    home: Home
    reference: str | None = None  # a study's name or file; None: the stored one
    name: str | None = None
    trials: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    executor: str | None = None
    workers: int | None = None
    resources: Resources = NOTHING_SAID
    scheduler: str | None = None  # of Ray Tune's
    sampler: str | None = None
    strategy: str | None = None
    order: str | None = None
    window: int | None = None
    seed: int | None = None
    tier: int | None = None
    enqueue: Sequence[Mapping[str, Any]] | None = None
    warm_start: str | None = None
    listed: Sequence[Mapping[str, Any]] = ()  # {"label", "params"}: to be trained instead of what a sampler asks for
    listed_of: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    storage: str | None = None
    checkpoints: str | None = None  # the URL of a bucket
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


def run(request: Request, watch: Callable[[Ledger, str, int], Callable[[str], None]]) -> Result:
    """Drive the study to its end or its interruption.

    `watch(ledger, name, workers)` gives what is called at every tick, with a text to show if there is one.
    """
    said = Placement(request.executor, request.workers, request.resources, request.scheduler)
    asked = said.settled()
    if asked.executor == "ray-tune":
        request = _decided_by_tune(request)
    if request.tracking_uri:
        check_uri(request.tracking_uri)
    storage = request.storage or request.home.storage
    try:
        known = Ledger(storage, create=False, upgrade=True)
    except NoLedger:
        if request.reference is None:
            raise
        known = None
    study, spec = declare(request, known, workers=asked.workers)
    placement = said.over(_last(known, spec.name)).settled() if known else asked
    if placement.executor == "ray-tune":
        _decided_by_tune(request)  # as the study was driven before
        _bounded_by_trials(known, spec.name)
    if not (request.trials or request.epochs or request.seconds or (known and _begun(known, spec.name))):
        raise UserError(f"study {spec.name!r} is new: say how far it is to go, by --trials, --epochs or --time.")
    checkpoints = locations.settled(request.checkpoints, _row(known, spec.name), placement.executor)
    placement.check(study)
    one_by_one = [path for path, value in request.overrides.items() if isinstance(value, Raw)]
    preflight.check(study, spec, options=one_by_one, here=not elsewhere(placement.executor))
    data = study.check_data()
    lease_timeout = request.lease_timeout or _lease_seconds()
    home = request.home.create()
    ledger = known or Ledger(storage)
    options = Options(
        home=home,
        storage=ledger.url,
        tracking_uri=_tracking_uri(request, ledger, spec.name),
        trials=request.trials,
        epochs=request.epochs,
        seconds=request.seconds,
        allow_drift=request.allow_drift,
        data=data,
        placement=placement,
        checkpoints=checkpoints,
        lease_timeout=lease_timeout,
    )
    driver = _driver_of(placement)(ledger, study, spec, options, placement.make())
    driver.acquire()
    try:
        results, show = Results(ledger, spec.name, home), watch(ledger, spec.name, placement.workers)
        if notice := silence(options.tracking_uri):
            print(notice, file=sys.stderr)

        def tick(notice: str = "") -> None:
            results.tick()
            show(notice)

        return _drive(driver, ledger, spec, options, tick, results.write)
    finally:
        driver.release()


def _lease_seconds() -> float:
    text = os.environ.get("HPO_LEASE_SECONDS", str(LEASE_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UserError(f"HPO_LEASE_SECONDS={text!r} is no time: give seconds, more than 0, or leave it unset.")
    return seconds


def _drive(
    driver: Driver,
    ledger: Ledger,
    spec: StudySpec,
    options: Options,
    on_tick: Callable[[str], None],
    write_results: Callable[[], None],
) -> Result:
    from hpo.tracking import mirror_process

    def behind() -> int:
        return mirror_process.behind(ledger, tracker_name(options.tracking_uri), spec.name)

    if driver.idle:
        state = driver.run()
        write_results()
        if not behind():
            on_tick("")
            return Result(spec.name, state, driver.reason, 0, None)
    mirroring = mirror_process.spawn(options.home, options.storage, options.tracking_uri, spec.name)
    signals = Signals(driver, mirroring.kill, command(f"resume --study {spec.name}"))

    def tick() -> None:
        if notice := mirroring.revive(every=MIRROR_REVIVAL):
            print(notice, file=sys.stderr)
        on_tick(signals.untold())

    with signals:
        try:
            state = driver.run(tick)
            write_results()
        finally:  # a mirror that is left to die with this process keeps its lease
            signals.trained = True
            if left := behind():
                last = "last transaction" if left == 1 else f"last {left} transactions"
                on_tick(f"waiting for MLflow to take the {last}")
            left = mirror_process.finish(mirroring, ledger, options.tracking_uri, spec.name)
    on_tick("")
    return Result(spec.name, state, driver.reason, left, signals.first)


def _driver_of(placement: Settled) -> type[Driver]:
    if placement.executor != "ray-tune":
        return Driver
    from hpo.tuning import TuneDriver  # and with it Ray

    return TuneDriver


def _decided_by_tune(request: Request) -> Request:
    """What a scheduler of Tune's leaves to say. Raises UserError for what it has taken over."""
    given = {"--strategy": request.strategy not in (None, "none"), "--order ordered": request.order == "ordered"}
    given |= {"--epochs": request.epochs, "--time": request.seconds}
    for flag in (flag for flag, was_given in given.items() if was_given):
        raise UserError(f"{flag} with --executor ray-tune: there Ray Tune decides, by --scheduler and --trials.")
    return replace(request, strategy="none", order="async")


def _bounded_by_trials(ledger: Ledger | None, name: str) -> None:
    """Raise UserError where a study that Ray Tune is to go on with has a bound that Tune would not keep to."""
    if (row := _row(ledger, name)) is None:
        return
    stored = Budget.of(dict(row))
    if stored.epochs or stored.seconds:
        bound = f"--epochs {stored.epochs}" if stored.epochs else f"--time {spelled(stored.seconds or 0)}"
        raise UserError(
            f"study {name!r} was begun with {bound}, which Ray Tune does not keep to: go on with another "
            "--executor, or start another study by --name with --trials."
        )


def _last(ledger: Ledger, name: str) -> Placement:
    """Where the study's trials ran last."""
    row = _row(ledger, name)
    return Placement() if row is None else Placement.of(row["environment"])


def _row(ledger: Ledger | None, name: str) -> Mapping[Any, Any] | None:
    """The study as it was begun, if it was."""
    if ledger is None or not _begun(ledger, name):
        return None
    with ledger.read() as connection:
        return queries.study_row(connection, name)


def _tracking_uri(request: Request, ledger: Ledger, name: str) -> str:
    """Where the study is tracked: as given, else where it was begun, else in the home."""
    if _begun(ledger, name):
        return tracking_uri_of(ledger, name, request.home, request.tracking_uri)
    return request.tracking_uri or request.home.tracking_uri


def declare(request: Request, ledger: Ledger | None, workers: int) -> tuple[Study, StudySpec]:
    """The study as asked for: flags, then what the ledger, if any, has stored for its name, then the declaration."""
    for flag, value, known in (
        ("--sampler", request.sampler, SAMPLERS),
        ("--strategy", request.strategy, STRATEGIES),
        ("--order", request.order, ORDERS),
    ):
        if value is not None:
            one_of(flag, value, tuple(known))
    if request.window is not None and request.window < 1:
        raise UserError(f"--window {request.window}: give 1 or more.")
    study = _load(request.reference, ledger) if request.reference else None
    name = check_name(request.name if request.name is not None else (study.name if study else ""))
    stored = _stored(ledger, name, wanted=study is None) if ledger else None
    if study is None:
        assert stored is not None
        study = load(stored.reference)
    tier = request.tier or (stored.tier if stored else None)
    enqueue = stored.enqueue if stored and request.enqueue is None else request.enqueue
    if tier is not None:
        declared, study = study.space, study.upto(tier)
        enqueue = None if enqueue is None else within(enqueue, declared, study.space)
    study = study.configure(_overrides(request.overrides, stored), enqueue)
    strategy = request.strategy and _strategy(request.strategy, study)
    chosen = strategy or (stored.strategy if stored else study.strategy)
    if strategy or not stored:  # what was begun so goes on
        compatibility.rungs(chosen)
    promotes = compatibility.promotes(chosen, request.order)
    lanes = lanes_of(as_json(study.config))
    at_once = workers * lanes
    defaults = stored or StudySpec(
        reference=study.reference,
        name=name,
        **_sampling(study.sampler),
        strategy=dict(study.strategy),
        order="async" if promotes else "ordered",
        window=at_once if promotes else max(WINDOW, 2 * at_once),
        objectives=[objective.to_json() for objective in study.objectives],
        constraints=[one.to_json() for one in study.constraints],
        metrics=list(study.metrics),
    )
    given: dict[str, Any] = {"order": request.order, "window": request.window, "seed": request.seed}
    given |= {"strategy": strategy, "overrides": dict(study.overrides)}
    given |= {"tier": tier, "enqueue": [dict(one) for one in study.enqueue]}
    if request.listed:
        given |= {"listed": [dict(one) for one in request.listed], "listed_of": request.listed_of}
    if strategy and promotes:
        given["order"] = "async"
    if request.warm_start is not None and (stored is None or stored.warm_start != request.warm_start):
        given |= {"warm_start": request.warm_start, "earlier": _earlier(request.warm_start, study, ledger)}
    if promotes and request.window is None and request.workers is not None:
        given["window"] = request.workers * lanes
    given |= {"reference": study.reference, "metrics": list(study.metrics)}
    given |= {"objectives": [objective.to_json() for objective in study.objectives]}
    given |= {"constraints": [one.to_json() for one in study.constraints]}
    if request.sampler is not None:
        own = study.sampler["name"] == request.sampler
        given |= _sampling(study.sampler if own else sampler_spec(request.sampler))
    given |= compatibility.generations(
        chosen, study, request.order, request.window, Budget(request.trials, request.epochs)
    )
    if brought := compatibility.sampler(chosen, request.sampler):
        given |= _sampling(sampler_spec(brought))
    spec = defaults.model_copy(update={key: value for key, value in given.items() if value is not None})
    compatibility.check(study, spec)
    return study, spec


def _earlier(name: str, study: Study, ledger: Ledger | None) -> list[dict[str, Any]]:
    if ledger is None:
        raise UserError(f"--warm-start {name}: this home holds no study yet; name the home of that one by --home.")
    earlier, complete = warm.found(ledger, name, study)
    print(f"warm start: {len(earlier)} of {counted(complete, 'complete trial')} of study {name}", file=sys.stderr)
    return earlier


def _load(reference: str, ledger: Ledger | None) -> Study:
    """The study; one that no declaration has, but the ledger, is to be continued by `hpo resume`."""
    declared = reference.endswith(".py") or reference in shipped()
    if not declared and ledger and (stored := _stored(ledger, reference, wanted=False)):
        raise StudyError(
            f"no declaration is called {reference!r}; this ledger has a study of that name from "
            f"{stored.reference}: `{command(f'resume --study {reference}')}` continues it."
        )
    return load(reference)


def _overrides(given: Mapping[str, Any], stored: StudySpec | None) -> dict[str, Any]:
    """What is given, over what was when the study began; a preset, if one is given, takes the place of all of that."""
    given = flatten(given)
    return given if stored is None or "preset" in given else {**stored.overrides, **given}


def _sampling(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A sampler's specification as StudySpec holds it."""
    return {"sampler": spec["name"], "sampler_options": {key: spec[key] for key in spec if key != "name"}}


def _begun(ledger: Ledger, name: str) -> bool:
    with ledger.read() as connection:
        return name in queries.study_names(connection)


def _stored(ledger: Ledger, name: str, wanted: bool) -> StudySpec | None:
    """What the ledger has for the name; StudyError if there is nothing and it is `wanted`."""
    if not wanted and not _begun(ledger, name):
        return None
    with ledger.read() as connection:
        return StudySpec.from_json(queries.study_row(connection, name)["spec"])


def _strategy(name: str, study: Study) -> dict[str, Any]:
    """The named strategy, with the declaration's options where it declares that one, and not those of the default."""
    declared = study.strategy["name"] == name and not by_default(study.strategy)
    return dict(study.strategy) if declared else dict(make_strategy(name).model_dump())
