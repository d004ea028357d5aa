"""Configures the gpt study. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config import (
    CheckpointConfig,
    ClipConfig,
    Frozen,
    NonNegative,
    OptimConfig,
    Positive,
    ScheduleConfig,
    TrainConfig,
)
from trainer.config.fields import added

PositiveInt = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]
LONGEST_WORD = 6  # letters of a word of the generated corpus


class MixPhase(Frozen):
    """A phase of the mixture: from `start`, a share of the run, `target` is the target domain's share of the rows."""

    start: Ratio = 0.0
    target: Ratio


class CorpusConfig(Frozen):
    """The generated corpus: training documents of each domain; a tenth as many to validate, and to test.

    With `keys`, a document defines as many at its start, each a capital letter and a digit. It then has exactly `words`
    words, and the definitions once more anywhere between them: those digits are known from the start alone.
    """

    general: PositiveInt = 1500
    target: PositiveInt = 400
    num_words: Annotated[int, Field(ge=4, le=2000)] = 48  # words of the lexicon
    successors: PositiveInt = 6  # possible next words of a word
    words: PositiveInt = added(16)  # the most words of a document
    keys: Annotated[int, Field(ge=0, le=26)] = added(0)

    @property
    def longest(self) -> int:
        """Returns the most tokens of a document, by bytes: words, definitions, spaces between them, and both ends."""
        return self.words * (LONGEST_WORD + 1) + 2 * self.keys * 3 + 1

    @model_validator(mode="after")
    def _check(self) -> CorpusConfig:
        if self.successors > self.num_words:
            raise ValueError(f"successors {self.successors} are more than num_words {self.num_words}.")
        if self.keys > self.words:
            raise ValueError(f"keys {self.keys} are more than words {self.words}: lower keys, or give more words.")
        return self


class DataConfig(Frozen):
    """Selects the texts. An empty `path` means the generated corpus of two domains, whose entropy is known.

    `path` is the target domain: a text file, a table with a column `text` (of any format of trainer.files.tables), a
    directory or a pattern of such, in a bucket too (trainer.files.shards), or a directory of Hugging Face's datasets,
    of which `split` is read; the optional `general_path` is the same for a general domain. `separator` divides a text
    file into documents; without one, a file is a document. `cache` is a directory that keeps the tokens for later runs
    with the same settings and texts; empty: the home's `shared`.

    Rows of `block_size` tokens are drawn from both domains by the ratios of `phases`; an epoch takes the phase that it
    begins in. `tokens_per_parameter` is the number of tokens that the run sees for each parameter of the model: about
    20 is the optimum for a budget of operations (see budget.py). None: an epoch has as many rows as both domains
    together.

    `tokenizer_file` is a tokenizer.json, SentencePiece's `.model`, WordPiece's vocab.txt or tiktoken's `.tiktoken`.
    """

    path: str = ""
    general_path: str = ""
    column: str = "text"
    separator: str = ""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    vocab_size: Annotated[int, Field(ge=257)] = 257  # BPE's, an upper limit of the tokens it learns
    tokenizer_file: str = ""  # a tokenizer of another model, whose token `end_token` ends documents; empty: learn BPE
    end_token: str = "<|end|>"
    block_size: Annotated[int, Field(ge=8)] = 128
    phases: tuple[MixPhase, ...] = (
        MixPhase(start=0.0, target=0.1),
        MixPhase(start=0.5, target=0.4),
        MixPhase(start=0.8, target=0.8),
    )
    tokens_per_parameter: Positive | None = None
    held_out: Annotated[float, Field(gt=0, lt=0.5)] = 0.05  # share of a file to validate, and as much to test
    test: bool = False  # also evaluate the test part, by which no trial is selected
    seed: Annotated[int, Field(ge=0)] = 0  # seed of the generated corpus
    corpus: CorpusConfig = CorpusConfig()
    cache: str = ""
    split: str = added("")
    tiktoken_pattern: Literal["gpt2", "cl100k", "o200k"] = added("cl100k")  # what divides text before tiktoken's ranks
    by_position: bool = added(False)  # also report the loss by the position of a token in its document

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.general_path and not self.path:
            raise ValueError("general_path is given and path, the target domain, is not: give both, or path alone.")
        if self.split and not self.path:
            raise ValueError(f"split {self.split!r} is of path, which is not given: give both, or leave split out.")
        if self.tokenizer == "bytes" and self.vocab_size != 257:
            raise ValueError(f"vocab_size={self.vocab_size} is BPE's, bytes have 257: set tokenizer=bpe, or leave it.")
        if self.tokenizer_file and self.tokenizer == "bytes":
            raise ValueError("tokenizer_file is read only with tokenizer=bpe: set that, or leave it out.")
        starts = [phase.start for phase in self.phases]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"phases start at {starts}: let the first start at 0 and each later than the one before.")
        if not self.path and self.block_size < (longest := self.corpus.longest):
            raise ValueError(
                f"block_size {self.block_size} cuts documents of the generated corpus, of up to {longest} tokens, and "
                f"their entropy would not be known: give {longest} or more."
            )
        return self


