"""BERT: padding is not seen, what is not predicted is not computed, and layers may be divided by heads.

The equality with transformers is in test_pretrained.py.
"""

from __future__ import annotations

import pytest
import torch

from studies.bert.model import MLP, Attention, Bert

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "mlp_size": 48, "positions": 24}


def bert(**sizes) -> Bert:
    torch.manual_seed(0)
    model = Bert(50, **SIZES | sizes).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)  # so large that what is attended to shows
    return model.eval()


@torch.no_grad()
def test_every_token_is_seen_by_all_and_padding_by_none():
    model, tokens = bert(), torch.randint(50, (1, 12))
    seen = torch.arange(12)[None] < 9
    before = model(tokens, seen)
    for place in range(12):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % 50
        differs = (model(changed, seen) != before).any(dim=-1)[0, :9]
        assert differs.all() if place < 9 else not differs.any()


@torch.no_grad()
def test_a_padded_row_has_the_logits_of_the_row_alone():
    model, lengths = bert(), (5, 12, 1)
    tokens, seen = torch.randint(50, (3, 12)), torch.arange(12) < torch.tensor(lengths)[:, None]
    together = model(tokens, seen)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(together[row, :length], model(tokens[row : row + 1, :length])[0])
    torch.testing.assert_close(model(tokens, torch.ones_like(seen)), model(tokens))


def test_predicted_places_have_the_logits_and_gradients_of_the_whole_row():
    model, tokens, places = bert(), torch.randint(50, (2, 12)), torch.tensor([[3, 0, 11], [7, 7, 2]])
    whole = model(tokens)
    chosen = torch.stack([whole[row, places[row]] for row in range(2)])
    weights = torch.randn_like(chosen)
    expected = torch.autograd.grad((chosen * weights).sum(), list(model.parameters()))
    shapes = []
    model.head.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    logits = model(tokens, places=places)
    torch.testing.assert_close(logits, chosen)
    torch.testing.assert_close(
        torch.autograd.grad((logits * weights).sum(), list(model.parameters())), expected, rtol=1e-6, atol=1e-9
    )
    assert shapes == [(2, 3, 32)]  # and so no other logit was computed


def test_every_parameter_has_a_gradient():
    model = bert(dropout=0.1).train()
    model(torch.randint(50, (2, 9)), places=torch.tensor([[1], [4]])).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@torch.no_grad()
def test_attention_is_the_softmax_of_scaled_products():
    layer, x = Attention(8, 1, 0.0).double(), torch.randn(1, 6, 8, dtype=torch.float64)
    seen = torch.tensor([[True, True, False, True, True, False]])
    scores = (layer.q(x) @ layer.k(x).mT / 8**0.5).masked_fill(~seen[:, None], -torch.inf)
    expected = layer.o(scores.exp() / scores.exp().sum(dim=-1, keepdim=True) @ layer.v(x))
    torch.testing.assert_close(layer(x, seen[:, None, None]), expected)


@torch.no_grad()
def test_layers_may_be_divided_by_heads_and_columns():
    """Columns of q, k, v and up, rows of o and down: what two ranks compute adds up to the whole."""
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    for whole, make in ((Attention(32, 4, 0.0), lambda: Attention(32, 4, 0.0)), (MLP(32, 48), lambda: MLP(32, 48))):
        extra, parts = () if isinstance(whole, MLP) else (None,), []
        whole.double()
        for rank in range(2):
            part = make().double()
            for name, layer in part.named_children():
                if isinstance(layer, torch.nn.Dropout):
                    continue
                full = whole.get_submodule(name)
                rows = name in ("o", "down")
                layer.weight = torch.nn.Parameter(full.weight.chunk(2, dim=1 if rows else 0)[rank])
                layer.bias = torch.nn.Parameter(full.bias / 2 if rows else full.bias.chunk(2)[rank])
            parts.append(part(x, *extra))
        torch.testing.assert_close(sum(parts), whole(x, *extra))


def test_weights_begin_with_the_papers_deviation_at_any_width():
    torch.manual_seed(0)
    model = Bert(500, **SIZES | {"hidden_size": 192, "mlp_size": 768, "positions": 64})
    for name, p in model.named_parameters():
        if p.ndim == 2:
            assert p.std().item() == pytest.approx(0.02 * (768 / 192) ** 0.5, rel=0.1), name
        else:
            assert torch.equal(p, torch.full_like(p, "norm" in name and name.endswith("weight"))), name


@torch.no_grad()
def test_dropout_is_drawn_in_training_alone():
    model, tokens = bert(dropout=0.3), torch.randint(50, (2, 9))
    assert torch.equal(model(tokens), model(tokens))
    assert torch.equal(model(tokens), bert()(tokens))
    model.train()
    assert not torch.allclose(model(tokens), model(tokens))
    layer, x = Attention(32, 4, 0.3).double(), torch.randn(1, 5, 32, dtype=torch.float64)
    draws = torch.stack([layer.train()(x, None) for _ in range(3000)])
    torch.testing.assert_close(draws.mean(dim=0), layer.eval()(x, None), rtol=0, atol=0.02)
    assert draws.std(dim=0).min() > 0.005
