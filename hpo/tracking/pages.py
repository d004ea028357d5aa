"""Builds a study's page in MLflow: the address of its trials, best first, the columns there, and descriptions.

The address leads to MLflow's model-training view (its front page offers tools for language models). Its columns are a
shared view, a tag of the experiment that holds the state of the page as JSON, as MLflow's own button writes it (3.17).
If the tag is missing, the address itself states the filter and the order.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from hpo.ledger.answer import Best
from hpo.ledger.rows import StudyRow, UnsentTrial
from hpo.tracking.names import entry_name
from hpo.tracking.ui.gate import PARAMETER

NOTE = "mlflow.note.content"  # the description, as Markdown
VIEW = "trials"  # the name of the shared view
_SHARED = f"mlflow.sharedViewState.{VIEW}"
_KIND = {"mlflow.experimentKind": "custom_model_development"}  # MLflow's words for the model-training view
_TRIALS = "tags.`hpo.kind` = 'trial'"
MOST_PARAMS, MOST_FRONT = 4, 20
_ALL = {"max_results": 1000}  # experiments, the most that a server lists at once


def objective_keys(objectives: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns the metrics that hold the values of complete trials, one for each objective."""
    return ["objective"] if len(objectives) == 1 else [entry_name(f"objective/{goal['metric']}") for goal in objectives]


def _order(objectives: Sequence[Mapping[str, object]]) -> tuple[str, bool]:
    """Returns the column that sorts the best trials first, and whether that order is ascending."""
    return f"metrics.`{objective_keys(objectives)[0]}`", objectives[0]["direction"] == "minimize"


def experiment_tags(study: StudyRow, params: Sequence[str], description: str) -> dict[str, str]:
    """Returns the tags of a study's experiment: its kind, its description and its shared view."""
    objectives = study.spec.objectives
    key, ascending = _order(objectives)
    state = {
        "searchFilter": _TRIALS,
        "orderByKey": key,
        "orderByAsc": ascending,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": [
            "attributes.`Duration`",
            *(f"metrics.`{key}`" for key in (*objective_keys(objectives), "epoch")),
            *(f"params.`{entry_name(path)}`" for path in params[:MOST_PARAMS]),
            "tags.`hpo.state`",
            "tags.`hpo.stopped_by`",
        ],
    }
    return {**_KIND, NOTE: description, _SHARED: json.dumps(state)}


def study_page(base: str, study: StudyRow, token: str = "") -> str:
    """Returns the address of the study's trials on MLflow's server at `base`, which is queried for the experiment;
    `base` if there is none or no answer. If a gate asks for a `token`, the address contains it."""
    experiment = _experiment(base, study.name, token)
    base = f"{base}/?{PARAMETER}={token}" if token else base
    if experiment is None:
        return base
    query = "workflowType=machine_learning"
    if any(tag["key"] == _SHARED for tag in experiment.get("tags", ())):
        query += f"&viewStateShareKey={VIEW}"
    else:
        key, ascending = _order(study.spec.objectives)
        query += f"&orderByKey={quote(key, safe='')}&orderByAsc={str(ascending).lower()}"
        query += f"&searchFilter={quote(_TRIALS, safe='')}"
    return f"{base}{'' if token else '/'}#/experiments/{experiment['experiment_id']}/runs?{query}"


def _experiment(base: str, name: str, token: str) -> dict[str, Any] | None:
    """Returns the experiment of a study, even if it was renamed; None if there is none or no answer."""
    parts = urlsplit(base)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=10.0)

    def ask(what: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        headers |= {"Content-Type": "application/json"} if body else {}
        text = json.dumps(body) if body else None
        connection.request("POST" if body else "GET", f"{parts.path}/api/2.0/mlflow/{what}", text, headers)
        with connection.getresponse() as answer:
            read = json.load(answer)
        return read if answer.status == 200 else {}

    try:
        if found_by_name := ask(f"experiments/get-by-name?experiment_name={quote(name, safe='')}"):
            return found_by_name["experiment"]
        listed = ask("experiments/search", _ALL).get("experiments", ())
        experiments = {experiment["experiment_id"]: experiment for experiment in listed}
        search = {"experiment_ids": [*experiments], "filter": f"tags.`hpo.study` = '{name}'", "max_results": 1}
        runs = ask("runs/search", search).get("runs", ()) if experiments else ()
        return experiments[runs[0]["info"]["experiment_id"]] if runs else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def study_note(study: StudyRow, counts: Mapping[str, int], best: Sequence[Best]) -> str:
    """Returns the description of a study: its best trial, or those of the front, with parameters, and its counts."""
    end_counts = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none yet"
    lines = [*_best(study.name, best), "", f"Trials: {end_counts}."]
    return "\n".join(lines)


def _best(name: str, best: Sequence[Best]) -> list[str]:
    if not best:
        return ["No trial is complete yet."]
    if len(best) == 1:
        [top] = best
        values = ", ".join(f"{metric} {value:.6g}" for metric, value in top.values.items())
        rows = [f"| {_cell(path)} | {_cell(value)} |" for path, value in top.params.items()]
        run = run_name(*(top.finished and top.finished.trained_in) or (name, top.number))
        title = f"Best: trial {top.number}, {values} (run {run})"
        title += f", {top.finished.described()}" if top.finished else ""
        seed_notes = top.seeds.lines(top.number) if top.seeds else []
        title += f"; {'; '.join(seed_notes)}" if seed_notes else ""
        return [title, "", "| parameter | value |", "|---|---|", *rows]
    metrics = list(best[0].values)
    rows = [
        f"| {run_name(name, point.number)} | {' | '.join(f'{value:.6g}' for value in _shown(point).values())} |"
        for point in best[:MOST_FRONT]
    ]
    more = [f"and {len(best) - MOST_FRONT} more"] if len(best) > MOST_FRONT else []
    title = f"{len(best)} trials that none is better than in every objective"
    title += f", by their means under other seeds (study {best[0].seeds.study})" if best[0].seeds else ""
    return [title, "", f"| run | {' | '.join(metrics)} |", f"|---|{'---|' * len(metrics)}", *rows, *more]


def _shown(best: Best) -> dict[str, float]:
    return best.seeds.means if best.seeds else best.values


def run_name(study: str, number: int) -> str:
    """Returns the name of a trial's run."""
    return f"{study}-{number:04d}"


def trial_note(study: StudyRow, trial: UnsentTrial, stopped_by: str, error: str) -> str:
    """Returns the description of a trial that has ended: its values, or why it is not complete."""
    objectives, values, why = study.spec.objectives, trial.values, stopped_by or error
    if trial.state == "complete" and values:
        shown = zip(objectives, values, strict=True)
        why = ", ".join(f"{objective['metric']} {value:.6g}" for objective, value in shown if value is not None)  # pyright: ignore
    return f"{trial.state.capitalize()}: {why}" if why else ""


def _cell(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")
