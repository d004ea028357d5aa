"""Holds everything that must survive: one dict with a named item for each thing that training changes.

What the configuration or the seed determines is not state: no random generator, no schedule but its plateau, no
hyperparameter. So a checkpoint can be trained on under another configuration.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.config import TrainConfig
from trainer.errors import CheckpointError, ConfigError
from trainer.gradients.loss_spikes import Spikes
from trainer.metrics.meter import Meter
from trainer.metrics.monitor import EarlyStopping
from trainer.model.averaging import Average
from trainer.model.precision import LossScale
from trainer.optim.lookahead import Lookahead
from trainer.optim.schedule import Plateau
from trainer.runtime.epochs import Epochs

STATE_ITEMS = (
    "model",
    "optimizer",
    "lookahead",
    "average",
    "loss_scale",
    "spikes",
    "plateau",
    "early_stopping",
    "guard",
    "meter",
    "step",
    "epoch",
    "position",
    "report",
)


@dataclass
class TrainState:
    """The moving parts of a fit. `step` windows are done in all, `position` of the `windows` of epoch `epoch`; `epochs`
    says how many each epoch has.

    `micro_batch_size` may have become less than what is configured, for want of memory. `keeper` is the optimizer that
    keeps the state, if another. `parallel` is how ranks share the work, `loaded_parallel` how they did where the state
    was saved. `report` is the report of a closed epoch that the state is saved with, so that it can be made again.
    """

    model: nn.Module
    optimizer: Optimizer
    plateau: Plateau
    early_stopping: EarlyStopping
    meter: Meter
    average: Average
    spikes: Spikes
    epochs: Epochs
    micro_batch_size: int
    loss_scale: LossScale | None = None
    keeper: Optimizer | None = None
    parallel: dict[str, Any] = field(default_factory=dict)
    lookahead: Lookahead | None = None
    step: int = 0
    epoch: int = 0
    position: int = 0
    report: dict[str, Any] | None = None
    loaded_parallel: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._keeper = self.keeper or self.optimizer
        self._names: dict[torch.Tensor, str] = {p: name for name, p in self.model.named_parameters()}

    @property
    def windows(self) -> int:
        return self.epochs.length(self.epoch)

    def state_dict(self) -> dict[str, Any]:
        """The items by name; their leaves are tensors and JSON values. Tensors are those in use, not copies, and
        parameters themselves, so that whoever saves them knows which are trained."""
        return {
            "model": self.model.state_dict(keep_vars=True),
            "optimizer": _optimizer_state(self._keeper, self._names),
            "lookahead": None if self.lookahead is None else self.lookahead.state(),
            "average": self.average.state(),
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state(),
            "spikes": self.spikes.state(),
            "plateau": self.plateau.state(),
            "early_stopping": self.early_stopping.state(),
            "guard": {"consecutive": self.meter.consecutive, "steps": dict(self.meter.steps)},
            "meter": self.meter.state(),
            "step": self.step,
            "epoch": self.epoch,
            "position": {
                "window": self.position,
                "of": self.windows,
                "parallel": self.parallel,
                "micro_batch_size": self.micro_batch_size,
            },
            "report": self.report,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what `state_dict` gave. Raises ConfigError where it belongs to another model or batch size."""
        omitted = _omitted()
        for item, load in {
            "model": self._load_model,
            "optimizer": lambda value: _load_optimizer(self._keeper, self._names, value),
            "lookahead": lambda value: self.lookahead and self.lookahead.load(value),
            "average": self.average.load,
            "loss_scale": lambda value: self.loss_scale and self.loss_scale.load(value),
            "spikes": self.spikes.load,
            "plateau": self.plateau.load,
            "early_stopping": self.early_stopping.load,
            "guard": self._load_guard,
            "meter": self.meter.load,
            "step": lambda value: setattr(self, "step", value),
            "epoch": lambda value: setattr(self, "epoch", value),
            "position": self._load_position,
            "report": lambda value: setattr(self, "report", value),
        }.items():
            if item not in omitted:
                load(state[item])

    def check_epochs_left(self, config: TrainConfig) -> None:
        """Raise ConfigError where the checkpoint of `resume_from` has as many epochs as are to be trained."""
        if self.epoch >= config.num_epochs:
            raise ConfigError(
                f"train.resume_from ({config.resume_from}) has {self.epoch} epochs behind it and "
                f"train.num_epochs is {config.num_epochs}: raise num_epochs."
            )

    def start_from(self, state: dict[str, Any], part: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """As `load_state_dict`, of this rank's part of a checkpoint from elsewhere, which may hold anything. Raises
        CheckpointError where that is no state of a fit."""
        try:
            self.load_state_dict(part(state))
            if not all(type(count) is int and count >= 0 for count in (self.step, self.epoch, self.position)):
                raise ValueError(f"step, epoch and window {self.step!r}, {self.epoch!r}, {self.position!r}")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint holds no state of this trainer ({type(error).__name__}: {str(error)[:100]})."
            ) from error

    def load_weights(self, state: dict[str, Any]) -> None:
        """Take from what `state_dict` gave the weights, and all that follows them from step to step."""
        self._load_model(state["model"])
        _load_optimizer(self._keeper, self._names, state["optimizer"])
        self.average.load(state["average"])
        if self.lookahead is not None:
            self.lookahead.load(state["lookahead"])

    def _load_model(self, value: dict[str, Any]) -> None:
        try:
            self.model.load_state_dict(value)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"the checkpoint holds another model than the configuration's: keep that model ({reason})."
            ) from error

    def _load_guard(self, value: dict[str, Any]) -> None:
        self.meter.consecutive = value["consecutive"]
        self.meter.steps = dict(value.get("steps", {"trained": 1}))  # checkpoints of earlier releases count none

    def _load_position(self, value: dict[str, Any]) -> None:
        if value["window"] and value["of"] != self.windows:
            raise ConfigError(
                f"the checkpoint lies inside an epoch of {value['of']} steps, and this configuration's has "
                f"{self.windows}: keep batch_size, batch_growth and the data, or start from a checkpoint at the end of "
                "an epoch."
            )
        self.position = value["window"]
        self.micro_batch_size = min(self.micro_batch_size, value.get("micro_batch_size", self.micro_batch_size))
        self.loaded_parallel = value.get("parallel", {})


