"""Holds the transactions on the rows of a trial's checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

from sqlalchemy import update
from sqlalchemy.engine import Connection

from hpo.ledger.claims import Claim, begin_earlier, bump
from hpo.ledger.database import statements as sql
from hpo.ledger.database.tables import checkpoints
from hpo.ledger.rows import ConfiguredCheckpoint


def change(connection: Connection, taken: Claim, changes: Mapping[str, Mapping[str, object]]) -> set[str]:
    """Changes rows of the trial's checkpoints, path -> column -> value: state (kept, deleted, damaged) or best.

    Returns the paths that were not deleted because another trial will start from them or a backup holds them. Raises
    Fenced if another attempt has the trial.
    """
    revision = bump(connection, taken)
    dropped = [path for path, values in changes.items() if values.get("state") == "deleted"]
    needed = _needed(connection, taken, dropped) if dropped else set[str]()
    for path, values in changes.items():
        left = {key: value for key, value in values.items() if path not in needed or key != "state"}
        row = (checkpoints.c.trial_id == taken.trial_id) & (checkpoints.c.path == path)
        if left:
            connection.execute(update(checkpoints).where(row).values(revision=revision, **left))
    if any(values.get("state") == "damaged" for values in changes.values()):
        begin_earlier(connection, taken)
    return needed


def _needed(connection: Connection, taken: Claim, paths: Sequence[str]) -> set[str]:
    connection.execute(sql.LOCK_CHECKPOINTS, {"trial": taken.trial_id, "paths": list(paths)})
    paths_of = {f"{taken.number}/{path}": path for path in paths}
    sources = connection.execute(sql.NEEDED_OR_HELD, {"study": taken.study_id, "sources": list(paths_of)}).scalars()
    return {paths_of[label] for label in sources}


def committed_paths(connection: Connection, taken: Claim) -> set[str]:
    """Returns the paths of the trial's kept checkpoints, whichever attempt currently holds the trial."""
    return {row.path for row in connection.execute(sql.KEPT, {"trial": taken.trial_id})}


def monitored(config: Mapping[str, object]) -> Mapping[str, str] | None:
    """Returns a trial's options of checkpoints, `monitor` and `mode` among them, if its best is kept by a metric."""
    train = cast("Mapping[str, Mapping[str, str]] | None", config.get("train"))
    keep = train.get("checkpoint") if isinstance(train, dict) else None
    return keep if keep and keep.get("monitor") is not None else None


def best_of(rows: Sequence[ConfiguredCheckpoint]) -> str | None:
    """Returns the path of the best kept checkpoint among those of one trial; None if nothing is monitored.

    The newest checkpoint of a step counts. Only finite values compete; the earlier step wins a tie.
    """
    keep = monitored(rows[0].config) if rows else None
    if keep is None:
        return None
    sign = 1.0 if keep["mode"] == "min" else -1.0
    values: dict[int, tuple[float, str]] = {}
    for row in rows:
        value = float(row.metrics.get(keep["monitor"], "nan"))
        if row.state == "kept" and math.isfinite(value):
            values[row.step] = (sign * value, row.path)
    return min(((value, step, path) for step, (value, path) in values.items()), default=(0.0, 0, None))[2]
