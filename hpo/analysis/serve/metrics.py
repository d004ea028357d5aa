"""Measures the studies of a home for a monitoring system, by a few queries for all of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request

from hpo.ledger import leases
from hpo.ledger.process_id import is_dead
from hpo.ledger.views import metrics as metric_queries
from hpo.space.trial_state import STATES
from hpo.storage.metrics_text import PATH, Family, Kind, Measure, Sample, answer_with
from hpo.tracking.ui.gate import App, Receive, Send, answer

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.ledger.rows import Connection, LeaseRow
    from hpo.ledger.views.metrics import InState, StudyState, Trained

ROLES = ("driver", "mirror", "alerts")
STUDY_STATES = ("running", "interrupted", "complete", "stopped", "removing")


class Silences:
    """Remembers since when a counter stands still, by this process's own clock, as whoever takes a lease over does."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since: dict[object, tuple[object, float]] = {}

    def look(self, tokens: Mapping[object, object]) -> dict[object, float]:
        """Returns for how many seconds each counter has had its value, and forgets those that are missing."""
        now, before = self._now(), self._since
        self._since = {
            key: before[key] if key in before and before[key][0] == token else (token, now)
            for key, token in tokens.items()
        }
        return {key: now - since for key, (_, since) in self._since.items()}


class HomeMetrics:
    """Measures a ledger whenever it is called, from any thread."""

    def __init__(
        self,
        ledger: Ledger,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger, self._wall = ledger, wall
        self._silences, self._looking = Silences(monotonic), threading.Lock()

    def __call__(self) -> list[Family]:
        with self._looking:
            return self._ledger.look(lambda connection: list(self._families(connection)))

    def _families(self, connection: Connection) -> Iterator[Family]:
        studies, holders = metric_queries.every_study(connection), leases.holders(connection)
        in_training = metric_queries.in_training(connection)
        names = {study.id: study.name for study in studies}
        yield _states(studies, holders)
        epochs, transactions = _sums(names, rows := metric_queries.by_state(connection))
        yield _trials(names, rows)
        yield _by_study("hpo_epochs", "Epochs that trials have trained.", names, epochs, kind="counter")
        meaning = "Transactions on trials: reports, checkpoints, events and ends."
        yield _by_study("hpo_trial_transactions", meaning, names, transactions, kind="counter")
        now = self._wall()
        yield _by_study(
            "hpo_report_age_seconds",
            "Time since the last report of the trial in training that has been silent for longest.",
            names,
            _largest((trial.study_id, max(0.0, now - trial.at)) for trial in in_training),
        )
        yield from self._leases(names, holders, in_training)
        mirrored = {study_id: count for study_id, count in transactions.items() if f"mirror:{study_id}" in holders}
        yield _by_study(
            "hpo_mirror_behind_transactions",
            "Transactions of the ledger on trials that the tracker furthest behind lacks.",
            names,
            mirrored | metric_queries.behind(connection),  # all of them where the tracker has nothing yet
        )
        kept = dict.fromkeys(names, 0) | metric_queries.kept_bytes(connection)
        yield _by_study("hpo_checkpoint_bytes", "Size of the checkpoints that are kept.", names, kept)

    def _leases(
        self, names: Mapping[int, str], holders: Mapping[str, LeaseRow], in_training: Sequence[Trained]
    ) -> Iterator[Family]:
        tokens: dict[object, object] = {name: (row.fence, row.renewals) for name, row in holders.items()}
        tokens |= {trial.trial_id: (trial.fence, trial.renewals) for trial in in_training}
        silent = self._silences.look(tokens)
        for role in ROLES:
            of_role = ((_study_of(name), silent[name]) for name in holders if name.startswith(f"{role}:"))
            meaning = f"Time since the lease of the study's {role} was renewed, as seen from here."
            yield _by_study(f"hpo_{role}_lease_age_seconds", meaning, names, _largest(of_role))
        yield _by_study(
            "hpo_trial_lease_age_seconds",
            "Time since the lease of the trial in training that is silent for longest was renewed, as seen from here.",
            names,
            _largest((trial.study_id, silent[trial.trial_id]) for trial in in_training),
        )


def _states(studies: Sequence[StudyState], holders: Mapping[str, LeaseRow]) -> Family:
    samples: list[Sample] = []
    for study in studies:
        driver = holders.get(f"driver:{study.id}")
        runs = driver is not None and not is_dead(driver.host, driver.pid, driver.pid_started)
        now = study.state if study.state != "open" else "running" if runs else "interrupted"
        samples += [Sample(state == now, {"study": study.name, "state": state}) for state in STUDY_STATES]
    return Family("hpo_study_state", "gauge", "1 for the state that the study is in.", samples)


def _trials(names: Mapping[int, str], rows: Sequence[InState]) -> Family:
    count = {(row.study_id, row.state): row.trials for row in rows}
    samples = [
        Sample(count.get((study_id, state), 0), {"study": name, "state": state})
        for study_id, name in names.items()
        for state in STATES
    ]
    return Family("hpo_trials", "gauge", "Trials by their state.", samples)


def _sums(names: Mapping[int, str], rows: Sequence[InState]) -> tuple[dict[int, int], dict[int, int]]:
    """Returns study id -> epochs, and study id -> transactions, over all states."""
    epochs, transactions = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for row in rows:
        epochs[row.study_id] += row.epochs
        transactions[row.study_id] += row.transactions
    return epochs, transactions


def _by_study(
    name: str, meaning: str, names: Mapping[int, str], values: Mapping[int, float], *, kind: Kind = "gauge"
) -> Family:
    of_studies = [(study, values[study_id]) for study_id, study in names.items() if study_id in values]
    return Family(name, kind, meaning, [Sample(value, {"study": study}) for study, value in of_studies])


def _largest(pairs: Iterator[tuple[int, float]]) -> dict[int, float]:
    largest: dict[int, float] = {}
    for study_id, value in pairs:
        largest[study_id] = max(value, largest.get(study_id, value))
    return largest


def _study_of(lease: str) -> int:
    return int(lease.split(":")[1])


class MetricsRoute:
    """An ASGI application that answers `/metrics` to those who bring the token, and passes on all else to `app`."""

    def __init__(self, app: App, measure: Measure, token: str, prefix: str) -> None:
        self._app, self._measure, self._token = app, measure, token
        self._paths = (PATH, prefix + PATH)

    async def __call__(self, scope: MutableMapping[str, object], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            return await self._app(scope, receive, send)
        authorization = Request(scope).headers.get("authorization", "")
        status, body, content = await asyncio.to_thread(answer_with, self._measure, self._token, authorization)
        return await answer(send, status, body, ("Content-Type", content))
