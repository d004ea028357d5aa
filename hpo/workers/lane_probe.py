"""Imports a study's task in its own process and reports what lanes need.

It reports the fields in which they may differ and, on request, the time of a step. So no driver imports torch, and a
failure stays in this process. Run as `python -m hpo.workers.lane_probe`, with the question as JSON on standard input
and the answer on standard output.
"""

from __future__ import annotations

if __name__ == "__main__":
    from hpo.child_process import die_with_parent

    die_with_parent()

import contextlib
import json
import math
import resource
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.study import Study
from hpo.storage.home import Home
from hpo.terminal import print
from hpo.text import megabytes
from hpo.workers.attempt import task_of
from hpo.workers.executors.resources import memory_left
from hpo.workers.lane_kinds import LEAST, alike
from hpo.workers.lanes import fields_of
from trainer.errors import ConfigError
from trainer.report import trains_itself
from trainer.runtime.threads import limited

SECONDS = 1.0  # of steps, to measure each number of lanes
LARGE = 0.1  # seconds of a micro-batch that keeps the processor busy: lanes save nothing, and take long to measure
NEAR = 1.2  # speedup of the most lanes below which fewer are not tried
MEMORY = 0.5  # the share of free memory that the lanes of all workers may take


def answer(
    spec: Mapping[str, object], home: str, workers: int, share: float, widths: list[int], worth: float
) -> dict[str, Any]:
    """Returns what lanes need to know of the study's task, by name:

    `fields` that the task adds to those in which lanes may differ; `seconds` of a step by numbers of lanes, 1 first;
    `solo`, the seconds of all trials of a worker one by one, of which it has `share`; and sentences about why a trial
    leaves nothing for lanes to share, `busy`, why no more lanes were measured, `full`, and why lanes are impossible,
    `against`.

    Groups are measured if enough of their lanes can be alike, if `solo` is at least `worth` seconds, and as far as
    each worker has memory for them.
    """
    resolved = ResolvedStudy.stored(spec)
    study = resolved.study
    task = study.task_class()
    answer_fields: dict[str, Any] = {"fields": [], "seconds": {}, "alone": 0.0, "busy": "", "full": "", "against": ""}
    try:
        answer_fields["fields"] = [*fields_of(study)]
    except ConfigError as error:
        return answer_fields | {"against": str(error)}
    if trains_itself(task_of(study, Home(Path(home)), study.config)):  # an instance may, though its class does not
        return answer_fields | {"against": f"{task.__name__} has a fit() of its own"}
    if not widths or alike(resolved, widths[-1], answer_fields["fields"]) < LEAST:
        return answer_fields
    with limited(study.config.train.num_threads):  # type: ignore[attr-defined]
        return answer_fields | _measured(study, Home(Path(home)), workers, share, widths, worth)


def _measured(study: Study, home: Home, workers: int, share: float, widths: list[int], worth: float) -> dict[str, Any]:
    from trainer.lanes import probe

    config: Any = study.config

    def make() -> Any:
        return task_of(study, home, config)

    def configured(lanes: int) -> Any:
        return config.train.model_copy(update={"lanes": lanes})

    taken, before = _Taken(), memory_left()
    step, steps = probe.solo(make, configured(1), SECONDS, worth / share)
    if not math.isfinite(step):
        return {"against": "a trial ends before a step can be measured"}
    seconds = {1: step}
    measured: dict[str, Any] = {"seconds": seconds, "alone": share * steps * step}
    if measured["alone"] < worth:
        return measured
    train = config.train
    if (part := step / -(-train.batch_size // (train.fixed_micro_batch_size or train.batch_size))) > LARGE:
        return measured | {"busy": f"a batch takes {part:.2g} s on its own, all of it computing"}
    lane_bytes = taken.most  # bytes of a lane with its own data
    for lanes in reversed(widths):
        if workers * lanes * lane_bytes > MEMORY * before:
            measured["full"] = (
                f"{lanes} lanes take {megabytes(int(lanes * lane_bytes))} in each worker, of {megabytes(before)} free"
            )
            continue
        taken = _Taken()
        try:
            seconds[lanes] = probe.fused(make, configured(lanes), SECONDS)
        except ConfigError as error:
            return measured | {"against": str(error)}
        lane_bytes = max(lane_bytes, taken.most / lanes)
        if workers * lanes * lane_bytes > MEMORY * before or not math.isfinite(seconds[lanes]):
            del seconds[lanes]
        elif seconds[lanes] > min(seconds.values()) or step < NEAR * seconds[lanes]:
            break  # fewer lanes share less
    if min(seconds.values()) < step:  # which includes what a process does only once
        seconds[1] = min(step, probe.solo(make, configured(1), SECONDS)[0])
    return measured


class _Taken:
    """Measures the host's memory that this process takes from here on."""

    def __init__(self) -> None:
        self._before = psutil.Process().memory_info().rss

    @property
    def most(self) -> int:
        """Returns the maximum in bytes; 0 if it has had more before."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return max(0, peak - self._before)


def main() -> None:
    question = json.load(sys.stdin)
    tempfile.tempdir = question.pop("scratch", None)
    with contextlib.redirect_stdout(sys.stderr):  # keeps what a task prints out of the answer
        reply = answer(**question)
    print(json.dumps(reply))


if __name__ == "__main__":
    main()
