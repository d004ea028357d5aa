"""Defines `Task`, which a study supplies to be trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError, TrainerError
from trainer.finding import Finding
from trainer.quote import quoted
from trainer.report import number
from trainer.runtime.model_state import accepting
from trainer.runtime.tensors import settle


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one micro-batch, before any mean is taken.

    `sum` is a scalar with gradient: the sum of the losses. `count` is their number: samples, tokens or days.
    The optimizer steps on the sums of all micro-batches of a window over their counts, so uneven micro-batches
    weigh as they would in one large batch. A window whose count is 0 is skipped. `terms` holds more scalar sums
    over the same count, logged as `train/<name>`. `parts` are the scalars with gradient that add up to `sum`, by name,
    for rules that compare their gradients; a loss of one part may leave them out.
    """

    sum: Tensor
    count: float | Tensor
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the numbers that are tensors, by name."""
        named: dict[str, Any] = {"sum": self.sum, "count": self.count}
        named |= {f"term {name!r}": term for name, term in self.terms.items()}
        named |= {f"part {name!r}": part for name, part in self.parts.items()}
        return {name: number for name, number in named.items() if isinstance(number, Tensor)}

    def scalars(self) -> Loss:
        """Returns the loss with numbers without a shape."""
        count = self.count.reshape(()) if isinstance(self.count, Tensor) else self.count
        terms = {name: term.reshape(()) for name, term in self.terms.items()}
        return Loss(self.sum.reshape(()), count, terms, {name: part.reshape(()) for name, part in self.parts.items()})

    def times(self, factor: float | Tensor) -> Loss:
        """Returns the loss with every number, and so every gradient, multiplied."""
        terms = {name: term * factor for name, term in self.terms.items()}
        return Loss(self.sum * factor, self.count * factor, terms, {k: part * factor for k, part in self.parts.items()})


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A trained language model, for exports in the formats of language models.

    `save` writes it into an empty directory as Hugging Face stores it: config.json, *.safetensors and the files of its
    tokenizer, if it has some. `logits` computes [batch, length, vocab_size] of tokens [batch, length], which an encoder
    and its decoder ("seq2seq") read both. `tolerance` is the share of the largest logit by which those of the saved
    model may differ, on random tokens of `length`.
    """

    save: Callable[[Path], None]
    logits: Callable[[Tensor], Tensor]
    vocab_size: int
    tolerance: float = 1e-3
    kind: Literal["causal", "masked", "seq2seq"] = "causal"
    length: int = 32


def method(task: Any, name: str) -> str:
    """Returns `loss() of SineTask (sine.py:28)`, for a sentence about its result."""
    code = getattr(getattr(type(task), name), "__code__", None)
    where = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
    return f"{name}() of {type(task).__name__}{where}"


def checked(task: Task, loss: Any) -> Loss:
    """Returns the task's loss with numbers without a shape. Raises TrainerError if it is not such a loss."""
    if not isinstance(loss, Loss):
        raise TrainerError(
            f"{method(task, 'loss')} returned a {type(loss).__name__}: return Loss(sum, n), the losses of n "
            "samples added up, or of their mean Loss(mean * n, n)."
        )
    numbers = loss.tensors()
    many = {name: f"of shape {tuple(tensor.shape)}" for name, tensor in numbers.items() if tensor.numel() != 1}
    odd = many if "sum" in numbers else {"sum": type(loss.sum).__name__}
    for name, problem in odd.items():
        raise TrainerError(
            f"{method(task, 'loss')} returned a Loss whose {name} is {problem}: give a tensor of one number, "
            "the sum with its gradient, as in Loss(losses.sum(), len(losses))."
        )
    return loss.scalars() if any(tensor.ndim for tensor in numbers.values()) else loss


def built(task: Task) -> nn.Module:
    """Returns the task's model after `settle` has prepared its tensors. Raises TrainerError if it is not a module."""
    model: Any = task.model()
    if not isinstance(model, nn.Module):
        raise TrainerError(f"{method(task, 'model')} returned a {type(model).__name__}: return the nn.Module.")
    return accepting(settle(model))


def measured(task: Task, model: nn.Module) -> dict[str, float]:
    """Returns the metrics of the task's evaluation. Raises TrainerError unless they are numbers by name."""
    results: Any = task.evaluate(model)
    if not isinstance(results, Mapping):
        raise TrainerError(
            f"{method(task, 'evaluate')} returned a {type(results).__name__}: return numbers by name, as in "
            "{'val/loss': 0.5}."
        )
    metrics: dict[str, float] = {}
    for name, value in results.items():
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
                f"{method(task, 'evaluate')} gave {name!r} a {type(value).__name__} that is not a number ({error}): "
                "return one for each name."
            ) from error
    return metrics


