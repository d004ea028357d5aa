"""Defines ATFT-GAT-FAN. Torch only.

    x -> FAN -> residual -> variable selection -> gated convolutions -> attention over the window -> z
          \\-> main signal -> filters over the window --------------------------------------------------------> m
    z + m -> GATv2 over the day's graph -> gated fusion with z -> gated residual network -> head per horizon
    last day, its neighbours', main signal -> one linear map ------------------------------> + head per horizon

Letters in shapes: D days, N stocks, L days of the window, F features, K neighbours, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class FrequencyNormalisation(nn.Module):
    """FAN (Ye et al., NeurIPS 2024, arXiv 2409.20371): splits a window into its K strongest frequencies and the rest.

    x: [..., L, F], each channel alone -> (rest, main), rest + main = x. K = 0 is the identity: rest is x itself and
    main is 0. Frequencies of equal amplitude are kept together. The paper predicts the main signal by a network of two
    layers; here `Atft` reads it by filters and a linear map, without an activation between them.
    """

    dft: Tensor
    inverse: Tensor

    def __init__(self, lookback: int, num_frequencies: int) -> None:
        super().__init__()
        self.num_frequencies = num_frequencies
        # The real FFT of 20 days as one product: on a CPU faster than torch.fft with its strided copies.
        eye = torch.eye(lookback, dtype=torch.float64)
        dft = torch.view_as_real(torch.fft.rfft(eye, dim=0)).movedim(-1, 0).flatten(0, 1)
        self.register_buffer("dft", dft.float(), persistent=False)
        self.register_buffer("inverse", torch.linalg.pinv(dft).float(), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.num_frequencies == 0:
            return x, torch.zeros_like(x)
        spectrum = (self.dft @ x).unflatten(-2, (2, -1))
        power = spectrum.square().sum(dim=-3)
        # The K-th largest by K passes: on 11 bins faster than topk, and along a strided axis.
        left, least = power, power.amax(dim=-2, keepdim=True)
        for _ in range(self.num_frequencies - 1):
            left = torch.where(left >= least, -1.0, left)
            least = left.amax(dim=-2, keepdim=True)
        kept = torch.where((power >= least)[..., None, :, :], spectrum, 0.0)
        main = self.inverse @ kept.flatten(-3, -2)
        return x - main, main


class GatedResidual(nn.Module):
    """Gated residual network (Lim et al., arXiv 1912.09363, eq. 2 to 4): LayerNorm(skip(a) + GLU(W ELU(W a + W c)))."""

    def __init__(self, size: int, hidden: int, out: int, dropout: float, context: int = 0) -> None:
        super().__init__()
        self.enter = nn.Linear(size, hidden)
        self.context = nn.Linear(context, hidden, bias=False) if context else None
        self.middle = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)
        self.gate = nn.Linear(hidden, 2 * out)
        self.skip = nn.Identity() if size == out else nn.Linear(size, out)
        self.norm = nn.LayerNorm(out)

    def forward(self, a: Tensor, context: Tensor | None = None) -> Tensor:
        hidden = self.enter(a)
        if self.context is not None and context is not None:
            hidden = hidden + self.context(context)
        hidden = self.dropout(self.middle(F.elu(hidden)))
        return self.norm(self.skip(a) + F.glu(self.gate(hidden), dim=-1))


class VariableSelection(nn.Module):
    """Weights of the features of a window (TFT, section 4.2), one per stock and day: their mean is 1.

    Computed from the window's last day and mean, with the sector as context, and shared by the days of the window:
    a selection per day of the window costs L times as much. x: [D, N, L, F], context: [D, N, H] -> [D, N, F].
    """

    def __init__(self, features: int, hidden: int, dropout: float, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.features = features
        self.network = GatedResidual(2 * features, hidden, features, dropout, context=hidden)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        scores = self.network(torch.cat([x[..., -1, :], x.mean(dim=-2)], dim=-1), context)
        if self.kind == "softmax":
            return self.features * scores.softmax(dim=-1)
        return 2 * scores.sigmoid()


class GatedConvolution(nn.Module):
    """Gated convolution of kernel and stride 2, residual (Dauphin et al., arXiv 1612.08083): pairs of days become one.

    Aligned to the last day, so that the newest position always holds it; an odd length repeats the oldest day. The
    dropout mask is shared by the positions (Gal and Ghahramani, arXiv 1512.05287).
    x: [..., L, H] -> [..., ceil(L/2), H].
    """

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * hidden, 2 * hidden)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2] % 2:
            x = torch.cat([x[..., :1, :], x], dim=-2)
        pairs = x.unflatten(-2, (-1, 2))
        update = F.glu(self.mix(pairs.flatten(-2)), dim=-1)
        return self.norm(pairs[..., 1, :] + update * self.dropout(torch.ones_like(update[..., :1, :])))


class Recurrent(nn.Module):
    """LSTM with a gated residual (TFT, section 4.5). x: [..., L, H] -> the same shape."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.gate = nn.Linear(hidden, 2 * hidden)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x.flatten(0, -3))
        return self.norm(x + F.glu(self.gate(self.dropout(out)), dim=-1).view_as(x))


