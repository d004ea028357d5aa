"""A Llama-style decoder (Touvron et al. 2023, arXiv 2302.13971); torch only.

Pre-norm by RMSNorm (Zhang & Sennrich 2019), rotary positions (Su et al. 2021, arXiv 2104.09864, in the layout of
Hugging Face: coordinate i turns with coordinate i + width/2), grouped-query attention (Ainslie et al. 2023, arXiv
2305.13245), SwiGLU (Shazeer 2020, arXiv 2002.05202), no biases.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Llama(nn.Module):
    """tokens: [batch, length] of ids -> logits: [batch, length, vocab_size], each of the token that follows.

    documents: [batch, length], the number of a token's document within its row, -1 for padding: a token attends to its
    own document, up to itself. None: each row is one document.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        mlp_size: int,
        rope_theta: float = 10_000.0,
        norm_eps: float = 1e-5,
        tie: bool = False,
    ) -> None:
        super().__init__()
        self.embed = Embed(vocab_size, hidden_size, hidden_size // num_heads, rope_theta)
        self.blocks = nn.ModuleList(
            Block(hidden_size, num_heads, num_kv_heads, mlp_size, norm_eps) for _ in range(num_layers)
        )
        self.head = Head(vocab_size, hidden_size, norm_eps)
        if tie:
            self.head.logits.weight = self.embed.tokens.weight
        self.initialise(hidden_size, num_layers)

    def initialise(self, hidden_size: int, num_layers: int) -> None:
        """GPT-2's (Radford et al. 2019), whose deviation of 0.02 at a width of 768 is (3 width)^-1/2: so at any other.
        What adds to the residual stream is smaller by the root of how often that happens."""
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                adds = name.endswith(("attend.o.weight", "mlp.down.weight"))
                nn.init.normal_(weight, std=(3 * hidden_size * (2 * num_layers if adds else 1)) ** -0.5)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        state = self.embed(tokens, documents)
        for block in self.blocks:
            state = block(*state)
        return self.head(*state)

    def parts(self) -> list[nn.Module]:
        """Modules which, called one after another, compute what it does: for the stages of a pipeline."""
        return [self.embed, *self.blocks, self.head]


class Embed(nn.Module):
    """(x [batch, length, hidden], cos, sin) and, where documents are given or tokens were read before, a mask, for all
    blocks: parts hand on all of it."""

    past: int | None = None  # how many tokens were read before, between `remember` and `forget`

    def __init__(self, vocab_size: int, hidden_size: int, width: int, theta: float) -> None:
        super().__init__()
        self.tokens, self.width, self.theta = nn.Embedding(vocab_size, hidden_size), width, theta

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> tuple[Tensor, ...]:
        length, past = tokens.shape[1], self.past or 0
        turns = angles(length, self.width, self.theta, tokens.device, past)
        masks = [] if documents is None else [document_mask(documents)]
        if past:
            masks = [torch.ones(length, past + length, dtype=torch.bool, device=tokens.device).tril(past)]
        if self.past is not None:
            self.past += length
        return self.tokens(tokens), *turns, *masks


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, mlp: int, eps: float) -> None:
        super().__init__()
        self.norm1, self.attend = nn.RMSNorm(hidden, eps), Attention(hidden, heads, kv_heads)
        self.norm2, self.mlp = nn.RMSNorm(hidden, eps), SwiGLU(hidden, mlp)

    def forward(self, x: Tensor, *places: Tensor) -> tuple[Tensor, ...]:
        x = x + self.attend(self.norm1(x), *places)
        return x + self.mlp(self.norm2(x)), *places


class Head(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps)
        self.logits = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, x: Tensor, *places: Tensor) -> Tensor:
        return self.logits(self.norm(x))


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, mlp: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, mlp, bias=False), nn.Linear(hidden, mlp, bias=False)
        self.down, self.silu = nn.Linear(mlp, hidden, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Causal, within documents; `heads / kv_heads` successive heads share keys and values. Of a layer that is divided
    by columns it computes as many heads as there are columns for."""

    past: list[tuple[Tensor, Tensor]] | None = None  # keys and values [batch, kv_heads, length, width] of tokens before

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.width, self.shared = hidden // heads, heads // kv_heads
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = (nn.Linear(hidden, kv_heads * self.width, bias=False) for _ in range(2))
        self.o = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.past is not None:
            k, v = (torch.cat(parts, dim=2) for parts in zip(*self.past, (k, v), strict=True))
            self.past = [(k, v)]
        # Not enable_gqa: on a GPU no memory-efficient kernel has both that and a mask, and all scores would be written.
        k, v = (t.repeat_interleave(self.shared, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o(out.transpose(1, 2).flatten(2))


def remember(model: nn.Module) -> None:
    """From now on each call reads the tokens that follow those of the calls before, from none on; without documents.

    Every layer keeps the keys and values that it has computed, so ranks which divide the model have those of their own
    heads and blocks. Called again, it begins anew.
    """
    for module in model.modules():
        if isinstance(module, Embed):
            module.past = 0
        elif isinstance(module, Attention):
            module.past = []


def forget(model: nn.Module) -> None:
    """Each call is a whole row again."""
    for module in model.modules():
        if isinstance(module, Embed | Attention):
            module.past = None


def angles(
    length: int, width: int, theta: float, device: torch.device | None = None, start: int = 0
) -> tuple[Tensor, Tensor]:
    """cos and sin [length, width] of position * theta^(-2i/width), i = 0 .. width/2 - 1, twice over.

    Positions count from `start`, by default the row's, whatever document stands there: attention depends on differences
    alone.
    """
    places = torch.arange(start, start + length, dtype=torch.float32, device=device)
    rates = theta ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angle = (places[:, None] * rates).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + width/2}) of x [..., length, width] by its angle."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def document_mask(documents: Tensor) -> Tensor:
    """[batch, 1, length, length], True where a token may look: at its own document up to itself; padding at itself."""
    length = documents.shape[1]
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
