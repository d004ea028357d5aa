"""Packing, padding, buckets, mixtures and curricula against what they promise."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rounds import rounds
from torch import nn
from torch.nn import functional as F

from trainer.config.data import CurriculumConfig
from trainer.data import Bucketed, Curriculum, Mixture, Packed, Padded, block_diagonal_mask, next_tokens, pad
from trainer.data.augment import Chain, CorruptSpans, Mask, MaskTokens, MaskWords, Noise, Permute
from trainer.data.mixture import assign, visible
from trainer.data.view import View, order
from trainer.data.view import read as batch_of
from trainer.errors import DataError


def texts(lengths, vocab: int = 50) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, vocab, (length,), generator=generator) for length in lengths]


class Decoder(nn.Module):
    """One block of causal attention and a linear head, on tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(50, 16), nn.Embedding(32, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 50)

    def forward(self, tokens, positions, mask):
        x = self.token(tokens) + self.position(positions)
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.head(x + attended.transpose(1, 2).flatten(2))


def test_the_loss_of_packed_rows_is_that_of_the_documents_one_by_one():
    torch.manual_seed(0)
    model = Decoder().double()
    documents = texts([5, 1, 9, 3, 12, 2, 7, 4, 6, 8])
    packed = Packed(documents, 16)
    batch = torch.utils.data.default_collate([packed[len(packed) + row] for row in range(len(packed))])  # of epoch 1
    logits = model(batch["tokens"], batch["positions"], block_diagonal_mask(batch["documents"]))
    targets = next_tokens(batch["tokens"], batch["documents"])
    together = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    alone, count = torch.zeros((), dtype=torch.float64), 0
    for document in documents:
        n = len(document)
        logits = model(document[None], torch.arange(n)[None], torch.ones(n, n, dtype=torch.bool).tril())
        alone = alone + F.cross_entropy(logits[0, :-1], document[1:], reduction="sum")
        count += n - 1
    assert (targets != -100).sum() == count
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)
    together.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_the_mask_without_causality_shows_a_document_to_itself():
    mask = block_diagonal_mask(torch.tensor([[0, 0, 1, -1, -1]]), causal=False)[0, 0]
    assert mask.int().tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]


lengths_of_documents = st.lists(st.integers(0, 25), min_size=1, max_size=40).filter(any)


