"""What the model must do before it has learnt anything."""

import numpy as np
import pytest
import torch

from studies.atft.model import Atft, FrequencyNormalisation, GraphAttention, Recurrent, spread

D, N, L, F, K, H = 2, 9, 20, 6, 4, 3


def make(**changes):
    torch.manual_seed(0)
    settings = {
        "lookback": L,
        "hidden_size": 16,
        "num_heads": 4,
        "num_layers": 2,
        "num_filters": 4,
        "temporal": "convolution",
        "attention": True,
        "dropout": 0.1,
        "num_frequencies": 3,
        "graph": True,
        "selection": "softmax",
    }
    return Atft(F, H, 3, 2, **(settings | changes)).eval()


def inputs(seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    neighbours = torch.randint(0, N, (D, N, K), generator=g)
    neighbours[..., 0] = torch.arange(N)
    return {
        "x": torch.randn(D, N, L, F, generator=g),
        "mask": torch.rand(D, N, generator=g) > 0.2,
        "sectors": torch.randint(0, 4, (N,), generator=g),
        "neighbours": neighbours,
        "valid": torch.rand(D, N, K, generator=g) > 0.3,
        "edges": torch.randn(D, N, K, 2, generator=g),
    }


@pytest.mark.parametrize("lookback", [20, 21])
@pytest.mark.parametrize("k", range(6))
def test_fan_equals_the_largest_bins_of_torch_fft(k, lookback):
    x = torch.randn(5, lookback, 7, generator=torch.Generator().manual_seed(k))
    rest, main = FrequencyNormalisation(lookback, k)(x)
    spectrum = torch.fft.rfft(x, dim=1)
    order = spectrum.abs().argsort(dim=1, descending=True)
    kept = torch.zeros_like(spectrum).scatter(1, order[:, :k], spectrum.gather(1, order[:, :k]))
    torch.testing.assert_close(main, torch.fft.irfft(kept, n=lookback, dim=1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rest + main, x)


def test_fan_without_frequencies_is_exactly_the_identity():
    x = torch.randn(5, L, 7)
    rest, main = FrequencyNormalisation(L, 0)(x)
    assert rest is x and (main == 0).all()


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("temporal", ["convolution", "lstm"])
@pytest.mark.parametrize(("selection", "attention"), [("softmax", True), ("sigmoid", True), ("none", False)])
def test_the_last_day_moves_every_horizon_and_predictions_vary(graph, k, temporal, selection, attention):
    changes = {"graph": graph, "num_frequencies": k, "temporal": temporal, "selection": selection}
    model, batch = make(**changes, attention=attention), inputs()
    batch["x"].requires_grad_()
    out = model(**batch)
    assert out.shape == (D, N, H)
    assert (out.std(dim=1) > 1e-2).all()
    for h in range(H):
        (gradient,) = torch.autograd.grad(out[..., h].sum(), batch["x"], retain_graph=True)
        assert (gradient[:, :, -1].abs().amax(dim=-1) > 0).all()
        # Two convolutions reach 4 days back: without attention and FAN the model ends there.
        reach = 3 if not attention and k == 0 and temporal == "convolution" else L - 1
        assert (gradient[:, :, L - 1 - reach].abs().amax(dim=-1) > 0).all()


def test_a_part_left_out_has_no_say():
    model, batch = make(), inputs()
    other = {**batch, "edges": batch["edges"] + 1, "neighbours": batch["neighbours"].flip(1)}
    torch.testing.assert_close(model(**batch, use_graph=False), model(**other, use_graph=False))
    assert not torch.equal(model(**batch), model(**other))
    out, plain = model(**batch), model(**batch, use_fan=False)
    model.fan.num_frequencies = 1
    torch.testing.assert_close(model(**batch, use_fan=False), plain)
    assert not torch.equal(out, plain) and not torch.equal(model(**batch), out)


def test_quantiles_increase_whatever_the_weights():
    model, batch = make(num_quantiles=5), inputs()
    torch.nn.init.normal_(model.head.weight, std=30.0)
    out = model(**batch)
    assert out.shape == (D, N, H, 5) and (out.diff(dim=-1) >= 0).all()
    raw = torch.tensor([[0.3, -2.0, 1.5, 0.0, 4.0]], dtype=torch.float64)
    step = np.log1p(np.exp(raw[0].numpy()))
    want = [1.5 - step[1] - step[0], 1.5 - step[1], 1.5, 1.5 + step[3], 1.5 + step[3] + step[4]]
    np.testing.assert_allclose(spread(raw)[0], want)


def test_it_starts_far_below_the_targets_so_that_little_must_be_unlearnt():
    out = make()(**inputs())
    assert (out.std(dim=1) < 0.2).all(), "targets have a deviation of 1"


def test_what_a_line_knows_reaches_every_head_beside_the_deep_part():
    model, batch = make(selection="none", num_frequencies=0, graph=False), inputs()
    for p in model.head.parameters():
        torch.nn.init.zeros_(p)
    torch.nn.init.normal_(model.skip.weight)
    torch.testing.assert_close(model(**batch), batch["x"][:, :, -1] @ model.skip.weight.T)


def test_filters_read_the_main_signal_of_each_feature_by_itself():
    model, batch = make(selection="none", num_frequencies=2, graph=False), inputs()
    for p in (*model.head.parameters(), model.skip.weight):
        torch.nn.init.zeros_(p)
    torch.nn.init.normal_(model.main_skip.weight)
    _, main = FrequencyNormalisation(L, 2)(batch["x"])
    filtered = torch.einsum("dnlf,kl->dnfk", main, model.main_window.weight) + model.main_window.bias
    torch.testing.assert_close(model(**batch), filtered.flatten(-2) @ model.main_skip.weight.T)


def test_filters_begin_as_means_of_the_last_days():
    model, window = make(), torch.randn(L)
    got = model.main_window(window)
    torch.testing.assert_close(got, torch.stack([window[-n:].mean() for n in (20, 10, 5, 2)]))


def test_the_recurrent_form_equals_an_lstm_with_a_gated_residual():
    torch.manual_seed(2)
    layer, x = Recurrent(8, 0.5).eval(), torch.randn(2, 3, L, 8)
    out, _ = layer.lstm(x.view(6, L, 8))
    value, gate = layer.gate(out).view(2, 3, L, 16).split(8, dim=-1)
    torch.testing.assert_close(layer(x), layer.norm(x + value * gate.sigmoid()))


def test_permuting_the_stocks_permutes_the_predictions():
    model, batch = make(), inputs()
    out = model(**batch)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(5))
    place = torch.empty(N, dtype=torch.long)
    place[order] = torch.arange(N)
    permuted = {name: value[:, order] for name, value in batch.items() if name != "sectors"}
    permuted |= {"sectors": batch["sectors"][order], "neighbours": place[batch["neighbours"][:, order]]}
    torch.testing.assert_close(model(**permuted), out[:, order])


def test_days_do_not_see_each_other():
    model, batch = make(), inputs()
    alone = model(**{k: v if k == "sectors" else v[:1] for k, v in batch.items()})
    torch.testing.assert_close(model(**batch)[:1], alone)


def test_absent_and_invalid_neighbours_change_nothing():
    model, batch = make(), inputs()
    batch["mask"][:, 3] = False
    out = model(**batch)
    batch["x"][:, 3] = 9.0
    changed = model(**batch)
    others = [i for i in range(N) if i != 3]
    torch.testing.assert_close(changed[:, others], out[:, others])
    assert (changed[:, 3] != out[:, 3]).any()


def test_an_isolated_stock_still_passes():
    model, batch = make(), inputs()
    batch["valid"][:, :, 1:] = False
    batch["valid"][:, :, 0] = False
    assert torch.isfinite(model(**batch)).all()


def test_graph_attention_equals_dense_attention_over_a_matrix():
    torch.manual_seed(1)
    layer = GraphAttention(8, 2, 2, 0.0)
    torch.nn.init.normal_(layer.prior.weight)
    h = torch.randn(1, N, 8)
    adjacency = torch.rand(N, N) > 0.5
    adjacency.fill_diagonal_(True)
    edges, features = torch.randn(N, N, 2), torch.randn(1, N, 5)
    # Every stock lists all others, itself first; the matrix decides which are valid.
    neighbours = torch.stack([torch.tensor([i] + [j for j in range(N) if j != i]) for i in range(N)])[None]
    rows = torch.arange(N)[:, None]
    out, around = layer(h, features, neighbours, adjacency[rows, neighbours[0]][None], edges[rows, neighbours[0]][None])
    source, target = layer.source(h[0]), layer.target(h[0])
    prior = layer.SHARPNESS * layer.prior(edges).squeeze(-1)
    by_edge = prior.masked_fill(~adjacency, float("-inf")).softmax(dim=1)
    torch.testing.assert_close(around[0], by_edge.fill_diagonal_(0.0) @ features[0])
    for head in range(2):
        part = slice(4 * head, 4 * head + 4)
        mixed = source[None, :, part] + target[:, None, part] + layer.edge(edges)[..., part]
        scores = torch.nn.functional.leaky_relu(mixed, 0.2) @ layer.score[head] + prior
        share = scores.masked_fill(~adjacency, float("-inf")).softmax(dim=1)
        torch.testing.assert_close(out[0, :, part], share @ source[:, part])


def test_dropout_is_off_in_evaluation_and_on_in_training():
    model, batch = make(), inputs()
    torch.testing.assert_close(model(**batch), model(**batch), rtol=0, atol=0)
    model.train()
    assert (model(**batch) != model(**batch)).any()


def test_a_second_layer_reads_what_the_filters_give():
    one, two = make(num_frequencies=2), make(num_frequencies=2, main_layers=2)
    assert set(two.state_dict()) - set(one.state_dict()) == {"main_deep.1.weight", "main_deep.1.bias"}
    h, layer = torch.randn(3, two.main_deep[1].in_features), two.main_deep[1]
    torch.testing.assert_close(two.main_deep(h), torch.nn.functional.gelu(h) @ layer.weight.T + layer.bias)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    torch.nn.init.zeros_(two.main_mix.weight)
    before = two(**inputs())
    torch.nn.init.normal_(two.main_mix.weight)
    assert torch.equal(two(**inputs()), before), "the deep part hears of the main signal through the second layer alone"
