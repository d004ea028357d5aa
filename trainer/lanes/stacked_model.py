"""Stacks several models into one: their weights are rows of one tensor, and one pass computes the gradients of all.

The forward pass is vectorised by torch.vmap (as HFTA does by hand, Wang et al. 2021, arXiv 2102.02344) and
differentiated outside of it, since fewer backward passes have a rule for vmap than forward ones.

A lane's numbers do not depend on the others, to the bit. Matrix products and sums run over each row separately.
Elementwise functions are computed in blocks of the processor's vectors, and by other code in the rest of the last
block: untrained rows at the end, `SPARE` elements at least, fill that rest.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trainer.compat.modules import DropoutNd
from trainer.compat.pytree import tree_flatten, tree_unflatten
from trainer.data.loader import to_device
from trainer.errors import ConfigError
from trainer.lanes.fused_optimizers import RULES, Rows
from trainer.lanes.lane import NOT_ITS_OWN, Lane
from trainer.lanes.per_lane_ops import SPARE, Lanewise, PerLane, layers
from trainer.runtime.seeding import seed_all
from trainer.task import Loss, Task

# Relative to a gradient's norm. Lanes round as products of other shapes do, about 1e-6; in bf16, about 1e-2.
TOLERANCE = {"bf16": 0.1}


class _Forward(nn.Module):
    """The loss as a module, so that `functional_call` can give the model other weights."""

    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self.model = lane.state.model
        self.lane = lane

    def forward(self, batch: Any) -> Loss:
        return self.lane.stepper.task_loss(self.lane.task, batch)


@dataclass(slots=True)
class Sums:
    """Each lane's sums over a window's passes, as in `trainer.runtime.window`, [lanes] each."""

    loss: Tensor
    count: Tensor
    terms: dict[str, Tensor]

    def __add__(self, other: Sums) -> Sums:
        both = {name: self.terms[name] + term for name, term in other.terms.items() if name in self.terms}
        terms = {**self.terms, **other.terms, **both}
        return Sums(self.loss + other.loss, self.count + other.count, terms)


class Stack:
    """The stacked models of `lanes`, whose weights, gradients and statistics become views of its rows.

    Raises ConfigError if they are not alike.
    """

    def __init__(self, lanes: Sequence[Lane], device: torch.device) -> None:
        self.lanes, self.device = list(lanes), device
        models = [lane.state.model for lane in lanes]
        check_alike(models)
        trainable = [[p for p in model.parameters() if p.requires_grad] for model in models]
        self.names = [name for name, p in models[0].named_parameters() if p.requires_grad]
        self.shapes = [p.shape for p in trainable[0]]
        self.sizes = [p.numel() for p in trainable[0]]
        rows = [torch.cat([p.detach().reshape(-1) for p in params]) for params in trainable]
        self.weights = torch.stack(rows + rows[:1] * SPARE)
        self.gradient = torch.zeros_like(self.weights[: len(lanes)])
        self._shown: list[tuple[list[nn.Parameter], list[Tensor]]] = []  # each lane's parameters and gradients
        for params, weights, gradient in zip(trainable, self.weights, self.gradient, strict=False):
            for p, w in zip(params, self._parts(weights), strict=True):
                p.data = w
            self._shown.append((params, [*self._parts(gradient)]))
        by_model = [dict(_held(model)) for model in models]
        self.held: dict[str, Tensor] = {}
        for name in by_model[0]:
            values = [tensors[name].detach() for tensors in by_model]
            self.held[name] = torch.stack(values + values[:1] * SPARE)
            for tensors, value in zip(by_model, self.held[name], strict=False):
                tensors[name].data = value
        self._rows: Rows | None = None
        self._own = _own_numbers([lane.task for lane in lanes], device)
        self._forward = _Forward(self.lanes[0])
        self._dropped = [tuple(layer.p for layer in layers(model)) for model in models]
        self._rates = [PerLane(rates) for rates in zip(*self._dropped, strict=True)]

    def _parts(self, row: Tensor) -> Iterable[Tensor]:
        """Returns views of a row [parameters], one for each parameter."""
        return (part.view(shape) for part, shape in zip(row.split(self.sizes), self.shapes, strict=True))

    def pass_over(self, windows: Sequence[list[Any]]) -> Sums:
        """Computes the gradients of the summed losses in `gradient`, and so in every lane's parameters.

        Parameters without a gradient from any loss are left out. `windows` has each lane's micro-batches.
        """
        totals: Sums | None = None
        with_gradient: set[int] = set()
        self.gradient.zero_()
        columns = self.gradient.split(self.sizes, dim=1)
        for micro_step, batches in enumerate(zip(*windows, strict=True)):
            sums, gradients = self._pass(micro_step, batches)
            totals = sums if totals is None else totals + sums
            for i, gradient in gradients.items():
                columns[i].add_(gradient) if i in with_gradient else columns[i].copy_(gradient)
                with_gradient.add(i)
        for params, gradients in self._shown:
            for i, (p, gradient) in enumerate(zip(params, gradients, strict=True)):
                p.grad = gradient if i in with_gradient else None
        self._all_met = len(with_gradient) == len(self.sizes)
        assert totals is not None
        return totals

    def prepare_rows(self) -> None:
        """Allocates the memory for stepping the lanes as rows, once all parameters have a gradient."""
        if self._rows is None and self._all_met and self.lanes[0].config.optim.name in RULES:
            self._rows = Rows(self.lanes, self.weights[: len(self.lanes)], self.gradient, self._parts)

    def step_rows(self, lrs: Mapping[int, float]) -> set[int]:
        """Steps the lanes that can be stepped as rows, at their rates; returns their numbers.

        Lanes in which a parameter has no gradient are left to their own optimizers.
        """
        if self._rows is None:
            return set()
        together = {k: lr for k, lr in lrs.items() if self._all_met and self._rows.even[k]}
        for k in lrs.keys() - together.keys():
            self._rows.even[k] = False  # its parameters count their steps separately from here on
        if together:
            self._rows.step(together)
        return set(together)

    def _pass(self, micro_step: int, batches: Sequence[Any]) -> tuple[Sums, dict[int, Tensor]]:
        """Returns the sums of a pass over one micro-batch of each lane, and the gradients.

        The gradients are by the number of a parameter, [lanes, size] each.
        """
        lanes = len(self.lanes)
        first, leaves, rows = self._gathered(batches)
        parts = tuple(
            part.view(rows, *shape).requires_grad_()
            for part, shape in zip(self.weights[:rows].split(self.sizes, dim=1), self.shapes, strict=True)
        )
        losses, count, terms, anew = self._losses(micro_step, parts, first, leaves, rows)
        gradients = torch.autograd.grad(losses.sum(), parts, allow_unused=True)
        for name, now in anew.items():  # buffers that the model has replaced
            self.held[name][:rows].copy_(now.detach())
        terms = {name: term.detach()[:lanes] for name, term in terms.items()}
        sums = Sums(losses.detach()[:lanes], count.detach()[:lanes], terms)
        return sums, {i: g[:lanes].reshape(lanes, -1) for i, g in enumerate(gradients) if g is not None}

    def _gathered(self, batches: Sequence[Any]) -> tuple[_Leaves, dict[int, Tensor], int]:
        """Returns the micro-batches of all lanes as one.

        These are one batch's structure, the tensors by position, [rows, ...] each, and the number of rows with the
        spare ones.
        """
        read = {id(batch): _leaves(to_device(batch, self.device)) for batch in {id(b): b for b in batches}.values()}
        lane_batches = [read[id(batch)] for batch in batches]
        first = lane_batches[0]
        if any(batch.others != first.others or batch.spec != first.spec for batch in read.values()):
            raise ConfigError("train.lanes: batches hold values that are no tensors and differ: set it to 1.")
        samples = next((tensor.shape[0] for tensor in first.tensors.values() if tensor.ndim), 1)
        rows = len(lane_batches) + max(-(-SPARE // max(samples, 1)), 1 if len(lane_batches) > 1 else 2)
        return first, {i: _stacked([batch.tensors[i] for batch in lane_batches], rows) for i in first.tensors}, rows

    def _losses(
        self, micro_step: int, parts: tuple[Tensor, ...], first: _Leaves, leaves: dict[int, Tensor], rows: int
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Returns for each row the loss, its count and terms, and the replaced buffers, [rows, ...] each."""
        task, progress = (
            self.lanes[0].task,
            [(lane.state.step / lane.fit.total, lane.state.step) for lane in self.lanes],
        )
        config, counts = task.config, list[Any]()

        def loss_of(parts: tuple[Tensor, ...], held: dict[str, Tensor], leaves: Any, own: Any, clock: Any) -> Any:
            task.config = _with(config, own)
            task.progress, task.step = clock
            batch = tree_unflatten(
                [leaves.get(i, first.others.get(i)) for i in range(first.spec.num_leaves)], first.spec
            )
            values = dict(zip(self.names, parts, strict=True)) | held
            substitutes = {f"model.{name}": value for name, value in values.items()}
            loss = functional_call(self._forward, substitutes, (batch,))
            counts.append(loss.count)
            count = loss.count if isinstance(loss.count, Tensor) else loss.sum.new_zeros(())
            anew = {name: now for name, value in held.items() if (now := substitutes[f"model.{name}"]) is not value}
            return loss.sum, count, dict(loss.terms), anew

        fixed, numbers = ({name: values[:rows] for name, values in table.items()} for table in (self.held, self._own))
        seeds = self._seeds(micro_step)
        seed_all(seeds[0])
        try:
            with self._dropping(self._rates), Lanewise(seeds, self.device, self._dropped):
                outputs = torch.vmap(loss_of)(parts, fixed, leaves, numbers, self._clocks(progress, rows))
        finally:
            task.config = config
            task.progress, task.step = progress[0]
        losses, count, terms, anew = outputs
        return losses, count if isinstance(counts[0], Tensor) else losses.new_full((rows,), counts[0]), terms, anew

    def _seeds(self, micro_step: int) -> list[int]:
        """Returns the seed of each lane's draws for its next micro-batch."""
        drawn: dict[tuple[int, int], int] = {}
        for lane in self.lanes:
            seed_and_step = lane.config.seed, lane.state.step
            drawn[seed_and_step] = drawn.get(seed_and_step) or lane.seed(micro_step)
        return [drawn[lane.config.seed, lane.state.step] for lane in self.lanes]

    def _clocks(self, progress: Sequence[tuple[float, int]], rows: int) -> tuple[Tensor, Tensor]:
        """Returns each lane's `progress` and `step` for its task.

        They are tensors even at equal steps, since a Python number rounds differently.
        """
        filled = [*progress, *[progress[0]] * (rows - len(progress))]
        shares, steps = zip(*filled, strict=True)
        return torch.tensor(shares, device=self.device), torch.tensor(steps, device=self.device)

    @contextmanager
    def _dropping(self, rates: Sequence[PerLane]) -> Any:
        """Gives the dropout layers of the first lane's model the rates of all lanes within the block."""
        dropouts = layers(self.lanes[0].state.model)
        before = [layer.p for layer in dropouts]
        for layer, rate in zip(dropouts, rates, strict=True):
            layer.p = rate
        try:
            yield
        finally:
            for layer, p in zip(dropouts, before, strict=True):
                layer.p = p