TEMPORAL = {"convolution": GatedConvolution, "lstm": Recurrent}


class WindowAttention(nn.Module):
    """Interpretable multi-head attention (TFT, section 4.4) of the last day over its window: heads share the values.

    x: [..., L, H] -> [..., H].
    """

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden, bias=False)  # a bias adds the same to all days: softmax drops it
        self.value = nn.Linear(hidden, self.size)
        self.out = nn.Linear(self.size, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x[..., -1, :]).unflatten(-1, (self.heads, self.size))
        # Bilinear form moved to the query: (Wk x) . q = x . (Wk^T q) spares a projection of every day of the window.
        folded = torch.einsum("...hs,hsd->...hd", query, self.key.weight.unflatten(0, (self.heads, self.size)))
        share = (folded @ x.transpose(-1, -2) / self.size**0.5).softmax(dim=-1)
        pooled = self.dropout(share).mean(dim=-2, keepdim=True) @ x
        return self.out(self.value(pooled.squeeze(-2)))


class GraphAttention(nn.Module):
    """GATv2 (Brody et al., arXiv 2105.14491) over padded, masked neighbour lists; the first is the stock itself.

    score = a . LeakyReLU(W_s h_source + W_t h_target + W_e edge) + b . edge, per head; b is shared by the heads (the
    edge bias of Graphormer, Ying et al., arXiv 2106.05234) and 0 at first, when neighbours weigh alike.

    h: [D, N, H]; features: [D, N, F]; neighbours: [D, N, K] int; valid: [D, N, K]; edges: [D, N, K, E] -> the message
    [D, N, H], and the others' features weighed by b . edge alone, [D, N, F]. A stock's own share is missing there, so
    one that no other leads gets little.
    """

    # Adam moves a weight by the learning rate a step: too little for a bias that must distinguish neighbours.
    SHARPNESS = 10.0

    def __init__(self, hidden: int, heads: int, edge_features: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.source = nn.Linear(hidden, hidden)
        self.target = nn.Linear(hidden, hidden)
        self.edge = nn.Linear(edge_features, hidden, bias=False)
        self.score = nn.Parameter(torch.empty(heads, self.size))
        nn.init.xavier_uniform_(self.score)
        self.prior = nn.Linear(edge_features, 1, bias=False)
        nn.init.zeros_(self.prior.weight)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, h: Tensor, features: Tensor, neighbours: Tensor, valid: Tensor, edges: Tensor
    ) -> tuple[Tensor, Tensor]:
        days, stocks, k = neighbours.shape
        flat = neighbours.reshape(days, stocks * k, 1)
        source = self.source(h).gather(1, flat.expand(-1, -1, h.shape[-1])).unflatten(1, (stocks, k))
        mixed = F.leaky_relu(source + self.target(h)[:, :, None] + self.edge(edges), 0.2)
        scores = (mixed.unflatten(-1, (self.heads, self.size)) * self.score).sum(dim=-1)
        prior = self.SHARPNESS * self.prior(edges)
        share = self.dropout((scores + prior).masked_fill(~valid[..., None], float("-inf")).softmax(dim=2))
        by_edge = prior.masked_fill(~valid[..., None], float("-inf")).softmax(dim=2)
        message = (share[..., None] * source.unflatten(-1, (self.heads, self.size))).sum(dim=2).flatten(-2)
        around = features.gather(1, flat.expand(-1, -1, features.shape[-1])).unflatten(1, (stocks, k))
        return message, (by_edge * around)[:, :, 1:].sum(dim=2)


