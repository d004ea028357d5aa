"""Trains and evaluates T5."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from studies._lm.denoising import DenoisingTask, Noise, vocabulary_size
from studies.t5.config import SENTINELS, Config, SpanConfig
from studies.t5.model import T5
from trainer.data.augment import CorruptSpans

JUDGED = SpanConfig()  # the paper's spans, with which trials are validated


class T5Task(DenoisingTask):
    """Writes the spans that are missing of a row."""

    config: Config
    names = tuple(f"<extra_id_{number}>" for number in range(SENTINELS))

    def model(self) -> nn.Module:
        return T5(vocabulary_size(self.config.data, self.names), **self.config.model.sizes)

    def noise(self, *, validates: bool) -> Noise:
        spans = JUDGED if validates else self.config.spans
        return CorruptSpans(torch.tensor(self.special), self.tokens.tokenizer.end, spans.share, spans.mean)

    def restored(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = batch["labels"]
        return model(batch["tokens"], None, self._shifted(labels)), labels

    def _shifted(self, labels: Tensor) -> Tensor:
        """Returns what the decoder reads: an end, which starts it, and all labels but the last."""
        return F.pad(labels[:, :-1], (1, 0), value=self.tokens.tokenizer.end)

    def artifacts(self, model: nn.Module) -> dict[str, str]:
        """Returns the first validation rows with their gaps, and as the model fills them: `samples/epoch-N.txt`."""
        if not self.config.samples:
            return {}
        batch = {name: rows[: self.config.samples] for name, rows in next(self.noisy(model, "val")).items()}
        gaps, written = {number: f"<{gap}>" for gap, number in enumerate(self.special)}, []
        for tokens, spans in zip(batch["tokens"], self._generated(model, batch), strict=True):
            text, spans = self.written(tokens.tolist(), gaps), self.written(spans.tolist(), gaps)
            written.append(f"with gaps:\n{text}\nspans:\n{spans}")
        epoch = round(self.progress * self.config.train.num_epochs)
        return {f"samples/epoch-{epoch:04d}.txt": "\n---\n".join(written) + "\n"}

    def _generated(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the likeliest next token after another, as many as there are labels [rows, out]."""
        labels = torch.zeros_like(batch["labels"])
        for place in range(labels.shape[1]):
            logits = model(batch["tokens"], None, self._shifted(labels[:, : place + 1]))
            labels[:, place] = logits[:, -1].argmax(-1)
        return labels
