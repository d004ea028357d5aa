"""Configures the atft study. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from studies.atft.phases import ALL, PHASES, TERMS, PhaseConfig, plan
from trainer.config import CheckpointConfig, Frozen, NonNegative, OptimConfig, ScheduleConfig, TrainConfig, added
from trainer.errors import ConfigError

PositiveInt = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]


def _split(names: object) -> object:
    """Returns a tuple of names, from a list or from text that separates them by commas: `-o data.features=a,b`."""
    if isinstance(names, str):
        return tuple(name.strip() for name in names.split(",") if name.strip())
    return tuple(names) if isinstance(names, list) else names


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]


class MarketConfig(Frozen):
    """The embedded synthetic market: `snr` is the standard deviation of alpha over that of the noise."""

    num_days: Annotated[int, Field(ge=200)] = 1200
    num_stocks: Annotated[int, Field(ge=24)] = 64
    snr: Annotated[float, Field(ge=0.0, le=1.0)] = 0.25


class GraphConfig(Frozen):
    """The day's graph: correlation of the excess returns of the last `window` days, built every `refresh` days."""

    window: Annotated[int, Field(ge=5)] = 60
    min_observations: Annotated[int, Field(ge=3)] = 40
    min_correlation: Share = 0.3
    top_k: PositiveInt = 10
    refresh: PositiveInt = 5

    @model_validator(mode="after")
    def _observable(self) -> GraphConfig:
        if self.min_observations > self.window:
            raise ValueError(f"min_observations {self.min_observations} exceeds the window of {self.window} days")
        return self


class SplitConfig(Frozen):
    """Splits walk-forward, in trading days. `fold` counts from the earliest; `test` also evaluates the last block.

    `train_days` limits the training days to the last ones before validation, a window that rolls with the folds (0:
    all, a window that grows).
    """

    val_days: PositiveInt = 120
    test_days: PositiveInt = 80
    purge: PositiveInt = 20
    embargo: Annotated[int, Field(ge=0)] = 5
    num_folds: PositiveInt = 1
    fold: Annotated[int, Field(ge=0)] = 0
    min_train_days: PositiveInt = 100
    train_days: Annotated[int, Field(ge=0)] = added(0)
    test: bool = False

    @model_validator(mode="after")
    def _fold_exists(self) -> SplitConfig:
        if self.fold >= self.num_folds:
            raise ValueError(f"fold {self.fold} does not exist among {self.num_folds}: count from 0")
        return self

    @model_validator(mode="after")
    def _window_is_long_enough(self) -> SplitConfig:
        if 0 < self.train_days < self.min_train_days:
            raise ValueError(
                f"train_days {self.train_days} is below min_train_days {self.min_train_days}: raise it, lower that, or "
                "give 0 to train on all days"
            )
        return self


class DataConfig(Frozen):
    """The source of the panel and its preparation. An empty `path` is the synthetic market.

    `features` names numeric columns of the file that become features in addition to those made of prices and volume;
    each must be known at the close of its day. `max_stocks` keeps the most traded stocks of the training span (0: all);
    `control="shuffled"` permutes the training targets within each day, so that nothing can be learnt: the negative
    control.
    """

    path: str = ""
    features: Names = ()
    seed: Annotated[int, Field(ge=0)] = 0
    market: MarketConfig = MarketConfig()
    graph: GraphConfig = GraphConfig()
    split: SplitConfig = SplitConfig()
    lookback: Annotated[int, Field(ge=4)] = 20
    horizons: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 5, 10, 20)
    target: Literal["zscore", "rank_normal"] = "zscore"
    winsor: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.005
    max_stocks: Annotated[int, Field(ge=0)] = 100
    min_stocks: Annotated[int, Field(ge=5)] = 20
    block_days: Annotated[int, Field(ge=8)] = 10
    control: Literal["none", "shuffled"] = "none"

    @model_validator(mode="after")
    def _features_fit(self) -> DataConfig:
        if self.features and not self.path:
            raise ValueError("data.features names columns of data.path, which is not given")
        if len(set(self.features)) < len(self.features):
            raise ValueError(f"features {', '.join(self.features)} names a column twice")
        return self

    @model_validator(mode="after")
    def _horizons_fit(self) -> DataConfig:
        if list(self.horizons) != sorted(set(self.horizons)):
            raise ValueError(f"horizons {self.horizons} must increase")
        if 5 not in self.horizons:
            raise ValueError(f"horizons {self.horizons} must contain 5: trials are compared on val/rank_ic_5d")
        if self.split.purge < self.horizons[-1]:
            raise ValueError(f"split.purge {self.split.purge} is shorter than the longest horizon {self.horizons[-1]}")
        return self


class ModelConfig(Frozen):
    """The model's sizes and parts.

    `num_frequencies` is FAN's K (0: no FAN), `num_filters` the filters on each channel of its main signal. With
    `main_layers=2` the filters' output passes a second layer, as in FAN's paper; `graph`, `attention` and `selection`
    switch the GAT, the attention over the window and the weights of the features.
    """

    hidden_size: PositiveInt = 32
    num_heads: PositiveInt = 4
    num_layers: PositiveInt = 2
    dropout: Share = 0.3
    num_frequencies: Annotated[int, Field(ge=0)] = 3
    num_filters: PositiveInt = 4
    main_layers: Literal[1, 2] = 1
    graph: bool = True
    temporal: Literal["convolution", "lstm"] = "convolution"
    selection: Literal["softmax", "sigmoid", "none"] = "softmax"
    attention: bool = True

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}")
        return self