class Task:
    """A trial's model, data and loss. There is one instance per trial, without state that outlives the trial.

    Every method may draw from the global generators of torch, numpy and python: they are seeded before each call. A
    task with its own training loop needs only `fit(reporter, checkpoints) -> Outcome`: it continues from
    `checkpoints.load_latest()`, calls `reporter.report` after each epoch and obeys the verdict.
    """

    # The share of the run's steps done, kept by the trainer: for weights that change over the run.
    progress: float = 0.0
    # The optimizer steps done, kept in the same way: for measurements at some steps only.
    step: int = 0
    # The unit of `Loss.count`. Other than samples it also has a rate, `train/tokens_per_sec`; tokens have a perplexity.
    unit: str = "samples"
    # True while `loss` gets a batch that only keeps this rank in step with others, which have samples left: its result
    # does not count, and what it gathers from all ranks must leave this one's out.
    filler: bool = False
    # The number of the model's equal blocks, if the task has a method of_depth: its memory is then estimated from that
    # of shallower models.
    depth: int | None = None
    # Paths of the configuration, such as model.dropout, in which lanes of one model (train.lanes) may differ: dropout
    # rates, and numbers that `loss` reads from `self.config`, where they then are tensors.
    lane_fields: tuple[str, ...] = ()
    # A directory for expensive data that all trials share, such as tokens; None: there is none.
    shared: Path | None = None

    def __init__(self, config: Any) -> None:
        """Takes `config`, the whole resolved configuration, already validated."""
        self.config = config

    def in_fold(self, fold: int, folds: int) -> Task:
        """Returns the task whose `train_set` and `evaluate` are those of `fold`, from 0, of `folds` (`train.folds`)."""
        raise ConfigError(
            f"train.folds={folds}: {type(self).__name__} does not divide its data; give it a method "
            "in_fold(fold, folds) that returns the task of one fold, or leave train.folds."
        )

    def model(self) -> nn.Module:
        """Builds the model, on the CPU; called under the seed of stream "init"."""
        raise TrainerError(f"{type(self).__name__} needs a method model() that returns an nn.Module.")

    def train_set(self) -> Any:
        """Returns the training data, map-style.

        It has `__len__`, and `__getitem__(index) -> sample` (collated as torch does) or `__getitems__(indices) ->
        batch` for a whole batch at once. A list counts as samples still to be collated; a batch is a tensor, a tuple or
        a dict. It may have its own order and collate, see `trainer.data.view`. A data set with an attribute `draws =
        False` promises that reading it draws no random number, and saves the seeding before each read.
        """
        raise TrainerError(f"{type(self).__name__} needs a method train_set() that returns a dataset.")

    def of_depth(self, depth: int) -> Task:
        """Returns the same task with a model of `depth` blocks, for an estimate of memory."""
        raise NotImplementedError(f"{type(self).__name__} has depth={self.depth} and needs a method of_depth(depth).")

    def largest_batch(self, size: int) -> Any:
        """Returns the largest possible micro-batch of `size` samples, on the host, for the estimate of memory.

        Its values do not matter. None: the first samples of the training set stand for all.
        """
        return None

    def augment(self, sample: Any, generator: torch.Generator) -> Any:
        """Changes one training sample; `generator` is seeded by (seed, epoch, index). By default changes nothing."""
        return sample

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Returns the loss of one micro-batch, already on the model's device."""
        raise TrainerError(f"{type(self).__name__} needs a method loss(model, batch) that returns a Loss.")

    def lr_scale(self, progress: float) -> float:
        """Returns a factor on the schedule's learning rate at the share `progress` of the run's steps: for phases."""
        return 1.0

    def parallel_plan(self, model: nn.Module) -> Mapping[str, str]:
        """Returns pattern of module names -> "colwise", "rowwise" or a sequence style, for `train.parallel.tensor`.

        A linear layer by columns gives each rank some of its outputs; a following one by rows takes them as its inputs,
        through elementwise modules between, and gives all ranks the whole output again. After a module named "scatter"
        ranks hold parts of the sequence (dimension 1), up to one named "gather"; between them norms and dropout are
        named "sequence", and layers by rows "rowwise_scatter".
        """
        return {}

    def expert_plan(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns the modules that hold experts, for `train.parallel.expert`.

        Each parameter of such a module itself, not of those within it, has a row for each expert. The module has an
        attribute `owners`, None in one process; on several ranks it is a `trainer.distributed.expert_parallel.Exchange`
        through which `forward` reaches the experts of all ranks.
        """
        return ()

    def pipeline_plan(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns parts of `model` which, called one after another, compute its output, for `train.parallel.pipeline`.

        The first takes the model's arguments; each other one takes the previous one's output, a tensor or a tuple of
        tensors. Each rank gets a run of them. By default they are the elements of an `nn.Sequential`.
        """
        return list(model) if isinstance(model, nn.Sequential) else []

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns metrics of the model, named `val/...`; called after each epoch in eval mode and without gradient."""
        return {}

    def findings(self, model: nn.Module) -> Sequence[Finding]:
        """Returns findings of checks that the task has of its own, for a diagnosis; called like `evaluate`."""
        return ()

    def artifacts(self, model: nn.Module) -> Mapping[str, str]:
        """Returns texts that belong to the trial, by file name.

        It is called after `evaluate`, in the same mode, on every rank alike.
        """
        return {}

    def language_model(self, model: nn.Module) -> LanguageModel | None:
        """Returns the trained model as Hugging Face stores it, for exports; None for a model of another kind.

        Raises ConfigError if that format cannot hold it.
        """
        return None
