"""The decoder against references: rotary positions as complex numbers, causality, documents, shared heads."""

from __future__ import annotations

import json

import pytest
import torch

from studies._lm.corpus_config import CorpusConfig
from studies.gpt import budget
from studies.gpt.budget import FLOPS_PER_PARAMETER_AND_TOKEN, flops, optimal, parameters, rows
from studies.gpt.config import Config, DataConfig, ModelConfig
from studies.gpt.generate import generate
from studies.gpt.model import Attention, Llama, angles, document_mask, forget, remember, rotate
from studies.gpt.task import GptTask, sizes
from trainer.config import TrainConfig
from trainer.data import block_diagonal_mask
from trainer.metrics.flops import flops as counted

SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "mlp_size": 48}


def llama(vocab_size: int = 50, **given) -> Llama:
    torch.manual_seed(0)
    model = Llama(vocab_size, **SMALL | given)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)  # so large that what is attended to shows
    return model.eval()


def test_rotary_positions_multiply_complex_numbers():
    x = torch.randn(2, 3, 7, 8)
    places, rates = torch.arange(7, dtype=torch.float64), 100.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turned = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(
        torch.ones(7, 4, dtype=torch.float64), places[:, None] * rates
    )
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(rotate(x, *angles(7, 8, 100.0)).double(), expected, rtol=1e-5, atol=1e-6)


