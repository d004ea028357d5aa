"""Reads the best trial, or those of a Pareto front, and the command that trains each again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.analysis.results.format import judgement, number
from hpo.analysis.results.trial import checkpoint_at, detail, kept_checkpoint, of_checkpoint
from hpo.declaration import preflight
from hpo.declaration.imported import REFERENCE
from hpo.errors import HpoError, UserError
from hpo.ledger import queries
from hpo.space.config import flatten
from hpo.storage import locations, metrics_json
from hpo.storage.home import Home
from hpo.text import aligned, command, endings

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection, RowMapping


def best_trials(connection: Connection, home: Home, name: str, most: int | None = None) -> list[dict[str, Any]]:
    """The best complete trial, or those of the Pareto front, at most so many: number, values, params, the path of the
    checkpoint, and the overrides that train it."""
    study = queries.study_row(connection, name)
    found = queries.bests(connection, study)[:most]
    if not found:
        raise none_complete(name)
    return [_best_trial(connection, home, study, one) for one in found]


def none_complete(name: str) -> HpoError:
    """What a command that needs a complete trial ends with where the study has none."""
    shows = command(f"status --study {name}")
    return HpoError(f"study {name!r} has no complete trial: `{shows}` shows how its trials stand.")


def _best_trial(connection: Connection, home: Home, study: RowMapping, found: queries.Best) -> dict[str, Any]:
    name, judged = study["name"], study["spec"]["objectives"]
    overrides = study["spec"]["overrides"] | found.params
    trial = detail(connection, home, name, found.number)
    checkpoint = kept_checkpoint(trial)
    place, root = locations.place(home, study), home.checkpoints(name, found.number)
    there = checkpoint is not None and place.is_there(root / Path(checkpoint["path"]).name)
    metrics = metrics_json.path(home, name, found.number)
    return {
        "study": name,
        "reference": study["spec"]["reference"],
        "metric": judged[0]["metric"],
        "number": found.number,
        "value": found.value,
        "values": found.values,
        "judged": trial["judged"],
        "beside": _beside(study, trial["judged"]),
        "params": found.params,
        "epoch": trial["epoch"],
        "folds": len(trial["folds"]),
        "checkpoint": checkpoint["path"] if checkpoint and there else None,
        "checkpoint_epoch": checkpoint["epoch"] if checkpoint and there else None,
        "checkpoint_at": checkpoint_at(trial, checkpoint) if checkpoint and there else None,
        "metrics": str(metrics) if metrics.is_file() else None,
        "missing_checkpoint": checkpoint["path"] if checkpoint and not there else None,
        "overrides": overrides,
        "unread": preflight.unread(overrides, flatten(trial["config"])),
    }


def _beside(study: RowMapping, judged: Mapping[str, Any] | None) -> dict[str, float]:
    """The metrics that the study declares by name, at the epoch the trial was judged at, but objectives and losses."""
    objectives = [one["metric"] for one in study["spec"]["objectives"]]
    metrics = judged["metrics"] if judged else {}
    named = [key for key in study["spec"]["metrics"] if not key.endswith("/loss") and key not in objectives]
    return {key: metrics[key] for key in named if key in metrics}


def chosen_best(found: Sequence[Mapping[str, Any]], number: int | None) -> Mapping[str, Any]:
    """The best trial, or of a front the one that is named; UserError where that is none of it."""
    numbers = [one["number"] for one in found]
    if number is None and len(found) == 1:
        return found[0]
    if number not in numbers:
        which = f"trial {number} is not one of the best" if number is not None else "there is more than one best trial"
        raise UserError(f"{which}: give --trial {' or '.join(map(str, numbers))}.")
    return found[numbers.index(number)]


def describe_front(found: Sequence[Mapping[str, Any]]) -> str:
    """The trials of a Pareto front side by side, and how to see one in full."""
    name, metrics = found[0]["study"], list(found[0]["values"])
    varied = [p for p in found[0]["params"] if len({json.dumps(one["params"].get(p)) for one in found}) > 1]
    rows = [["trial", *metrics, *endings(varied).values()]]
    for one in found:
        params = (number(one["params"].get(path, "")) for path in varied)
        rows.append([str(one["number"]), *(f"{value:.6g}" for value in one["values"].values()), *params])
    first = found[0]["number"]
    return "\n".join(
        [
            f"{name}: no trial is better than these {len(found)} in every objective",
            *(f"  {line}" for line in aligned(rows)),
            f"one in full, and how to train it: {command(f'best --study {name} --trial {first}')}",
        ]
    )


def describe_best(best: Mapping[str, Any], saved: str | None = None) -> str:
    """The best trial as text, with the command that trains it; from the file where its configuration is `saved`, or
    has to be, since options that nothing reads are refused."""
    gone = f"{best['missing_checkpoint']} is not there any more" if best["missing_checkpoint"] else "none is kept"
    taken = f" ({of_checkpoint(best['checkpoint_at'], precise)})" if best["checkpoint"] else ""
    at = best["judged"] and queries.Judged(**best["judged"])
    judged = judgement(best["values"], at, best["epoch"], precise, saved=best["checkpoint_epoch"])
    return "\n".join(
        [
            f"{best['study']}, trial {best['number']}: {judged}",
            *(f"  {key} {number(value)}" for key, value in best["beside"].items()),
            *(f"  {path} = {json.dumps(value)}" for path, value in best["params"].items()),
            f"checkpoint: {best['checkpoint'] or gone}{taken}",
            *([f"metrics: {best['metrics']}"] if best["metrics"] else []),
            train_line(best, saved),
        ]
    )


def train_line(best: Mapping[str, Any], saved: str | None = None) -> str:
    """What to do with the best trial now."""
    what = "search on from it" if imported(best) else "train it"
    return f"{what}: {train_command(best, saved)}"


def imported(best: Mapping[str, Any]) -> bool:
    """Whether the trial is another tool's: it cannot be trained here, but begun from."""
    return best["reference"].startswith(REFERENCE)


def train_command(best: Mapping[str, Any], saved: str | None = None) -> str:
    """What trains the best trial again, from the file where its configuration is `saved`, or has to be; of an imported
    study, what searches on from it."""
    if imported(best):
        return command(f"run --study STUDY --warm-start {best['study']}")
    reference, name, saving = shlex.quote(best["reference"]), f"{best['study']}-best", ""
    if best["unread"] and not saved:
        saving = command(f"best --study {best['study']} --trial {best['number']} --to {name}.yaml") + " && "
        saved = f"{name}.yaml"
    options = " ".join(f"-o {shlex.quote(text)}" for text in overrides_of(best["overrides"]))
    options = f"--config {shlex.quote(saved)}" if saved else options
    return saving + command(f"run --study {reference} --name {name} --trials 1 --strategy none {options}")


def precise(value: float) -> str:
    return f"{value:.6g}"


def overrides_of(params: Mapping[str, Any]) -> list[str]:
    """`path=value` for each parameter, as `-o` takes them."""
    return [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in params.items()]


def save_overrides(params: Mapping[str, Any], path: Path) -> None:
    """Write parameters as a file for `--config`."""
    import yaml

    nested: dict[str, Any] = {}
    for dotted, value in params.items():
        *parents, leaf = dotted.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    try:
        path.write_text(yaml.safe_dump(nested, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): name another file.") from error
