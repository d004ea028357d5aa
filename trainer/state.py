"""Holds the state that must survive: one dict with a named item for everything that training changes.

Values that the configuration or the seed determines are not state: no random generator, no schedule other than its
plateau, no hyperparameter. So training can continue from a checkpoint under another configuration.
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
from trainer.gradients.balance import Balance
from trainer.gradients.loss_spikes import Spikes
from trainer.metrics.meter import Meter
from trainer.metrics.monitor import EarlyStopping, read
from trainer.model.averaging import Average
from trainer.model.compiled import Compiled
from trainer.model.precision import LossScale
from trainer.optim.lookahead import Lookahead
from trainer.optim.optimizer_state import MOMENTUM, Kept
from trainer.optim.schedule import Plateau
from trainer.runtime.epochs import Epochs
from trainer.runtime.model_state import Saved

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
    """The state of a fit that changes. `step` windows are done in all, `position` of the `windows` of epoch `epoch`.

    `epochs` has the number of windows in each epoch. `micro_batch_size` may be less than configured, if memory ran out.
    `keeper` is the optimizer that keeps the state, if another. `parallel` is how ranks share the work,
    `loaded_parallel` how they did when the state was saved. `report` is the report of a closed epoch that the state is
    saved with, so that it can be made again. `cycles_momentum`: the schedule sets the momentum at each step.
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
    balance: Balance | None = None
    compiled: Compiled | None = None
    step: int = 0
    epoch: int = 0
    position: int = 0
    report: dict[str, Any] | None = None
    cycles_momentum: bool = False
    loaded_parallel: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        names: dict[torch.Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        self._saved = Saved(self.model)
        scheduled = MOMENTUM if self.cycles_momentum else ()
        self._kept = Kept(self.optimizer, self.keeper or self.optimizer, names, scheduled)

    @property
    def windows(self) -> int:
        return self.epochs.length(self.epoch)

    def watch(self, metrics: Mapping[str, float], config: TrainConfig) -> None:
        """Updates the parts that follow an epoch's metrics. Raises ConfigError if a monitored one is missing."""
        if config.schedule.name == "plateau":
            self.plateau.update(read(metrics, config.schedule.plateau.monitor, "schedule.plateau.monitor"))
        if config.early_stopping.monitor is not None:
            self.early_stopping.update(read(metrics, config.early_stopping.monitor, "early_stopping.monitor"))
        if config.checkpoint.monitor is not None:
            read(metrics, config.checkpoint.monitor, "checkpoint.monitor")

    def state_dict(self) -> dict[str, Any]:
        """Returns the items by name; their leaves are tensors and JSON values.

        Tensors are not copied, and parameters stay parameters, so that the saver knows which are trained.
        """
        extras: dict[str, Any] = {} if self.balance is None else {"balance": self.balance.state()}
        if self.compiled is not None:
            extras["compiled"] = [self.compiled.shapes]  # one list for each rank
        return extras | {
            "model": self._saved.state(),
            "optimizer": self._kept.state(),
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
        """Loads the result of `state_dict`. Raises ConfigError if it belongs to another model or batch size."""
        omitted = _omitted()
        for name, load in {
            "model": self._load_model,
            "optimizer": self._kept.load,
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
            if name not in omitted:
                load(state[name])
        if self.balance is not None and "balance" not in omitted:
            self.balance.load(state.get("balance"))
        if self.compiled is not None and "compiled" not in omitted:
            shapes = state.get("compiled", [])
            self.compiled.load(shapes[0] if len(shapes) == 1 else [])

    def check_epochs_left(self, config: TrainConfig) -> None:
        """Raises ConfigError if the checkpoint of `resume_from` already has the configured number of epochs."""
        if self.epoch >= config.num_epochs:
            raise ConfigError(
                f"train.resume_from ({config.resume_from}) has trained {self.epoch} epochs and "
                f"train.num_epochs is {config.num_epochs}: raise num_epochs."
            )

    def start_from(self, state: dict[str, Any], part: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Loads this rank's part of a checkpoint from elsewhere, which may hold anything.

        Raises CheckpointError if it is not the state of a fit.
        """
        try:
            self.load_state_dict(part(state))
            if not all(type(count) is int and count >= 0 for count in (self.step, self.epoch, self.position)):
                raise ValueError(f"step, epoch and window {self.step!r}, {self.epoch!r}, {self.position!r}")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint holds no state of this trainer ({type(error).__name__}: {str(error)[:100]})."
            ) from error

    def load_weights(self, state: dict[str, Any]) -> None:
        """Loads from the result of `state_dict` the weights, and all that follows them from step to step."""
        self._load_model(state["model"])
        self._kept.load(state["optimizer"])
        self.average.load(state["average"])
        if self.lookahead is not None:
            self.lookahead.load(state["lookahead"])
        if self.balance is not None:
            self.balance.load(state.get("balance"))

    def _load_model(self, value: dict[str, Any]) -> None:
        try:
            self._saved.load(value)
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
    """Returns the items that a test leaves out, to show that each of them matters."""
    return set(os.environ.get("HPO_OMIT_STATE", "").split(",")) if os.environ.get("HPO_TESTING") == "1" else set()
