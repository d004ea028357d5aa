"""Several models as one: their weights are rows of one tensor, and one pass computes the gradients of all.

The forward pass is vectorised by torch.vmap (as HFTA does by hand, Wang et al. 2021, arXiv 2102.02344) and
differentiated outside of it, since fewer backward passes have a rule for vmap than forward ones.

A lane's numbers do not depend on the others, to the bit. Products of matrices and sums run over each row alone. What
acts on each element is computed in blocks of the processor's vectors, and by other code for what is left of the last
block: rows at the end that nobody trains, `SPARE` elements at least, take that up.
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
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_flatten, tree_unflatten

from trainer.data.loader import to_device
from trainer.errors import ConfigError
from trainer.lanes.fused_optimizers import RULES, Rows
from trainer.lanes.lane import NOT_ITS_OWN, Lane
from trainer.lanes.per_lane_ops import SPARE, Lanewise, PerLane, layers
from trainer.runtime.seeding import seed_all
from trainer.task import Loss, Task

# Of a gradient's norm. Lanes round as products of other shapes do, some 1e-6; in bf16 after others, some 1e-2.
TOLERANCE = {"bf16": 0.1}


class _Forward(nn.Module):
    """The loss as a module, so that `functional_call` can give the model other weights."""

    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self.model = lane.state.model
        self.lane = lane

    def forward(self, batch: Any) -> Loss:
        return self.lane.stepper.task_loss(batch)


@dataclass(slots=True)
class Sums:
    """What the passes over a window left behind of each lane: sums, as in `trainer.runtime.window`, [lanes] each."""

    loss: Tensor
    count: Tensor
    terms: dict[str, Tensor]

    def __add__(self, other: Sums) -> Sums:
        both = {name: self.terms[name] + term for name, term in other.terms.items() if name in self.terms}
        terms = {**self.terms, **other.terms, **both}
        return Sums(self.loss + other.loss, self.count + other.count, terms)


class Stack:
    """The models of `lanes`, which show its rows as their own weights, gradients and statistics from here on.

    Raises ConfigError where they are not alike.
    """

    def __init__(self, lanes: Sequence[Lane], device: torch.device) -> None:
        self.lanes, self.device = list(lanes), device
        models = [lane.state.model for lane in lanes]
        check_alike(models)
        trained = [[p for p in model.parameters() if p.requires_grad] for model in models]
        self.names = [name for name, p in models[0].named_parameters() if p.requires_grad]
        self.shapes = [p.shape for p in trained[0]]
        self.sizes = [p.numel() for p in trained[0]]
        rows = [torch.cat([p.detach().reshape(-1) for p in params]) for params in trained]
        self.weights = torch.stack(rows + rows[:1] * SPARE)
        self.gradient = torch.zeros_like(self.weights[: len(lanes)])
        self._shown: list[tuple[list[nn.Parameter], list[Tensor]]] = []  # of each lane, and the gradients they may have
        for params, weights, gradient in zip(trained, self.weights, self.gradient, strict=False):
            for p, w in zip(params, self._parts(weights), strict=True):
                p.data = w
            self._shown.append((params, [*self._parts(gradient)]))
        held = [dict(_held(model)) for model in models]
        self.held: dict[str, Tensor] = {}
        for name in held[0]:
            values = [of[name].detach() for of in held]
            self.held[name] = torch.stack(values + values[:1] * SPARE)
            for of, value in zip(held, self.held[name], strict=False):
                of[name].data = value
        self._rows: Rows | None = None
        self._own = _own_numbers([lane.task for lane in lanes], device)
        self._forward = _Forward(self.lanes[0])
        self._dropped = [tuple(one.p for one in layers(model)) for model in models]
        self._rates = [PerLane(rates) for rates in zip(*self._dropped, strict=True)]

    def _parts(self, row: Tensor) -> Iterable[Tensor]:
        """A row [parameters] as the parameters that it is made of."""
        return (part.view(shape) for part, shape in zip(row.split(self.sizes), self.shapes, strict=True))

    def pass_over(self, windows: Sequence[list[Any]]) -> Sums:
        """The gradients of the summed losses, in `gradient` and so in every lane's parameters, but for those that no
        loss came from; `windows` has each lane's micro-batches."""
        found: Sums | None = None
        met: set[int] = set()
        self.gradient.zero_()
        columns = self.gradient.split(self.sizes, dim=1)
        for micro_step, batches in enumerate(zip(*windows, strict=True)):
            sums, gradients = self._pass(micro_step, batches)
            found = sums if found is None else found + sums
            for i, gradient in gradients.items():
                columns[i].add_(gradient) if i in met else columns[i].copy_(gradient)
                met.add(i)
        for params, gradients in self._shown:
            for i, (p, gradient) in enumerate(zip(params, gradients, strict=True)):
                p.grad = gradient if i in met else None
        self._all_met = len(met) == len(self.sizes)
        assert found is not None
        return found

    def prepare_rows(self) -> None:
        """Once all parameters have a gradient, take the memory that stepping them as rows needs."""
        if self._rows is None and self._all_met and self.lanes[0].config.optim.name in RULES:
            self._rows = Rows(self.lanes, self.weights[: len(self.lanes)], self.gradient, self._parts)

    def step_rows(self, lrs: Mapping[int, float]) -> set[int]:
        """Step those of these lanes, at their rates, that can be stepped as rows; which they were. What a parameter
        without a gradient is left out of is for each lane's own optimizer."""
        if self._rows is None:
            return set()
        together = {k: lr for k, lr in lrs.items() if self._all_met and self._rows.even[k]}
        for k in lrs.keys() - together.keys():
            self._rows.even[k] = False  # its parameters count their steps by themselves from here on
        if together:
            self._rows.step(together)
        return set(together)

    def _pass(self, micro_step: int, batches: Sequence[Any]) -> tuple[Sums, dict[int, Tensor]]:
        """What a pass over one micro-batch of each lane leaves, and by the number of a parameter its gradients, [lanes,
        size] each."""
        lanes = len(self.lanes)
        first, leaves, rows = self._gathered(batches)
        parts = tuple(
            part.view(rows, *shape).requires_grad_()
            for part, shape in zip(self.weights[:rows].split(self.sizes, dim=1), self.shapes, strict=True)
        )
        losses, count, terms, anew = self._losses(micro_step, parts, first, leaves, rows)
        found = torch.autograd.grad(losses.sum(), parts, allow_unused=True)
        for name, now in anew.items():  # buffers that the model has put in the place of those it was given
            self.held[name][:rows].copy_(now.detach())
        terms = {name: term.detach()[:lanes] for name, term in terms.items()}
        sums = Sums(losses.detach()[:lanes], count.detach()[:lanes], terms)
        return sums, {i: g[:lanes].reshape(lanes, -1) for i, g in enumerate(found) if g is not None}

    def _gathered(self, batches: Sequence[Any]) -> tuple[_Leaves, dict[int, Tensor], int]:
        """A micro-batch of each lane as one: how one of them is put together, the tensors by place, [rows, ...] each,
        and how many rows there are with the spare ones."""
        read = {id(batch): _leaves(to_device(batch, self.device)) for batch in {id(b): b for b in batches}.values()}
        each = [read[id(batch)] for batch in batches]
        first = each[0]
        if any(one.others != first.others or one.spec != first.spec for one in read.values()):
            raise ConfigError("train.lanes: batches hold values that are no tensors and differ: set it to 1.")
        samples = next((tensor.shape[0] for tensor in first.tensors.values() if tensor.ndim), 1)
        rows = len(each) + max(-(-SPARE // max(samples, 1)), 1 if len(each) > 1 else 2)
        return first, {i: _stacked([one.tensors[i] for one in each], rows) for i in first.tensors}, rows

    def _losses(
        self, micro_step: int, parts: tuple[Tensor, ...], first: _Leaves, leaves: dict[int, Tensor], rows: int
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Of each row the loss, its count and terms, and the buffers that the model has put anew, [rows, ...] each."""
        task, progress = self.lanes[0].task, [(lane.state.step / lane.total, lane.state.step) for lane in self.lanes]
        config, counts = task.config, list[Any]()

        def loss_of(parts: tuple[Tensor, ...], held: dict[str, Tensor], leaves: Any, own: Any, clock: Any) -> Any:
            task.config = _with(config, own)
            task.progress, task.step = clock
            batch = tree_unflatten(
                [leaves.get(i, first.others.get(i)) for i in range(first.spec.num_leaves)], first.spec
            )
            values = dict(zip(self.names, parts, strict=True)) | held
            given = {f"model.{name}": value for name, value in values.items()}
            loss = functional_call(self._forward, given, (batch,))
            counts.append(loss.count)
            count = loss.count if isinstance(loss.count, Tensor) else loss.sum.new_zeros(())
            anew = {name: now for name, value in held.items() if (now := given[f"model.{name}"]) is not value}
            return loss.sum, count, dict(loss.terms), anew

        held, own = ({name: values[:rows] for name, values in of.items()} for of in (self.held, self._own))
        seeds = self._seeds(micro_step)
        seed_all(seeds[0])
        try:
            with self._dropping(self._rates), Lanewise(seeds, self.device, self._dropped):
                found = torch.vmap(loss_of)(parts, held, leaves, own, self._clocks(progress, rows))
        finally:
            task.config = config
            task.progress, task.step = progress[0]
        losses, count, terms, anew = found
        return losses, count if isinstance(counts[0], Tensor) else losses.new_full((rows,), counts[0]), terms, anew

    def _seeds(self, micro_step: int) -> list[int]:
        """Of each lane, of what it draws for its next micro-batch."""
        drawn: dict[tuple[int, int], int] = {}
        for lane in self.lanes:
            at = lane.config.seed, lane.state.step
            drawn[at] = drawn.get(at) or lane.seed(micro_step)
        return [drawn[lane.config.seed, lane.state.step] for lane in self.lanes]

    def _clocks(self, progress: Sequence[tuple[float, int]], rows: int) -> tuple[Tensor, Tensor]:
        """What lanes see as their task's `progress` and `step`. At equal steps as well: a number of python's rounds
        otherwise than a tensor."""
        filled = [*progress, *[progress[0]] * (rows - len(progress))]
        shares, steps = zip(*filled, strict=True)
        return torch.tensor(shares, device=self.device), torch.tensor(steps, device=self.device)

    @contextmanager
    def _dropping(self, rates: Sequence[PerLane]) -> Any:
        """Within it the dropout layers of the first lane's model have the rates of all lanes."""
        dropouts = layers(self.lanes[0].state.model)
        before = [one.p for one in dropouts]
        for one, rate in zip(dropouts, rates, strict=True):
            one.p = rate
        try:
            yield
        finally:
            for one, p in zip(dropouts, before, strict=True):
                one.p = p


def _own_numbers(tasks: Sequence[Task], device: torch.device) -> dict[str, Tensor]:
    """Of `Task.lane_fields` the numbers, [lanes + SPARE] each. Also where lanes agree: a number of python's rounds
    otherwise than a tensor."""
    found: dict[str, Tensor] = {}
    for path in tasks[0].lane_fields:
        values = [reduce(getattr, path.split("."), task.config) for task in tasks]
        if all(isinstance(value, (int, float)) for value in values) or any(value != values[0] for value in values):
            found[path] = torch.tensor([float(value) for value in values + values[:1] * SPARE], device=device)
    return found


def _with(config: Any, values: Mapping[str, Any]) -> Any:
    """The configuration with these in place, unchecked."""
    for path, value in values.items():
        config = _replaced(config, path.split("."), value)
    return config


def _replaced(part: Any, path: Sequence[str], value: Any) -> Any:
    first, *rest = path
    return part.model_copy(update={first: _replaced(getattr(part, first), rest, value) if rest else value})


def compare(alone: Tensor, together: Tensor, precision: str) -> None:
    """Raise ConfigError where a lane's gradient is not the trial's own."""
    norm, off = torch.linalg.vector_norm(alone), torch.linalg.vector_norm(alone - together)
    if bool(norm.isfinite()) and not bool(off <= TOLERANCE.get(precision, 1e-3) * norm + 1e-6):
        raise ConfigError(f"{NOT_ITS_OWN[:-1]} (off by {off / norm:.1e} of its norm).")


def _held(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """What each lane has of its own and does not train."""
    yield from ((name, p) for name, p in model.named_parameters() if not p.requires_grad)
    yield from model.named_buffers()


@dataclass(frozen=True, slots=True)
class _Leaves:
    """A batch taken apart: its tensors by place, what else is there, and how it is put together."""

    tensors: dict[int, Tensor]
    others: dict[int, Any]
    spec: Any


def _leaves(batch: Any) -> _Leaves:
    flat, spec = tree_flatten(batch)
    tensors = {i: leaf for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)}
    return _Leaves(tensors, {i: leaf for i, leaf in enumerate(flat) if i not in tensors}, spec)


def _stacked(leaves: Sequence[Tensor], rows: int) -> Tensor:
    """[rows, ...], the last ones copies of the first; a leaf that all lanes share is copied at once."""
    if all(leaf is leaves[0] for leaf in leaves):
        return leaves[0].expand(rows, *leaves[0].shape).contiguous()
    if any(leaf.shape != leaves[0].shape for leaf in leaves):
        raise ConfigError(
            f"train.lanes: batches of {tuple(leaves[0].shape)} and of another shape cannot be stacked: give all "
            "samples one shape, or set train.lanes=1."
        )
    return torch.stack([*leaves, *[leaves[0]] * (rows - len(leaves))])


def check_alike(models: Sequence[nn.Module]) -> None:
    """Raise ConfigError where lanes of one model cannot stand for them."""
    kinds = {p.dtype for p in models[0].parameters() if p.requires_grad}
    if len(kinds) > 1:
        raise ConfigError(
            f"train.lanes: {type(models[0]).__name__} has trained parameters of {' and '.join(map(str, kinds))}: "
            "give them one dtype, or set train.lanes=1."
        )
    first = _described(models[0])
    for model in models[1:]:
        for name, what in _described(model).items():
            if first.get(name) != what:
                raise ConfigError(
                    f"train.lanes: the models of two trials differ in {_shown(name, model)}: only numbers that shape "
                    "no model may differ between lanes; take what shapes it out of the task's lane_fields."
                )


def _shown(name: str, model: nn.Module) -> str:
    return f"{name!r} of {type(model).__name__}" if name else type(model).__name__


def _described(model: nn.Module) -> Mapping[str, Any]:
    """By name, what a module or a tensor of the model is."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if isinstance(value, (bool, int, float, str, tuple))}
        own.pop("training")
        if isinstance(module, _DropoutNd):
            own.pop("p")
        found[name] = type(module), own
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[name] = tensor.shape, tensor.dtype, tensor.requires_grad
    return found