def _own_numbers(tasks: Sequence[Task], device: torch.device) -> dict[str, Tensor]:
    """Returns the numeric `Task.lane_fields`, [lanes + SPARE] each.

    Lanes that agree have a tensor too, since a Python number rounds differently.
    """
    numbers: dict[str, Tensor] = {}
    for path in tasks[0].lane_fields:
        values = [reduce(getattr, path.split("."), task.config) for task in tasks]
        if all(isinstance(value, (int, float)) for value in values) or any(value != values[0] for value in values):
            numbers[path] = torch.tensor([float(value) for value in values + values[:1] * SPARE], device=device)
    return numbers


def _with(config: Any, values: Mapping[str, Any]) -> Any:
    """Returns the configuration with these values, unchecked."""
    for path, value in values.items():
        config = _replaced(config, path.split("."), value)
    return config


def _replaced(part: Any, path: Sequence[str], value: Any) -> Any:
    first, *rest = path
    return part.model_copy(update={first: _replaced(getattr(part, first), rest, value) if rest else value})


def compare(solo: Tensor, together: Tensor, precision: str) -> None:
    """Raises ConfigError if a lane's gradient differs from the trial's own."""
    norm, off = torch.linalg.vector_norm(solo), torch.linalg.vector_norm(solo - together)
    if bool(norm.isfinite()) and not bool(off <= TOLERANCE.get(precision, 1e-3) * norm + 1e-6):
        raise ConfigError(f"{NOT_ITS_OWN[:-1]} (off by {off / norm:.1e} of its norm).")


