"""Reads the best trial, or the trials of a Pareto front, and the commands that train them again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.analysis.results.expected import OnNewData, on_new_data
from hpo.analysis.results.extended import Extension, extended
from hpo.analysis.results.format import judgement, number
from hpo.analysis.results.stopped import Stopped, line, stopped_ahead
from hpo.analysis.results.trial import checkpoint_at, detail, kept_checkpoint, of_checkpoint
from hpo.declaration import preflight
from hpo.declaration.imported import REFERENCE
from hpo.door import option
from hpo.errors import HpoError, UserError
from hpo.ledger import answer, queries
from hpo.ledger.answer import OtherSeeds
from hpo.ledger.finished import Finished
from hpo.ledger.rows import StudyRow
from hpo.ledger.stored_spec import StoredSpec
from hpo.search.confirming import DEFAULT_NAME, NONE
from hpo.space.assignments import NO_PRESET
from hpo.space.config import flatten
from hpo.storage import locations, metrics_json
from hpo.storage.home import Home
from hpo.text import aligned, command, counted, endings

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection


def best_trials(connection: Connection, home: Home, name: str, most: int | None = None) -> list[dict[str, Any]]:
    """Returns the best complete trial, or at most `most` of the Pareto front.

    Each has its number, values, params, the path of its checkpoint, its overrides, and as `alone` those that train it
    after the search, under no preset if one is left out.
    """
    study = queries.study_row(connection, name)
    bests = answer.bests(connection, study)[:most]
    if not bests:
        raise none_complete(name)
    of_study = {
        "extended": [asdict(extension) for extension in extended(connection, name)],
        "stopped_ahead": [asdict(stopped) for stopped in stopped_ahead(connection, study)],
        "expected": None,
    }
    if bests[0].seeds is None and (on_new := on_new_data(connection, study)):
        of_study["expected"] = asdict(on_new)
    return [_best_trial(connection, home, study, best) | of_study for best in bests]


def none_complete(name: str) -> HpoError:
    """Returns the error of a command that needs a complete trial if the study has none."""
    shows = command(f"status --study {name}")
    return HpoError(f"study {name!r} has no complete trial: `{shows}` shows how its trials stand.")


def _best_trial(connection: Connection, home: Home, study: StudyRow, found: answer.Best) -> dict[str, Any]:
    name, judged = study.name, study.spec.objectives
    overrides, alone = study.spec.overrides | found.params, _alone(study.spec) | found.params
    source, number = (found.finished and found.finished.trained_in) or (name, found.number)
    trial = detail(connection, home, source, number)
    checkpoint = kept_checkpoint(trial)
    location, root = locations.of(home, queries.study_row(connection, source)), home.checkpoints(source, number)
    is_there = checkpoint is not None and location.is_there(root / Path(checkpoint["path"]).name)
    metrics = metrics_json.path(home, source, number)
    return {
        "study": name,
        "reference": study.spec.reference,
        "metric": judged[0]["metric"],
        "number": found.number,
        "value": found.value,
        "values": found.values,
        "seeds": found.seeds and asdict(found.seeds),
        "finished": found.finished and asdict(found.finished),
        "judged": trial["judged"],
        "beside": _beside(study, trial["judged"]),
        "params": found.params,
        "epoch": trial["epoch"],
        "folds": len(trial["folds"]),
        "checkpoint": checkpoint["path"] if checkpoint and is_there else None,
        "checkpoint_epoch": checkpoint["epoch"] if checkpoint and is_there else None,
        "checkpoint_at": checkpoint_at(trial, checkpoint) if checkpoint and is_there else None,
        "metrics": str(metrics) if metrics.is_file() else None,
        "missing_checkpoint": checkpoint["path"] if checkpoint and not is_there else None,
        "overrides": overrides,
        "alone": alone,
        "confirms": study.spec.confirm != NONE,
        "preset_left_out": study.spec.of_search_alone.get("preset", ""),
        "unread": preflight.unread(overrides, flatten(trial["config"]), study.spec.read_when),
    }


def _alone(spec: StoredSpec) -> dict[str, object]:
    """Returns the overrides that train a trial alone."""
    return {path: value for path, value in spec.overrides.items() if path not in spec.of_search_alone}


def _beside(study: StudyRow, judged: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns the metrics that are declared by name, except objectives and losses, at the epoch that decided the
    trial's value."""
    objectives = [objective["metric"] for objective in study.spec.objectives]
    metrics = judged["metrics"] if judged else {}
    named = [key for key in study.spec.metrics if not key.endswith("/loss") and key not in objectives]
    return {key: metrics[key] for key in named if key in metrics}


