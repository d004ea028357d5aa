"""Finds the module in which numbers first stopped being finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.ranks import ALONE, Solo

Suspect = tuple[tuple[int, ...], str]  # sorts by the time in a window; and the words for it


def first_nonfinite(model: nn.Module, run: Callable[[], Any], ranks: Solo = ALONE) -> str:
    """Returns a description of the first non-finite part of `model`.

    It is a parameter, else the first output of a module in `run`, a forward and a backward pass from cleared gradients,
    else the first gradient in the backward pass. With several ranks it is the first of all of them. They all `run`,
    since they may wait for each other, or none does if a parameter is at fault.
    """
    spoilt = next((f"parameter {name} is not finite" for name, p in model.named_parameters() if not _finite(p)), "")
    if words := ranks.earliest(((0 if spoilt else 1,), spoilt))[1]:
        return words
    watch = _Watch(model, ranks)
    try:
        run()
    finally:
        watch.close()
    return ranks.earliest(_suspect(model, watch))[1]


def _suspect(model: nn.Module, watch: _Watch) -> Suspect:
    """Returns the module at fault, if all parameters are finite."""
    if watch.bad_output:
        return (1, *watch.bad_at), f"the output of module {watch.bad_output} is the first that is not finite"
    if culprit := watch.culprit():
        say = "gives is the first that is not finite, the model's outputs are finite"
        return (2, *watch.on_the_way_back(culprit)), f"the gradient that module {watch.names[culprit]} {say}"
    if watch.given_bad:
        return (3,), "the loss gives a gradient that is not finite, the model's outputs are finite"
    for name, p in model.named_parameters():
        if p.grad is not None and not _finite(p.grad):
            return (4,), f"the gradient of parameter {name} is not finite, by no module of this process"
    return (5,), "the model's outputs are finite, the loss is not"


class _Watch:
    """Hooks on the inputs and outputs of every module, forward and backward.

    A module is at fault if it receives finite gradients and passes on non-finite ones, to an input or to its own
    parameter; of nested modules, the innermost is.
    """

    def __init__(self, model: nn.Module, ranks: Solo) -> None:
        self.names = {module: name or type(model).__name__ for name, module in model.named_modules()}
        self.bad_output, self.bad_at = "", (0, 0)  # the first on this rank: its stage, and its number among all outputs
        self._ranks, self._outputs = ranks, 0
        self._stages: dict[nn.Module, int] = {}
        self._given: dict[nn.Module, bool] = {}  # in backward order: True if the gradients of its outputs were finite
        self._spoilt: set[nn.Module] = set()
        self._hooks = []
        for module in self.names:
            self._hooks.append(module.register_forward_pre_hook(self._enter))
            self._hooks.append(module.register_forward_hook(self._leave))
            self._hooks += _hook_gradients([*module.parameters(recurse=False)], self._judge(module))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def given_bad(self) -> bool:
        """Returns True if the model's own output received a gradient that is not finite."""
        return not self._given.get(next(iter(self.names)), True)

    def culprit(self) -> nn.Module | None:
        """Returns the first module in the backward pass that is at fault for a gradient."""
        for module in self._given:
            if module in self._spoilt and not self._spoilt & {*module.modules()} - {module}:
                return module
        return None

    def on_the_way_back(self, module: nn.Module) -> tuple[int, int]:
        """Returns the position of a module in the backward pass, with the last stage first."""
        return -self._stages[module], [*self._given].index(module)

    def _judge(self, module: nn.Module) -> Callable[[Tensor], None]:
        """Returns the hook for a gradient that `module` passes on."""

        def look(grad: Tensor) -> None:
            if self._given.get(module, False) and not _finite(grad):
                self._spoilt.add(module)

        return look

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        # Views, since the gradient of an input shared with other modules would be the sum of all of theirs.
        views = tuple(x.view_as(x) if isinstance(x, Tensor) else x for x in inputs)
        _hook_gradients(views, self._judge(module))
        return views

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._stages[module] = self._ranks.stage
        self._outputs += 1
        if not self.bad_output and not _finite(output):
            self.bad_output, self.bad_at = self.names[module], (self._ranks.stage, self._outputs)

        def look(grad: Tensor) -> None:
            self._given[module] = self._given.get(module, True) and _finite(grad)

        _hook_gradients(output, look)


def _hook_gradients(value: Any, look: Callable[[Tensor], None]) -> list[Any]:
    return [tensor.register_hook(look) for tensor in _tensors(value) if tensor.requires_grad]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(value))