class MoeConfig(Frozen):
    """A mixture of `experts` in place of each block's MLP (see experts.py); 1 is the plain MLP, which reads no other
    field.

    Each expert is an MLP of the model's `mlp_size`. A router gives every token to the `top_k` that it rates highest,
    and `shared` more experts take all tokens. An expert takes `capacity` times its even share of a row's tokens, the
    earliest, and a token that it drops goes on by the residual; None: it takes all that it is given.
    """

    experts: PositiveInt = 1
    top_k: PositiveInt = 2
    capacity: Positive | None = None
    shared: Annotated[int, Field(ge=0)] = 0
    balance: NonNegative = 0.01  # weight of the loss that keeps loads even
    z_loss: NonNegative = 0.001  # weight of the loss that keeps the router's logits small

    @model_validator(mode="after")
    def _experts_are_enough(self) -> MoeConfig:
        if 1 < self.experts < self.top_k:
            raise ValueError(
                f"top_k {self.top_k} is more than experts {self.experts}: lower top_k, or give more experts."
            )
        return self


class PositionConfig(Frozen):
    """Tells the model where tokens are, and how far back they see (see positions.py).

    `scaling` fits the rotary positions of a model that was trained on rows of `trained` tokens to rows of
    `data.block_size`. `window` is the number of last tokens of its document that a token sees, itself included; None:
    all. `sinks` is the number of the document's first tokens that it sees besides.
    """

    kind: Literal["rotary", "alibi", "learned"] = "rotary"
    scaling: Literal["none", "linear", "ntk", "yarn"] = "none"
    trained: PositiveInt | None = None
    window: PositiveInt | None = None
    sinks: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _check(self) -> PositionConfig:
        if self.scaling != "none" and self.kind != "rotary":
            raise ValueError(f"scaling {self.scaling} is of rotary positions, and kind is {self.kind}: leave one out.")
        if self.scaling != "none" and self.trained is None:
            raise ValueError(
                f"scaling {self.scaling} needs trained, the row length that the model was trained on: give it."
            )
        if self.sinks and self.window is None:
            raise ValueError(f"sinks {self.sinks} are seen besides a window, and there is none: set window.")
        return self


class ModelConfig(Frozen):
    """A Llama-style decoder; `mlp_size` None is 8/3 of `hidden_size`, up to a multiple of 16.

    `weights` is a directory in Hugging Face's format to start from, of the sizes given here: continued pre-training.
    """

    hidden_size: PositiveInt = 64
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    mlp_size: PositiveInt | None = None
    rope_theta: Positive = 10_000.0
    norm_eps: Positive = 1e-5
    tie: bool = True  # the embedding is the head as well
    weights: str = ""
    moe: MoeConfig = added(MoeConfig())
    position: PositionConfig = added(PositionConfig())
    activation: Literal["swiglu", "geglu"] = added("swiglu")

    @property
    def mixed(self) -> bool:
        """Returns True if the blocks have a mixture of experts."""
        return self.moe.experts > 1

    @property
    def mlp(self) -> int:
        return self.mlp_size or -(-self.hidden_size * 8 // 3 // 16) * 16

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"num_heads {self.num_heads} do not divide hidden_size {self.hidden_size} into heads of even width, "
                "which rotary positions need: change one of them."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads {self.num_kv_heads} do not divide num_heads {self.num_heads}: change one of them."
            )
        return self


