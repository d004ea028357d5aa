"""Extracts an optimizer's state for a checkpoint, and restores it exactly.

Torch's `load_state_dict` casts the state of a parameter to the parameter's type, so that sums in float64 are rounded,
masks become numbers, and texts are lost. Here each value comes back in its own type, on the device that torch chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.errors import ConfigError
from trainer.runtime.json_encoding import decoded, encoded
from trainer.runtime.tensors import same_bits

_SET_ANEW = ("params", "lr")  # entries of a group that are set at each start or step
MOMENTUM = ("momentum", "betas")  # those that a schedule of the momentum sets at each step


class Kept:
    """The state of `optimizer` for each parameter, by the parameter's name, and the group entries that steps change.

    A group's entry that steps do not change is a hyperparameter and belongs to the configuration. An entry that they
    change, such as Prodigy's `d` or a count of steps, is state. `keeper` is the optimizer that keeps the state of
    parameters, if that is another one. `names` are the model's parameters. `scheduled` are further entries that are
    set at each step, and so no state.
    """

    def __init__(
        self, optimizer: Optimizer, keeper: Optimizer, names: Mapping[Tensor, str], scheduled: Sequence[str] = ()
    ) -> None:
        self._optimizer, self._keeper, self._names = optimizer, keeper, names
        self._set_anew = {*_SET_ANEW, *scheduled}
        self._begun = [_copied(self._entries(group)) for group in optimizer.param_groups]

    def state(self) -> dict[str, Any]:
        """Returns the argument of `load`; its tensors are not copies."""
        state: dict[str, Any] = {"of": type(self._keeper).__name__, "state": {}}
        for key, value in self._keeper.state.items():
            if isinstance(key, Tensor):
                state["state"][self._names[key]] = encoded(dict(value))
            else:  # shared by all parameters
                state.setdefault("shared", {})[key] = encoded(value)
        for group, begun in zip(self._optimizer.param_groups, self._begun, strict=True):
            entries = {k: v for k, v in self._entries(group).items() if k not in begun or not same(begun[k], v)}
            if entries and group["params"]:
                names = [self._names[p] for p in group["params"]]
                state.setdefault("groups", {})[names[0]] = {"of": names, "entries": encoded(entries)}
        return state

    def load(self, value: Mapping[str, Any]) -> None:
        """Restores the result of `state`. Raises ConfigError if it is from another optimizer or model.

        Each tensor is then laid out like its parameter: a checkpoint gives rows in order, and torch's fused kernels
        walk through memory without regard to strides, so a parameter with channels last would get another element's
        momentum.
        """
        if value["of"] != (name := type(self._keeper).__name__):
            raise ConfigError(
                f"the checkpoint holds the state of {value['of']}, and train.optim asks for {name}: keep it."
            )
        kept = {name: decoded(state) for name, state in value["state"].items()}
        if unknown := kept.keys() - set(self._names.values()):
            raise ConfigError(
                f"the checkpoint's optimizer knows a parameter {min(unknown)!r} that the model lacks: keep that model."
            )
        # Torch numbers the parameters in the order of the groups.
        order = [p for group in self._keeper.param_groups for p in group["params"]]
        packed = self._keeper.state_dict()
        packed["state"] = {i: kept[name] for i, p in enumerate(order) if (name := self._names[p]) in kept}
        packed["state"] |= {key: decoded(shared) for key, shared in value.get("shared", {}).items()}
        self._keeper.load_state_dict(packed)
        for p in order:
            if (name := self._names[p]) in kept:
                self._keeper.state[p].update(_exact(kept[name], self._keeper.state[p], p))
        self._load_groups(value.get("groups", {}))

    def _load_groups(self, groups: Mapping[str, Any]) -> None:
        """Restores the changed entries of groups, and resets all others to their values before the first step.

        Ranks may divide a group into several, so each takes the entries of the group that has its first parameter.
        """
        of = {name: decoded(group["entries"]) for group in groups.values() for name in group["of"]}
        for optimizer in dict.fromkeys((self._optimizer, self._keeper)):
            for group, begun in zip(optimizer.param_groups, self._begun, strict=True):
                first = next(iter(group["params"]), None)
                entries = {} if first is None else of.get(self._names[first], {})
                for key in self._entries(group).keys() - begun.keys():
                    del group[key]
                for key, value in (_copied(begun) | entries).items():
                    group[key] = _exact(value, begun.get(key), first)

    def _entries(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in group.items() if key not in self._set_anew}


def _copied(value: Any) -> Any:
    """Returns a copy of tensors and their containers; other objects stay the same."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def same(before: Any, now: Any) -> bool:
    """Returns True if two entries of groups are equal; other objects are equal if identical."""
    if before is now or type(before) is not type(now):
        return before is now
    if isinstance(now, Tensor):
        return same_bits(before, now)
    if isinstance(now, dict):
        return before.keys() == now.keys() and all(same(before[key], now[key]) for key in now)
    if isinstance(now, (list, tuple)):
        return len(before) == len(now) and all(map(same, before, now))
    return isinstance(now, (int, float, complex, str, bytes)) and repr(before) == repr(now)  # NaN equals NaN


def _exact(kept: Any, loaded: Any, p: Tensor | None) -> Any:
    """Returns `kept` as it was saved, on the device of torch's `loaded` value, else the parameter's."""
    if isinstance(kept, Tensor):
        like = loaded if isinstance(loaded, Tensor) else p
        tensor = kept if like is None else kept.to(like.device)
        if p is not None and tensor.shape == p.shape and tensor.stride() != p.stride():
            tensor = torch.empty_like(p, dtype=tensor.dtype).copy_(tensor)
        return tensor
    if isinstance(kept, dict):
        inner = loaded if isinstance(loaded, dict) else {}
        return {key: _exact(value, inner.get(key), p) for key, value in kept.items()}
    if isinstance(kept, (list, tuple)):
        inner = loaded if isinstance(loaded, (list, tuple)) and len(loaded) == len(kept) else [None] * len(kept)
        return type(kept)(_exact(value, other, p) for value, other in zip(kept, inner, strict=True))
    return kept
