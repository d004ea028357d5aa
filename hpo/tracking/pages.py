"""What MLflow's pages show of a study: the address of its trials, best first, the columns there, and descriptions.

The address leads to MLflow's model-training view (its front page offers tools for language models). Its columns are a
shared view, a tag of the experiment that holds the state of the page as JSON, as MLflow's own button writes it (3.17);
where the tag is missing, the address says at least what is shown and in which order.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from hpo.ledger.queries import Best
from hpo.ledger.rows import RowMapping
from hpo.tracking.gate import PARAMETER
from hpo.tracking.names import entry_name

NOTE = "mlflow.note.content"  # the description, as Markdown
VIEW = "trials"  # the name of the shared view
_SHARED = f"mlflow.sharedViewState.{VIEW}"
_KIND = {"mlflow.experimentKind": "custom_model_development"}  # MLflow's words for the model-training view
_TRIALS = "tags.`hpo.kind` = 'trial'"
MOST_PARAMS, MOST_FRONT = 4, 20


def objective_keys(objectives: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics under which the values of complete trials stand, one for each objective."""
    return ["objective"] if len(objectives) == 1 else [entry_name(f"objective/{one['metric']}") for one in objectives]


def _order(objectives: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """The column that has the best trials first, and whether the least values are."""
    return f"metrics.`{objective_keys(objectives)[0]}`", objectives[0]["direction"] == "minimize"


def experiment_tags(study: RowMapping, params: Sequence[str], description: str) -> dict[str, str]:
    """What an experiment says of its study: its kind, its description and its shared view."""
    objectives = study["spec"]["objectives"]
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
            *(f"metrics.`{one}`" for one in (*objective_keys(objectives), "epoch")),
            *(f"params.`{entry_name(path)}`" for path in params[:MOST_PARAMS]),
            "tags.`hpo.state`",
            "tags.`hpo.stopped_by`",
        ],
    }
    return {**_KIND, NOTE: description, _SHARED: json.dumps(state)}


def study_page(base: str, study: RowMapping, token: str = "") -> str:
    """The address of the study's trials on MLflow's server at `base`, which is asked for the experiment; `base` where
    there is none yet or no answer. Where a gate asks for a `token`, the address brings it."""
    experiment = _experiment(base, study["name"], token)
    base = f"{base}/?{PARAMETER}={token}" if token else base
    if experiment is None:
        return base
    query = "workflowType=machine_learning"
    if any(tag["key"] == _SHARED for tag in experiment.get("tags", ())):
        query += f"&viewStateShareKey={VIEW}"
    else:
        key, ascending = _order(study["spec"]["objectives"])
        query += f"&orderByKey={quote(key, safe='')}&orderByAsc={str(ascending).lower()}"
        query += f"&searchFilter={quote(_TRIALS, safe='')}"
    return f"{base}{'' if token else '/'}#/experiments/{experiment['experiment_id']}/runs?{query}"


def _experiment(base: str, name: str, token: str) -> dict[str, Any] | None:
    parts = urlsplit(base)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=10.0)
    try:
        path = f"{parts.path}/api/2.0/mlflow/experiments/get-by-name?experiment_name={quote(name, safe='')}"
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return json.load(answer)["experiment"] if answer.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def study_note(study: RowMapping, counts: Mapping[str, int], best: Sequence[Best]) -> str:
    """The description of a study: its best trial, or those of the front, with their parameters, and its counts."""
    ended = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none yet"
    lines = [*_best(study["name"], best), "", f"Trials: {ended}."]
    return "\n".join(lines)


def _best(name: str, best: Sequence[Best]) -> list[str]:
    if not best:
        return ["No trial is complete yet."]
    if len(best) == 1:
        [one] = best
        values = ", ".join(f"{metric} {value:.6g}" for metric, value in one.values.items())
        rows = [f"| {_cell(path)} | {_cell(value)} |" for path, value in one.params.items()]
        title = f"Best: trial {one.number}, {values} (run {run_name(name, one.number)})"
        return [title, "", "| parameter | value |", "|---|---|", *rows]
    metrics = list(best[0].values)
    rows = [
        f"| {run_name(name, one.number)} | {' | '.join(f'{value:.6g}' for value in one.values.values())} |"
        for one in best[:MOST_FRONT]
    ]
    more = [f"and {len(best) - MOST_FRONT} more"] if len(best) > MOST_FRONT else []
    title = f"{len(best)} trials that none is better than in every objective"
    return [title, "", f"| run | {' | '.join(metrics)} |", f"|---|{'---|' * len(metrics)}", *rows, *more]


def run_name(study: str, number: int) -> str:
    """The name of a trial's run."""
    return f"{study}-{number:04d}"


def trial_note(study: RowMapping, trial: RowMapping, stopped_by: str, error: str) -> str:
    """The description of a trial that has ended: what it came to, or why it is not complete."""
    objectives, values, why = study["spec"]["objectives"], trial["values"], stopped_by or error
    if trial["state"] == "complete" and values:
        shown = zip(objectives, values, strict=True)
        why = ", ".join(f"{one['metric']} {value:.6g}" for one, value in shown if value is not None)
    return f"{trial['state'].capitalize()}: {why}" if why else ""


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")
