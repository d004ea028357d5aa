"""How sure a report's answer is: the best trials under other seeds, and without each of their parameters.

{
    "confirm": [confirmation]   one for each objective, as `hpo confirm --json` has them; empty where nobody has asked
    "notes": [str]              what those tables say
    "ablate": [ablation]        the same of `hpo ablate --json`
    "noise": {objective: {"deviation": float, "runs": int}}   of runs that differ in their seed alone, pooled
    "undecided": str            that the first two of the only objective cannot be told apart; else empty
    "commands": {"confirm": str, "ablate": str, "anew": str, "seeds": str, "steadiest": str}   what makes the tables,
        the first of them of other trials, and with as many seeds as may decide, where they are few; and what shows how
        to train the best trial under other seeds; of an imported study nothing does
    "lacking": {"confirm": str, "ablate": str}    why a table that was asked for is not here; else empty
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
    """Of the newest study that each of the two commands has derived from this one."""
    with ledger.read() as connection:
        own = [one for one, of in queries.derived(connection).items() if of == name]
        spec = queries.study_row(connection, name)["spec"]
        lists = {one: [row["label"] for row in queries.study_row(connection, one)["spec"]["listed"]] for one in own}
    made = {kind_of(labels): one for one, labels in lists.items()}
    tables: dict[str, list[Any]] = {"confirm": [], "ablate": []}
    lacking = {"confirm": "", "ablate": ""}
    for kind, read in (("confirm", _confirmed), ("ablate", _ablated)):
        if kind in made:
            try:
                tables[kind] = read(ledger, name, made[kind])
            except HpoError as error:
                lacking[kind] = reason(error)
    several = len(tables["confirm"]) > 1
    confirmed = [one.as_json() for one in tables["confirm"]]
    row = steadiest(confirmed, spec["objectives"][0]["direction"])
    best = row["trial"] if row else None
    return {
        "confirm": confirmed,
        "notes": [line for one in tables["confirm"] for line in notes(one, several)],
        "ablate": [asdict(one) for one in tables["ablate"]],
        "noise": {one.metric: found for one in tables["confirm"] if (found := noise(one))},
        "undecided": "" if several else "".join(map(undecided, tables["confirm"])),
        "commands": {} if spec.get("imported") else commands(name, own, best, tables["confirm"]),
        "lacking": lacking,
    }


def commands(
    name: str, own: Collection[str], steadiest: int | None = None, confirmed: Sequence[Confirmation] = ()
) -> dict[str, str]:
    """What makes the tables; `own` are the studies derived from this one, `steadiest` the best trial under other
    seeds."""
    fresh = next(one for number in count(2) if (one := f"{name}-confirm-{number}") not in own)
    trial = "" if steadiest is None else f" --trial {steadiest}"
    return {
        "confirm": command(f"confirm --study {name}"),
        "anew": command(f"confirm --study {name} --name {fresh}"),
        "ablate": command(f"ablate --study {name}{trial}"),
        "seeds": "".join(more_seeds(one) for one in confirmed[:1]),
        "steadiest": "" if steadiest is None else command(f"best --study {name}{trial}"),
    }


def more_seeds(of: Confirmation) -> str:
    """The command that trains the same trials under as many seeds as may tell the first two apart; empty where they are
    told apart, or where too many would be needed."""
    from hpo.analysis.follow_up import confirm

    if not of.ahead or not confirm.undecided(of) or not (seeds := confirm.seeds_needed(of.ahead)):
        return ""
    own = "" if of.name == f"{of.study}-confirm" else f" --name {of.name}"
    return command(f"confirm --study {of.study}{own} --top {len(of.rows)} --seeds {seeds}")


def undecided(of: Confirmation) -> str:
    """As `hpo confirm` says it."""
    from hpo.analysis.follow_up import confirm

    return confirm.undecided(of)


def steadiest(confirmed: Sequence[Mapping[str, Any]], direction: str) -> Mapping[str, Any] | None:
    """The row of the trial with the best mean under other seeds, by the first objective; None where there are none."""
    rows = [row for one in confirmed[:1] for row in one["rows"] if row["again"]]
    sign = 1.0 if direction == "minimize" else -1.0
    return min(rows, key=lambda row: sign * row["again"]["mean"], default=None)


def kind_of(labels: Sequence[str]) -> str:
    """The command that has derived a study of configurations with these labels."""
    from hpo.analysis.follow_up.ablate import FOUND

    return "ablate" if FOUND in labels else "confirm"


def notes(of: Confirmation, several: bool) -> list[str]:
    """What a table of `hpo confirm` says."""
    from hpo.analysis.follow_up import confirm

    return confirm.notes(of, several)


def _confirmed(ledger: Ledger, name: str, own: str) -> list[Confirmation]:
    from hpo.analysis.follow_up import confirm
    from hpo.analysis.follow_up.derived_study import found, repeats

    of = found(ledger, name)
    metrics = confirm.held_out(of, None)
    return confirm.confirmations(of, own, metrics, repeats(ledger, own, metrics))


def _ablated(ledger: Ledger, name: str, own: str) -> list[Any]:
    from hpo.analysis.follow_up import ablate
    from hpo.analysis.follow_up.derived_study import SEED, found, repeats

    of = found(ledger, name)
    with ledger.read() as connection:
        listed = queries.study_row(connection, own)["spec"]["listed"]
    as_found: Mapping[str, Any] = next(row["params"] for row in listed if row["label"] == ablate.FOUND)
    params = {path: value for path, value in as_found.items() if path != SEED}
    trial = next((one for one in of.ranked if one["params"] == params), None)
    if trial is None:
        raise HpoError(f"no complete trial of {name!r} has the parameters that {own!r} was made of.")
    return ablate.ablations(of, own, trial, ablate.variants(of, trial), repeats(ledger, own))


def noise(of: Confirmation) -> dict[str, Any] | None:
    """The standard deviation of one run, pooled over the configurations: sqrt(sum (n-1) s^2 / sum (n-1)); None where no
    configuration has two runs."""
    spreads = [row.again for row in of.rows if row.again is not None and row.again.error is not None]
    freedom = sum(one.count - 1 for one in spreads)
    if not freedom:
        return None
    squares = sum((one.count - 1) * one.count * (one.error or 0.0) ** 2 for one in spreads)
    return {"deviation": math.sqrt(squares / freedom), "runs": sum(one.count for one in spreads)}
