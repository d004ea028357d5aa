"""What of a study fits a memory: what `hpo plan` shows, by the estimate of a training step (trainer/memory.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import ceil
from typing import TYPE_CHECKING, Any

from hpo.config import as_json, flatten
from hpo.errors import UserError
from hpo.study import Study, load
from hpo.words import aligned, counted
from trainer.config.fields import size

if TYPE_CHECKING:
    from trainer.memory import Estimate

MICRO_BATCH = "train.micro_batch_size"
FREE = 0.1  # of the memory: what the estimate does not see has to fit there
Choice = tuple[int, ...]  # of each field, which of its values, from 0; the larger, the less memory


@dataclass(frozen=True)
class Fits:
    """A configuration that fits, as overrides; windows take so many micro-batches."""

    overrides: Mapping[str, Any]
    accumulation: int
    needs: Estimate


@dataclass(frozen=True)
class Plan:
    """`rows` are the configurations that fit `memory` bytes, none of which has all that another has."""

    study: str
    memory: int
    rows: list[Fits]
    estimated: int

    @property
    def usable(self) -> int:
        return int(self.memory * (1 - FREE))


def size_of(text: str) -> int:
    """The bytes of `6GB`, above 0."""
    try:
        found = size(text)
    except ValueError as error:
        raise UserError(f"--memory {text!r}: {error}.") from error
    if not found:
        raise UserError(f"--memory {text!r}: give more than nothing.")
    return found


def plan(reference: str, overrides: Mapping[str, Any], memory: int) -> Plan:
    """Try what the study's declaration may change (`Study.plan`; else its micro-batch), but for what `overrides` set.

    Raises UserError where nothing fits, and where there is no step that could be estimated.
    """
    study = load(reference).configure(overrides)
    fields = _fields(study)
    steps = Steps(study, fields)
    found = Plan(study.name, memory, [], 0)
    choices = frontier([len(values) for values in fields.values()], lambda one: steps[one].peak <= found.usable)
    rows = [Fits(steps.overrides(one), steps.accumulation(one), steps[one]) for one in choices]
    if not rows:
        last = tuple(len(values) - 1 for values in fields.values())
        least = " ".join(f"{path}={value}" for path, value in steps.overrides(last).items())
        raise UserError(
            f"nothing that study {study.name!r} may change fits {_gib(memory)}, of which a tenth stays free: even "
            f"{least} needs {steps[last]}."
        )
    return Plan(study.name, memory, rows, len(steps.estimates))


def frontier(sizes: Sequence[int], fits: Callable[[Choice], bool]) -> list[Choice]:
    """The choices that fit and are not, in every field, at or behind another one that fits; the dearest fields come
    first. What fits has all behind it fitting too, so few are asked about."""
    found: list[Choice] = []
    misfits: list[Choice] = []

    def misfit(one: Choice) -> bool:
        if any(_behind(known, one) for known in misfits):
            return True
        if fits(one):
            return False
        misfits.append(one)
        return True

    last = [size - 1 for size in sizes]
    for one in product(*map(range, sizes)):
        if any(_behind(one, known) for known in found):
            continue
        # Whole branches first: one's first fields, with the least that the others can need.
        if not any(misfit((*one[:k], *last[k:])) for k in range(1, len(sizes) + 1)):
            found.append(one)
    return found


def _behind(one: Choice, other: Choice) -> bool:
    """Whether it needs no more memory in any field."""
    return all(a >= b for a, b in zip(one, other, strict=True))


class Steps:
    """The estimates of a study's configurations, each made once, when it is asked for."""

    def __init__(self, study: Study, fields: Mapping[str, Sequence[Any]]) -> None:
        self.study, self.fields = study, fields
        self.estimates: dict[Choice, Estimate] = {}

    def overrides(self, choice: Choice) -> dict[str, Any]:
        return {path: values[i] for (path, values), i in zip(self.fields.items(), choice, strict=True)}

    def accumulation(self, choice: Choice) -> int:
        train = self._config(choice).train
        return ceil(train.largest_batch_size / (train.fixed_micro_batch_size or train.batch_size))

    def __getitem__(self, choice: Choice) -> Estimate:
        if choice not in self.estimates:
            self.estimates[choice] = self._estimate(choice)
        return self.estimates[choice]

    def _config(self, choice: Choice) -> Any:
        return self.study.configure({**self.study.overrides, **self.overrides(choice)}).config

    def _estimate(self, choice: Choice) -> Estimate:
        from trainer.memory import plan as planned
        from trainer.runtime import pick_device

        config = self._config(choice)
        task = self.study.task_class()(config)
        if hasattr(task, "fit"):
            raise UserError(f"study {self.study.name!r} trains in a loop of its own, whose memory cannot be estimated.")
        train = config.train.model_copy(update={"device": "cpu"})  # that of this machine does not matter
        micro = train.fixed_micro_batch_size or train.batch_size

        def first(size: int) -> Any:
            from trainer.data import Loader

            return Loader(task, train, pick_device("cpu")).first(size)

        limit = 1 << 62  # nothing is halved: what fits is the plan's to find
        return planned(task, train, limit, micro, first, accumulates=micro < train.largest_batch_size).asked


def _fields(study: Study) -> dict[str, Sequence[Any]]:
    """What may be changed: path -> values."""
    train = getattr(study.config, "train", None)
    if not hasattr(train, "batch_size"):
        raise UserError(f"study {study.name!r} has no TrainConfig in its field train, so no step to estimate.")
    given = flatten(as_json(study.config))
    fields: dict[str, Sequence[Any]] = {path: v for path, v in study.plan.items() if path not in study.overrides}
    if MICRO_BATCH in fields:
        fields[MICRO_BATCH] = [n for n in fields[MICRO_BATCH] if n <= given["train.batch_size"]] or [1]
    elif not study.plan and MICRO_BATCH not in study.overrides:
        fields[MICRO_BATCH] = list(_halves(given["train.batch_size"]))
    return fields


def _halves(size: int) -> Iterator[int]:
    while size > 1:
        yield size
        size = -(-size // 2)
    yield 1


def describe(found: Plan) -> str:
    """The configurations that fit with what each part takes, how to run them, and what the estimate leaves out."""
    parts = [name for name in asdict(found.rows[0].needs) if name != "peak"]
    power, unit = (30, "GiB") if found.rows[0].needs.peak >= 2**30 else (20, "MiB")
    head = ["", *(path.rpartition(".")[2] for path in found.rows[0].overrides), "accumulation", f"peak {unit}", *parts]
    table = [head]
    for n, row in enumerate(found.rows, 1):
        needs = asdict(row.needs)
        sizes = [f"{needs[name] / 2**power:.2f}" for name in ("peak", *parts)]
        table.append([str(n), *map(str, row.overrides.values()), str(row.accumulation), *sizes])
    lines = [f"{found.study}: what fits {_gib(found.memory)}, with a tenth left free", *aligned(table)]
    for n, row in enumerate(found.rows, 1):
        lines.append(f"{n}:  " + " ".join(f"-o {path}={value}" for path, value in row.overrides.items()))
    lines.append(
        f"Each has something that the others lack. {counted(found.estimated, 'configuration')} estimated: all that is "
        "alive in a step of the optimizer on the largest micro-batch that may come. Not seen are CUDA itself, the work "
        "space of kernels, and the allocator's rounding and gaps: for these is the tenth."
    )
    return "\n".join(lines)


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"
