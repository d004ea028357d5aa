"""Finds the module in which numbers first stopped being finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.ranks import ALONE, Solo

Suspect = tuple[tuple[int, ...], str]  # the earlier in a window, the less; and in words what is not finite


def first_nonfinite(model: nn.Module, run: Callable[[], Any], ranks: Solo = ALONE) -> str:
    """In words, the first thing of `model` that is not finite: a parameter, else the first output of a module in
    `run`, a forward and a backward pass from cleared gradients, else the first gradient on the way back.

    Of what several ranks have found it is the first. They all `run`, which may be for each other, or none of them does,
    where a parameter is to blame.
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
    """Where all parameters are finite."""
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
    """Hooks that see what every module takes and gives, forward and back.

    A module is to blame for a gradient that is given finite ones and gives others, to an input or to a parameter of its
    own; of modules within each other the innermost.
    """

    def __init__(self, model: nn.Module, ranks: Solo) -> None:
        self.names = {module: name or type(model).__name__ for name, module in model.named_modules()}
        self.bad_output, self.bad_at = "", (0, 0)  # the first of this rank: its stage, and what number of all outputs
        self._ranks, self._outputs = ranks, 0
        self._stages: dict[nn.Module, int] = {}
        self._given: dict[nn.Module, bool] = {}  # in backward order: whether the gradients of its outputs were finite
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
        """Whether the model's own output was given a gradient that is not finite."""
        return not self._given.get(next(iter(self.names)), True)

    def culprit(self) -> nn.Module | None:
        """The first module on the way back that is to blame for a gradient."""
        for module in self._given:
            if module in self._spoilt and not self._spoilt & {*module.modules()} - {module}:
                return module
        return None

    def on_the_way_back(self, module: nn.Module) -> tuple[int, int]:
        """The place of one that was given gradients, the last stage being the first."""
        return -self._stages[module], [*self._given].index(module)

    def _judge(self, module: nn.Module) -> Callable[[Tensor], None]:
        """What looks at a gradient that `module` gives."""

        def look(grad: Tensor) -> None:
            if self._given.get(module, False) and not _finite(grad):
                self._spoilt.add(module)

        return look

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        # Views, since the gradient of an input that others take as well would be the sum of all they give.
        own = tuple(one.view_as(one) if isinstance(one, Tensor) else one for one in inputs)
        _hook_gradients(own, self._judge(module))
        return own

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
