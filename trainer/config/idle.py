"""Lists the fields of `TrainConfig` that a run reads only if another field is set, and checks them.

`TrainConfig` refuses combinations that are always a mistake; `hpo run` refuses an option that no trial of the study's
space reads; `fit` reports the rest as an event. All of them read the one table here. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

# refused: no configuration may set it, since the field that switches it on is off and offers no choice.
# option: a space may draw the switch, and a trial that draws it off has an event; an option that no trial reads is
#     refused.
# told: a trial reads it or not by where it runs, on how many ranks for example; if not, the trial has an event.
Answer = Literal["refused", "option", "told"]


@dataclass(frozen=True, slots=True)
class Switch:
    """A field `path` that makes other fields read while `on` is True for its value: `values` in words, any value if
    empty."""

    path: str
    on: Callable[[Any], bool]
    values: str = ""

    def __str__(self) -> str:
        return f"{self.path}={self.values}" if self.values else self.path


@dataclass(frozen=True, slots=True)
class Idle:
    """`fields` that are read only while one of `switches` is on. A field that ends in a dot stands for all below it."""

    fields: tuple[str, ...]
    switches: tuple[Switch, ...]
    answer: Answer

    def __contains__(self, path: str) -> bool:
        return any(path == field or (field.endswith(".") and path.startswith(field)) for field in self.fields)

    def sentence(self, path: str, value: Any, prefix: str = "") -> str:
        """Returns a sentence that the value is not read, and the fix; each path begins with `prefix`."""
        switches = " or ".join(f"{prefix}{switch}" for switch in self.switches)
        subject = "that" if len(self.switches) == 1 else "one of these"
        return f"{prefix}{path}={value!r} is read only with {switches}: set {subject}, or leave {prefix}{path} out."


def _is(path: str, *values: Any) -> Switch:
    return Switch(path, lambda value: value in values, " or ".join(str(value).lower() for value in values))


def _is_given(path: str) -> Switch:
    return Switch(path, lambda value: value not in (None, (), []))


def _several(path: str) -> Switch:
    return Switch(path, lambda value: isinstance(value, int) and value > 1, "2 or more")


_WARMUP_LENGTHS = tuple(_is_given(f"schedule.warmup_{unit}") for unit in ("ratio", "steps", "epochs"))
_WORKERS = Switch("num_workers", lambda value: value not in (0, "none"), "1 or more")
_RANKS = tuple(_several(f"parallel.{axis}") for axis in ("data", "tensor", "pipeline"))


def _of(part: str, *fields: str) -> tuple[str, ...]:
    return tuple(f"{part}.{field}" for field in fields)


TABLE: tuple[Idle, ...] = (
    Idle(("batch_growth.factor",), (_is_given("batch_growth.epochs"),), "refused"),
    Idle(("activations.modules",), (_is("activations.checkpoint", "full", "selective"),), "refused"),
    Idle(("init.gain",), (_is("init.name", "xavier_uniform", "xavier_normal", "orthogonal"),), "refused"),
    Idle(("init.std",), (_is("init.name", "normal", "trunc_normal"),), "refused"),
    Idle(_of("clip", "adaptive_eps", "adaptive_exclude"), (_is_given("clip.adaptive"),), "refused"),
    Idle(("gradients.noise_decay",), (_is_given("gradients.noise"),), "refused"),
    Idle(("freeze.until",), (_is_given("freeze.patterns"),), "refused"),
    Idle(_of("gradients", "penalty_norm", "penalty_of"), (_is_given("gradients.penalty"),), "refused"),
    Idle(
        _of("early_stopping", "mode", "patience", "min_delta", "divergence"),
        (_is_given("early_stopping.monitor"),),
        "refused",
    ),
    Idle(_of("checkpoint", "mode", "keep_best"), (_is_given("checkpoint.monitor"),), "refused"),
    Idle(_of("schedule", "warmup", "warmup_power", "warmup_start"), _WARMUP_LENGTHS, "refused"),
    Idle(("schedule.warmup_power",), (_is("schedule.warmup", "polynomial"),), "refused"),
    Idle(("schedule.warmup_start",), (_is("schedule.warmup", "exponential"),), "refused"),
    Idle(("schedule.base_batch_size",), (_is("schedule.scale_lr", "linear", "sqrt"),), "refused"),
    Idle(
        _of("gradients", "balance_alpha", "balance_lr", "balance_of"), (_is("gradients.balance", "gradnorm"),), "option"
    ),
    Idle(("optim.sam.",), (_is("optim.wrap", "sam"),), "option"),
    Idle(("optim.lookahead.",), (_is("optim.wrap", "lookahead"), _is("optim.name", "ranger")), "option"),
    Idle(("average.decay",), (_is("average.name", "ema"),), "option"),
    Idle(("average.start",), (_is("average.name", "swa"),), "option"),
    Idle(("average.every_steps",), (_is("average.name", "ema", "swa"),), "option"),
    Idle(
        _of("rollback", "threshold", "window", "min_history", "lr_factor", "cooldown", "max_rollbacks"),
        (_is("rollback.enabled", True),),
        "option",
    ),
    Idle(("loss_scale.",), (_is("precision", "fp16"),), "option"),
    Idle(("loss_scale.growth_interval",), (_is("loss_scale.dynamic", True),), "option"),
    Idle(("prefetch", "data_retry"), (_WORKERS,), "option"),
    Idle(("parallel.powersgd_rank",), (_is("parallel.compression", "powersgd"),), "option"),
    Idle(
        _of("parallel", "bucket_mb", "static_graph", "find_unused", "compression", "powersgd_rank", "sync_batchnorm"),
        (_several("parallel.data"),),
        "told",
    ),
    Idle(("parallel.timeout",), _RANKS, "told"),
)

# Fields that change how a run goes but none of its numbers, with their effects.
UNSEEN: dict[str, str] = {
    "activations.checkpoint": "computes activations twice in place of keeping them, to the bit",
    "activations.offload": "keeps activations elsewhere, to the bit",
    "checkpoint.asynchronous": "saves while training goes on: the same files",
    "compile": "the same operations in other kernels; what it costs is seen in time",
    "data_timeout": "ends a read that hangs",
    "deterministic": "chooses among kernels of a GPU; on a CPU there is one",
    "device": "where it runs",
    "folds": "read by trainer.cross_validation, around fit",
    "seeds": "read by trainer.cross_validation, around fit",
    "lanes": "read by trainer.lanes, around fit: a lane trains as it does alone but for rounding",
    "num_threads": "where partial sums meet, which small tensors have none of",
    "num_workers": "reads ahead; any number gives the same weights",
    "validate_data": "refuses samples that cannot be trained on",
}


def leaves(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields the dotted path, the value and the default of each field that has no fields of its own."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value, field.get_default(call_default_factory=True)


def rows_unread(
    paths: Iterable[str], possible: Callable[[str], Sequence[Any] | None], *answers: Answer
) -> Iterator[tuple[str, Idle]]:
    """Yields each of `paths` that no run reads, with its row of the table, if the row has one of `answers`.

    possible   returns the values that a field may have; None: any
    """
    paths = [*paths]
    for row in TABLE:
        if row.answer in answers and (idle := [path for path in paths if path in row]) and not _on(row, possible):
            yield from ((path, row) for path in idle)


def _on(row: Idle, possible: Callable[[str], Sequence[Any] | None]) -> bool:
    values = {switch: possible(switch.path) for switch in row.switches}
    return any(choices is None or any(map(switch.on, choices)) for switch, choices in values.items())


def unread(config: Any) -> str:
    """Returns sentences about the settings of `config`, a `TrainConfig`, that this run does not read; empty if none."""
    sentences = idle_fields(config, "option", "told", prefix="train.")
    size, share = config.fixed_micro_batch_size, config.largest_share
    if size is not None and size > share:
        sentences.append(
            f"train.micro_batch_size={size} is more than the {share} samples that are one rank's of the largest batch: "
            "lower it to accumulate, or leave train.micro_batch_size out."
        )
    return " ".join(sentences)


def idle_fields(config: BaseModel, *answers: Answer, prefix: str = "") -> list[str]:
    """Returns a sentence for each field of `config`, a `TrainConfig`, that is not the default and is not read."""
    values = {path: (value, default) for path, value, default in leaves(config)}
    changed = [path for path, (value, default) in values.items() if value != default]
    unread_rows = dict(rows_unread(changed, lambda path: values[path][:1], *answers))
    return [row.sentence(path, values[path][0], prefix) for path, row in unread_rows.items()]