def _omitted() -> set[str]:
    """Items that a test leaves out, to show that each of them matters."""
    return set(os.environ.get("HPO_OMIT_STATE", "").split(",")) if os.environ.get("HPO_TESTING") == "1" else set()


def _optimizer_state(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
    """What the optimizer keeps for each parameter, by the parameter's name; and whose it is."""
    return {"of": type(optimizer).__name__, "state": {names[p]: dict(state) for p, state in optimizer.state.items()}}


def _load_optimizer(optimizer: Optimizer, names: Mapping[torch.Tensor, str], value: dict[str, Any]) -> None:
    """Put back what was kept. Torch's own loader places and casts it; it numbers the parameters in group order.

    Each tensor is then laid out as its parameter is: a checkpoint gives rows in order, and torch's fused kernels walk
    through memory without a look at strides, so a parameter with channels last would meet another's momentum.
    """
    if value["of"] != (mine := type(optimizer).__name__):
        raise ConfigError(f"the checkpoint holds the state of {value['of']}, and train.optim asks for {mine}: keep it.")
    kept = value["state"]
    packed = optimizer.state_dict()
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    unknown = kept.keys() - set(names.values())
    if unknown:
        raise ConfigError(
            f"the checkpoint's optimizer knows a parameter {min(unknown)!r} that the model lacks: keep that model."
        )
    packed["state"] = {i: kept[name] for i, name in enumerate(order) if name in kept}
    optimizer.load_state_dict(packed)
    for p, state in optimizer.state.items():
        for key, tensor in state.items():
            if isinstance(tensor, torch.Tensor) and tensor.shape == p.shape and tensor.stride() != p.stride():
                state[key] = torch.empty_like(p, dtype=tensor.dtype).copy_(tensor)
