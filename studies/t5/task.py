"""Trains and evaluates T5."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from studies._lm.denoising import DenoisingTask, Noise, added_names
from studies.t5 import pretrained
from studies.t5.config import JUDGED, SENTINELS, Config
from studies.t5.model import T5
from trainer.data.augment import CorruptSpans
from trainer.data.text import BPE
from trainer.data.tokenizer_files import save_tokenizer
from trainer.task import LanguageModel


class T5Task(DenoisingTask):
    """Writes the spans that are missing of a row."""

    config: Config
    names = tuple(f"<extra_id_{number}>" for number in range(SENTINELS))

    def model(self) -> nn.Module:
        settings = self.config.model
        model = T5(self.vocab_size, **settings.sizes)
        if settings.weights:
            pretrained.load(model, settings, self.vocab_size)
        return model

    @cached_property
    def start(self) -> int:
        """Returns the token that the decoder starts with: the padding of the tokenizer's, else an end."""
        tokenizer = self.tokens.tokenizer
        padding = tokenizer.id_of("<pad>") if isinstance(tokenizer, BPE) else None
        return tokenizer.end if padding is None else padding

    def noise(self, *, validates: bool) -> Noise:
        spans = JUDGED if validates else self.config.spans
        return CorruptSpans(torch.tensor(self.special), self.tokens.tokenizer.end, spans.share, spans.mean)

    def restored(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = batch["labels"]
        return model(batch["tokens"], None, self._shifted(labels)), labels

    def _shifted(self, labels: Tensor) -> Tensor:
        """Returns the decoder's input: the start, and all labels but the last."""
        return F.pad(labels[:, :-1], (1, 0), value=self.start)

    def parallel_plan(self, model: nn.Module) -> dict[str, str]:
        """Returns the plan: columns of q, k, v (whole heads, with their positions), gate and up, rows of those after
        them."""
        plan = {f"*.layers.*.{part}.{name}": "colwise" for part in ("attend", "cross") for name in "qkv"}
        plan |= {f"*.layers.*.mlp.{name}": "colwise" for name in ("gate", "up")}
        plan |= {f"{stack}.bias": "colwise" for stack in ("encoder", "decoder")}
        return plan | {f"*.layers.*.{part}": "rowwise" for part in ("attend.o", "cross.o", "mlp.down")}

    def language_model(self, model: nn.Module) -> LanguageModel:
        """Returns the model as Hugging Face's T5ForConditionalGeneration, whose tokenizer has the sentinels."""

        def save(directory: Path) -> None:
            tokenizer, settings = self.tokens.tokenizer, self.config.model
            pretrained.save(model.state_dict(), settings, self.vocab_size, directory, self.start, tokenizer.end)
            save_tokenizer(tokenizer, directory, added=added_names(tokenizer, self.names))

        return LanguageModel(save, lambda tokens: model(tokens, None, tokens), self.vocab_size, kind="seq2seq")

    def artifacts(self, model: nn.Module) -> dict[str, str]:
        """Returns the first validation rows with their gaps, and as the model fills them: `samples/epoch-N.txt`."""
        if not self.config.samples:
            return {}
        batch = next(self.noisy(model, "val", self.config.samples))
        gaps, written = {number: f"<{gap}>" for gap, number in enumerate(self.special)}, []
        for tokens, spans in zip(batch["tokens"], self._generated(model, batch), strict=True):
            text, spans = self.written(tokens.tolist(), gaps), self.written(spans.tolist(), gaps)
            written.append(f"with gaps:\n{text}\nspans:\n{spans}")
        return self.samples(written)

    def _generated(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the likeliest next token after another, as many as there are labels [rows, out]."""
        labels = torch.zeros_like(batch["labels"])
        for place in range(labels.shape[1]):
            logits = model(batch["tokens"], None, self._shifted(labels[:, : place + 1]))
            labels[:, place] = logits[:, -1].argmax(-1)
        return labels
