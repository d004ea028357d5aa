"""The parts of the atft net, each against its formula written out in numpy, in double precision."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from studies.atft.model import Atft, GatedConvolution, GatedResidual, VariableSelection, WindowAttention


def ready(part: nn.Module) -> nn.Module:
    """In double, without dropout, its layer norms scaling and shifting, which at first they do not."""
    torch.manual_seed(0)
    for layer in part.modules():
        if isinstance(layer, nn.LayerNorm):
            nn.init.normal_(layer.weight, 1.0, 0.5)
            nn.init.normal_(layer.bias)
    return part.double().eval()


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def array(x: Tensor) -> np.ndarray:
    return x.detach().numpy()


def line(x: np.ndarray, layer: nn.Linear) -> np.ndarray:
    return x @ array(layer.weight).T + (0 if layer.bias is None else array(layer.bias))


def normed(x: np.ndarray, norm: nn.LayerNorm) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + norm.eps)
    return array(norm.weight) * centred / deviation + array(norm.bias)


def gated(x: np.ndarray) -> np.ndarray:
    """GLU: the first half of the last axis by the sigmoid of the second."""
    half = x.shape[-1] // 2
    return x[..., :half] / (1 + np.exp(-x[..., half:]))


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


def residual(part: GatedResidual, a: np.ndarray, c: np.ndarray | None) -> np.ndarray:
    """Lim et al. 2021, eq. 2 to 4; where the width changes, a line of the input is what the gate's is added to."""
    entered = line(a, part.enter) + (0 if c is None else line(c, part.context))
    eta2 = np.where(entered > 0, entered, np.exp(entered) - 1)
    eta1 = line(eta2, part.middle)
    kept = a if isinstance(part.skip, nn.Identity) else line(a, part.skip)
    return normed(kept + gated(line(eta1, part.gate)), part.norm)


@pytest.mark.parametrize(("size", "out", "context"), [(5, 5, 0), (5, 3, 0), (5, 5, 4), (6, 3, 4)])
def test_a_gated_residual_network_is_its_equations(size, out, context):
    part = ready(GatedResidual(size, 7, out, 0.5, context))
    assert isinstance(part.skip, nn.Identity) == (size == out)
    a, c = drawn(2, 3, size), drawn(2, 3, context) if context else None
    expected = residual(part, array(a), None if c is None else array(c))
    np.testing.assert_allclose(array(part(a, c)), expected, atol=1e-12)
    if context:
        np.testing.assert_allclose(array(part(a)), residual(part, array(a), None), atol=1e-12)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_features_are_weighed_by_the_last_day_the_mean_and_the_sector(kind):
    part = ready(VariableSelection(5, 8, 0.5, kind))
    x, sector = drawn(2, 3, 6, 5), drawn(2, 3, 8)
    seen = np.concatenate([array(x)[:, :, -1], array(x).mean(axis=2)], axis=-1)
    scores = residual(part.network, seen, array(sector))
    found = array(part(x, sector))
    expected = 5 * softmax(scores) if kind == "softmax" else 2 / (1 + np.exp(-scores))
    np.testing.assert_allclose(found, expected, atol=1e-12)
    if kind == "softmax":
        np.testing.assert_allclose(found.mean(axis=-1), 1)


@pytest.mark.parametrize("selection", ["softmax", "sigmoid"])
def test_a_net_with_selection_is_one_without_that_reads_weighed_features(selection):
    """Wherever features are read: in the window, in the main signal, on the last day, and of the neighbours."""
    settings = {"lookback": 6, "hidden_size": 8, "num_heads": 2, "num_layers": 1, "num_filters": 2, "dropout": 0.1}
    settings |= {"num_frequencies": 2, "graph": True, "temporal": "convolution", "attention": True}
    net, plain = (ready(Atft(5, 2, 3, 2, **settings, selection=kind)) for kind in (selection, "none"))
    for skip in (net.skip, net.main_skip, net.graph_skip):
        nn.init.normal_(skip.weight)
    assert plain.load_state_dict(net.state_dict(), strict=False).missing_keys == []
    x, sectors = drawn(2, 4, 6, 5), torch.tensor([0, 1, 2, 1])
    neighbours = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]]).expand(2, -1, -1)
    around = (torch.ones(2, 4, dtype=torch.bool), sectors, neighbours, torch.ones(2, 4, 2, dtype=torch.bool))
    weights = net.select(x, net.sector(sectors).expand(2, -1, -1))
    assert weights.std(dim=-1).min() > 0.1
    rest = (*around, drawn(2, 4, 2, 2))
    torch.testing.assert_close(net(x, *rest), plain(x * weights[..., None, :], *rest))


@pytest.mark.parametrize("days", [1, 4, 7])
def test_a_gated_convolution_pairs_days_from_the_last(days):
    part = ready(GatedConvolution(4, 0.5))
    x = drawn(2, 3, days, 4)
    pairs = [(max(newer - 1, 0), newer) for newer in range(days - 1, -1, -2)][::-1]
    expected = [
        normed(both[..., 4:] + gated(line(both, part.mix)), part.norm)
        for both in (
            np.concatenate([array(x)[..., older, :], array(x)[..., newer, :]], axis=-1) for older, newer in pairs
        )
    ]
    np.testing.assert_allclose(array(part(x)), np.stack(expected, axis=-2), atol=1e-12)


def test_a_gated_convolution_drops_the_same_channels_of_every_pair():
    part = ready(GatedConvolution(4, 0.5))
    part.norm = nn.Identity()
    x = drawn(5, 8, 4)
    whole = part(x) - x[:, 1::2]
    share = (part.train()(x) - x[:, 1::2]) / whole
    torch.testing.assert_close(share, share[:, :1].round().expand(-1, 4, -1))
    assert set(share[:, 0].round().flatten().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("heads", [1, 3])
def test_attention_over_the_window_is_the_mean_of_its_heads(heads):
    """Head by head: softmax(q . k / sqrt(width)) of the last day's query and every day's key."""
    part = ready(WindowAttention(6, heads, 0.5))
    x, size = drawn(2, 3, 5, 6), 6 // heads
    query, keys, values = line(array(x)[:, :, -1], part.query), line(array(x), part.key), line(array(x), part.value)
    shares = []
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        scores = (keys[..., own] * query[:, :, None, own]).sum(axis=-1) / np.sqrt(size)
        shares.append(softmax(scores))
    pooled = (np.mean(shares, axis=0)[..., None] * values).sum(axis=2)
    np.testing.assert_allclose(array(part(x)), line(pooled, part.out), atol=1e-12)