class SamplesConfig(Frozen):
    """Texts that the model writes after each epoch, the trial's `samples/epoch-N.txt`.

    There are up to `tokens` tokens after each of `prompts`, none for 0. Temperature 0 takes the likeliest token each
    time.
    """

    prompts: tuple[str, ...] = ("", "")
    tokens: Annotated[int, Field(ge=0)] = 96
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.8


TRAIN = TrainConfig(
    num_epochs=5,
    batch_size=8,
    optim=OptimConfig(lr=3e-3, beta1=0.9, beta2=0.95, weight_decay=0.1),
    schedule=ScheduleConfig(name="cosine", warmup_ratio=0.05),
    clip=ClipConfig(norm=1.0),
    checkpoint=CheckpointConfig(monitor="val/loss", mode="min"),
)


class Config(Frozen):
    """The whole configuration of the study. `train.batch_size` counts rows of `data.block_size` tokens."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    samples: SamplesConfig = SamplesConfig()
    train: TrainConfig = TRAIN

    @property
    def masks(self) -> bool:
        """Returns True if attention always needs a mask: for lanes, and for positions that limit or weigh distances."""
        position = self.model.position
        return self.train.fixed_lanes > 1 or position.kind == "alibi" or position.window is not None

    @model_validator(mode="after")
    def _ranks_divide(self) -> Config:
        tensor, heads = self.train.parallel.tensor, self.model.num_kv_heads
        if heads % tensor:
            raise ValueError(
                f"train.parallel.tensor={tensor} does not divide model.num_kv_heads {heads}: a rank takes whole heads."
            )
        if self.train.parallel.pipeline > 1 and self.model.tie:
            raise ValueError("model.tie shares weights of the first and the last stage of a pipeline: set it to false.")
        return self

    @model_validator(mode="after")
    def _positions_fit(self) -> Config:
        position, parallel = self.model.position, self.train.parallel
        if position.kind != "rotary" and parallel.tensor > 1:
            raise ValueError(
                f"model.position.kind={position.kind} and train.parallel.tensor={parallel.tensor} exclude each other: "
                "leave one of them out."
            )
        if position.kind != "rotary" and self.model.weights:
            raise ValueError(
                f"model.weights are a Llama's, whose positions are rotary, and model.position.kind is {position.kind}: "
                "leave one of them out."
            )
        if position.trained is not None and position.trained > self.data.block_size:
            raise ValueError(
                f"model.position.trained {position.trained} is more than data.block_size {self.data.block_size}: "
                "give the shorter rows that the model was trained on."
            )
        return self

    @model_validator(mode="after")
    def _ranks_share_experts(self) -> Config:
        ranks, experts = self.train.parallel.expert, self.model.moe.experts
        if ranks > 1 and experts % ranks:
            raise ValueError(
                f"train.parallel.expert={ranks} does not divide model.moe.experts {experts}: give each rank as many "
                "experts."
            )
        return self

    @model_validator(mode="after")
    def _experts_are_whole(self) -> Config:
        train, experts = self.train, self.model.moe.experts
        refused = {
            f"train.parallel.tensor={train.parallel.tensor}": train.parallel.tensor > 1,
            f"train.parallel.pipeline={train.parallel.pipeline}": train.parallel.pipeline > 1,
            f"train.lanes={train.lanes}": train.fixed_lanes > 1,
            f"train.compile={'graphs' if train.compile == 'graphs' else 'true'}": bool(train.compile),
        }
        for setting, is_set in refused.items():
            if is_set and self.model.mixed:
                raise ValueError(
                    f"model.moe.experts={experts} and {setting} exclude each other (only the data say how many "
                    f"tokens an expert gets): leave {setting.partition('=')[0]} out, or set model.moe.experts to 1."
                )
        if self.model.mixed and self.model.weights:
            raise ValueError(
                f"model.weights are a plain Llama's, which has no experts, and model.moe.experts is {experts}: leave "
                "one of them out."
            )
        return self