def test_attention_depends_on_differences_of_positions_alone():
    q, k = torch.randn(2, 1, 8)
    cos, sin = angles(20, 8, 100.0)
    at = [rotate(x.expand(20, 8), cos, sin) for x in (q, k)]
    products = at[0] @ at[1].T
    for shift in (1, 5, 12):
        torch.testing.assert_close(products[shift:, shift:], products[:-shift, :-shift], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_later_token_changes_nothing_before_it():
    model, tokens = llama(), torch.randint(50, (1, 12))
    before = model(tokens)
    for place in range(12):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % 50
        after = model(changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.allclose(after[:, place:], before[:, place:])


@torch.no_grad()
def test_documents_of_a_row_are_as_rows_of_their_own():
    model, lengths = llama(), (5, 1, 4)
    texts = [torch.randint(50, (1, length)) for length in lengths]
    row = torch.cat([*texts, torch.full((1, 2), 49)], dim=1)
    documents = torch.tensor([[0] * 5 + [1] + [2] * 4 + [-1] * 2])
    packed = model(row, documents)
    alone = torch.cat([model(text) for text in texts], dim=1)
    torch.testing.assert_close(packed[:, :10], alone, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(packed).all()


def test_the_mask_is_the_trainers():
    documents = torch.tensor([[0, 0, 1, 1, 1, -1, -1], [0, 1, 2, 2, 3, 3, 3]])
    mine, theirs = document_mask(documents), block_diagonal_mask(documents)
    held = (documents >= 0)[:, None, :, None].expand_as(mine)
    assert torch.equal(mine[held], theirs[held]) and mine.any(dim=-1).all()


@torch.no_grad()
def test_shared_keys_are_keys_repeated():
    """Two heads of keys for four of queries: full attention whose weights of keys and values stand twice."""
    shared, full = Attention(32, 4, 2), Attention(32, 4, 4)
    for name in "qkvo":
        weight = getattr(shared, name).weight
        if name in "kv":
            weight = weight.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
        getattr(full, name).weight.copy_(weight)
    x, turns = torch.randn(2, 9, 32), angles(9, 8, 100.0)
    torch.testing.assert_close(shared(x, *turns), full(x, *turns))


@torch.no_grad()
def test_attention_is_the_softmax_of_products():
    layer, x, turns = Attention(8, 1, 1), torch.randn(1, 6, 8), angles(6, 8, 100.0)
    q, k = (rotate(one(x), *turns)[0].double() for one in (layer.q, layer.k))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    for given, hidden in (((), later), ((document_mask(documents),), later | (documents != documents.T))):
        scores = (q @ k.T / 8**0.5).masked_fill(hidden, -torch.inf)
        weights = scores.exp() / scores.exp().sum(dim=1, keepdim=True)
        expected = weights @ layer.v(x)[0].double() @ layer.o.weight.T.double()
        torch.testing.assert_close(layer(x, *turns, *given)[0].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", [{}, {"tie": False, "num_kv_heads": 4}, {"mlp_size": 40, "num_layers": 3}])
def test_parameters_are_counted_without_building_the_model(given):
    config = Config(model=ModelConfig(hidden_size=32).model_copy(update=given))
    model = Llama(257, **sizes(config))
    assert parameters(config.model, 257) == sum(p.numel() for p in model.parameters())


def test_the_first_trial_has_the_defaults():
    from hpo.space.config import as_json, flatten
    from studies.gpt import STUDY

    [first] = STUDY.enqueue
    default = flatten(as_json(Config()))
    assert first == {path: default[path] for path in STUDY.space.paths}


def test_the_full_size_is_124_million():
    from studies.gpt import STUDY

    full = STUDY.configure({"preset": "full"}).config
    assert isinstance(full, Config)
    assert round(parameters(full.model, full.data.vocab_size) / 1e6) == 124


def test_a_budget_is_spent_on_20_tokens_for_each_parameter():
    size, tokens = optimal(5.76e23)  # Gopher's, of which table 3 has 67 B parameters and 1.5 T tokens
    assert tokens / size == pytest.approx(20) and flops(round(size), tokens) == pytest.approx(5.76e23)
    assert size == pytest.approx(67e9, rel=0.05) and tokens == pytest.approx(1.5e12, rel=0.1)
    config = Config(data=DataConfig(tokens_per_parameter=20.0), train=TrainConfig(num_epochs=4))
    per_epoch, seen = rows(config), 20 * parameters(config.model, 257)
    assert per_epoch is not None and per_epoch * 128 * 4 == pytest.approx(seen, rel=0.01)


def test_the_best_of_a_budget_of_operations_is_printed_with_its_source(capsys):
    budget.main(["--flops", "5.76e23"])
    found = json.loads(capsys.readouterr().out)
    size, tokens = found["compute_optimal_parameters"], found["compute_optimal_tokens"]
    assert size == pytest.approx(67e9, rel=0.05) and tokens == pytest.approx(1.5e12, rel=0.1)  # table 3
    assert 6 * size * tokens == pytest.approx(5.76e23, rel=1e-6) and "2203.15556" in found["source"]
    budget.main(["model.tie=false"])
    assert json.loads(capsys.readouterr().out)["parameters"] > parameters(Config().model, 257)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--flops", "0"], "'0' is not a number of operations: give one, such as 1e18."),
        (["--flops", "nan"], "'nan' is not a number of operations"),
        (["--flops", "much"], "'much' is not a number of operations"),
        (["--flops", "1e18", "preset=full"], "--flops reads no configuration: leave preset=full out."),
        (["preset"], "is not an override"),
    ],
)
def test_a_budget_that_cannot_be_is_one_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as end:
        budget.main(arguments)
    printed = capsys.readouterr()
    assert end.value.code == 2 and words in printed.err.splitlines()[-1] and printed.out == ""


def test_a_step_is_counted_as_6_operations_for_each_parameter_and_token():
    """What MFU is measured by, against the budget's C = 6 N D; attention's own products come on top."""
    config = Config(data=DataConfig(corpus=CorpusConfig(general=30, target=20)))
    task = GptTask(config)
    size = parameters(config.model, 257)
    norms = sum(p.numel() for p in task.model().parameters() if p.ndim == 1)
    batch = task.train_set().__getitems__([0, 1, 2])
    attention = 2 * 3 * 2 * (3 * 4 * 2 * 128 * 128 * 16)  # layers, passes, products; rows, heads, of width 16
    assert counted(task, batch) == FLOPS_PER_PARAMETER_AND_TOKEN * (size - norms) * 3 * 128 + attention


@torch.no_grad()
@pytest.mark.parametrize(
    "train", [{"batch_size": 1}, {"batch_size": 32, "micro_batch_size": 3}, {"micro_batch_size": "auto"}]
)
def test_what_is_measured_does_not_depend_on_how_many_rows_are_at_once(train):
    config = Config(data=DataConfig(corpus=CorpusConfig(general=30, target=60)), train=TrainConfig(batch_size=500))
    model = GptTask(config).model().eval()
    expected = GptTask(config).evaluate(model)
    found = GptTask(config.model_copy(update={"train": TrainConfig(**train)})).evaluate(model)
    names = [name for name in expected if name.startswith("val/")]
    assert [found[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-5)


def unread(model: Llama, prompt: list[int], count: int, length: int) -> list[int]:
    """The likeliest tokens, the whole window computed again for each."""
    tokens = [*prompt]
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens[-length:]]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
@pytest.mark.parametrize("length", [5, 8, 40])
@pytest.mark.parametrize("prompt", [[3], [3, 1, 4], [7, 3, 1, 4, 0, 9, 6, 2, 5, 8]])
def test_the_likeliest_tokens_are_those_of_the_logits(prompt, length):
    """Within the window, where it begins to move, and from a prompt on that is longer than it."""
    model = llama()
    written = generate(model, prompt, 12, length=length, temperature=0)
    assert written == unread(model, prompt, 12, length)
    stop = written.index(written[5])
    assert generate(model, prompt, 12, length=length, temperature=0, end=written[5]) == written[:stop]


@torch.no_grad()
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("cuts", [(7, *range(8, 13)), (1, 12), (4, 5, 9, 12)])
def test_logits_with_keys_and_values_kept_are_those_of_whole_rows(heads, cuts):
    """However the row comes in pieces; what is kept is of the heads of keys alone, and is forgotten where told so."""
    model, tokens = llama(num_kv_heads=heads), torch.randint(50, (2, 12))
    whole = model(tokens)
    remember(model)
    for _ in range(2):
        pieces = [model(tokens[:, start:stop]) for start, stop in zip((0, *cuts), cuts, strict=False)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-5, atol=1e-5)
        [kept] = model.blocks[1].attend.past  # type: ignore[union-attr]
        assert [tensor.shape for tensor in kept] == [(2, heads, 12, 8)] * 2
        remember(model)
    forget(model)
    assert torch.equal(model(tokens), whole)


@torch.no_grad()
def test_each_token_is_read_once_until_the_window_is_full():
    model, read = llama(), []
    model.embed.register_forward_pre_hook(lambda _, given: read.append(given[0].shape[1]))
    generate(model, [3, 1, 4], 8, length=7, temperature=0)
    assert read == [3, 1, 1, 1, 1, 7, 7, 7]


@torch.no_grad()
def test_a_model_that_has_written_or_failed_to_reads_whole_rows_again():
    model, tokens = llama(), torch.randint(50, (1, 6))
    before = model(tokens)
    generate(model, [3, 1, 4], 4, length=8, temperature=0)
    assert torch.equal(model(tokens), before)
    broken = model.head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, [3], 1, length=8)
    broken.remove()
    assert torch.equal(model(tokens), before)


@torch.no_grad()
def test_drawn_tokens_follow_the_softmax():
    model, generator = llama(vocab_size=5), torch.Generator().manual_seed(1)
    p = (model(torch.tensor([[2, 0]]))[0, -1] / 0.5).softmax(dim=-1)
    drawn = [generate(model, [2, 0], 1, length=8, temperature=0.5, generator=generator)[0] for _ in range(600)]
    counts = torch.bincount(torch.tensor(drawn), minlength=5) / 600
    assert (counts - p).abs().max() < 4 * 0.5 / 600**0.5