@given(lengths_of_documents, st.integers(1, 12), st.integers(0, 3))
def test_packing_keeps_every_token_once_and_wastes_little(lengths, length, epoch):
    documents = [torch.arange(n) + 100 * i + 1 for i, n in enumerate(lengths)]
    packed = Packed(documents, length, seed=7)
    rows = [packed[index] for index in packed.order(0, epoch, 4)]
    tokens = torch.cat([row["tokens"][row["documents"] >= 0] for row in rows])
    assert sorted(tokens.tolist()) == sorted(torch.cat(documents).tolist())
    for row in rows:
        for number in range(int(row["documents"].max()) + 1):
            piece = row["documents"] == number
            assert row["positions"][piece].tolist() == list(range(int(piece.sum())))
            values = row["tokens"][piece]
            assert (values.diff() == 1).all()  # neighbours in one document
        assert (row["tokens"][row["documents"] < 0] == 0).all()
    fewest = -(-sum(lengths) // length)
    room = sorted(int((row["documents"] < 0).sum()) for row in rows)
    assert len(rows) <= 11 / 9 * max(fewest, _rows_needed(lengths, length)) + 4
    if len(room) > 1:  # no two rows fit into one
        assert length - room[-1] + length - room[-2] > length


def _rows_needed(lengths, length: int) -> int:
    """A lower bound: pieces longer than half a row need a row each."""
    return sum(n // length + (n % length > length / 2) for n in lengths)


def test_packing_is_a_function_of_seed_and_epoch():
    documents = texts([4] * 12 + [8] * 5)
    rows = lambda seed, epoch: str([Packed(documents, 16, seed=seed)[epoch * 6 + row] for row in range(6)])  # noqa: E731
    assert len(Packed(documents, 16)) == 6
    assert rows(0, 1) == rows(0, 1)
    assert len({rows(seed, epoch) for seed in (0, 1) for epoch in (0, 1)}) == 4
    with pytest.raises(DataError, match="no document with a token"):
        Packed([torch.tensor([])], 4)
    with pytest.raises(DataError, match="3 lengths for 2 documents"):
        Packed(texts([1, 2]), 4, lengths=[1, 2, 3])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.sampled_from(["left", "right"]), st.integers(1, 4))
def test_padding_adds_what_the_mask_leaves_out(lengths, side, multiple_of):
    tensors = texts(lengths)
    padded, mask = pad(tensors, -1, side, multiple_of)
    assert padded.shape[1] % multiple_of == 0 and padded.shape[1] - max(lengths) < multiple_of
    assert [row[keep].tolist() for row, keep in zip(padded, mask, strict=True)] == [t.tolist() for t in tensors]
    assert (padded[~mask] == -1).all()
    if padded.shape[1]:
        edge = mask[:, 0] if side == "right" else mask[:, -1]
        assert edge.tolist() == [n > 0 for n in lengths]


def test_dicts_are_padded_where_it_is_asked_for():
    samples = [{"ids": torch.arange(n), "labels": torch.arange(n) + 5, "id": n} for n in (1, 3)]
    batch = Padded(samples, {"ids": 0, "labels": -100}).__getitems__([1, 0])
    assert batch["labels"].tolist() == [[5, 6, 7], [5, -100, -100]] and batch["id"].tolist() == [3, 1]
    assert batch["mask"].tolist() == [[True, True, True], [True, False, False]]
    with pytest.raises(DataError, match="pad 'tokens', and samples have ids, labels, id"):
        Padded(samples).__getitems__([0])


def padding_share(data, batch_size: int) -> float:
    order = data.order(0, 0, batch_size)
    batches = [data.__getitems__(order[i : i + batch_size]) for i in range(0, len(order), batch_size)]
    masks = [batch["mask"] for batch in batches]
    return 1 - sum(int(m.sum()) for m in masks) / sum(m.numel() for m in masks)


def test_buckets_leave_little_to_pad():
    lengths = (np.random.default_rng(0).pareto(2.0, 2000) * 20 + 1).astype(int).clip(max=300).tolist()
    plain = Padded(texts(lengths))
    bucketed = Bucketed(plain, lengths, bucket=50)
    before, after = padding_share(plain, 16), padding_share(bucketed, 16)
    assert before > 0.5 and after < before / 4, (before, after)


@given(st.integers(1, 90), st.integers(1, 9), st.integers(1, 4), st.integers(0, 3))
def test_buckets_are_a_permutation_of_runs_of_a_sorted_bucket(size, batch_size, bucket, epoch):
    lengths = [(7 * i) % 23 for i in range(size)]
    data = Bucketed(list(range(size)), lengths, bucket)
    order = data.order(3, epoch, batch_size)
    assert sorted(order) == list(range(size))
    for start in range(0, size, bucket * batch_size):
        part = order[start : start + bucket * batch_size]
        windows = [sorted(lengths[i] for i in part[j : j + batch_size]) for j in range(0, len(part), batch_size)]
        assert sorted(sum(windows, [])) == sum(sorted(windows), [])  # noqa: RUF017


ratios = st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any)


@given(ratios, st.integers(1, 400))
def test_every_prefix_of_a_mixture_is_right_within_one_sample(weights, size):
    shares = np.array(weights) / sum(weights)
    assigned = assign(shares.tolist(), size)
    counts = np.cumsum(assigned[:, None] == np.arange(len(weights)), axis=0)
    ideal = np.arange(1, size + 1)[:, None] * shares
    live = max(sum(w > 0 for w in weights), 2)
    assert np.abs(counts - ideal).max() <= 1 - 1 / (2 * live - 2) + 1e-6 if live > 2 else True
    assert np.abs(counts - ideal).max() < 1