class TermScale(Frozen):
    """Factors on the weights of every phase, one per term: the factors that a search varies."""

    mse: NonNegative = 1.0
    rank_ic: NonNegative = 1.0
    cs_ic: NonNegative = 1.0
    sharpe: NonNegative = 1.0


class LossConfig(Frozen):
    """The composite loss. `phase` picks one of `phases`, or `schedule` for all of them in turn.

    `horizon_weights.5` is the weight of 5 days, 1 for a horizon that is not named; `point=quantile` gives the model a
    head of the quantiles .05, .25, .5, .75 and .95, of which the median ranks.
    """

    phase: str = "3"
    scale: TermScale = TermScale()
    point: Literal["mse", "huber", "quantile"] = "mse"
    tau: Annotated[float, Field(gt=0.0, le=5.0)] = 0.2
    horizon_weights: dict[str, NonNegative] = Field(default_factory=dict)


class EvalConfig(Frozen):
    """Settings of the evaluation.

    `cost` is paid per unit of turnover; more undefined days than the share `max_undefined` fail a trial.
    """

    cost: Annotated[float, Field(ge=0.0)] = 0.0005
    max_undefined: Share = 0.05


def _in_a_phase(reads: str) -> str:
    """Returns the condition that a phase of the run `reads` something, such as `phases.{}.graph == True`."""
    return " or ".join(f"(loss.phase in ('{name}', '{ALL}') and {reads.format(name)})" for name in PHASES)


# Fields that are read only under a condition: `read_when` of the study. data.graph.window also sets the day of the
# first sample.
_GRAPH = ("min_observations", "min_correlation", "top_k", "refresh")
READ_WHEN = {
    "data.market.*": "data.path == ''",
    "data.features": "data.path != ''",
    "data.seed": "data.path == '' or data.control == 'shuffled'",
    **{f"data.graph.{name}": f"model.graph == True and ({_in_a_phase('phases.{}.graph == True')})" for name in _GRAPH},
    **dict.fromkeys(["model.main_layers", "model.num_filters"], "model.num_frequencies > 0"),
    "model.num_heads": "model.attention == True or model.graph == True",
    **{f"phases.{name}.*": f"loss.phase in ('{name}', '{ALL}')" for name in PHASES},
    **{f"phases.{name}.epochs": f"loss.phase == '{ALL}'" for name in PHASES},
    **{f"loss.scale.{term}": _in_a_phase(f"phases.{{}}.weights.{term} > 0") for term in TERMS},
    "loss.tau": f"loss.scale.rank_ic > 0 and ({_in_a_phase('phases.{}.weights.rank_ic > 0')})",
}


TRAIN = TrainConfig(
    num_epochs=4,
    batch_size=1,
    optim=OptimConfig(lr=3e-3),
    schedule=ScheduleConfig(name="cosine", warmup_ratio=0.1),
    checkpoint=CheckpointConfig(monitor="val/rank_ic_5d", mode="max"),
)


class Config(Frozen):
    """The whole configuration of the study. `train.batch_size` counts blocks of `data.block_days` consecutive days."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    phases: dict[str, PhaseConfig] = Field(default_factory=lambda: dict(PHASES))
    evaluation: EvalConfig = EvalConfig()
    train: TrainConfig = TRAIN

    @field_validator("phases", mode="before")
    @classmethod
    def _phases_known(cls, given: object) -> object:
        """Refuses an unknown phase, before its missing fields are reported."""
        if isinstance(given, dict) and (unknown := sorted(set(given) - set(PHASES), key=str)):
            raise ValueError(f"{unknown[0]!r} is not a phase: choose among {', '.join(PHASES)}")
        return given

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        bins = self.data.lookback // 2 + 1
        if self.model.num_frequencies > bins:
            raise ValueError(f"num_frequencies {self.model.num_frequencies} exceeds the {bins} bins of the window")
        weights, known = self.loss.horizon_weights, [str(h) for h in self.data.horizons]
        if unknown := sorted(set(weights) - set(known)):
            raise ValueError(
                f"loss.horizon_weights.{unknown[0]} is of no horizon: choose among {', '.join(known)}, or add it to "
                "data.horizons"
            )
        if not any(self.omega):
            raise ValueError("loss.horizon_weights are all 0: raise one")
        try:
            phases = plan(self.loss.phase, dict(self.loss.scale), self.phases).phases
        except ConfigError as error:
            raise ValueError(str(error)) from error
        parallel, partial = self.train.parallel, any(not (phase.graph and phase.fan) for _, phase in phases)
        if partial and parallel.ranks > 1 and not parallel.find_unused:
            raise ValueError(
                "a phase leaves the graph or FAN out, and ranks wait for the gradients of all of the model: set "
                "train.parallel.find_unused=true, or phases.1.graph, .fan and phases.2.fan to true"
            )
        return self

    def in_fold(self, fold: int, folds: int) -> Config:
        """Returns the configuration of one of `folds`, counted from the earliest."""
        config = self.model_dump()
        config["data"]["split"] |= {"fold": fold, "num_folds": folds}
        return Config.model_validate(config)

    @property
    def omega(self) -> list[float]:
        """Returns the weight of each horizon, as configured."""
        return [self.loss.horizon_weights.get(str(h), 1.0) for h in self.data.horizons]
