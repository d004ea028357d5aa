"""Defines the ledger's tables. They are the single source of truth; everything else is derived or mirrored.

    studies ─┬─ trials ─┬─ asks          the proposal, and what the sampler knew then
             │          ├─ attempts      one worker's attempt at a trial, with its fence
             │          ├─ reports       one value per (trial, fold, key, step), first write wins
             │          ├─ decisions     the strategy's answer to a report
             │          ├─ checkpoints   durable checkpoints, committed with a report
             │          └─ events        everything else that happened, artifacts included
             ├─ workers                  who trains
             ├─ leases                   who drives a study, who mirrors it
             ├─ mirrors                  the progress of a tracker with a trial
             ├─ tags                     set by people and training functions on it, or on a trial of it
             └─ alerts, alert_cursors    messages and their targets, and how far the ledger was searched for them
    audit                                who did what; outlives the studies that it names
    quotas                               what the studies of a person may use
    compatibility                        the oldest schema that may use the ledger

Conventions. Times are seconds since the epoch, for people and trackers; only `held_until` is compared. JSON columns
hold plain JSON. A NaN value is stored as NULL, infinities as themselves.

`trials.revision` grows by one with every transaction that changes the trial; the rows that it wrote carry it, so a
mirror at revision r sends the rows above r. One attempt at a time writes to a trial, so the order of revisions is the
order of commits.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.engine import Dialect

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class Json(TypeDecorator[Any]):
    """A column type for JSON that holds an object, or a list; reading anything else raises ValueError."""

    impl, cache_ok = JSON, True

    def __init__(self, kind: type = dict) -> None:
        super().__init__()
        self.kind = kind

    def process_result_value(self, value: object, dialect: Dialect) -> Any:
        if value is not None and not isinstance(value, self.kind):
            raise ValueError(f"the JSON of the ledger is no {self.kind.__name__}")
        return value


studies = Table(
    "studies",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("uid", String(32), nullable=False),  # random; names the study's runs in trackers
    Column("created_at", Double, nullable=False),
    Column("state", String(16), nullable=False),  # open | complete | stopped (after equal tracebacks) | removing
    # The budget, for the study over all its resumptions; see hpo.declaration.budget.
    Column("requested", Integer, nullable=False),  # trials; 0 for no bound
    Column("max_epochs", Integer),
    Column("max_seconds", Double),
    Column("seconds_used", Double, nullable=False, server_default="0"),  # of a driver's run
    Column(
        "spec", Json(), nullable=False
    ),  # hpo.declaration.spec.StudySpec: reference, overrides, sampler, strategy, order, window, seed ...
    Column("identity", Json(), nullable=False),  # component -> hash or value; a change is drift
    Column("environment", Json(), nullable=False),  # versions, git commit, host
    Column("revision", Integer, nullable=False, server_default="0"),  # bumped by study-level changes, for mirrors
    Column("lease_seconds", Double, nullable=False, server_default="30"),  # the longest silence of its workers
)

trials = Table(
    "trials",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("study_id", Integer, ForeignKey("studies.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("parent", Integer),  # number of the trial it descends from
    Column("generation", Integer, nullable=False, server_default="0"),
    Column("start", Text),  # the checkpoint it was asked to begin from, <trial number>/<checkpoints.path>
    Column("from_epoch", Integer, nullable=False, server_default="0"),  # that checkpoint's; not trained by this trial
    Column("group", String(32)),  # shared by trials that train as one model
    Column("ranks", Integer, nullable=False, server_default="1"),
    Column("fence", Integer, nullable=False, server_default="0"),  # of its newest attempt
    Column("revision", Integer, nullable=False, server_default="0"),
    Column("step", Integer, nullable=False, server_default="0"),  # the highest one reported
    Column("epoch", Integer, nullable=False, server_default="0"),  # the highest one closed
    Column("values", Json(list)),  # one per objective, once terminal or paused in order; null for a missing one
    Column("violations", Json(list)),  # one per constraint, the excess over its bounds; null for a missing one
    Column("outcome", String(16)),  # trainer.report.OutcomeKind, or "refused" without an attempt
    Column("error", Text),
    Column("traceback", Text),
    Column("losses", Integer, nullable=False, server_default="0"),  # attempts lost to infrastructure
    Column("told", Integer),  # its place in the sequence of tells to the sampler; null until told
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("ended_at", Double),
    UniqueConstraint("study_id", "number"),
    UniqueConstraint("study_id", "told"),
    Index(None, "study_id", "state", "number"),
)

asks = Table(
    "asks",
    metadata,
    Column("trial_id", Integer, ForeignKey("trials.id"), primary_key=True),
    Column("draw", Integer, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("told", Integer, nullable=False),  # how many tells the sampler had seen: the sequence
    Column("params", Json(), nullable=False),  # dotted path -> value, active dimensions only
    Column("coordinates", Json(), nullable=False),  # path -> the sampler's coordinate, for every dimension
    Column("config", Json(), nullable=False),  # the whole resolved configuration
    Column("config_hash", String(64), nullable=False),
    Column("trial_attrs", Json(), nullable=False),  # the sampler's system attributes
    Column("study_attrs", Json(), nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("host", String(255), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("pid_started", String(64), nullable=False),  # distinguishes a recycled pid
    Column("slots", Integer, nullable=False),
    Column("executor", String(32), nullable=False),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("schema", String(32)),  # of its release
)

attempts = Table(
    "attempts",
    metadata,
    Column("trial_id", Integer, ForeignKey("trials.id"), primary_key=True),
    Column("fence", Integer, primary_key=True),
    Column("worker_id", String(32), ForeignKey("workers.id"), nullable=False),
    Column("claim", String(32)),  # token of the claim that began it, with which a retry finds it again
    Column("renewals", Integer, nullable=False, server_default="0"),
    Column("from_step", Integer, nullable=False, server_default="0"),  # of the checkpoint it resumed from
    Column("step", Integer, nullable=False, server_default="0"),  # the last one it reported
    Column("outcome", String(16)),  # OutcomeKind once ended; null while it runs
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double),
)

reports = Table(
    "reports",
    metadata,
    Column("trial_id", Integer, ForeignKey("trials.id"), primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("key", String(250), primary_key=True),
    Column("fold", Integer, primary_key=True),
    Column("epoch", Integer),  # set when the report closes an epoch
    Column("value", Double),  # NaN is NULL
    Column("fence", Integer, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("at", Double, nullable=False),
    sqlite_with_rowid=False,
)

decisions = Table(
    "decisions",
    metadata,
    Column("trial_id", Integer, ForeignKey("trials.id"), primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("fold", Integer, primary_key=True),
    Column("verdict", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("checkpoint", Text),  # <trial number>/<checkpoints.path>, of a restart
    Column("params", Json(), nullable=False),
    Column("strategy", String(64), nullable=False),
    Column("fence", Integer, nullable=False),
    Column("obeyed", Integer),  # fence of the attempt that ended by it; it is obeyed only once
    Column("revision", Integer, nullable=False),
    sqlite_with_rowid=False,
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("trial_id", Integer, ForeignKey("trials.id"), nullable=False),
    Column("step", Integer, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("path", Text, nullable=False),  # relative to the checkpoint root
    Column("sha256", String(64), nullable=False),  # of its manifest
    Column("size", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),  # kept | deleted | damaged
    Column("best", Integer, nullable=False, server_default="0"),  # 1 while it is the best kept
    Column("metrics", Json(), nullable=False),  # those of the report that committed it
    Column("fence", Integer, nullable=False),
    Column("revision", Integer, nullable=False),  # of its last change
    Column("at", Double, nullable=False),
    Column("held_until", Double),  # retention leaves it alone before, since a backup needs it
    UniqueConstraint("trial_id", "path"),
)

events = Table(
    "events",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("study_id", Integer, ForeignKey("studies.id"), nullable=False),
    Column("trial_id", Integer, ForeignKey("trials.id")),
    Column("kind", String(64), nullable=False),
    Column("fields", Json(), nullable=False),
    Column("revision", Integer, nullable=False),  # the trial's, or the study's for an event of no trial
    Column("uid", String(64), nullable=False, unique=True),  # makes a retried commit harmless
    Column("at", Double, nullable=False),
    Index(None, "study_id", "trial_id"),
)

leases = Table(
    "leases",
    metadata,
    Column("name", String(80), primary_key=True),  # driver:<study id> | mirror:<study id> | alerts:<study id>
    Column("owner", String(32)),  # null when free
    Column("fence", Integer, nullable=False, server_default="0"),
    Column("renewals", Integer, nullable=False, server_default="0"),
    Column("host", String(255)),
    Column("pid", Integer),
    Column("pid_started", String(64)),
    Column("since", Double),
    Column("schema", String(32)),  # of the owner's release
)

mirrors = Table(
    "mirrors",
    metadata,
    Column("tracker", String(250), primary_key=True),  # the tracking URI, without credentials
    Column("study_id", Integer, ForeignKey("studies.id"), primary_key=True),
    Column("number", Integer, primary_key=True),  # trial number; -1 is the study's own run
    Column("run_id", String(64), nullable=False),
    Column("revision", Integer, nullable=False),  # the tracker has everything up to here
)

tags = Table(
    "tags",
    metadata,
    Column("study_id", Integer, ForeignKey("studies.id"), primary_key=True),
    Column("number", Integer, primary_key=True),  # trial number; -1 is the study
    Column("key", String(250), primary_key=True),
    Column("value", Text),  # null once removed, so that trackers drop it too
    Column("at", Double, nullable=False),
)

alerts = Table(
    "alerts",
    metadata,
    Column("id", Integer, primary_key=True),  # their order
    Column("study_id", Integer, ForeignKey("studies.id"), nullable=False),
    Column("target", String(250), nullable=False),  # as it was declared; holds no secret
    Column("event", String(160), nullable=False),  # a permanent name of what has happened
    Column("content", Json(), nullable=False),  # as it is sent each time
    Column("state", String(16), nullable=False),  # waiting | sent | refused | dropped
    Column("message", String(200)),  # the id of its message, fixed before the first sending
    Column("tries", Integer, nullable=False, server_default="0"),
    Column("error", Text),  # why the last try failed
    Column("at", Double, nullable=False),
    UniqueConstraint("study_id", "target", "event"),
)

alert_cursors = Table(
    "alert_cursors",
    metadata,
    Column("study_id", Integer, ForeignKey("studies.id"), primary_key=True),
    Column("number", Integer, primary_key=True),  # trial number; -1 marks since when the study has alerts
    Column("state", String(16), nullable=False),  # the trial's, at the last look
    Column("revision", Integer, nullable=False),  # everything up to here was searched
)

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True),  # their order
    Column("uid", String(32), nullable=False, unique=True),  # makes a retried commit harmless
    Column("at", Double, nullable=False),
    Column("study", String(64), nullable=False),  # its name; the study may be deleted
    Column("action", String(16), nullable=False),  # run | resume | stop | rm | promote | tag
    Column("user", String(250), nullable=False),  # of the system
    Column("role", String(250)),  # of the server; null for SQLite
    Column("host", String(255), nullable=False),
    Column("command", Text, nullable=False),  # as it was typed, without passwords
)

quotas = Table(
    "quotas",
    metadata,
    Column("person", String(250), primary_key=True),  # a role of the server, or a user of the system
    Column("trials", Integer),  # that train at a time; null for no bound
    Column("bytes", BigInteger),  # of kept checkpoints
)

compatibility = Table(  # one row
    "compatibility",
    metadata,
    Column("schema", String(32), primary_key=True),  # the oldest whose releases may use the ledger
    Column("release", String(32), nullable=False),  # the first release that has it, for messages
)
