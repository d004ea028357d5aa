"""Defines a Llama-style decoder (Touvron et al. 2023, arXiv 2302.13971); torch only.

Pre-norm by RMSNorm (Zhang & Sennrich 2019), rotary positions (Su et al. 2021, arXiv 2104.09864, in the layout of
Hugging Face: coordinate i turns with coordinate i + width/2), grouped-query attention (Ainslie et al. 2023, arXiv
2305.13245), SwiGLU or GeGLU (Shazeer 2020, arXiv 2002.05202), no biases.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Plain:
    """Computes attention and the loss by torch's own functions; `Llama` takes others with the same three methods."""

    @staticmethod
    def mask(documents: Tensor, width: int, begins: Tensor | None) -> Tensor | None:
        """Returns the argument of `attend` that keeps documents [batch, length] apart, with heads of size `width`."""
        return document_mask(documents)

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Returns causal attention [batch, heads, length, width] of q; successive heads share one of k and v."""
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)

    @staticmethod
    def loss(x: Tensor, head: nn.Module, targets: Tensor) -> Tensor:
        """Returns the summed cross-entropy of head(x) [..., classes] by targets [...], -100 for none."""
        return F.cross_entropy(head(x).flatten(0, -2).float(), targets.flatten(), reduction="sum")


class Rotary:
    """Tells the layers where tokens are, by turning queries and keys; `Llama` takes others with the same methods.

    `start` is the number of tokens that were read before, which belong to the same document.
    """

    def __init__(self, width: int, theta: float) -> None:
        self.width, self.theta = width, theta

    def place(self, x: Tensor, documents: Tensor | None, start: int) -> Tensor:
        """Returns the embedded tokens x [batch, length, hidden], to which other positions are added."""
        return x

    def turns(self, length: int, device: torch.device, start: int) -> Tensor:
        """Returns cos and sin [2, length, width] of the angles by which `rotate` turns."""
        return tables(length, self.width, self.theta, device, start)

    def limit(
        self, mask: Tensor | None, documents: Tensor | None, length: int, device: torch.device, start: int
    ) -> Tensor | None:
        """Returns the argument of `Plain.attend`, made of the causal mask, None where the whole row may be seen."""
        return mask


class Llama(nn.Module):
    """tokens: [batch, length] of ids -> logits: [batch, length, vocab_size], each of the token that follows.

    documents: [batch, length], the number of a token's document within its row, -1 for padding: a token attends to its
    own document, up to itself. None: each row is one document. begins: where documents begin, as `kernels` take it.

    With targets [batch, length], -100 for none, it returns their summed cross-entropy in place of the logits.

    feed: makes a block's MLP of (hidden_size, mlp_size); None: a `GatedMLP`. positions: None for `Rotary` ones.
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
        kernels: type[Plain] = Plain,
        feed: Callable[[int, int], nn.Module] | None = None,
        positions: Rotary | None = None,
    ) -> None:
        super().__init__()
        positions = positions or Rotary(hidden_size // num_heads, rope_theta)
        self.embed = Embed(vocab_size, hidden_size, positions, kernels)
        self.blocks = nn.ModuleList(
            Block(hidden_size, num_heads, num_kv_heads, mlp_size, norm_eps, kernels, feed or GatedMLP)
            for _ in range(num_layers)
        )
        self.head = Head(vocab_size, hidden_size, norm_eps, kernels)
        if tie:
            self.head.logits.weight = self.embed.tokens.weight
        self.initialise(hidden_size, num_layers)

    def initialise(self, hidden_size: int, num_layers: int) -> None:
        """Initialises as GPT-2 does (Radford et al. 2019), whose deviation of 0.02 at a width of 768 is (3 width)^-1/2.

        The same formula holds at any width. Weights that add to the residual stream are smaller by the root of the
        number of such additions.
        """
        for name, weight in self.named_parameters():
            if weight.ndim >= 2:
                adds = name.removesuffix(".weight").endswith(("attend.o", "mlp.down", "mlp.shared.down"))
                nn.init.normal_(weight, std=(3 * hidden_size * (2 * num_layers if adds else 1)) ** -0.5)

    def forward(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
        begins: Tensor | None = None,
    ) -> Tensor:
        state = self.embed(tokens, documents, targets, begins)
        for block in self.blocks:
            state = block(*state)
        return self.head(*state)

    def parts(self) -> list[nn.Module]:
        """Returns modules which, called one after another, compute the model: for the stages of a pipeline."""
        return [self.embed, *self.blocks, self.head]


class Embed(nn.Module):
    """Returns (x [batch, length, hidden], cos, sin), then optional tensors; all parts pass on all of it.

    These are a mask or the documents' offsets, if rows have several documents or tokens were read before, and the
    targets if given. Only targets are int64.
    """

    past: int | None = None  # number of tokens read before, between `remember` and `forget`

    def __init__(self, vocab_size: int, hidden_size: int, positions: Rotary, kernels: type[Plain] = Plain) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions, self.kernels = positions, kernels

    def forward(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
        begins: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        length, past, device = tokens.shape[1], self.past or 0, tokens.device
        turns = self.positions.turns(length, device, past)
        mask = None if documents is None else self.kernels.mask(documents, self.positions.width, begins)
        if past:
            mask = torch.ones(length, past + length, dtype=torch.bool, device=device).tril(past)
        mask = self.positions.limit(mask, documents, length, device, past)
        if self.past is not None:
            self.past += length
        x = self.positions.place(self.tokens(tokens), documents, past)
        return x, turns[0], turns[1], *(t for t in (mask, targets) if t is not None)


class Block(nn.Module):
    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        mlp: int,
        eps: float,
        kernels: type[Plain],
        feed: Callable[[int, int], nn.Module],
    ) -> None:
        super().__init__()
        self.norm1, self.attend = nn.RMSNorm(hidden, eps), Attention(hidden, heads, kv_heads, kernels)
        self.norm2, self.mlp = nn.RMSNorm(hidden, eps), feed(hidden, mlp)

    def forward(self, x: Tensor, *extra: Tensor) -> tuple[Tensor, ...]:
        x = x + self.attend(self.norm1(x), *extra)
        return x + self.mlp(self.norm2(x)), *extra


class Head(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int, eps: float, kernels: type[Plain]) -> None:
        super().__init__()
        self.norm, self.kernels = nn.RMSNorm(hidden_size, eps), kernels
        self.logits = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, x: Tensor, *extra: Tensor) -> Tensor:
        x = self.norm(x)
        targets = [t for t in extra if t.dtype == torch.int64]
        return self.kernels.loss(x, self.logits, *targets) if targets else self.logits(x)


