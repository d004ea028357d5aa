"""Holds the summary that a run ends with: how it ended, the best trial and the commands that follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpo.analysis.results.format import duration, judgement, number
from hpo.analysis.results.progress import Progress
from hpo.analysis.results.status import aligned, behind_by, next_commands
from hpo.space.trial_state import STATES
from hpo.text import command, counted, portion

if TYPE_CHECKING:
    from hpo.driver.request import RunResult

_LATER = "once the search is complete or, where time alone bounds it, in time that it leaves"
MOST_SHOWN = 5  # trials of a front that the summary lists


def summary(progress: Progress, result: RunResult, seconds: float) -> str:
    """Returns the summary of a run: its end, the `seconds` its command took, the best trial and the next commands."""
    states = progress.states
    counts = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    share_ended = portion(progress.ended, progress.requested, "trial")
    lines = [f"{progress.name}: {result.state}, {share_ended} ended" + (f" ({counts})" if counts else "")]
    lines[0] += f" in {duration(seconds)}"
    lines[0] += f", perturbed {counted(progress.replaced, 'time')}" if progress.replaced else ""
    reruns = progress.conclude()
    for best in progress.best[:MOST_SHOWN]:
        text = judgement(dict(zip(progress.metrics, best.values, strict=True)), best.judged, best.epoch)
        lines.append(f"{'best' if len(progress.metrics) == 1 else 'on the front'}: trial {best.number}, {text}")
        params = best.params.items() if len(progress.best) == 1 else ()
        lines += [*(f"  {line}" for line in reruns), *(f"  {path} = {number(value)}" for path, value in params)]
    if more := progress.best[MOST_SHOWN:]:
        lines.append(f"and {counted(len(more), 'more trial')} on the front")
    late = result.state == "interrupted" and bool(result.reason)  # by time for one
    if ahead := progress.stopped_ahead() if result.state == "complete" or late else "":
        lines += [ahead, f"  the end phase does so by itself {_LATER}"][: 1 + late]
    lines += progress.remarks()
    if result.behind:
        lines.append(behind_by(result.behind, result.damage))
    study, resumes = f"--study {progress.name}", result.state == "interrupted" and not result.reason
    failed = [trial.number for trial in progress.trials.values() if trial.state == "failed"]
    following = next_commands(progress.name, failed, progress.saves, progress.continuing if resumes else "")
    if progress.best and not resumes:
        following[command(f"best {study}")] = (
            "its checkpoint, and " if progress.keeps_best else ""
        ) + "how to train it"
    following[command(f"compare {study}")] = "trials side by side"
    pages = progress.tracking_uri
    following[pages if pages.startswith("http") else command("ui")] = "everything in MLflow"
    return "\n".join([*lines, *aligned(following)])
