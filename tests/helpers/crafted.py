"""A ledger written row by row, with trials of every state, to look at without training anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import insert, select, update

from hpo.ledger import Ledger
from hpo.ledger.database import tables
from hpo.space import trial_state

SPEC: dict[str, Any] = {
    "reference": "mlp",
    "overrides": {},
    "sampler": "tpe",
    "strategy": {"name": "median"},
    "order": "ordered",
    "window": 4,
    "seed": 0,
    "objectives": [{"metric": "val/accuracy", "direction": "maximize", "select": "last"}],
    "metrics": ["val/*"],
}


def open_crafted(path: Path, names: tuple[str, ...] = ("crafted",), *, url: str = "", **spec: Any) -> Ledger:
    """A new ledger at `path`, or at the URL, that holds studies without trials, ten requested of each."""
    ledger = Ledger(url or f"sqlite:///{path}")
    with ledger.write() as connection:
        for i, name in enumerate(names):
            connection.execute(
                insert(tables.studies).values(
                    name=name,
                    uid=f"{i:032}",
                    created_at=0.0,
                    state="open",
                    requested=10,
                    spec=SPEC | {"name": name} | spec,
                    identity={},
                    environment={"home": str(path.parent), "tracking_uri": f"sqlite:///{path.parent}/mlflow.db"},
                )
            )
        connection.execute(
            insert(tables.workers).values(
                id="w", host="box", pid=41, pid_started="x", slots=1, executor="local", started_at=0.0
            )
        )
    return ledger


def put_trial(
    ledger: Ledger,
    number: int,
    state: str = "complete",
    curve: tuple[float | None, ...] = (),
    *,
    metrics: Mapping[str, float | tuple[float, ...]] | None = None,
    params: dict[str, Any] | None = None,
    **columns: Any,
) -> int:
    """Write a trial of the first study; its objective took the values of `curve`, one per epoch of 10 steps, and
    `metrics` theirs, or one and the same. Its id."""
    terminal = state in trial_state.TERMINAL_STATES
    params = {"train.optim.lr": 0.1 / (number + 1)} if params is None else params
    values = {"values": [curve[-1] if curve else None]} if terminal else {}
    with ledger.write() as connection:
        study = connection.execute(select(tables.studies.c.id).order_by(tables.studies.c.id)).scalars().first()
        row = {"study_id": study, "number": number, "state": state, "epoch": len(curve), "step": 10 * len(curve)}
        row |= {"created_at": 0.0, "started_at": 0.0, "ended_at": 90.0 if terminal else None} | values | columns
        trial = connection.execute(insert(tables.trials).values(row).returning(tables.trials.c.id)).scalar_one()
        ask = {"draw": 0, "seed": 0, "told": 0, "params": params, "coordinates": {}, "config_hash": "0" * 64}
        ask |= {"trial_attrs": {}, "study_attrs": {}}
        ask |= {"config": {"train": {"num_epochs": 4, "optim": {"lr": params.get("train.optim.lr")}}}}
        connection.execute(insert(tables.asks).values(trial_id=trial, **ask))
        attempt = {"trial_id": trial, "fence": 1, "worker_id": "w", "started_at": 0.0, "step": 10 * len(curve)}
        connection.execute(insert(tables.attempts).values(attempt))
        for epoch, value in enumerate(curve, start=1):
            others = {k: one[epoch - 1] if isinstance(one, tuple) else one for k, one in (metrics or {}).items()}
            for key, point in {"val/accuracy": value, **others}.items():
                report = {"trial_id": trial, "step": 10 * epoch, "key": key, "fold": 0, "epoch": epoch, "value": point}
                connection.execute(insert(tables.reports).values(**report, fence=1, revision=1, at=0.0))
    return trial


def change_trial(ledger: Ledger, number: int, **columns: Any) -> None:
    with ledger.write() as connection:
        connection.execute(update(tables.trials).where(tables.trials.c.number == number).values(**columns))


def config_of(ledger: Ledger, trial_id: int, config: Mapping[str, Any]) -> None:
    """Give a trial this configuration."""
    with ledger.write() as connection:
        mine = tables.asks.c.trial_id == trial_id
        connection.execute(update(tables.asks).where(mine).values(config=dict(config)))
