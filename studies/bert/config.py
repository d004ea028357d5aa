"""Configures the bert study. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from studies._lm.corpus_config import CorpusConfig, PositiveInt, TextConfig
from studies._lm.denoising_config import check_ranks, training
from trainer.config import Frozen, Positive, TrainConfig
from trainer.config.fields import Beta

MASK = "[MASK]"  # the token that stands for one to predict


class MaskConfig(Frozen):
    """Takes `share` of a row's tokens out, by whole words or each token alone (trainer.data.augment.MaskWords).

    The paper's share is 0.15; larger models learn more from 0.4 (Wettig et al. 2023, arXiv 2202.08005). Trials are
    validated with a share of 0.15 and whole words, whatever they train with.
    """

    share: Annotated[float, Field(gt=0, le=0.5)] = 0.15
    unit: Literal["word", "token"] = "word"


class ModelConfig(Frozen):
    """A BERT encoder; `mlp_size` None is 4 times `hidden_size`. `positions` is the most tokens of a row.

    `weights` is a directory in Hugging Face's format to start from, of the sizes given here.
    """

    hidden_size: PositiveInt = 64
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 4
    mlp_size: PositiveInt | None = None
    positions: PositiveInt = 32
    norm_eps: Positive = 1e-12
    dropout: Beta = 0.0
    weights: str = ""

    @property
    def mlp(self) -> int:
        return self.mlp_size or 4 * self.hidden_size

    @property
    def sizes(self) -> dict[str, Any]:
        """Returns the arguments of `Bert`, other than the vocabulary."""
        return self.model_dump(exclude={"weights"}) | {"mlp_size": self.mlp}

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads {self.num_heads} do not divide hidden_size {self.hidden_size} into equal heads: change one "
                "of them."
            )
        return self


class Config(Frozen):
    """The whole configuration of the study. `train.batch_size` counts rows of `data.block_size` tokens.

    `samples` is the number of validation rows that are written after each epoch as the model fills them.
    """

    data: TextConfig = TextConfig(block_size=32, corpus=CorpusConfig(general=600, target=3000))
    masks: MaskConfig = MaskConfig()
    model: ModelConfig = ModelConfig()
    samples: Annotated[int, Field(ge=0)] = 2
    train: TrainConfig = training(batch_size=64)

    @model_validator(mode="after")
    def _rows_fit(self) -> Config:
        if self.data.block_size > self.model.positions:
            raise ValueError(
                f"data.block_size {self.data.block_size} is more than model.positions {self.model.positions}: raise "
                "model.positions, or lower data.block_size."
            )
        return self

    @model_validator(mode="after")
    def _ranks_divide(self) -> Config:
        check_ranks(self.train.parallel, self.model.num_heads)
        return self
