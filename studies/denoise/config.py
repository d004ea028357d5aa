"""Configures the denoise study. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainer.config import Frozen, Positive
from trainer.config.fields import Beta

PositiveInt = Annotated[int, Field(ge=1)]
READ_BY = {"positions": "bert", "head_size": "t5", "activation": "t5", "tie": "t5"}  # fields of one kind of model alone


class ModelConfig(Frozen):
    """A BERT encoder, or a T5 with `num_layers` layers in its encoder and as many in its decoder.

    `head_size` None is `hidden_size / num_heads`. `mlp_size` None is 4 times `hidden_size`; with geglu, whose MLP has
    three matrices in place of two, 8/3 of it, up to a multiple of 16. `norm_eps` None is the paper's code's: 1e-12 for
    bert, 1e-6 for t5. `positions` is the most tokens of a row, which BERT learns positions for. T5 1.0 has
    activation=relu and tie=true, 1.1 geglu and false.

    `weights` is a directory in Hugging Face's format to start from, of the sizes given here.
    """

    kind: Literal["bert", "t5"] = "bert"
    hidden_size: PositiveInt = 64
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 4
    head_size: PositiveInt | None = None
    mlp_size: PositiveInt | None = None
    activation: Literal["relu", "geglu"] = "geglu"
    positions: PositiveInt = 512
    norm_eps: Positive | None = None
    dropout: Beta = 0.0
    tie: bool = True  # the embedding is the head as well
    weights: str = ""

    @property
    def width(self) -> int:
        """Returns the width of a head."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def mlp(self) -> int:
        gated = self.kind == "t5" and self.activation == "geglu"
        return self.mlp_size or (-(-self.hidden_size * 8 // 3 // 16) * 16 if gated else 4 * self.hidden_size)

    @property
    def eps(self) -> float:
        return self.norm_eps or (1e-12 if self.kind == "bert" else 1e-6)

    @property
    def sizes(self) -> dict[str, Any]:
        """Returns the arguments of `Bert` or `T5`, other than the vocabulary."""
        theirs = {name for name, kind in READ_BY.items() if kind != self.kind}
        return self.model_dump(exclude={"kind", "weights", *theirs}) | {"mlp_size": self.mlp, "norm_eps": self.eps}

    @model_validator(mode="after")
    def _kind_has_them(self) -> ModelConfig:
        for name, kind in READ_BY.items():
            value = getattr(self, name)
            if kind != self.kind and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name}={value} is read by kind={kind}, and kind is {self.kind}: leave one of them out."
                )
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.head_size is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads {self.num_heads} do not divide hidden_size {self.hidden_size} into equal heads: change one "
                f"of them{', or give head_size' if self.kind == 't5' else ''}."
            )
        return self
