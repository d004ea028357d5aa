"""A ledger with many trials of many reports, written in bulk: a study of mlp's space as a search might have left it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from sqlalchemy import insert

from hpo.declaration import content
from hpo.declaration.references import load
from hpo.ledger import Ledger
from hpo.ledger.database import tables
from hpo.storage.home import Home

EPOCHS, STEPS, BATCH = 50, 20, 2000
PER_EPOCH = 1.5  # seconds
RUNGS = (2, 6, 18)


def write(home: Home, count: int, name: str = "many", seed: int = 0, workers: int = 4) -> Ledger:
    """Half of the trials complete at epoch 50, the others stop at a rung, fail or are infeasible; each reports val/loss
    and train/loss at every epoch."""
    study, draws = load("mlp"), random.Random(seed)
    ledger = Ledger(home.create().storage)
    spec: dict[str, Any] = {
        "reference": "mlp",
        "overrides": {"train.num_epochs": EPOCHS},
        "sampler": "tpe",
        "seed": seed,
    }
    spec |= {
        "strategy": {"name": "asha"},
        "order": "async",
        "window": 8,
        "metrics": ["val/*", "train/loss"],
        "name": name,
    }
    spec |= {"objectives": [{"metric": "val/loss", "direction": "minimize", "select": "last"}]}
    environment = {
        "host": "box",
        "home": str(home.root),
        "tracking_uri": home.tracking_uri,
        "versions": {"torch": "2.13"},
    }
    with ledger.write() as connection:
        row = {"name": name, "uid": f"{seed:032}", "created_at": 0.0, "state": "complete", "requested": count}
        row |= {
            "spec": spec,
            "identity": content.identity(study),
            "environment": environment,
            "seconds_used": 60.0 * count,
        }
        study_id = connection.execute(insert(tables.studies).values(row).returning(tables.studies.c.id)).scalar_one()
        for i in range(workers):
            worker = {"id": f"{seed}w{i}", "host": "box", "pid": 100 + i, "pid_started": "x", "slots": 1}
            connection.execute(insert(tables.workers).values(worker | {"executor": "local", "started_at": 0.0}))
    free, first = [1000.0] * workers, _next_id(ledger)
    for begin in range(0, count, BATCH):
        numbers = range(begin, min(begin + BATCH, count))
        rows = [_trial(study_id, first + n, n, draws, free, seed) for n in numbers]
        with ledger.write() as connection:
            for table in ("trials", "asks", "attempts", "decisions"):
                if made := [one[table] for one in rows if table in one]:
                    connection.execute(insert(getattr(tables, table)), made)
            connection.execute(insert(tables.reports), [point for one in rows for point in one["reports"]])
    return ledger


def _next_id(ledger: Ledger) -> int:
    with ledger.read() as connection:
        return 1 + max(connection.execute(tables.trials.select()).scalars(), default=0)


def _trial(study: int, id_: int, number: int, draws: random.Random, free: list[float], seed: int) -> dict[str, Any]:
    params = {
        "train.optim.lr": 10 ** draws.uniform(-4, -1),
        "model.dropout": draws.uniform(0, 0.5),
        "model.hidden_size": 1 << draws.randint(4, 8),
        "model.num_layers": draws.randint(1, 3),
        "train.batch_size": 1 << draws.randint(4, 8),
        "train.optim.name": draws.choice(["adamw", "sgd"]),
    }
    if params["train.optim.name"] == "sgd":
        params["train.optim.momentum"] = draws.uniform(0, 0.99)
    fate = draws.random()
    state = "complete" if fate < 0.5 else "pruned" if fate < 0.9 else "failed" if fate < 0.95 else "infeasible"
    last = EPOCHS if state == "complete" else draws.choice(RUNGS)
    curve = list(_curve(params, last, draws))
    worker = min(range(len(free)), key=lambda i: free[i])
    start = free[worker] + draws.uniform(0, 2)
    end = free[worker] = start + PER_EPOCH * last
    bad = state in ("failed", "infeasible")
    trial = {"id": id_, "study_id": study, "number": number, "state": state, "epoch": last, "step": STEPS * last}
    trial |= {
        "values": None if bad else [curve[-1]],
        "error": "loss is nan at step 40" if bad else None,
        "told": number,
    }
    trial |= {"outcome": {"failed": "user_error", "infeasible": "nonfinite"}.get(state, state), "fence": 1}
    trial |= {"created_at": start, "started_at": start, "ended_at": end}
    config = {"train": {"num_epochs": EPOCHS, "seed": number % 3, "folds": 1}, "flat": params}
    ask = {"trial_id": id_, "draw": 0, "seed": 0, "told": 0, "params": params, "coordinates": {}, "config": config}
    ask |= {"config_hash": f"{number:064x}", "trial_attrs": {}, "study_attrs": {}}
    attempt = {"trial_id": id_, "fence": 1, "worker_id": f"{seed}w{worker}", "step": STEPS * last}
    attempt |= {"outcome": trial["outcome"], "started_at": start, "ended_at": end}
    found = {"trials": trial, "asks": ask, "attempts": attempt, "reports": list(_reports(id_, curve, start))}
    if state == "pruned":
        stop = {"trial_id": id_, "step": STEPS * last, "fold": 0, "verdict": "stop", "reason": f"rung {last}: not best"}
        found["decisions"] = stop | {"params": {}, "strategy": "asha", "fence": 1, "obeyed": 1, "revision": 1}
    return found


def _curve(params: dict[str, Any], epochs: int, draws: random.Random) -> Iterator[float]:
    goal = 0.2 + 0.3 * (math.log10(params["train.optim.lr"]) + 2.5) ** 2 / 2 + params["model.dropout"] ** 2
    for epoch in range(1, epochs + 1):
        yield goal + 2.0 * math.exp(-epoch / 8) + 0.02 * draws.gauss(0, 1)


def _reports(id_: int, curve: list[float], start: float) -> Iterator[dict[str, Any]]:
    for epoch, value in enumerate(curve, start=1):
        point: dict[str, Any] = {
            "trial_id": id_,
            "step": STEPS * epoch,
            "fold": 0,
            "epoch": epoch,
            "fence": 1,
            "revision": epoch,
        }
        point["at"] = start + PER_EPOCH * epoch
        yield point | {"key": "val/loss", "value": value}
        yield point | {"key": "train/loss", "value": 0.8 * value}
