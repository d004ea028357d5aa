"""Reads a model's state for a checkpoint and restores it, including buffers that its `state_dict` leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compat.modules import buffers_in, load_hooks_of
from trainer.runtime.json_encoding import decoded, encoded
from trainer.runtime.tensors import left_out, same_bits


class Saved:
    """The state of `model`: its `state_dict`, and the non-persistent buffers that have changed.

    Most of these are tables that the constructor makes, such as rotary frequencies: unchanged ones are not saved.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._begun = {
            name: None if buffer is None else buffer.detach().to("cpu", copy=True)
            for _, _, name, buffer in left_out(model)
        }

    def state(self) -> dict[str, Any]:
        """Returns the state by name; its tensors are not copies, and parameters stay parameters."""
        state = {
            name: value if isinstance(value, Tensor) else encoded(value)  # from get_extra_state
            for name, value in self._model.state_dict(keep_vars=True).items()
        }
        for _, _, name, buffer in left_out(self._model):
            if buffer is not None and name in self._begun:
                before = self._begun[name]
                if before is None or not same_bits(before, buffer):
                    state[name] = buffer
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`. Raises RuntimeError as `load_state_dict` does."""
        for module, name, path, _ in left_out(self._model):
            if path in self._begun:
                _put(module, name, self._begun[path])
        accepting(self._model).load_state_dict(state)


def accepting(model: nn.Module) -> nn.Module:
    """Returns the same model, whose `load_state_dict` takes all keys of `Saved.state`."""
    if _accept not in load_hooks_of(model):
        model.register_load_state_dict_pre_hook(_accept)
    return model


def _accept(model: nn.Module, state: dict[str, Any], prefix: str, *ignored: Any) -> None:
    """Removes the keys that torch does not expect from `state`, and decodes the modules' extra state."""
    for module, name, path, _ in left_out(model):
        if isinstance(buffer := state.pop(prefix + path, None), Tensor):
            _put(module, name, buffer)
    state |= {key: decoded(value) for key, value in state.items() if isinstance(value, dict | list)}


@torch.no_grad()
def _put(module: nn.Module, name: str, value: Tensor | None) -> None:
    """Sets a buffer to these values, in its own memory if they fit, since others may refer to it."""
    buffer = buffers_in(module).get(name)
    if value is None or buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
        like = next((t for t in (buffer, *module.parameters(), *module.buffers()) if t is not None), None)
        buffers_in(module)[name] = None if value is None else value.to(value.device if like is None else like.device)
    else:
        buffer.copy_(value)