class Named:
    draws = False

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index):
        return f"{self.name}{index}"


def read(data, epoch: int, seed: int = 0) -> list[str]:
    return [data[index] for index in data.order(seed, epoch, 4)]


def test_a_mixture_goes_through_all_of_a_source_before_it_repeats():
    data = Mixture([(Named("a", 10), 0.7), (Named("b", 7), 0.3)], size=10)
    epochs = [read(data, epoch) for epoch in range(10)]
    assert all(Counter(name[0] for name in epoch) == {"a": 7, "b": 3} for epoch in epochs)
    for name, size in (("a", 10), ("b", 7)):
        stream = [sample for epoch in epochs for sample in epoch if sample[0] == name]
        passes = [stream[i : i + size] for i in range(0, len(stream) - size + 1, size)]
        assert all(len(set(one)) == size for one in passes) and passes[0] != passes[1]
    assert read(data, 3) == epochs[3] and read(data, 3, seed=1) != epochs[3]


def test_a_mixture_changes_with_its_phases():
    data = Mixture([(Named("a", 10), 1), (Named("b", 7), 0)], size=10, phases={2: (1, 1), 4: (0, 1)})
    counts = [Counter(name[0] for name in read(data, epoch)) for epoch in range(5)]
    assert counts == [{"a": 10}, {"a": 10}, {"a": 5, "b": 5}, {"a": 5, "b": 5}, {"b": 10}]
    seen = [name for epoch in (2, 3, 4) for name in read(data, epoch) if name[0] == "b"]
    assert len(set(seen[:7])) == len(set(seen[7:14])) == 7


@rounds("given", [[0.0, 0.0], [1.0, -0.1], [1.0, float("nan")]])
def test_ratios_that_mean_nothing_are_refused(given):
    with pytest.raises(DataError, match="from epoch 0 on: give one per source"):
        Mixture([(Named("a", 3), given[0]), (Named("b", 3), given[1])])
    with pytest.raises(DataError, match="from epoch 1 on: give one per source"):
        Mixture([(Named("a", 3), 1)], phases={1: [1, 2]})
    with pytest.raises(DataError, match="none that is empty"):
        Mixture([(Named("a", 0), 1)])


@rounds("pacing", ["linear", "root", "exponential"])
def test_the_visible_share_grows_to_one(pacing):
    config = CurriculumConfig(start=0.1, epochs=3.0, pacing=pacing)
    shares = [visible(config, epoch / 10) for epoch in range(50)]
    assert shares[0] == pytest.approx(0.1) and shares == sorted(shares) and shares[30:] == [1.0] * 20


def test_a_curriculum_shows_no_more_than_is_visible_at_its_step():
    scores = np.random.default_rng(0).permutation(200)
    config = CurriculumConfig(start=0.1, epochs=2.5)
    data = Curriculum(list(range(200)), scores, config)
    hardest = []
    for epoch in range(3):
        order = data.order(0, epoch, 8)
        for w in range(25):
            window = scores[order[8 * w : 8 * w + 8]]
            assert window.max() < np.ceil(visible(config, epoch + w / 25) * 200)
            hardest.append(window.max())
    assert hardest[0] < 20 and max(hardest) > 190
    assert sorted(data.order(0, 3, 8)) == list(range(200))
    tiny = Curriculum(list(range(5)), range(5), CurriculumConfig(start=0.01))
    assert set(tiny.order(0, 0, 2)) <= {0, 1}
    with pytest.raises(DataError, match="3 scores for 5 samples"):
        Curriculum(list(range(5)), range(3), config)
    with pytest.raises(DataError, match="score of sample 1 is nan"):
        Curriculum(list(range(2)), [0.0, float("nan")], config)


@pytest.mark.parametrize("inner", [Mixture([(Named("a", 3), 1), (Named("b", 3), 1)]), Packed(texts([3] * 6), 3)])
def test_what_goes_by_place_is_refused_where_indices_are_none(inner):
    for around in (lambda: Bucketed(inner, range(6)), lambda: Curriculum(inner, range(6), CurriculumConfig())):
        with pytest.raises(DataError, match=r"by place, and .* numbers its samples in a way of its own"):
            around()
    assert len(Bucketed(inner, lambda index: index).order(0, 0, 2)) == 6