def _held(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Yields each lane's tensors that are not trained, by name."""
    yield from ((name, p) for name, p in model.named_parameters() if not p.requires_grad)
    yield from model.named_buffers()


@dataclass(frozen=True, slots=True)
class _Leaves:
    """The parts of a batch: its tensors by position, the other leaves, and its structure."""

    tensors: dict[int, Tensor]
    others: dict[int, Any]
    spec: Any


def _leaves(batch: Any) -> _Leaves:
    flat, spec = tree_flatten(batch)
    tensors = {i: leaf for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)}
    return _Leaves(tensors, {i: leaf for i, leaf in enumerate(flat) if i not in tensors}, spec)


def _stacked(leaves: Sequence[Tensor], rows: int) -> Tensor:
    """Returns the leaves as [rows, ...], the last ones copies of the first.

    A leaf that all lanes share is copied once.
    """
    if all(leaf is leaves[0] for leaf in leaves):
        return leaves[0].expand(rows, *leaves[0].shape).contiguous()
    if any(leaf.shape != leaves[0].shape for leaf in leaves):
        raise ConfigError(
            f"train.lanes: batches of {tuple(leaves[0].shape)} and of another shape cannot be stacked: give all "
            "samples one shape, or set train.lanes=1."
        )
    return torch.stack([*leaves, *[leaves[0]] * (rows - len(leaves))])


