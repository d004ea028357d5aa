"""Defines T5, an encoder and a decoder (Raffel et al. 2020, arXiv 1910.10683); torch only.

Pre-norm by RMSNorm (Zhang & Sennrich 2019), no biases, attention without a scale, and relative positions: a number for
each head and bucket of distances, which all layers of a stack add to the scores. T5 1.0 has ReLU and the embedding as
the head; 1.1 has GeGLU (Shazeer 2020, arXiv 2002.05202) and a head of its own. The parameters are those of Hugging
Face's T5ForConditionalGeneration.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BUCKETS, FARTHEST = 32, 128  # of distances, all of which from the farthest on are in one bucket


class T5(nn.Module):
    """tokens: [batch, length], targets_in: [batch, out] of ids -> logits: [batch, out, vocab_size].

    The decoder reads targets_in, which are a start token and the target, and each logit is of the token that follows.
    Their padding comes last, so that no token sees it.

    seen: [batch, length], True for tokens and False for padding, which nothing attends to; each row has a token. None:
    all are tokens.

    num_layers: of each stack. head_size: the width of a head, None for hidden_size / num_heads. dropout: of embeddings
    and attention weights, within the MLP, after each sublayer and after each stack, as in the paper's code. tie: the
    embedding is the head as well, on whose input the decoder's output is scaled by hidden_size^-1/2.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        mlp_size: int,
        head_size: int | None = None,
        activation: Literal["relu", "geglu"] = "geglu",
        norm_eps: float = 1e-6,
        dropout: float = 0.0,
        tie: bool = True,
    ) -> None:
        super().__init__()
        width, feed = head_size or hidden_size // num_heads, {"relu": MLP, "geglu": GatedMLP}[activation]

        def layer(cross: bool) -> Layer:
            return Layer(hidden_size, num_heads, width, feed(hidden_size, mlp_size, dropout), norm_eps, dropout, cross)

        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.encoder, self.decoder = (
            Stack([layer(causal) for _ in range(num_layers)], hidden_size, num_heads, norm_eps, dropout, causal)
            for causal in (False, True)
        )
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.scale = hidden_size**-0.5 if tie else 1.0
        if tie:
            self.head.weight = self.embed.weight
        self.initialise(hidden_size, width)

    def initialise(self, hidden_size: int, width: int) -> None:
        """Initialises as the paper's code does: by a variance of 1 / inputs, 1 / (inputs * width) for queries.

        Queries so have the scale that attention lacks. A head that is not the embedding is as any layer, like that of
        the authors' T5X.
        """
        for name, weight in self.named_parameters():
            if name == "embed.weight":
                nn.init.normal_(weight)
            elif weight.ndim == 2:
                inputs = hidden_size if name.endswith(".bias.weight") else weight.shape[1]
                nn.init.normal_(weight, std=(inputs * (width if name.endswith(".q.weight") else 1)) ** -0.5)

    def forward(self, tokens: Tensor, seen: Tensor | None, targets_in: Tensor) -> Tensor:
        mask = None if seen is None else seen[:, None, None, :]
        memory = self.encoder(self.embed(tokens), mask)
        return self.head(self.decoder(self.embed(targets_in), None, memory, mask) * self.scale)


class Stack(nn.Module):
    """The encoder, or the causal decoder: x [batch, length, hidden] -> [batch, length, hidden].

    mask: [batch, 1, 1, length], True where x has a token; None: everywhere. memory: the encoder's output, for layers
    with cross attention, and its mask.
    """

    def __init__(self, layers: list[Layer], hidden: int, heads: int, eps: float, dropout: float, causal: bool) -> None:
        super().__init__()
        self.layers, self.bias, self.causal = nn.ModuleList(layers), nn.Embedding(BUCKETS, heads), causal
        self.norm, self.dropout = nn.RMSNorm(hidden, eps), nn.Dropout(dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        scores = self.scores(x.shape[1], x.device)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, scores, memory, memory_mask)
        return self.dropout(self.norm(x))

    def scores(self, length: int, device: torch.device) -> Tensor:
        """Returns what is added to the scores, [1, heads, length, length]: by distance, -inf for the decoder's later
        tokens."""
        places = torch.arange(length, device=device)
        distance = places - places[:, None]
        scores = self.bias(buckets(distance, self.causal)).permute(2, 0, 1)[None]
        return scores.masked_fill(distance > 0, -torch.inf) if self.causal else scores


