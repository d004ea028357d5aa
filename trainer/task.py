"""Defines `Task`, which a study supplies to be trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError, TrainerError
from trainer.quote import quoted
from trainer.report import number
from trainer.runtime.saved import accepting
from trainer.runtime.tensors import settle


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one micro-batch, before any mean is taken.

    `sum` is a scalar with gradient: the losses added up. `count` is how many were added: samples, tokens or days.
    The optimizer steps on the sums of all micro-batches of a window over their counts, so uneven micro-batches
    weigh as they would in one large batch. A window whose count is 0 is skipped. `terms` holds more scalar sums
    over the same count, logged as `train/<name>`.
    """

    sum: Tensor
    count: float | Tensor
    terms: Mapping[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Of its numbers those that are tensors, by what to call them."""
        named = {"sum": self.sum, "count": self.count, **{f"term {name!r}": term for name, term in self.terms.items()}}
        return {name: number for name, number in named.items() if isinstance(number, Tensor)}

    def scalars(self) -> Loss:
        """The same of numbers without a shape."""
        count = self.count.reshape(()) if isinstance(self.count, Tensor) else self.count
        return Loss(self.sum.reshape(()), count, {name: term.reshape(()) for name, term in self.terms.items()})

    def times(self, factor: float | Tensor) -> Loss:
        """The same with every number, and so every gradient, multiplied."""
        terms = {name: term * factor for name, term in self.terms.items()}
        return Loss(self.sum * factor, self.count * factor, terms)


def method(task: Any, name: str) -> str:
    """`loss() of SineTask (sine.py:28)`, for a sentence on what it returned."""
    code = getattr(getattr(type(task), name), "__code__", None)
    where = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
    return f"{name}() of {type(task).__name__}{where}"


def checked(task: Task, loss: Any) -> Loss:
    """What the task returned as its loss, of numbers without a shape. Raises TrainerError where it is no such loss."""
    if not isinstance(loss, Loss):
        raise TrainerError(
            f"{method(task, 'loss')} returned a {type(loss).__name__}: return Loss(sum, n), the losses of n "
            "samples added up, or of their mean Loss(mean * n, n)."
        )
    numbers = loss.tensors()
    many = {name: f"of shape {tuple(tensor.shape)}" for name, tensor in numbers.items() if tensor.numel() != 1}
    odd = many if "sum" in numbers else {"sum": type(loss.sum).__name__}
    for name, found in odd.items():
        raise TrainerError(
            f"{method(task, 'loss')} returned a Loss whose {name} is {found}: give a tensor of one number, "
            "the sum with its gradient, as in Loss(losses.sum(), len(losses))."
        )
    return loss.scalars() if any(tensor.ndim for tensor in numbers.values()) else loss


def built(task: Task) -> nn.Module:
    """The task's model, its tensors settled. Raises TrainerError where it is none."""
    model: Any = task.model()
    if not isinstance(model, nn.Module):
        raise TrainerError(f"{method(task, 'model')} returned a {type(model).__name__}: return the nn.Module.")
    return accepting(settle(model))


def measured(task: Task, model: nn.Module) -> dict[str, float]:
    """The metrics that the task evaluates to. Raises TrainerError where they are no numbers by name."""
    found: Any = task.evaluate(model)
    if not isinstance(found, Mapping):
        raise TrainerError(
            f"{method(task, 'evaluate')} returned a {type(found).__name__}: return numbers by name, as in "
            "{'val/loss': 0.5}."
        )
    metrics: dict[str, float] = {}
    for name, value in found.items():
        if not isinstance(name, str):
            raise TrainerError(
                f"{method(task, 'evaluate')} gave a value the name {quoted(name, 80)}: name it by text, {str(name)!r}."
            )
        try:
            metrics[name] = number(value)
        except OverflowError as error:
            raise TrainerError(
                f"{method(task, 'evaluate')} gave {name!r} the value {quoted(value, 80)}: it is too large for a float."
            ) from error
        except (TypeError, ValueError, RuntimeError) as error:
            raise TrainerError(
                f"{method(task, 'evaluate')} gave {name!r} a {type(value).__name__} that is no number ({error}): "
                "return one for each name."
            ) from error
    return metrics


class Task:
    """A trial's model, data and loss. One instance per trial, which holds no state that outlives the trial.

    Every method may draw from the global generators of torch, numpy and python: they are seeded before each call.

    A task with a training loop of its own needs none of these methods but `fit(reporter, checkpoints) -> Outcome`:
    it goes on from `checkpoints.load_latest()`, calls `reporter.report` after each epoch and obeys the verdict.
    """

    # The share of the run's steps done, kept by the trainer: for weights that change over the run.
    progress: float = 0.0
    # The optimizer steps done, kept in the same way: for what is to be measured at some of them only.
    step: int = 0
    # What `Loss.count` counts. Other than samples it is also a rate, `train/tokens_per_sec`; tokens have a perplexity.
    unit: str = "samples"
    # Whether `loss` is asked of a batch that only keeps this rank in step with others, which have samples left: what it
    # returns counts nothing, and what it gathers from all ranks must leave this one's out.
    filler: bool = False
    # How many blocks of one kind the model is made of, where the task has a method of_depth: its memory is then
    # estimated from that of shallower ones.
    depth: int | None = None
    # Paths of the configuration, such as model.dropout, in which lanes of one model (train.lanes) may differ: those
    # that set dropout rates, and those that `loss` reads from `self.config`, where they then are tensors.
    lane_fields: tuple[str, ...] = ()
    # A directory for what is dear to make and the same for every trial, such as tokens; None: there is none to share.
    shared: Path | None = None

    def __init__(self, config: Any) -> None:
        """`config` is the whole resolved configuration, already validated."""
        self.config = config

    def in_fold(self, fold: int, folds: int) -> Task:
        """The task whose `train_set` and `evaluate` are those of `fold`, from 0, of `folds`: for `train.folds`."""
        raise ConfigError(
            f"train.folds={folds}: {type(self).__name__} does not divide its data; give it a method "
            "in_fold(fold, folds) that returns the task of one fold, or leave train.folds."
        )

    def model(self) -> nn.Module:
        """Build the model, on the CPU; called under the seed of stream "init"."""
        raise TrainerError(f"{type(self).__name__} needs a method model() that returns an nn.Module.")

    def train_set(self) -> Any:
        """The training data, map-style: `__len__`, and `__getitem__(index) -> sample` (collated as torch does) or
        `__getitems__(indices) -> batch` for a whole batch at once. A list counts as samples still to be collated;
        a batch is a tensor, a tuple or a dict. It may give its own order and collate, see `trainer.data.view`. A data
        set with an attribute `draws = False` promises that reading it draws no random number, and saves the seeding
        before each read."""
        raise TrainerError(f"{type(self).__name__} needs a method train_set() that returns a dataset.")

    def of_depth(self, depth: int) -> Task:
        """The same task with a model of so many of its blocks, for an estimate of memory."""
        raise NotImplementedError(f"{type(self).__name__} has depth={self.depth} and needs a method of_depth(depth).")

    def largest_batch(self, size: int) -> Any:
        """The largest micro-batch of `size` samples that may come, on the host, for the estimate of memory: its values
        do not matter. None: the first samples of the training set stand for all."""
        return None

    def augment(self, sample: Any, generator: torch.Generator) -> Any:
        """Change one training sample; `generator` is seeded by (seed, epoch, index). By default nothing is done."""
        return sample

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """The loss of one micro-batch, already on the model's device."""
        raise TrainerError(f"{type(self).__name__} needs a method loss(model, batch) that returns a Loss.")

    def lr_scale(self, progress: float) -> float:
        """A factor on the schedule's learning rate once the share `progress` of the run's steps is done: of a phase."""
        return 1.0

    def parallel_plan(self, model: nn.Module) -> Mapping[str, str]:
        """For `train.parallel.tensor`: pattern of module names -> "colwise", "rowwise", or what divides a sequence.

        A linear layer by columns gives each rank some of its outputs; one by rows that follows, with what stands
        between acting on each element alone, takes them as its inputs and gives all ranks the whole output again.
        After a module named "scatter" ranks hold parts of the sequence (dimension 1), up to one named "gather"; between
        them norms and dropout are named "sequence", and layers by rows "rowwise_scatter".
        """
        return {}

    def pipeline_plan(self, model: nn.Module) -> Sequence[nn.Module]:
        """For `train.parallel.pipeline`: parts of `model` which, called one after another, compute what it does.

        The first takes what the model is called with; each other one takes what the one before gives, a tensor or a
        tuple of tensors. Each rank gets a run of them. By default the elements of an `nn.Sequential`.
        """
        return list(model) if isinstance(model, nn.Sequential) else []

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics of the model, named `val/...`; called after each epoch in eval mode and without gradient."""
        return {}

    def artifacts(self, model: nn.Module) -> Mapping[str, str]:
        """Texts that belong to the trial, by file name: called after `evaluate` and as that, on every rank alike."""
        return {}