def chosen_best(found: Sequence[Mapping[str, object]], number: int | None) -> Mapping[str, Any]:
    """Returns the best trial, or the named trial of a front. Raises UserError if the front does not have it."""
    numbers = [trial["number"] for trial in found]
    if number is None and len(found) == 1:
        return found[0]
    if number not in numbers:
        problem = (
            f"trial {number} is not one of the best" if number is not None else "there is more than one best trial"
        )
        raise UserError(f"{problem}: give {option('trial')} {' or '.join(map(str, numbers))}.")
    return found[numbers.index(number)]


def describe_front(found: Sequence[Mapping[str, Any]]) -> str:
    """Returns the trials of a Pareto front side by side, and the command that shows one in full.

    Their values are means under other seeds if there are any.
    """
    name, metrics, seeds = found[0]["study"], list(found[0]["values"]), found[0]["seeds"]
    varied = [p for p in found[0]["params"] if len({json.dumps(trial["params"].get(p)) for trial in found}) > 1]
    rows = [["trial", *metrics, *endings(varied).values()]]
    for trial in found:
        params = (number(trial["params"].get(path, "")) for path in varied)
        rows.append([str(trial["number"]), *(f"{value:.6g}" for value in judged_by(trial).values()), *params])
    first = found[0]["number"]
    return "\n".join(
        [
            f"{name}: no trial is better than these {len(found)} in every objective{_by_seeds(seeds)}",
            *(f"  {line}" for line in aligned(rows)),
            *(f"trial {best['number']} was {line}" for best in found for line in after_stop(best)),
            *ahead_line(found[0]),
            f"one in full, and how to train it: {command(f'best --study {name} --trial {first}')}",
        ]
    )


def judged_by(best: Mapping[str, Any]) -> Mapping[str, float]:
    """Returns the values that put a trial on the front: its means under other seeds if it has any."""
    return best["seeds"]["means"] if best["seeds"] else best["values"]


def _by_seeds(seeds: Mapping[str, Any] | None) -> str:
    return f", by their means under {counted(seeds['runs'], 'other seed')} (study {seeds['study']})" if seeds else ""


def describe_best(best: Mapping[str, Any], saved: str | None = None) -> str:
    """Returns the best trial as text, with the command that trains it.

    The command reads the file in which the configuration is `saved`. Otherwise, if the study sets options that nothing
    reads, it first writes such a file, because `-o` refuses them.
    """
    gone = f"{best['missing_checkpoint']} is not there any more" if best["missing_checkpoint"] else "none kept"
    taken = f" ({of_checkpoint(best['checkpoint_at'], precise)})" if best["checkpoint"] else ""
    at = best["judged"] and queries.Judged(**best["judged"])
    judged = judgement(best["values"], at, best["epoch"], precise, saved=best["checkpoint_epoch"])
    return "\n".join(
        [
            *beaten(best),
            f"{best['study']}, trial {best['number']}: {judged}",
            *(f"  {line}" for line in (*after_stop(best), *under_other_seeds(best), *expectation(best))),
            *(f"  {key} {number(value)}" for key, value in best["beside"].items()),
            *(f"  {path} = {json.dumps(value)}" for path, value in best["params"].items()),
            *(f"  {path} = {json.dumps(value)} (set, not searched)" for path, value in pinned(best).items()),
            f"checkpoint: {best['checkpoint'] or gone}{taken}",
            *([f"metrics: {best['metrics']}"] if best["metrics"] else []),
            *(extension.described() for extension in _extensions(best)),
            *ahead_line(best),
            train_line(best, saved),
        ]
    )


def after_stop(best: Mapping[str, Any]) -> list[str]:
    """Returns the line about a best trial that was stopped and later trained to its end."""
    return [Finished(**best["finished"]).described()] if best["finished"] else []


