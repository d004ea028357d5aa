"""Implements `hpo plan`, which finds the configurations of a study that fit a memory.

It relies on the estimate of a step (trainer/memory/estimate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, log, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hpo.analysis.training.single_process import stepped
from hpo.declaration.references import load
from hpo.declaration.search_preset import as_new
from hpo.declaration.study import Study
from hpo.door import option
from hpo.errors import HpoError, UserError
from hpo.space.config import as_json, flatten
from hpo.text import aligned, counted
from trainer.config.fields import size

if TYPE_CHECKING:
    from trainer.memory.estimate import Estimate

MICRO_BATCH = "train.micro_batch_size"
FREE = 0.1  # share of the memory left for what the estimate does not include
Choice = tuple[int, ...]  # for each field the index of its value; the larger, the less memory


@dataclass(frozen=True)
class Fits:
    """A configuration that fits, as overrides; `accumulation` is the number of micro-batches in a window."""

    overrides: Mapping[str, Any]
    accumulation: int
    needs: Estimate


@dataclass(frozen=True)
class Plan:
    """The configurations that fit into a memory.

    memory     bytes
    rows       the configurations that fit, except those that have less than another in some field and more in none
    fields     the values that may be chosen, by field
    declared   whether the study declares them; otherwise only its micro-batch may change
    estimated  how many configurations had to be estimated
    """

    study: str
    memory: int
    rows: list[Fits]
    fields: Mapping[str, Sequence[Any]]
    declared: bool
    estimated: int

    @property
    def usable(self) -> int:
        return int(self.memory * (1 - FREE))


def size_of(text: str) -> int:
    """Returns the bytes of a text such as `6GB`, above 0."""
    try:
        count = size(text)
    except ValueError as error:
        raise UserError(f"{option('memory', repr(text))}: {error}.") from error
    if not count:
        raise UserError(f"{option('memory', repr(text))}: give more than nothing.")
    return count


def plan(
    reference: str, overrides: Mapping[str, Any], memory: int, told: Callable[[int, int], None] = lambda done, of: None
) -> Plan:
    """Tries the values that the declaration offers (`Study.plan`; else the micro-batch), except fields set by
    `overrides`.

    `told` is called with the number of decided configurations and the number of all. Raises UserError if nothing fits,
    and if the study has no step that can be estimated.
    """
    study = as_new(load(reference), overrides)
    fields = _fields(study, set(flatten(overrides)))
    steps = Steps(study, fields)
    empty = Plan(study.name, memory, [], fields, bool(study.plan), 0)
    sizes = [len(values) for values in fields.values()]
    choices = frontier(sizes, lambda choice: log(steps[choice].peak / empty.usable), told)
    rows = [Fits(steps.overrides(choice), steps.accumulation(choice), steps[choice]) for choice in choices]
    if not rows:
        last = tuple(len(values) - 1 for values in fields.values())
        least = " ".join(f"{path}={value}" for path, value in steps.overrides(last).items())
        raise UserError(
            f"nothing that study {study.name!r} may change fits {_gib(memory)}, of which a tenth stays free: even "
            f"{least or 'what is set'} needs {steps[last]}."
        )
    return replace(empty, rows=rows, estimated=len(steps.estimates))


def frontier(
    sizes: Sequence[int],
    over: Callable[[Choice], float],
    told: Callable[[int, int], None] = lambda done, of: None,
) -> list[Choice]:
    """Returns the choices that fit and that no other fitting choice dominates, the most expensive fields first.

    A choice dominates another if it needs at least as much in every field. `over` rises with the need of a choice, in
    the order of 1, and is at most 0 if it fits.

    Every choice dominated by a fitting one fits too. So the cheapest choice is tried first, and then the one expected
    to decide the most others. The chance that a choice fits is estimated from the answers so far, as if each field
    added its own share to `over`.
    """
    choices = np.array(list(product(*map(range, sizes))), ndmin=2)
    behind = np.all(choices[:, None] >= choices, axis=2)  # [i, j]: i needs no more memory than j in any field
    shares = np.hstack([np.ones((len(choices), 1)), *(choices[:, [f]] > np.arange(n - 1) for f, n in enumerate(sizes))])
    fitting, known = np.zeros(len(choices), bool), np.zeros(len(choices), bool)
    tried, answers = [len(choices) - 1], list[float]()
    while True:
        answers.append(over(tuple(map(int, choices[tried[-1]]))))
        if fits := answers[-1] <= 0:
            fitting |= behind[:, tried[-1]]
        known |= behind[:, tried[-1]] if fits else behind[tried[-1]]
        told(int(known.sum()), len(known))
        if known.all():
            break
        guess = shares @ np.linalg.pinv(shares[tried]) @ answers
        likely = 1 / (1 + np.exp(np.clip(10 * guess, -50, 50)))
        unknown = (~known).astype(float)
        gained = likely * (unknown @ behind) + (1 - likely) * (behind @ unknown)
        tried.append(int(np.where(known, 0, gained).argmax()))
    beaten = (behind & ~np.eye(len(choices), dtype=bool)) @ fitting.astype(float) > 0
    return [tuple(map(int, choice)) for choice in choices[fitting & ~beaten]]


class Steps:
    """Holds the estimates of a study's configurations, each made once, on demand."""

    def __init__(self, study: Study, fields: Mapping[str, Sequence[object]]) -> None:
        self.study, self.fields = study, fields
        self.estimates: dict[Choice, Estimate] = {}

    def overrides(self, choice: Choice) -> dict[str, Any]:
        return {path: values[i] for (path, values), i in zip(self.fields.items(), choice, strict=True)}

    def accumulation(self, choice: Choice) -> int:
        train = self._config(choice).train
        return ceil(train.largest_share / train.largest_pass)

    def __getitem__(self, choice: Choice) -> Estimate:
        if choice not in self.estimates:
            self.estimates[choice] = self._estimate(choice)
        return self.estimates[choice]

    def _config(self, choice: Choice) -> Any:
        return self.study.configure({**self.study.overrides, **self.overrides(choice)}).config

    def _estimate(self, choice: Choice) -> Estimate:
        from trainer.memory.estimate import plan as planned
        from trainer.runtime.device import pick_device

        config = self._config(choice)
        task = stepped(self.study, config, "whose memory cannot be estimated")
        train = config.train.model_copy(update={"device": "cpu"})  # this machine's device does not matter

        def first(size: int) -> Any:
            from trainer.data import Loader

            return Loader(task, train, pick_device("cpu")).first(size)

        limit = 1 << 62  # no micro-batch is halved: the plan itself searches
        return planned(task, train, limit, train.largest_pass, first).requested


