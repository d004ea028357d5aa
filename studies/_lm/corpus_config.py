"""Configures the texts of a language model that is trained from them: a generated corpus, or files. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config import Frozen
from trainer.config.fields import added

PositiveInt = Annotated[int, Field(ge=1)]
LONGEST_WORD = 6  # letters of a word of the generated corpus


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


class TextConfig(Frozen):
    """Selects the texts. An empty `path` means the generated corpus of two domains, whose entropy is known.

    `path` is the target domain: a text file, a table with a column `text` (of any format of trainer.files.tables), a
    directory or a pattern of such, in a bucket too (trainer.files.shards), or a directory of Hugging Face's datasets,
    of which `split` is read; the optional `general_path` is the same for a general domain. `separator` divides a text
    file into documents; without one, a file is a document. `cache` is a directory that keeps the tokens for later runs
    with the same settings and texts; empty: the home's `shared`. A row has `block_size` tokens.

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
    held_out: Annotated[float, Field(gt=0, lt=0.5)] = 0.05  # share of a file to validate, and as much to test
    test: bool = False  # also evaluate the test part, by which no trial is selected
    seed: Annotated[int, Field(ge=0)] = 0  # seed of the generated corpus
    corpus: CorpusConfig = CorpusConfig()
    cache: str = ""
    split: str = added("")
    tiktoken_pattern: Literal["gpt2", "cl100k", "o200k"] = added("cl100k")  # what divides text before tiktoken's ranks

    @model_validator(mode="after")
    def _check(self) -> TextConfig:
        if self.general_path and not self.path:
            raise ValueError("general_path is given and path, the target domain, is not: give both, or path alone.")
        if self.split and not self.path:
            raise ValueError(f"split {self.split!r} is of path, which is not given: give both, or leave split out.")
        if self.tokenizer == "bytes" and self.vocab_size != 257:
            raise ValueError(f"vocab_size={self.vocab_size} is BPE's, bytes have 257: set tokenizer=bpe, or leave it.")
        if self.tokenizer_file and self.tokenizer == "bytes":
            raise ValueError("tokenizer_file is read only with tokenizer=bpe: set that, or leave it out.")
        if self.tiktoken_pattern != "cl100k" and not self.tokenizer_file.endswith(".tiktoken"):
            raise ValueError(
                f"tiktoken_pattern={self.tiktoken_pattern} is read only for a tokenizer_file that ends in .tiktoken: "
                "leave it out."
            )
        return self