class Layer(nn.Module):
    """Adds to x what its sublayers compute of its norm: attention, cross attention in the decoder, and the MLP."""

    def __init__(
        self, hidden: int, heads: int, width: int, mlp: nn.Module, eps: float, dropout: float, cross: bool
    ) -> None:
        super().__init__()
        self.norm1, self.attend = nn.RMSNorm(hidden, eps), Attention(hidden, heads, width, dropout)
        if cross:
            self.norm_cross, self.cross = nn.RMSNorm(hidden, eps), Attention(hidden, heads, width, dropout)
        self.norm2, self.mlp, self.dropout = nn.RMSNorm(hidden, eps), mlp, nn.Dropout(dropout)

    def forward(self, x: Tensor, scores: Tensor, memory: Tensor | None, memory_mask: Tensor | None) -> Tensor:
        normed = self.norm1(x)
        x = x + self.dropout(self.attend(normed, normed, scores))
        if memory is not None:
            x = x + self.dropout(self.cross(self.norm_cross(x), memory, memory_mask))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Attention(nn.Module):
    """Attention of x to memory; `mask` is added to the scores, or True where they count. `dropout` is of the weights.

    A layer that is divided by columns computes as many heads as it has columns for.
    """

    def __init__(self, hidden: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.width, self.dropout = width, nn.Dropout(dropout)
        self.q, self.k, self.v = (nn.Linear(hidden, heads * width, bias=False) for _ in range(3))
        self.o = nn.Linear(heads * width, hidden, bias=False)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        projected = (self.q(x), self.k(memory), self.v(memory))
        q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in projected)
        # No kernel of PyTorch's has gradients of what is added to the scores on all devices and under vmap.
        scores = q @ k.mT
        if mask is not None:
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
        out = self.dropout(scores.softmax(-1)).to(v.dtype) @ v
        return self.o(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """T5 1.0's: down(relu(up(x)))."""

    def __init__(self, hidden: int, mlp: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, mlp, bias=False), nn.Linear(mlp, hidden, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.activate(x)))

    def activate(self, x: Tensor) -> Tensor:
        return F.relu(self.up(x))


class GatedMLP(MLP):
    """T5 1.1's: down(gelu(gate(x)) * up(x)), with GELU's approximation by tanh."""

    def __init__(self, hidden: int, mlp: int, dropout: float) -> None:
        super().__init__(hidden, mlp, dropout)
        self.gate = nn.Linear(hidden, mlp, bias=False)

    def activate(self, x: Tensor) -> Tensor:
        return F.gelu(self.gate(x), approximate="tanh") * self.up(x)


def buckets(distance: Tensor, causal: bool) -> Tensor:
    """Returns the buckets, from 0, of distances, which are a key's place less the query's.

    Half of the buckets are of single distances, the others of ranges that grow by a constant factor up to FARTHEST.
    Without `causal`, later keys have half of all buckets; else they have bucket 0, as they are not seen.
    """
    count = BUCKETS if causal else BUCKETS // 2
    steps = (-distance).clamp(min=0) if causal else distance.abs()
    single = count // 2
    bounds = [single * (FARTHEST / single) ** (i / (count - single)) for i in range(1, count - single)]
    bucket = steps.clamp(max=single) + sum((steps >= bound).long() for bound in bounds)
    return bucket if causal else bucket + (distance > 0) * count
