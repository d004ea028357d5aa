"""Defines BERT, an encoder that fills in masked tokens (Devlin et al. 2019, arXiv 1810.04805); torch only.

Post-norm, learned positions, GELU in its exact form, biases everywhere, and the embedding as the head: the parameters
are those of Hugging Face's BertForMaskedLM.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TYPES = 2  # token types, of which all tokens have the first: rows are single texts


class Bert(nn.Module):
    """tokens: [batch, length] of ids -> logits: [batch, length, vocab_size], each of the token at that place.

    seen: [batch, length], True for tokens and False for padding, which nothing attends to; each row has a token. None:
    all are tokens.

    With places [batch, predicted], which number the tokens of a row from 0, it returns the logits of these alone,
    [batch, predicted, vocab_size], and computes no others. All rows have as many, as in the paper's code: a row that
    masks fewer repeats a place, whose loss is then ignored. They are the same shape for every batch, so that a compiler
    has one model to compile. `length` is at most `positions`.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        mlp_size: int,
        positions: int = 512,
        norm_eps: float = 1e-12,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed = Embed(vocab_size, hidden_size, positions, norm_eps, dropout)
        self.layers = nn.ModuleList(
            Layer(hidden_size, num_heads, mlp_size, norm_eps, dropout) for _ in range(num_layers)
        )
        self.head = Head(vocab_size, hidden_size, norm_eps)
        self.head.logits.weight = self.embed.tokens.weight
        self.initialise(hidden_size)

    def initialise(self, hidden_size: int) -> None:
        """Initialises by the paper's deviation, 0.02 at a width of 768: (3 width)^-1/2 at any width; biases by 0."""
        for name, weight in self.named_parameters():
            if weight.ndim >= 2:
                nn.init.normal_(weight, std=(3 * hidden_size) ** -0.5)
            elif name.endswith(".bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens: Tensor, seen: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        mask = None if seen is None else seen[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        if places is not None:
            x = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
        return self.head(x)


class Embed(nn.Module):
    """Adds a token's embedding, its position's and its type's: [batch, length] -> [batch, length, hidden]."""

    def __init__(self, vocab_size: int, hidden: int, positions: int, eps: float, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, hidden), nn.Embedding(positions, hidden)
        self.types = nn.Embedding(TYPES, hidden)
        self.norm, self.dropout = nn.LayerNorm(hidden, eps), nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.types(torch.zeros_like(places)) + self.positions(places)
        return self.dropout(self.norm(x))


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, mlp: int, eps: float, dropout: float) -> None:
        super().__init__()
        self.attend, self.norm1 = Attention(hidden, heads, dropout), nn.LayerNorm(hidden, eps)
        self.mlp, self.norm2 = MLP(hidden, mlp), nn.LayerNorm(hidden, eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.norm1(x + self.dropout(self.attend(x, mask)))
        return self.norm2(x + self.dropout(self.mlp(x)))


class Attention(nn.Module):
    """Attention of each token to all that the mask [batch, 1, 1, length] admits, by True; `dropout` is of its weights.

    A layer that is divided by columns computes as many heads as it has columns for.
    """

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.width, self.dropout = hidden // heads, nn.Dropout(dropout)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.training and self.dropout.p:
            out = self._with_dropout(q, k, v, mask)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(out.transpose(1, 2).flatten(2))

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the same with dropout by a layer, as models that are trained together under vmap need it."""
        scores = q @ k.mT * self.width**-0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return self.dropout(scores.softmax(-1)).to(v.dtype) @ v


class MLP(nn.Module):
    def __init__(self, hidden: int, mlp: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, mlp), nn.Linear(mlp, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Head(nn.Module):
    """Returns the logits [..., vocab_size] of x [..., hidden], by a dense layer and the embedding."""

    def __init__(self, vocab_size: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden, eps)
        self.logits = nn.Linear(hidden, vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(F.gelu(self.dense(x))))
