"""Runs a study for `hpo run` and `hpo resume`: settles what the user gave, then drives it with its mirror beside it."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, NoReturn

from hpo.alerts import rules
from hpo.declaration import preflight
from hpo.declaration.budget import Budget
from hpo.declaration.references import load
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.spec import StudySpec
from hpo.driver import lane_width
from hpo.driver.beside import Beside
from hpo.driver.loop import Driver
from hpo.driver.request import LEASE_SECONDS, DriverOptions, RunRequest, RunResult
from hpo.driver.resolve import begun, declare, stored_spec
from hpo.driver.signals import Signals, leave
from hpo.errors import HpoError, NoLedger, UserError
from hpo.ledger import Ledger, queries, tags, verify_queries
from hpo.space.config import flatten
from hpo.storage import locations
from hpo.storage.metrics_json import Results
from hpo.terminal import print
from hpo.text import command, spelled
from hpo.tracking.damage import damage_of
from hpo.tracking.mlflow import silence
from hpo.tracking.trackers import settled
from hpo.tracking.uri import check_uri, tracking_uri_of
from hpo.workers.executors.placement import Placement, PlacementRequest, elsewhere
from hpo.workers.prepared import Prepared


def run(
    request: RunRequest,
    watch: Callable[[Ledger, str, int], Callable[[str], None]],
    at_once: Callable[[int], NoReturn] = leave,
    prepared: Prepared | None = None,
) -> RunResult:
    """Drive the study to its end or its interruption.

    `watch(ledger, name, workers)` gives what is called at every tick, with a text to show if there is one; a second
    signal calls `at_once`. `prepared` may have been begun before, and is closed by who has begun it.
    """
    with request.home.keeping(), ExitStack() as ends:
        return _run(request, watch, at_once, prepared, ends)


def _run(
    request: RunRequest,
    watch: Callable[[Ledger, str, int], Callable[[str], None]],
    at_once: Callable[[int], NoReturn],
    prepared: Prepared | None,
    ends: ExitStack,
) -> RunResult:
    said = PlacementRequest(request.executor, request.workers, request.resources, request.scheduler)
    asked = said.settled()
    if asked.executor == "ray-tune":
        request = _decided_by_tune(request)
    prepared = _prepared(asked, prepared, ends)  # imports while the study is read, which may import as much
    if request.tracking_uri:
        check_uri(request.tracking_uri)
    storage = request.storage or request.home.storage
    try:
        known = Ledger(storage, create=False, upgrade=True)
    except NoLedger:
        if request.reference is None:
            raise
        known = None
    resolved = declare(request, known, workers=asked.workers)
    study, spec = resolved.study, resolved.spec
    placement = said.over(_last(known, spec.name)).settled() if known else asked
    prepared = _unless_elsewhere(prepared, placement)
    if placement.executor == "ray-tune":
        _decided_by_tune(request)  # as the study was driven before
        _bounded_by_trials(known, spec.name)
    if not (request.trials or request.epochs or request.seconds or (known and begun(known, spec.name))):
        raise UserError(f"study {spec.name!r} is new: say how far it is to go, by --trials, --epochs or --time.")
    checkpoints = locations.settled(request.checkpoints, _row(known, spec.name), placement.executor)
    max_bytes = _max_bytes(request, known, spec.name, placement.executor)
    trackers, alerts = (_as_last_time(request, known, spec.name, option) for option in ("trackers", "alerts"))
    trackers = [settled(one) for one in trackers]
    rules.check(rules.parse_all(alerts), spec.to_json())
    placement.check(study)
    preflight.check(resolved, options=request.one_by_one, here=not elsewhere(placement.executor))
    data = study.check_data()
    lease_timeout = request.lease_timeout or _lease_seconds()
    home = request.home.create()
    resolved = _with_lanes(request, resolved, known, placement, prepared)
    ledger = known or Ledger(storage)
    options = DriverOptions(
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
        max_bytes=max_bytes,
        trackers=trackers,
        alerts=alerts,
        lease_timeout=lease_timeout,
        prepared=prepared,
    )
    driver = _driver_of(placement)(ledger, resolved, options, placement.make())
    driver.acquire()
    try:
        if request.tags:
            row = _row(ledger, spec.name) or {}
            ledger.transact(lambda connection: tags.put(connection, row["id"], tags.STUDY, request.tags))
        results, show = Results(ledger, spec.name, home), watch(ledger, spec.name, placement.workers)
        for notice in filter(None, (silence(options.tracking_uri), _taken_out(request.overrides, spec))):
            print(notice, file=sys.stderr)

        def tick(notice: str = "") -> None:
            results.tick()
            show(notice)

        return _drive(driver, ledger, spec, options, tick, results.write, at_once)
    finally:
        driver.release()


def _prepared(asked: Placement, begun: Prepared | None, ends: ExitStack) -> Prepared | None:
    """What will fork the workers, until `ends`, where they may be of this host and can be forked."""
    if begun is not None or asked.executor != "local" or not Prepared.possible():
        return _unless_elsewhere(begun, asked)
    return ends.enter_context(closing(Prepared()))


def _unless_elsewhere(prepared: Prepared | None, placement: Placement) -> Prepared | None:
    """The same, which ends where workers are not of this host after all."""
    if prepared is None or placement.executor == "local":
        return prepared
    prepared.close()
    return None


def _with_lanes(
    request: RunRequest,
    resolved: ResolvedStudy,
    known: Ledger | None,
    placement: Placement,
    prepared: Prepared | None,
) -> ResolvedStudy:
    """The study with the number of lanes that it is to have, of which the user is told."""
    stored = stored_spec(known, resolved.spec.name, wanted=False) if known else None
    settled, notice = lane_width.settled(request, resolved, stored, placement, prepared)
    if notice:
        print(notice, file=sys.stderr)
    if settled == request:
        return resolved
    with contextlib.redirect_stderr(io.StringIO()):  # the notices of the declaration, which were told before
        return declare(settled, known, workers=placement.workers)


def _taken_out(overrides: Mapping[str, Any], spec: StudySpec) -> str:
    """What the user sets, itself or by a preset, and so is not searched, of what the study would search without it."""
    if not overrides or spec.listed:
        return ""
    declared = load(spec.reference)
    space = (declared if spec.tier is None else declared.upto(spec.tier)).space
    told: list[str] = []
    preset = overrides.get("preset")
    directly = {path: value for path, value in overrides.items() if path != "preset"}
    for which, values in (("this run", directly), (f"preset={preset}", declared.presets.get(str(preset), {}))):
        before, space = space, space.pinned(flatten(values))
        if taken := [path for path in before.dimensions if path not in space.dimensions]:
            are = "is" if len(taken) == 1 else "are"
            told.append(f"{which} sets {', '.join(taken)}, which {are} not searched")
            told += [
                f"{path}={json.dumps(spec.overrides[path])} is none of what would be searched, {one.span}"
                for path, one in before.dimensions.items()
                if path in taken and path in directly and not one.may_be(spec.overrides[path])
            ]
    return "\n".join(told)


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
    options: DriverOptions,
    on_tick: Callable[[str], None],
    write_results: Callable[[], None],
    at_once: Callable[[int], NoReturn],
) -> RunResult:
    beside = Beside(options, ledger, spec.name)
    if driver.idle:
        state = driver.run()
        write_results()
        if not beside.behind() and not options.alerts:
            on_tick("")
            return RunResult(spec.name, state, driver.reason, 0, None)
    beside.start()
    signals = Signals(driver, beside.kill, command(f"resume --study {spec.name}"), at_once)

    def tell(left: int) -> None:
        if left:
            last = "last transaction" if left == 1 else f"last {left} transactions"
            on_tick(f"waiting for MLflow to take the {last}")

    def tick() -> None:
        beside.tick()
        on_tick(signals.untold())

    with signals:
        try:
            state = driver.run(tick)
            write_results()
        finally:  # a mirror that is left to die with this process keeps its lease
            signals.trained = True
            if left := beside.behind():
                tell(left)
            left = beside.finish(tell)
    on_tick("")
    damaged = damage_of(options.tracking_uri) or damage_of_ledger(ledger) if left else ""
    return RunResult(spec.name, state, driver.reason, left, signals.first if state == "interrupted" else None, damaged)


def damage_of_ledger(ledger: Ledger) -> str:
    """The sentence if SQLite finds its file damaged, all of which it reads; "" where it is sound, or no SQLite."""
    try:
        broken = ledger.look(verify_queries.integrity_check) if ledger.is_sqlite else []
    except HpoError as error:
        return str(error)
    fix = "restore the file from a backup, or choose another --home."
    return f"the ledger {ledger.shown} is damaged ({' '.join(broken[0].split())[:100]}): {fix}" if broken else ""


def _driver_of(placement: Placement) -> type[Driver]:
    if placement.executor != "ray-tune":
        return Driver
    from hpo.driver.ray_tune.driver import TuneDriver  # and with it Ray

    return TuneDriver


def _decided_by_tune(request: RunRequest) -> RunRequest:
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


def _last(ledger: Ledger, name: str) -> PlacementRequest:
    """Where the study's trials ran last."""
    row = _row(ledger, name)
    return PlacementRequest() if row is None else PlacementRequest.of(row["environment"])