class GatedMLP(nn.Module):
    """Computes down(activation(gate(x)) * up(x)): SwiGLU with SiLU, GeGLU with GELU."""

    def __init__(self, hidden: int, mlp: int, activation: type[nn.Module] = nn.SiLU) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, mlp, bias=False), nn.Linear(hidden, mlp, bias=False)
        self.down, self.activation = nn.Linear(mlp, hidden, bias=False), activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Recalls(nn.Module):
    """A module that keeps what it has computed with earlier tokens, between `remember` and `forget`."""

    past: list[tuple[Tensor, ...]] | None = None


class Attention(Recalls):
    """Causal attention within documents; `heads / kv_heads` successive heads share keys and values.

    A layer that is divided by columns computes as many heads as it has columns for. It keeps keys and values,
    [batch, kv_heads, length, width].
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, kernels: type[Plain] = Plain) -> None:
        super().__init__()
        self.width, self.kernels = hidden // heads, kernels
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = (nn.Linear(hidden, kv_heads * self.width, bias=False) for _ in range(2))
        self.o = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *extra: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.past is not None:
            k, v = (torch.cat(parts, dim=2) for parts in zip(*self.past, (k, v), strict=True))
            self.past = [(k, v)]
        mask = next((t for t in extra if t.dtype != torch.int64), None)
        if mask is not None and mask.is_floating_point():
            mask = mask.to(q.dtype)  # as autocast computes
        out = self.kernels.attend(q, k, v, mask)
        return self.o(out.transpose(1, 2).flatten(2))


def remember(model: nn.Module) -> None:
    """Makes each later call read the tokens after those of the previous calls, starting from none; without documents.

    Every layer keeps the keys and values that it has computed, so ranks which divide the model keep those of their own
    heads and blocks. A second call starts again.
    """
    for module in model.modules():
        if isinstance(module, Embed):
            module.past = 0
        elif isinstance(module, Recalls):
            module.past = []


def forget(model: nn.Module) -> None:
    """Makes each call a whole row again."""
    for module in model.modules():
        if isinstance(module, Embed | Recalls):
            vars(module).pop("past", None)  # restores its original state, so that training has changed no attribute


def angles(
    length: int, width: int, theta: float, device: torch.device | None = None, start: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [length, width] of position * theta^(-2i/width), i = 0 .. width/2 - 1, repeated twice.

    Positions count from `start`, by default the row's, whatever document is there: attention depends only on
    differences.
    """
    positions = torch.arange(start, start + length, dtype=torch.float32, device=device)
    rates = theta ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angle = (positions[:, None] * rates).repeat(1, 2)
    return angle.cos(), angle.sin()


def tables(length: int, width: int, theta: float, device: torch.device, start: int) -> Tensor:
    """Returns the two `angles` as one tensor, which a compiled model keeps.

    Its kernels would otherwise compute cos and sin for each number that they turn, in 25 ms of a step of 143 on an
    H200.
    """
    return torch.stack(angles(length, width, theta, device, start))


# Like torch.compiler.assume_constant_result, which takes two seconds to import.
tables._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (x_i, x_{i + width/2}) of x [..., length, width] by its angle."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def document_mask(documents: Tensor) -> Tensor:
    """Returns [batch, 1, length, length], True if a token may look: at its own document up to itself.

    Padding looks at padding.
    """
    length = documents.shape[1]
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