@rounds(
    "shown",
    [
        lambda pairs: View(pairs),
        lambda pairs: Bucketed(pairs, range(6)),
        lambda pairs: Mixture([(pairs, 1.0)]),
        lambda pairs: Bucketed(Mixture([(View(pairs), 1.0)]), lambda index: index),
    ],
)
def test_pairs_are_collated_once_however_they_are_shown(shown):
    """A list of (x, y): what torch's collate makes of it is a list, as samples that are not yet collated are."""
    x, y = batch_of(shown([(torch.full((2,), float(i)), i) for i in range(6)]), [4, 1])
    assert x.tolist() == [[4.0, 4.0], [1.0, 1.0]] and y.tolist() == [4, 1]


@rounds("kind", [np.array, torch.tensor, tuple])
def test_an_order_of_numbers_of_any_kind_seeds_alike(kind):
    """A seed is derived from the text of an index, and numpy's numbers have another text."""

    class Own(Named):
        def order(self, seed, epoch, batch_size):
            return kind([2, 0, 1])

    assert repr(list(order(Own("a", 3), 0, 0, 1))) == "[2, 0, 1]"
    with pytest.raises(DataError, match="order of Own has 3 indices in epoch 0 and its length is 4"):
        order(Own("a", 4), 0, 0, 1)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_augmentations_change_their_inputs_and_draw_from_their_generator():
    x, y = torch.arange(2000.0).view(100, 20), torch.tensor(1)
    for augment in (Noise(0.5), Mask(0.25, value=-1), Mask(0.25, dim=0), Permute(), Permute(dim=1)):
        state = torch.get_rng_state()
        changed = augment(x, generator())
        assert torch.equal(changed, augment(x, generator())) and not torch.equal(changed, augment(x, generator(1)))
        assert torch.equal(torch.get_rng_state(), state) and changed.shape == x.shape
        pointed = type(augment)(**vars(augment) | {"on": "x"})({"x": x, "y": y}, generator())
        assert torch.equal(pointed["x"], changed) and pointed["y"] is y
        pointed = type(augment)(**vars(augment) | {"on": 1})((y, x), generator())
        assert torch.equal(pointed[1], changed) and pointed[0] is y
    assert torch.equal(x, torch.arange(2000.0).view(100, 20))
    assert (Noise(0.5)(x, generator()) - x).std().item() == pytest.approx(0.5, rel=0.1)
    assert (Mask(0.25, value=-1)(x, generator()) == -1).float().mean().item() == pytest.approx(0.25, abs=0.04)
    rows = (Mask(1 / 2, value=-1, dim=0)(x, generator()) == -1).float().mean(dim=1)
    assert set(rows.tolist()) == {0.0, 1.0}
    assert Permute(dim=1)(x, generator()).sort(dim=1).values.equal(x)
    both = Chain((Permute(), Noise(0.1)))(x, g := generator())
    again = generator()
    assert torch.equal(both, Noise(0.1)(Permute()(x, again), again)) and torch.equal(g.get_state(), again.get_state())


def test_masked_tokens_are_those_of_bert():
    tokens = torch.arange(20_000) % 97 + 3
    masked = MaskTokens(mask_id=1, vocab_size=100, share=0.15)(tokens, generator())
    asked = masked["labels"] != -100
    assert asked.float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert torch.equal(masked["labels"][asked], tokens[asked])
    assert torch.equal(masked["tokens"][~asked], tokens[~asked])
    assert (masked["tokens"][asked] == 1).float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (masked["tokens"][asked] == tokens[asked]).float().mean().item() == pytest.approx(0.1, abs=0.03)


