"""Measures how sure a report's answer is: the best trials under other seeds, and without each of their parameters.

{
    "confirm": [confirmation]   one for each objective, as in `hpo confirm --json`; empty if it was not run
    "notes": [str]              remarks on those tables
    "ablate": [ablation]        likewise from `hpo ablate --json`
    "noise": {objective: {"deviation": float, "runs": int}}   of runs that differ only in their seed, pooled
    "undecided": str            that the first two of the only objective, of which one may be the default configuration,
        cannot be told apart; else empty
    "standing": [str]           which configuration has the best mean by the only objective, and whether it is the best,
        in the words of `notes`; empty where the first is a trial that is told from the others
    "beaten": bool              whether the default configuration is better than each trial, beyond doubt
    "commands": {"confirm": str, "ablate": str, "anew": str, "seeds": str, "steadiest": str}   the commands that make
        the tables; `anew` confirms other trials, `seeds` uses as many seeds as may decide, if they are few; and
        `steadiest` shows how to train the best trial under other seeds; empty for an imported study
    "lacking": {"confirm": str, "ablate": str}    why a table that was asked for is missing; else empty
}
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from typing import TYPE_CHECKING, Any

from hpo.analysis.report.snapshot import reason
from hpo.errors import HpoError
from hpo.ledger import queries
from hpo.text import command

if TYPE_CHECKING:
    from hpo.analysis.follow_up.confirm import Confirmation
    from hpo.ledger import Ledger


def sure(ledger: Ledger, name: str) -> dict[str, Any]:
    """Returns the results of the newest studies that `hpo confirm` and `hpo ablate` have derived from this one."""
    with ledger.read() as connection:
        derived = [study for study, source in queries.derived(connection).items() if source == name]
        spec = queries.study_row(connection, name).spec
        listed = {study: queries.study_row(connection, study).spec.listed for study in derived}
    by_kind = {kind_of([entry["label"] for entry in rows]): study for study, rows in listed.items()}
    tables: dict[str, list[Any]] = {"confirm": [], "ablate": []}
    lacking = {"confirm": "", "ablate": ""}
    for kind, read in (("confirm", _confirmed), ("ablate", _ablated)):
        if kind in by_kind:
            try:
                tables[kind] = read(ledger, name, by_kind[kind])
            except HpoError as error:
                lacking[kind] = reason(error)
    several = len(tables["confirm"]) > 1
    confirmed = [table.as_json() for table in tables["confirm"]]
    entry = steadiest(confirmed, spec.objectives[0]["direction"])
    best = entry["trial"] if entry else None
    return {
        "confirm": confirmed,
        "notes": [line for table in tables["confirm"] for line in notes(table, several)],
        "ablate": [asdict(ablation) for ablation in tables["ablate"]],
        "noise": {table.metric: pooled for table in tables["confirm"] if (pooled := noise(table))},
        **_standing(tables["confirm"]),
        "commands": {} if spec.imported else commands(name, derived, best, tables["confirm"]),
        "lacking": lacking,
    }


def commands(
    name: str, own: Collection[str], steadiest: int | None = None, confirmed: Sequence[Confirmation] = ()
) -> dict[str, str]:
    """Returns the commands that make the tables.

    `own` are the studies derived from this one, `steadiest` the best trial under other seeds.
    """
    fresh = next(free for number in count(2) if (free := f"{name}-confirm-{number}") not in own)
    trial = "" if steadiest is None else f" --trial {steadiest}"
    return {
        "confirm": command(f"confirm --study {name}"),
        "anew": command(f"confirm --study {name} --name {fresh}"),
        "ablate": command(f"ablate --study {name}{trial}"),
        "seeds": "".join(decides(table) for table in confirmed[:1]),
        "steadiest": "" if steadiest is None else command(f"best --study {name}{trial}"),
    }


def _standing(confirmed: Sequence[Confirmation]) -> dict[str, Any]:
    """Returns `undecided`, `standing` and `beaten`; with several objectives they say nothing."""
    if len(confirmed) != 1:
        return {"undecided": "", "standing": [], "beaten": False}
    from hpo.analysis.follow_up import confirm

    [table] = confirmed
    unsure = confirm.undecided(table) or any(rival.leads for rival in confirm.rivals(table))
    return {
        "undecided": confirm.undecided(table),
        "standing": confirm.standings(table) if unsure else [],
        "beaten": confirm.beaten(table),
    }


def decides(of: Confirmation) -> str:
    """Returns the command that trains the same trials under as many seeds as may decide between the first two."""
    from hpo.analysis.follow_up import confirm

    return confirm.decides(of)


def steadiest(confirmed: Sequence[Mapping[str, Any]], direction: str) -> Mapping[str, Any] | None:
    """Returns the row of the trial with the best mean under other seeds, by the first objective; None without one."""
    rows = [entry for table in confirmed[:1] for entry in table["rows"] if entry["again"] and not entry["left"]]
    sign = 1.0 if direction == "minimize" else -1.0
    return min(rows, key=lambda entry: sign * entry["again"]["mean"], default=None)


def kind_of(labels: Sequence[str]) -> str:
    """Returns the command that has derived a study with these labels."""
    from hpo.analysis.follow_up.ablate import FOUND
    from hpo.analysis.results.extended import is_extension

    return "ablate" if FOUND in labels else "extend" if is_extension(labels) else "confirm"


def notes(of: Confirmation, several: bool) -> list[str]:
    """Returns the notes about a table of `hpo confirm`."""
    from hpo.analysis.follow_up import confirm

    return confirm.notes(of, several)


def _confirmed(ledger: Ledger, name: str, own: str) -> list[Confirmation]:
    from hpo.analysis.follow_up import confirm
    from hpo.analysis.follow_up.derived_study import found, repeats

    source = found(ledger, name)
    metrics = confirm.held_out(source, None)
    return confirm.confirmations(source, own, metrics, repeats(ledger, own, metrics))


def _ablated(ledger: Ledger, name: str, own: str) -> list[Any]:
    from hpo.analysis.follow_up import ablate
    from hpo.analysis.follow_up.derived_study import SEED, found, repeats

    source = found(ledger, name)
    with ledger.read() as connection:
        listed = queries.study_row(connection, own).spec.listed
    as_found: Mapping[str, Any] = next(entry["params"] for entry in listed if entry["label"] == ablate.FOUND)
    params = {path: value for path, value in as_found.items() if path != SEED}
    trial = next((ranked for ranked in source.ranked if ranked["params"] == params), None)
    if trial is None:
        raise HpoError(f"no complete trial of {name!r} has the parameters that {own!r} was made of.")
    return ablate.ablations(source, own, trial, ablate.variants(source, trial), repeats(ledger, own))


def noise(of: Confirmation) -> dict[str, Any] | None:
    """Returns the standard deviation of one run, pooled over the configurations; None if none has two runs.

    It is sqrt(sum (n-1) s^2 / sum (n-1)).
    """
    spreads = [row.again for row in of.rows if row.again is not None and row.again.error is not None]
    freedom = sum(spread.count - 1 for spread in spreads)
    if not freedom:
        return None
    squares = sum((spread.count - 1) * spread.count * (spread.error or 0.0) ** 2 for spread in spreads)
    return {"deviation": math.sqrt(squares / freedom), "runs": sum(spread.count for spread in spreads)}