def ahead_line(best: Mapping[str, Any]) -> list[str]:
    """Returns the line about stopped trials that were better than the best, if there are any."""
    return list(filter(None, [line([Stopped(**stopped) for stopped in best["stopped_ahead"]], best["study"])]))


def _extensions(best: Mapping[str, Any]) -> list[Extension]:
    """Returns the extended trials, except the one that the line of `after_stop` mentions."""
    mentioned = best["finished"] and (best["finished"]["study"], best["finished"]["number"])
    extensions = [Extension(**entry) for entry in best["extended"]]
    return [extension for extension in extensions if (extension.study, extension.number) != mentioned]


def pinned(best: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the study's settings that are not searched parameters, by path."""
    return {path: value for path, value in best["overrides"].items() if path not in best["params"]}


def under_other_seeds(best: Mapping[str, Any]) -> list[str]:
    """Returns the lines about a best trial's result under other seeds, the search's first trial and rivals."""
    if not best["seeds"]:
        return []
    return OtherSeeds.of_json(best["seeds"]).with_command(best["study"], best["number"])


def beaten(best: Mapping[str, Any]) -> list[str]:
    """Returns the line that comes before a best trial to which the default configuration is to be preferred."""
    if not best["seeds"] or not OtherSeeds.of_json(best["seeds"]).beaten:
        return []
    return [f"{best['study']}: {DEFAULT_NAME} is better than the best trial under other seeds"]


def expectation(best: Mapping[str, Any]) -> list[str]:
    """Returns the lines about the value expected on new data, a runner-up that may be as good, and the default."""
    if not best["expected"]:
        return []
    on_new = OnNewData.of_json(best["expected"])
    number_of_best = best["number"]
    lines = [on_new.described(), on_new.doubt(number_of_best), on_new.beside_default(number_of_best)]
    return list(filter(None, lines))


def train_line(best: Mapping[str, Any], saved: str | None = None) -> str:
    """Returns the line with the command that trains the best trial."""
    step = "search on from it" if imported(best) else "train it"
    if preset := preset_left_out(best):
        step += f" without the preset {preset} of the search"
    return f"{step}: {train_command(best, saved)}"


def preset_left_out(best: Mapping[str, Any]) -> str:
    """Returns the preset of the search if the command that trains the trial leaves it out; else an empty text."""
    return "" if best["preset_left_out"] == NO_PRESET else best["preset_left_out"]


def imported(best: Mapping[str, Any]) -> bool:
    """Returns whether the trial is another tool's: it cannot be trained here, but a search can begin from it."""
    return best["reference"].startswith(REFERENCE)


def train_command(best: Mapping[str, Any], saved: str | None = None) -> str:
    """Returns the command that trains the best trial again or, in an imported study, that searches on from it.

    It reads the file in which the configuration is `saved`, or writes one first if that is needed.
    """
    if imported(best):
        return command(f"run --study STUDY --warm-start {best['study']}")
    reference, name, saving = shlex.quote(best["reference"]), f"{best['study']}-best", ""
    if best["unread"] and not saved:
        saving = command(f"best --study {best['study']} --trial {best['number']} --to {name}.yaml") + " && "
        saved = f"{name}.yaml"
    settings = [] if saved else overrides_of(best["alone"])
    settings = [f"preset={NO_PRESET}", *settings] if best["preset_left_out"] else settings
    options = " ".join(f"-o {shlex.quote(text)}" for text in settings)
    options = " ".join(filter(None, [f"--config {shlex.quote(saved)}" if saved else "", options]))
    run = command(
        f"run --study {reference} --name {name} --trials 1 --strategy none"
        f"{' --confirm none' if best['confirms'] else ''} {options}"
    )
    return saving + run


def precise(value: float) -> str:
    return f"{value:.6g}"


def overrides_of(params: Mapping[str, object]) -> list[str]:
    """Returns `path=value` for each parameter, as `-o` accepts them."""
    return [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in params.items()]


def save_overrides(params: Mapping[str, object], path: Path) -> None:
    """Writes parameters as a file for `--config`."""
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
