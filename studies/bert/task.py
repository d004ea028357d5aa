"""Trains and evaluates BERT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from studies._lm.denoising import DenoisingTask, Noise, added_names
from studies.bert import pretrained
from studies.bert.config import MASK, Config
from studies.bert.model import Bert
from trainer.data.augment import MaskWords
from trainer.data.text import word_begins
from trainer.data.tokenizer_files import save_tokenizer
from trainer.task import LanguageModel

SHARE = 0.15  # of the tokens that are predicted where trials are validated


class BertTask(DenoisingTask):
    """Predicts the masked tokens of a row from the others."""

    config: Config
    names = (MASK,)

    def model(self) -> nn.Module:
        settings = self.config.model
        model = Bert(self.vocab_size, **settings.sizes)
        if settings.weights:
            pretrained.load(model, settings, self.vocab_size)
        return model

    def noise(self, *, validates: bool) -> Noise:
        masks, tokenizer = self.config.masks, self.tokens.tokenizer
        words = validates or masks.unit == "word"
        begins = torch.tensor(word_begins(tokenizer)) if words else torch.ones(tokenizer.vocab_size, dtype=torch.bool)
        special = torch.zeros(tokenizer.vocab_size, dtype=torch.bool)
        special[tokenizer.end] = True
        share = SHARE if validates else masks.share
        return MaskWords(self.special[0], tokenizer.vocab_size, begins, special, share)

    def restored(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return model(batch["tokens"], None, batch["places"]), batch["labels"]

    def parallel_plan(self, model: nn.Module) -> dict[str, str]:
        """Returns the plan: columns of q, k, v (whole heads) and of the MLP's first layer, rows of those after them."""
        plan = {f"layers.*.attend.{name}": "colwise" for name in "qkv"} | {"layers.*.attend.o": "rowwise"}
        return plan | {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}

    def language_model(self, model: nn.Module) -> LanguageModel:
        """Returns the model as Hugging Face's BertForMaskedLM, whose tokenizer has the mask."""

        def save(directory: Path) -> None:
            tokenizer = self.tokens.tokenizer
            pretrained.save(model.state_dict(), self.config.model, self.vocab_size, directory, tokenizer.end)
            save_tokenizer(tokenizer, directory, added=added_names(tokenizer, self.names), roles={"mask_token": MASK})

        return LanguageModel(save, model, self.vocab_size, kind="masked", length=min(self.config.model.positions, 32))

    def artifacts(self, model: nn.Module) -> dict[str, str]:
        """Returns the first validation rows with their masks, and as the model fills them: `samples/epoch-N.txt`."""
        if not self.config.samples:
            return {}
        [mask], written = self.special, []
        batch = next(self.noisy(model, "val", self.config.samples))
        logits, _ = self.restored(model, batch)
        for row in range(len(logits)):
            tokens, places = batch["tokens"][row].clone(), batch["places"][row][batch["labels"][row] >= 0]
            masked = self.written(tokens.tolist(), {mask: "_"})
            tokens[places] = logits[row, : len(places)].argmax(-1)
            written.append(f"masked:\n{masked}\nfilled:\n{self.written(tokens.tolist(), {mask: '_'})}")
        return self.samples(written)