def test_masked_words_are_whole_and_as_many_as_fit():
    """Words of 1 to 5 tokens, the first of each below 10, and now and then a special one, 99."""
    g = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 6, (400,), generator=g).tolist()
    words = [[place % 10, *[20 + place % 50] * (size - 1)] for place, size in enumerate(sizes)]
    row = torch.tensor([token for place, word in enumerate(words) for token in ([99] * (place % 9 == 0) + word)])
    begins, special = torch.arange(100) < 10, torch.arange(100) == 99
    owner = (begins[row] | special[row]).cumsum(0).tolist()
    mask = MaskWords(98, 100, begins, special, share=0.15)
    most, replaced = round(len(row) * 0.15), []
    for seed in range(20):
        out = mask(row, torch.Generator().manual_seed(seed))
        count = int((out["labels"] >= 0).sum())
        places = out["places"][:count]
        assert most - 5 < count <= most == len(out["places"]) == len(out["labels"])
        assert torch.equal(out["labels"][:count], row[places]) and not (row[places] == 99).any()
        assert not out["places"][count:].any() and (out["labels"][count:] == -100).all()
        chosen = {owner[place] for place in places.tolist()}
        assert sum(owner[place] in chosen for place in range(len(row))) == count, "all tokens of each word"
        kept = torch.ones(len(row), dtype=torch.bool)
        kept[places] = False
        assert torch.equal(out["tokens"][kept], row[kept])
        replaced += (out["tokens"][places] == 98).tolist()
    assert sum(replaced) / len(replaced) == pytest.approx(0.8, abs=0.03)
    long = MaskWords(98, 100, begins, special)(torch.full((20,), 50), generator())
    assert (long["labels"] == -100).all(), "a word longer than what may be predicted stays"


def test_taken_spans_are_those_of_t5():
    """As many tokens and spans as the paper's code takes, and what is left and taken puts the row together again."""
    sentinels, end = torch.arange(1000, 1300), 999
    for length, share, mean in [(64, 0.15, 3.0), (512, 0.5, 1.0), (11, 0.5, 1.0), (8, 0.01, 9.0), (30, 0.3, 4.0)]:
        spans = CorruptSpans(sentinels, end, share, mean)
        taken = min(max(round(length * share), 1), length - 1)
        parts = min(max(round(taken / mean), 1), length - taken)
        row = torch.arange(length)
        out = {name: ids.tolist() for name, ids in spans(row, generator()).items()}
        assert (spans.taken(length), spans.spans(length)) == (taken, parts)
        assert len(out["tokens"]) == length - taken + parts + 1 and len(out["labels"]) == taken + parts + 1
        assert out["tokens"][-1] == out["labels"][-1] == end
        pieces: dict[int, list[int]] = {}
        for token in out["labels"][:-1]:
            pieces.setdefault(token, []) if token >= 1000 else pieces[[*pieces][-1]].append(token)
        assert [*pieces] == [*range(1000, 1000 + parts)] and all(pieces.values())
        whole = [i for token in out["tokens"][:-1] for i in (pieces[token] if token >= 1000 else [token])]
        assert whole == row.tolist()


def test_samples_without_spans_or_with_more_than_sentinels_are_refused():
    spans, generator = CorruptSpans(torch.arange(50, 52), 49, share=0.5, mean=1.0), torch.Generator()
    for length, count in ((0, 0), (1, 0), (6, 3)):
        with pytest.raises(DataError, match=rf"CorruptSpans: {length} tokens of a sample have {count} spans, and .* 2"):
            spans(torch.arange(length), generator)
    assert spans(torch.arange(2), generator)["labels"].tolist() == [50, 1, 49]


def test_every_division_into_spans_is_as_likely():
    """5 of 10 tokens in 3 spans: 6 divisions of those taken times 6 of the rest."""
    spans = CorruptSpans(torch.arange(50, 60), 49, share=0.5, mean=5 / 3)
    g = torch.Generator().manual_seed(0)
    counts = Counter(tuple(spans(torch.arange(10), g)["labels"].tolist()) for _ in range(7200))
    assert len(counts) == 36
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 60  # chi square, 35 degrees: p = .005
