"""T5: relative positions, what the decoder and padding see, and layers divided by heads.

The equality of its logits with transformers' is in test_pretrained.py.
"""

from __future__ import annotations

import pytest
import torch

from studies.t5.model import MLP, T5, Attention, GatedMLP, buckets

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "head_size": 6, "mlp_size": 48}


def t5(**sizes) -> T5:
    torch.manual_seed(0)
    model = T5(50, **SIZES | sizes).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)  # so large that what is attended to shows
    return model.eval()


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_are_those_of_transformers(causal, transformers):
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-400, 401)
    theirs = T5Attention._relative_position_bucket(distance, bidirectional=not causal, num_buckets=32, max_distance=128)
    assert torch.equal(buckets(distance, causal), theirs)
    assert len(theirs.unique()) == (32 if causal else 31)  # 16 would be a later key at distance 0


@torch.no_grad()
def test_scores_depend_on_distance_alone():
    stacks = t5()
    for stack in (stacks.encoder, stacks.decoder):
        scores = stack.scores(150, torch.device("cpu"))[0]
        assert torch.equal(scores[:, 1:, 1:], scores[:, :-1, :-1])
        later = torch.ones(150, 150, dtype=torch.bool).triu(1)
        assert torch.equal(scores == -torch.inf, (later & stack.causal).expand(4, -1, -1))
    assert torch.equal(
        stacks.encoder.scores(3, torch.device("cpu"))[0, :, 0], stacks.encoder.bias.weight[[0, 17, 18]].T
    )


@torch.no_grad()
def test_the_decoder_sees_all_of_the_source_and_no_later_target():
    model, tokens, targets = t5(), torch.randint(50, (1, 9)), torch.randint(50, (1, 7))
    before = model(tokens, None, targets)
    for place in range(7):
        changed = targets.clone()
        changed[0, place] = (changed[0, place] + 1) % 50
        differs = (model(tokens, None, changed) != before).any(dim=-1)[0]
        assert torch.equal(differs, torch.arange(7) >= place)
    for place in range(9):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % 50
        assert (model(changed, None, targets) != before).any(dim=-1).all()


@torch.no_grad()
def test_a_padded_row_has_the_logits_of_the_row_alone():
    model, lengths, outs = t5(), (5, 12, 1), (7, 2, 3)
    tokens, seen = torch.randint(50, (3, 12)), torch.arange(12) < torch.tensor(lengths)[:, None]
    targets = torch.randint(50, (3, 7))
    together = model(tokens, seen, targets)
    for row, (length, out) in enumerate(zip(lengths, outs, strict=True)):
        alone = model(tokens[row : row + 1, :length], None, targets[row : row + 1, :out])
        torch.testing.assert_close(together[row, :out], alone[0])


@pytest.mark.parametrize("activation", ["relu", "geglu"])
@pytest.mark.parametrize("tie", [False, True])
def test_every_parameter_has_a_gradient(activation, tie):
    model = t5(activation=activation, tie=tie, dropout=0.1).train()
    tokens = torch.randint(50, (2, 9))
    model(tokens, tokens != 3, tokens[:, :5]).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@torch.no_grad()
def test_attention_is_the_softmax_of_unscaled_products_and_scores():
    layer, x = Attention(8, 1, 5, 0.0).double(), torch.randn(1, 6, 8, dtype=torch.float64)
    memory, added = torch.randn(1, 4, 8, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    weights = (layer.q(x) @ layer.k(memory).mT + added).exp()
    expected = layer.o(weights / weights.sum(dim=-1, keepdim=True) @ layer.v(memory))
    torch.testing.assert_close(layer(x, memory, added[None, None]), expected)
    seen = torch.tensor([True, False, True, True])
    weights = (layer.q(x) @ layer.k(memory).mT).exp() * seen
    expected = layer.o(weights / weights.sum(dim=-1, keepdim=True) @ layer.v(memory))
    torch.testing.assert_close(layer(x, memory, seen[None, None, None]), expected)


@torch.no_grad()
def test_layers_may_be_divided_by_heads_and_columns():
    """Columns of q, k, v, gate and up and of the scores, rows of o and down: two ranks add up to the whole."""
    x, scores = torch.randn(2, 5, 32, dtype=torch.float64), torch.randn(1, 4, 5, 5, dtype=torch.float64)
    for make in (lambda: Attention(32, 4, 6, 0.0), lambda: MLP(32, 48, 0.0), lambda: GatedMLP(32, 48, 0.0)):
        whole, parts = make().double(), []
        attends = isinstance(whole, Attention)
        for rank in range(2):
            part = make().double()
            for name, layer in part.named_children():
                if isinstance(layer, torch.nn.Linear):
                    full = whole.get_submodule(name).weight
                    layer.weight = torch.nn.Parameter(full.chunk(2, dim=1 if name in ("o", "down") else 0)[rank])
            parts.append(part(x, x, scores.chunk(2, dim=1)[rank]) if attends else part(x))
        torch.testing.assert_close(sum(parts), whole(x, x, scores) if attends else whole(x))


def test_weights_begin_with_variances_by_their_inputs(transformers):
    """As in transformers, but for an untied head, whose deviation there is 1."""
    sizes = {"hidden_size": 96, "num_layers": 1, "num_heads": 8, "head_size": 24, "mlp_size": 256}
    torch.manual_seed(0)
    model = T5(500, **sizes, tie=False)
    theirs = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=500, d_model=96, d_kv=24, d_ff=256, num_layers=1, num_heads=8, feed_forward_proj="gated-gelu"
        )
    )
    layer, other = model.decoder.layers[0], theirs.decoder.block[0].layer
    pairs = [(model.embed, theirs.shared), (model.decoder.bias, other[0].SelfAttention.relative_attention_bias)]
    pairs += [(getattr(layer.attend, name), getattr(other[0].SelfAttention, name)) for name in "qkvo"]
    pairs += [(getattr(layer.cross, name), getattr(other[1].EncDecAttention, name)) for name in "qkvo"]
    pairs += [(layer.mlp.gate, other[2].DenseReluDense.wi_0), (layer.mlp.up, other[2].DenseReluDense.wi_1)]
    pairs += [(layer.mlp.down, other[2].DenseReluDense.wo)]
    for ours, expected in pairs:
        assert ours.weight.std().item() == pytest.approx(expected.weight.std().item(), rel=0.15), ours
    assert model.head.weight.std().item() == pytest.approx(96**-0.5, rel=0.05)
    tokens = torch.randint(500, (4, 20))
    for tie in (False, True):
        assert T5(500, **sizes, tie=tie)(tokens, None, tokens).std().item() == pytest.approx(1, rel=0.3)


@torch.no_grad()
def test_dropout_is_drawn_in_training_alone():
    model, tokens = t5(dropout=0.3), torch.randint(50, (2, 9))
    expected = t5()(tokens, None, tokens)
    assert torch.equal(model(tokens, None, tokens), expected)
    model.train()
    assert not torch.allclose(model(tokens, None, tokens), model(tokens, None, tokens))