def _fields(study: Study, pinned: Set[str]) -> dict[str, Sequence[Any]]:
    """Returns the fields that may change, path -> values. A preset pins nothing; no micro-batch exceeds the batch."""
    train = getattr(study.config, "train", None)
    if not hasattr(train, "batch_size"):
        raise UserError(f"study {study.name!r} has no TrainConfig in its field train, so no step to estimate.")
    most = flatten(as_json(study.config))["train.batch_size"]
    fields: dict[str, Sequence[Any]] = {path: values for path, values in study.plan.items() if path not in pinned}
    if MICRO_BATCH in fields:
        sizes = sorted({min(size, most) for size in fields[MICRO_BATCH]}, reverse=True)
        fields[MICRO_BATCH] = [size for size in sizes if _allowed(study, size)] or sizes
    elif not study.plan and MICRO_BATCH not in pinned:
        fields[MICRO_BATCH] = list(_halves(most))
    if len(fields.get(MICRO_BATCH, ())) > 1 and (least := _least(study)) > 1:
        fields[MICRO_BATCH] = [size for size in fields[MICRO_BATCH] if size >= least]
    return fields


def _least(study: Study) -> int:
    """Returns the fewest samples that a pass of the study's model can have."""
    from trainer.memory.estimate import least_of

    return 1 if study.trains_itself else least_of(study.task_class()(study.config))


def _allowed(study: Study, size: int) -> bool:
    """Returns whether the study's own rules accept this micro-batch with all values that it searches."""
    try:
        study.configure({**study.overrides, MICRO_BATCH: size})
    except HpoError:
        return False
    return True


def _halves(size: int) -> Iterator[int]:
    while size > 1:
        yield size
        size = -(-size // 2)
    yield 1


def describe(found: Plan) -> str:
    """Returns the fitting configurations with the memory of each part, how to run them, and what the estimate omits."""
    parts = list(found.rows[0].needs.parts)
    power, unit = (30, "GiB") if found.rows[0].needs.peak >= 2**30 else (20, "MiB")
    head = ["", *(path.rpartition(".")[2] for path in found.rows[0].overrides), "accumulation", f"peak {unit}", *parts]
    table = [head]
    for n, row in enumerate(found.rows, 1):
        sizes = [f"{size / 2**power:.2f}" for size in (row.needs.peak, *row.needs.parts.values())]
        table.append([str(n), *map(str, row.overrides.values()), str(row.accumulation), *sizes])
    lines = [f"{found.study}: what fits {_gib(found.memory)}, with a tenth left free", *aligned(table)]
    for n, row in enumerate(found.rows, 1):
        lines.append(
            f"{n}:  " + " ".join(option("overrides", f"{path}={value}") for path, value in row.overrides.items())
        )
    lines.append(
        f"{_searched(found)} Estimated is all that is alive in a step of the optimizer on the largest micro-batch that "
        "may come. Not seen are CUDA itself, the work space of kernels, and the allocator's rounding and gaps: for "
        "these is the tenth."
    )
    return "\n".join(lines)


def _searched(found: Plan) -> str:
    """Returns a sentence about the values that were tried, and on why there are several rows or one."""
    tried = "; ".join(f"{path} {', '.join(map(str, values))}" for path, values in found.fields.items())
    if not found.fields:
        return "Everything that may change is set, so this is all there is to estimate."
    total = prod(map(len, found.fields.values()))
    text = f"Tried: {tried} ({counted(total, 'configuration')}, {found.estimated} estimated)."
    if len(found.rows) > 1:
        text += " Each row has something that the others lack."
    elif found.rows[0].overrides == {path: values[0] for path, values in found.fields.items()}:
        text += " The dearest of all fits, so nothing has to be given up."
    else:
        text += " Whatever else fits has less in some field, and more in none."
    if not found.declared:
        text += f" Study {found.study!r} declares nothing else to give up (plan=)."
    return text


def _gib(size: float) -> str:
    if size < 2**10:
        return f"{size:.0f} bytes"
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"