class Atft(nn.Module):
    """The whole model.

    forward(x [D, N, L, F], mask [D, N], sectors [N], neighbours [D, N, K], valid [D, N, K], edges [D, N, K, E])
    -> [D, N, horizons], with several quantiles [D, N, horizons, quantiles], increasing by construction; outputs
    where the mask is False are meaningless. `sectors` are 0 for unknown. A call without `use_fan` or `use_graph` leaves
    that part out, as a phase of training may.

    The last day's features, its neighbours', and filters over the main signal's window also reach every head by one
    linear map, in parallel to the deep part (Cheng et al., arXiv 1606.07792), which linear effects need not pass.
    """

    def __init__(
        self,
        num_features: int,
        num_horizons: int,
        num_sectors: int,
        edge_features: int,
        *,
        lookback: int,
        hidden_size: int,
        num_heads: int,
        num_layers: int,
        num_filters: int,
        dropout: float,
        num_frequencies: int,
        graph: bool,
        temporal: str,
        selection: str,
        attention: bool,
        main_layers: int = 1,
        num_quantiles: int = 1,
    ) -> None:
        super().__init__()
        self.num_quantiles = num_quantiles
        outputs = num_horizons * num_quantiles
        self.fan = FrequencyNormalisation(lookback, num_frequencies)
        if num_frequencies:
            self.main_window = nn.Linear(lookback, num_filters)
            self.main_mix = nn.Linear(num_filters * num_features, hidden_size)
            self.main_deep = (
                nn.Sequential(nn.GELU(), nn.Linear(hidden_size, hidden_size)) if main_layers > 1 else nn.Identity()
            )
            self.main_skip = nn.Linear(num_filters * num_features, outputs, bias=False)
        self.sector = nn.Embedding(num_sectors + 1, hidden_size) if selection != "none" else None
        self.select = VariableSelection(num_features, hidden_size, dropout, selection) if selection != "none" else None
        self.embed = nn.Linear(num_features, hidden_size)
        self.position = nn.Parameter(0.02 * torch.randn(lookback, hidden_size))
        self.temporal = nn.ModuleList(TEMPORAL[temporal](hidden_size, dropout) for _ in range(num_layers))
        self.attention = WindowAttention(hidden_size, num_heads, dropout) if attention else None
        self.attention_gate = nn.Linear(hidden_size, 2 * hidden_size) if attention else None
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.gat = GraphAttention(hidden_size, num_heads, edge_features, dropout) if graph else None
        self.fusion = nn.Linear(2 * hidden_size, hidden_size) if graph else None
        self.graph_skip = nn.Linear(num_features, outputs, bias=False) if graph else None
        self.refine = GatedResidual(hidden_size, hidden_size, hidden_size, dropout)
        self.head = nn.Linear(hidden_size, outputs)
        self.skip = nn.Linear(num_features, outputs, bias=False)
        self._start_small()

    def _start_small(self) -> None:
        """Starts the head small: returns are nearly noise, and a random head's output would have to be unlearnt.

        The filters begin as means of the last 20, 10, 5, ... days.
        """
        with torch.no_grad():
            self.head.weight.mul_(0.1)
            if self.fan.num_frequencies:
                filters, lookback = self.main_window.weight.shape
                lengths = [max(1, lookback >> i) for i in range(filters)]
                means = [torch.arange(lookback) >= lookback - n for n in lengths]
                self.main_window.weight.copy_(torch.stack(means) / torch.tensor(lengths)[:, None])
                self.main_window.bias.zero_()
            for name, module in self.named_children():
                if isinstance(module, nn.Linear) and name.endswith("skip"):
                    module.weight.zero_()

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        sectors: Tensor,
        neighbours: Tensor,
        valid: Tensor,
        edges: Tensor,
        use_fan: bool = True,
        use_graph: bool = True,
    ) -> Tensor:
        use_fan = use_fan and self.fan.num_frequencies > 0
        rest, main = self.fan(x) if use_fan else (x, x)
        weights = x.new_ones(x.shape[-1])
        if self.select is not None and self.sector is not None:
            weights = self.select(x, self.sector(sectors).expand(x.shape[0], -1, -1))
        # FAN takes each channel separately, so channels may be weighed after it.
        z = self._read(rest * weights[..., None, :])
        last = x[..., -1, :] * weights
        out = self.skip(last)
        if use_fan:
            filtered = (self.main_window(main.transpose(-1, -2)) * weights[..., None]).flatten(-2)
            z, out = z + self.main_deep(self.main_mix(filtered)), out + self.main_skip(filtered)
        if use_graph and self.gat is not None and self.fusion is not None and self.graph_skip is not None:
            # A neighbour that is absent that day is masked; the stock itself always stays.
            present = mask.gather(1, neighbours.flatten(1)).view_as(neighbours) & valid
            present = torch.cat([torch.ones_like(present[..., :1]), present[..., 1:]], dim=-1)
            message, around = self.gat(z, last, neighbours, present, edges)
            gate = torch.sigmoid(self.fusion(torch.cat([z, message], dim=-1)))
            z, out = gate * message + (1 - gate) * z, out + self.graph_skip(around)
        out = out + self.head(self.refine(z))
        return out if self.num_quantiles == 1 else spread(out.unflatten(-1, (-1, self.num_quantiles)))

    def _read(self, window: Tensor) -> Tensor:
        """Returns [D, N, H] of [D, N, L, F]: the temporal block and attention, seen from the last day."""
        z = self.embed(window) + self.position
        for layer in self.temporal:
            z = layer(z)
        last = z[..., -1, :]
        if self.attention is not None and self.attention_gate is not None:
            last = last + F.glu(self.attention_gate(self.attention(z)), dim=-1)
        return self.attention_norm(last)


def spread(raw: Tensor) -> Tensor:
    """Returns increasing values [..., quantiles] from any values.

    The middle one stays, each next one is a softplus further out.
    """
    middle = raw.shape[-1] // 2
    steps = F.softplus(raw)
    centre = raw[..., middle : middle + 1]
    above = centre + steps[..., middle + 1 :].cumsum(dim=-1)
    below = centre - steps[..., :middle].flip(-1).cumsum(dim=-1).flip(-1)
    return torch.cat([below, centre, above], dim=-1)
