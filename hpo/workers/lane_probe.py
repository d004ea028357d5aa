"""A process that imports a study's task and tells what lanes need to know of it: which fields may differ between lanes
and, if that is asked, what a step takes. So no driver imports torch, and what fails there fails here.

Run as `python -m hpo.workers.lane_probe`, the question as JSON on standard input, the answer on standard output.
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

SECONDS = 1.0  # of steps that each number of lanes is measured by
LARGE = 0.1  # seconds of a micro-batch, in which the processor is busy: lanes save nothing, and take long to measure
NEAR = 1.2  # times as quick have the most lanes to be for fewer to be tried
MEMORY = 0.5  # of what is free, that the lanes of all workers may take


def answer(
    spec: Mapping[str, Any], home: str, workers: int, share: float, widths: list[int], worth: float
) -> dict[str, Any]:
    """`fields` that a task adds to what lanes may differ in; `seconds` of a step by numbers of lanes, 1 first; `alone`,
    seconds of all trials of a worker one by one, of which it has `share`; and in words why a trial has nothing that
    lanes could share, `busy`, why no more lanes were measured, `full`, and why there can be none, `against`.

    Groups are measured where enough of their lanes can be alike, where `alone` comes to `worth` seconds, and as far as
    there is memory for them in each worker.
    """
    resolved = ResolvedStudy.stored(spec)
    study = resolved.study
    task = study.task_class()
    told: dict[str, Any] = {"fields": [], "seconds": {}, "alone": 0.0, "busy": "", "full": "", "against": ""}
    try:
        told["fields"] = [*fields_of(study)]
    except ConfigError as error:
        return told | {"against": str(error)}
    if trains_itself(task_of(study, Home(Path(home)), study.config)):  # which an instance may, and its class not
        return told | {"against": f"{task.__name__} has a fit() of its own"}
    if not widths or alike(resolved, widths[-1], told["fields"]) < LEAST:
        return told
    with limited(study.config.train.num_threads):  # type: ignore[attr-defined]
        return told | _measured(study, Home(Path(home)), workers, share, widths, worth)


def _measured(study: Study, home: Home, workers: int, share: float, widths: list[int], worth: float) -> dict[str, Any]:
    from trainer.lanes import probe

    config: Any = study.config

    def make() -> Any:
        return task_of(study, home, config)

    def configured(lanes: int) -> Any:
        return config.train.model_copy(update={"lanes": lanes})

    taken, before = _Taken(), memory_left()
    step, steps = probe.alone(make, configured(1), SECONDS, worth / share)
    if not math.isfinite(step):
        return {"against": "a trial ends before a step can be measured"}
    seconds = {1: step}
    told: dict[str, Any] = {"seconds": seconds, "alone": share * steps * step}
    if told["alone"] < worth:
        return told
    train = config.train
    if (part := step / -(-train.batch_size // (train.fixed_micro_batch_size or train.batch_size))) > LARGE:
        return told | {"busy": f"a batch takes {part:.2g} s on its own, all of it computing"}
    each = taken.most  # bytes of a lane, whose data are its own
    for lanes in reversed(widths):
        if workers * lanes * each > MEMORY * before:
            told["full"] = (
                f"{lanes} lanes take {megabytes(int(lanes * each))} in each worker, of {megabytes(before)} free"
            )
            continue
        taken = _Taken()
        try:
            seconds[lanes] = probe.fused(make, configured(lanes), SECONDS)
        except ConfigError as error:
            return told | {"against": str(error)}
        each = max(each, taken.most / lanes)
        if workers * lanes * each > MEMORY * before or not math.isfinite(seconds[lanes]):
            del seconds[lanes]
        elif seconds[lanes] > min(seconds.values()) or step < NEAR * seconds[lanes]:
            break  # fewer lanes share less
    if min(seconds.values()) < step:  # which has met what a process does only once
        seconds[1] = min(step, probe.alone(make, configured(1), SECONDS)[0])
    return told


class _Taken:
    """What this process takes of the host's memory from here on."""

    def __init__(self) -> None:
        self._before = psutil.Process().memory_info().rss

    @property
    def most(self) -> int:
        """Bytes, at most; 0 where it has had more before."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return max(0, peak - self._before)


def main() -> None:
    asked = json.load(sys.stdin)
    tempfile.tempdir = asked.pop("scratch", None)
    with contextlib.redirect_stdout(sys.stderr):  # what a task prints is no answer
        told = answer(**asked)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
