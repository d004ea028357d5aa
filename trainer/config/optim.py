"""Holds `train.optim`: the table of optimizers, and their settings. docs/guide/optimizers.md says when to use which.

A custom optimizer is one class in one file, with either a line in OPTIMIZERS or its dotted path as `name`:

    hpo run ... -o train.optim.name=my_module:MyOptimizer -o train.optim.lr=0.01 -o train.optim.options.rank=4

It is a torch.optim.Optimizer, importable from the study file's directory or PYTHONPATH, and gets the parameter groups,
lr, weight_decay, the other hyperparameters that are set, and the options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from trainer.config.fields import PATTERN, Beta, Frozen, NonNegative, Positive, added

Implementation = Literal["auto", "fused", "foreach", "single"]


@dataclass(frozen=True, slots=True)
class Known:
    """An optimizer of the table.

    `build` ("module:callable") takes the parameter groups and, by name, the `defaults` updated by the settings.
    `runs_as` has the quickest implementation first. `sharded`: it also works on parameters that ranks hold parts of.
    `takes_complex`: complex parameters step as their real and imaginary parts. `averages`: evaluations show an average
    of the weights that it computes.
    """

    build: str
    defaults: Mapping[str, Any]
    runs_as: tuple[Implementation, ...] = ("foreach", "single")
    sharded: bool = True
    takes_complex: bool = False
    averages: bool = False

    @property
    def momentum(self) -> bool:
        """Returns True if it has a momentum that a schedule may change: one of its own, or the first of its betas.

        The first beta of an optimizer that averages says where one point lies between two others, and stays.
        """
        return not self.averages and ("momentum" in self.defaults or "betas" in self.defaults)


_OF_ONES_OWN: Mapping[str, Any] = {"lr": 1e-3, "weight_decay": 0.0}  # for an optimizer given by its dotted path
_ADAM = {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8}
_TORCH = ("fused", "foreach", "single")

OPTIMIZERS: dict[str, Known] = {
    "sgd": Known(
        "trainer.optim.from_torch:sgd",
        {"lr": 0.1, "weight_decay": 1e-4, "momentum": 0.9, "nesterov": False},
        _TORCH,
        takes_complex=True,
    ),
    "adam": Known("torch.optim:Adam", _ADAM, _TORCH, takes_complex=True),
    "adamw": Known("torch.optim:AdamW", _ADAM | {"weight_decay": 0.01}, _TORCH, takes_complex=True),
    "lamb": Known("trainer.optim.layerwise:Lamb", _ADAM | {"lr": 2e-3, "weight_decay": 0.01, "eps": 1e-6}),
    "lars": Known(
        "trainer.optim.layerwise:Lars", {"lr": 0.3, "weight_decay": 1e-4, "momentum": 0.9, "trust_coefficient": 1e-3}
    ),
    "lion": Known("trainer.optim.lion:Lion", {"lr": 3e-4, "weight_decay": 0.03, "betas": (0.9, 0.99)}),
    "schedule_free": Known(
        "trainer.optim.schedule_free:ScheduleFree", _ADAM | {"lr": 2.5e-3}, sharded=False, averages=True
    ),
    "prodigy": Known("trainer.optim.prodigy:Prodigy", _ADAM | {"lr": 1.0, "d0": 1e-6, "d_coef": 1.0}, sharded=False),
    "sophia": Known(
        "trainer.optim.sophia:Sophia",
        {"lr": 6e-4, "weight_decay": 0.2, "betas": (0.96, 0.99), "eps": 1e-12, "gamma": 0.01, "update_every": 10},
        sharded=False,
    ),
    "adafactor": Known(
        "trainer.optim.from_torch:adafactor",
        {"lr": 0.01, "weight_decay": 0.0, "beta2_decay": -0.8, "clip_threshold": 1.0},
        sharded=False,
    ),
    "sm3": Known("trainer.optim.sm3:SM3", {"lr": 0.1, "weight_decay": 1e-4, "momentum": 0.9}, ("single",)),
    "ranger": Known(  # wrapped in Lookahead
        "trainer.optim.from_torch:radam",
        {"lr": 1e-3, "weight_decay": 0.01, "betas": (0.95, 0.999), "eps": 1e-5},
        sharded=False,
        takes_complex=True,
    ),
    "muon": Known(
        "trainer.optim.muon:Muon",
        {
            "lr": 1e-3,
            "weight_decay": 0.1,
            "momentum": 0.95,
            "nesterov": True,
            "ns_steps": 5,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "adamw": ("*embed*", "head*", "*.head*", "*_head.*", "*classifier*"),  # no multihead_attn
        },
        ("single",),
    ),
    "soap": Known(
        "trainer.optim.shampoo:Soap",
        {"lr": 3e-3, "weight_decay": 0.01, "betas": (0.95, 0.95), "eps": 1e-8, "update_every": 10, "max_dim": 4096},
        ("single",),
        sharded=False,
    ),
    "shampoo": Known(
        "trainer.optim.shampoo:Shampoo",
        {"lr": 0.01, "weight_decay": 1e-4, "momentum": 0.9, "eps": 1e-6, "update_every": 10, "max_dim": 4096},
        ("single",),
        sharded=False,
    ),
}


def _known(name: str) -> str:
    if name in OPTIMIZERS or re.fullmatch(PATTERN, name):
        return name
    names = ", ".join(repr(known) for known in OPTIMIZERS)
    raise ValueError(f"choose one of {names}, or one of your own by its path, as in 'my_module:MyOptimizer'")


class LookaheadConfig(Frozen):
    """Returns every `k` steps to a point `alpha` of the way from the last such point (Zhang et al. 2019)."""

    k: Annotated[int, Field(ge=1)] | None = None  # None: 5; ranger 6
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.5


class SamConfig(Frozen):
    """Steps by the gradient at the worst point within `rho` (Foret et al. 2021): each step costs two passes."""

    rho: Positive = 0.05
    adaptive: bool = False  # the neighbourhood scales with each weight (Kwon et al. 2021); use a rho about ten times


class GroupConfig(Frozen):
    """Settings of the parameters whose names match `pattern` (fnmatch) and no earlier pattern."""

    pattern: Annotated[str, Field(min_length=1)]
    lr_scale: NonNegative = 1.0  # factor of the learning rate, on top of layer_decay's
    weight_decay: NonNegative | None = None  # None: as without the pattern


class OptimConfig(Frozen):
    """The optimizer. A field that is None has the default of the chosen optimizer (OPTIMIZERS), which must have it.

    Norms, biases and other parameters of fewer than two dimensions are not decayed, unless `groups` says so.
    """

    name: Annotated[str, AfterValidator(_known)] = "adamw"
    lr: Positive | None = None  # the peak of the schedule
    weight_decay: NonNegative | None = None
    momentum: Beta | None = None
    nesterov: bool | None = None
    betas: tuple[Beta, Beta] | None = None
    beta1: Beta | None = None  # one of the betas, with its own path to search
    beta2: Beta | None = None
    eps: Positive | None = None
    trust_coefficient: Positive | None = None  # lars: a step's size as a share of the layer's weights, at lr 1
    d0: Positive | None = added(None)  # prodigy: the first estimate of the distance to the solution
    d_coef: Positive | None = added(None)  # prodigy: factor of all later estimates
    gamma: Positive | None = None  # sophia: scales the curvature; the larger, the fewer entries are clipped
    update_every: Annotated[int, Field(ge=1)] | None = None  # sophia, soap, shampoo: steps between curvature updates
    max_dim: Annotated[int, Field(ge=1)] | None = None  # soap, shampoo: longer sides of a matrix stay as they are
    beta2_decay: Annotated[float, Field(lt=0, ge=-1)] | None = None  # adafactor: beta2 at step t is 1 - t^this
    clip_threshold: Annotated[float, Field(ge=1)] | None = None  # adafactor: the largest RMS of an unscaled update
    ns_steps: Annotated[int, Field(ge=1, le=20)] | None = None  # muon: iterations that orthogonalise an update
    adamw: tuple[str, ...] | None = None  # muon: patterns of matrices that AdamW trains; it has all embeddings anyway
    options: dict[str, bool | int | float | str | None] = Field(default_factory=dict)  # settings without a field here
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0  # a block's learning rate over the next deeper one's
    groups: tuple[GroupConfig, ...] = ()
    implementation: Implementation = "auto"  # auto: the quickest; each of them gives the same bits on every run
    wrap: Literal["none", "lookahead", "sam"] = "none"
    lookahead: LookaheadConfig = LookaheadConfig()
    sam: SamConfig = SamConfig()

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Returns the optimizer's hyperparameters, by name: its defaults, updated by the settings."""
        defaults = OPTIMIZERS[self.name].defaults if self.name in OPTIMIZERS else _OF_ONES_OWN
        settings = {name: value for name in _HYPERPARAMETERS if (value := getattr(self, name)) is not None}
        beta1, beta2 = settings.pop("beta1", None), settings.pop("beta2", None)
        if beta1 is not None or beta2 is not None:
            first, second = defaults.get("betas", (0.9, 0.999))
            settings["betas"] = (first if beta1 is None else beta1, second if beta2 is None else beta2)
        return {**defaults, **settings, **self.options}

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns the optimizer's keyword arguments: all but muon's patterns, which sort parameters into groups."""
        return {name: value for name, value in self.hyperparameters.items() if name != "adamw"}

    @property
    def lookahead_k(self) -> int | None:
        """Returns the steps of a cycle of Lookahead; None without it. Ranger is RAdam within Lookahead."""
        if self.wrap != "lookahead" and self.name != "ranger":
            return None
        return self.lookahead.k or (6 if self.name == "ranger" else 5)

    @property
    def averages(self) -> bool:
        """Returns True if evaluations show an average of the weights that the optimizer computes."""
        return self.name in OPTIMIZERS and OPTIMIZERS[self.name].averages

    @model_validator(mode="after")
    def _check(self) -> OptimConfig:
        if self.betas is not None and (self.beta1 is not None or self.beta2 is not None):
            raise ValueError("betas sets beta1 and beta2 as well: give the pair, or one or both of the others.")
        if self.name in OPTIMIZERS:
            self._check_known(OPTIMIZERS[self.name])
        elif self.implementation != "auto":
            raise ValueError(
                f"implementation={self.implementation!r} is for the optimizers of the table: leave it auto."
            )
        hyperparameters = self.hyperparameters
        if self.averages:
            self._check_average(hyperparameters["betas"][0])
        if hyperparameters.get("nesterov") and hyperparameters.get("momentum") == 0:
            raise ValueError("nesterov is true but momentum is 0: set momentum above 0, or nesterov to false.")
        return self

    def _check_average(self, beta1: float) -> None:
        if self.wrap == "lookahead":
            raise ValueError(
                f"wrap is 'lookahead', which moves the weights, and {self.name} computes their average from where its "
                "own steps move them: leave wrap out, or choose adamw."
            )
        if beta1 == 0:
            raise ValueError(
                f"the first of betas is 0, the share of the average in the point at which {self.name} computes "
                "gradients: set it above 0, to 0.9 for example."
            )

    def _check_known(self, known: Known) -> None:
        names = [name for name in known.defaults if name in _HYPERPARAMETERS]
        fields = {*names, *(("beta1", "beta2") if "betas" in names else ())}
        if doubled := fields & set(self.options):
            name = min(doubled)
            raise ValueError(
                f"options.{name} is set, and {self.name} has a field for it: set train.optim.{name} instead."
            )
        foreign = [name for name in _HYPERPARAMETERS if getattr(self, name) is not None and name not in fields]
        foreign += [f"options.{name}" for name in self.options]
        if foreign:
            raise ValueError(
                f"{foreign[0]} is set, and {self.name} has none: its own are {', '.join(names)}; "
                f"leave {foreign[0]} out, or search it only when the name is one that has it."
            )
        if self.implementation not in ("auto", *known.runs_as):
            ways = " or ".join(("auto", *known.runs_as))
            raise ValueError(f"implementation={self.implementation!r} does not exist for {self.name}: give {ways}.")


_NOT_HYPERPARAMETERS = {"name", "options", "layer_decay", "groups", "implementation", "wrap", "lookahead", "sam"}
_HYPERPARAMETERS = tuple(name for name in OptimConfig.model_fields if name not in _NOT_HYPERPARAMETERS)