def check_alike(models: Sequence[nn.Module]) -> None:
    """Raises ConfigError if the models differ, so that one cannot represent them all."""
    kinds = {p.dtype for p in models[0].parameters() if p.requires_grad}
    if len(kinds) > 1:
        raise ConfigError(
            f"train.lanes: {type(models[0]).__name__} has trained parameters of {' and '.join(map(str, kinds))}: "
            "give them one dtype, or set train.lanes=1."
        )
    first = _described(models[0])
    for model in models[1:]:
        for name, description in _described(model).items():
            if first.get(name) != description:
                raise ConfigError(
                    f"train.lanes: the models of two trials differ in {_shown(name, model)}: only numbers that shape "
                    "no model may differ between lanes; take what shapes it out of the task's lane_fields."
                )


def _shown(name: str, model: nn.Module) -> str:
    return f"{name!r} of {type(model).__name__}" if name else type(model).__name__


def _described(model: nn.Module) -> Mapping[str, Any]:
    """Returns the properties of each module and tensor of the model, by name."""
    properties: dict[str, Any] = {}
    for name, module in model.named_modules():
        settings = {
            key: value for key, value in vars(module).items() if isinstance(value, (bool, int, float, str, tuple))
        }
        settings.pop("training")
        if isinstance(module, DropoutNd):
            settings.pop("p")
        properties[name] = type(module), settings
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        properties[name] = tensor.shape, tensor.dtype, tensor.requires_grad
    return properties
