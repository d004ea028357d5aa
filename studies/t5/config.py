"""Configures the t5 study. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from studies._lm.corpus_config import CorpusConfig, PositiveInt, TextConfig
from studies._lm.denoising_config import check_ranks, training
from trainer.config import Frozen, Positive, TrainConfig
from trainer.config.fields import Beta

SENTINELS = 100  # tokens that each stand for a span, as in the paper's vocabulary


class SpanConfig(Frozen):
    """Takes `share` of a row's tokens out, in spans of `mean` tokens on average (trainer.data.augment.CorruptSpans).

    The defaults are the paper's. Trials are validated with them, whatever they train with.
    """

    share: Annotated[float, Field(gt=0, le=0.5)] = 0.15
    mean: Annotated[float, Field(ge=1)] = 3.0

    def count(self, length: int) -> int:
        """Returns the number of spans of a row, as `CorruptSpans.spans` does; a row has 8 tokens at least."""
        taken = max(round(length * self.share), 1)
        return min(max(round(taken / self.mean), 1), length - taken)


JUDGED = SpanConfig()  # the paper's spans, with which trials are validated


class ModelConfig(Frozen):
    """A T5 with `num_layers` layers in its encoder and as many in its decoder.

    `head_size` None is `hidden_size / num_heads`. `mlp_size` None is 4 times `hidden_size`; with geglu, whose MLP has
    three matrices in place of two, 8/3 of it, up to a multiple of 16. T5 1.0 has activation=relu and tie=true, 1.1
    geglu and false.

    `weights` is a directory in Hugging Face's format to start from, of the sizes given here.
    """

    hidden_size: PositiveInt = 64
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 4
    head_size: PositiveInt | None = None
    mlp_size: PositiveInt | None = None
    activation: Literal["relu", "geglu"] = "geglu"
    norm_eps: Positive = 1e-6
    dropout: Beta = 0.0
    tie: bool = True  # the embedding is the head as well
    weights: str = ""

    @property
    def width(self) -> int:
        """Returns the width of a head."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def mlp(self) -> int:
        gated = -(-self.hidden_size * 8 // 3 // 16) * 16
        return self.mlp_size or (gated if self.activation == "geglu" else 4 * self.hidden_size)

    @property
    def sizes(self) -> dict[str, Any]:
        """Returns the arguments of `T5`, other than the vocabulary."""
        return self.model_dump(exclude={"weights"}) | {"mlp_size": self.mlp}

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.head_size is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads {self.num_heads} do not divide hidden_size {self.hidden_size} into equal heads: change one "
                "of them, or give head_size."
            )
        return self


class Config(Frozen):
    """The whole configuration of the study. `train.batch_size` counts rows of `data.block_size` tokens.

    `samples` is the number of validation rows that are written after each epoch as the model fills them.
    """

    data: TextConfig = TextConfig(block_size=64, corpus=CorpusConfig(general=600, target=3000))
    spans: SpanConfig = SpanConfig()
    model: ModelConfig = ModelConfig()
    samples: Annotated[int, Field(ge=0)] = 2
    train: TrainConfig = training(batch_size=32)

    @model_validator(mode="after")
    def _sentinels_are_enough(self) -> Config:
        length = self.data.block_size
        for spans, remedy in (
            (self.spans, "lower the share, or raise the mean"),
            (JUDGED, "trials are validated with these, so lower data.block_size"),
        ):
            if (count := spans.count(length)) > SENTINELS:
                raise ValueError(
                    f"a row of data.block_size={length} tokens has {count} spans by spans.share {spans.share} and "
                    f"spans.mean {spans.mean}, and there are {SENTINELS} sentinels: {remedy}."
                )
        return self

    @model_validator(mode="after")
    def _ranks_divide(self) -> Config:
        check_ranks(self.train.parallel, self.model.num_heads)
        return self