def _row(ledger: Ledger | None, name: str) -> Mapping[Any, Any] | None:
    """The study as it was begun, if it was."""
    if ledger is None or not begun(ledger, name):
        return None
    with ledger.read() as connection:
        return queries.study_row(connection, name)


def _max_bytes(request: RunRequest, known: Ledger | None, name: str, executor: str) -> int | None:
    """What the study's checkpoints may take: as given, else as last time."""
    row = _row(known, name)
    if executor == "ray-tune" and request.max_bytes:
        raise UserError("--max-bytes has no effect under --executor ray-tune, which keeps checkpoints itself.")
    if executor == "ray-tune":
        return None
    return request.max_bytes or (row["environment"].get("max_bytes") if row else None)


def _as_last_time(request: RunRequest, known: Ledger | None, name: str, option: str) -> Sequence[str]:
    """An option that may be given several times: as given, else as last time; `none` alone takes it back."""
    given: Sequence[str] | None = getattr(request, option)
    if given is None:
        row = _row(known, name)
        return row["environment"].get(option, []) if row else []
    return [] if [*given] == ["none"] else given


def _tracking_uri(request: RunRequest, ledger: Ledger, name: str) -> str:
    """Where the study is tracked: as given, else where it was begun, else in the home."""
    if begun(ledger, name):
        return tracking_uri_of(ledger, name, request.home, request.tracking_uri)
    return request.tracking_uri or request.home.tracking_uri
