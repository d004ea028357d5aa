"""The order of the data, from any position and with any number of workers; and seeds."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, Subset

from trainer.config import TrainConfig
from trainer.data import Loader, TensorDataset
from trainer.data.loader import Sampler
from trainer.errors import DataError
from trainer.runtime.seeding import derive, seed_all, shuffled
from trainer.task import Task

CPU = torch.device("cpu")


class Numbers(Task):
    """The numbers 0 to n - 1; `data` decides how they are offered."""

    data = None

    def train_set(self):
        return self.data


def loader(data, num_workers: int = 0, task: type[Numbers] = Numbers, **config) -> Loader:
    made = task(None)
    made.data = data
    return Loader(made, TrainConfig(num_workers=num_workers, **config), CPU)


def flat(windows) -> list[list[int]]:
    return [torch.cat(window).tolist() for window in windows]


@given(
    size=st.integers(1, 60),
    batch_size=st.integers(1, 70),
    micro=st.one_of(st.none(), st.integers(1, 70)),
    epoch=st.integers(0, 3),
    position=st.integers(0, 60),
)
def test_windows_partition_the_epoch_from_any_position(size, batch_size, micro, epoch, position):
    sampler = Sampler(range(size), TrainConfig(batch_size=batch_size, micro_batch_size=micro, seed=3))
    sampler.epoch = epoch
    whole = [index for _, indices in sampler for index in indices]
    assert sorted(whole) == list(range(size))
    assert whole == shuffled(3, epoch, size)
    sampler.position = position = min(position, sampler.windows)
    rest = [indices for _, indices in sampler]
    assert [index for indices in rest for index in indices] == whole[position * batch_size :]
    assert len(rest) == sum(len(sampler.micro_batches(window, 0)) for window in range(position, sampler.windows))
    assert all(len(indices) <= min(micro or batch_size, batch_size) for indices in rest)


@given(
    size=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    micro=st.none() | st.integers(1, 25),
    shares=st.integers(1, 5),
)
def test_shares_partition_every_window_in_equally_many_micro_batches(size, batch_size, micro, shares):
    config = TrainConfig(batch_size=batch_size, micro_batch_size=micro, seed=3)
    order = shuffled(3, 0, size)
    samplers = [Sampler(range(size), config, share, shares) for share in range(shares)]
    requests = [[indices for _, indices in sampler] for sampler in samplers]
    assert len({len(one) for one in requests}) == 1
    done = 0
    for window in range(samplers[0].windows):
        own = [len(sampler.micro_batches(window, sampler.share)) for sampler in samplers]
        assert own[0] == max(own) > 0
        seen = [one[done : done + count] for one, count in zip(requests, own, strict=True)]
        trained = [index for batches in seen for indices in batches for index in indices]
        assert trained == order[window * batch_size : (window + 1) * batch_size]
        done += own[0]
    assert done == len(requests[0])


def test_the_order_depends_on_seed_and_epoch():
    orders = {tuple(shuffled(seed, epoch, 50)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_way_to_offer_data_gives_the_same_batches(num_workers):
    x = torch.arange(10)
    offers = [TensorDataset(x=x), list(x), Subset(list(x), range(10)), Subset(torch.arange(20), range(10))]
    results = []
    for data in offers:
        made = loader(data, num_workers, batch_size=4, micro_batch_size=3)
        windows = [list(made.epoch(epoch, 0)) for epoch in (0, 1)]
        made.close()
        results.append([[b["x"] if isinstance(b, dict) else b for b in w] for ws in windows for w in ws])
    assert all(flat(result) == flat(results[0]) for result in results)
    assert [len(window) for window in results[0]] == [2, 2, 1] * 2


class Drawing(Numbers):
    def augment(self, sample, generator):
        return float(sample) + torch.rand(1, generator=generator)


class Reading:
    """Draws from every global generator while it is read."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


@pytest.mark.parametrize(("data", "task"), [(list(range(10)), Drawing), (Reading(), Numbers)])
def test_what_is_drawn_depends_on_neither_position_nor_workers(data, task):
    def read(num_workers, position):
        made = loader(data, num_workers, task, batch_size=4, micro_batch_size=3)
        windows = [torch.cat(window) for window in made.epoch(1, position)]
        made.close()
        return windows

    whole = read(0, 0)
    for num_workers, position in ((0, 1), (2, 0), (2, 2)):
        for a, b in zip(whole[position:], read(num_workers, position), strict=True):
            assert torch.equal(a, b)


class Stream(IterableDataset):
    def __iter__(self):
        yield 1


@pytest.mark.parametrize("data", [DataLoader(TensorDataset(torch.arange(4))), Stream(), iter([1, 2])])
def test_what_cannot_be_read_by_index_is_refused_with_what_to_return(data):
    with pytest.raises(DataError, match=f"Numbers returned a {type(data).__name__}, .* of a DataLoader its `dataset`"):
        loader(data)


def test_an_empty_training_set_is_refused():
    with pytest.raises(DataError, match="training set of Numbers is empty"):
        loader([])


def test_tensor_dataset():
    x, y = torch.arange(6), torch.arange(6) * 10
    assert [t.tolist() for t in TensorDataset(x, y).__getitems__([4, 1])] == [[4, 1], [40, 10]]
    named = TensorDataset(x=x, y=y)
    assert {key: value.item() for key, value in named[3].items()} == {"x": 3, "y": 30}
    with pytest.raises(DataError, match=r"different lengths \[6, 2\]"):
        TensorDataset(x, y[:2])
    with pytest.raises(DataError, match="by position or by name"):
        TensorDataset()


def test_derived_seeds_are_fixed_for_all_time():
    """Golden values: another derivation would give every study other results."""
    assert derive(0, "step", 0, 0) == 2269300444199237613
    assert derive(2**63 - 1, "augment", 7, 123456) == 1085097861841504980
    assert shuffled(0, 0, 8) == [3, 2, 5, 7, 6, 4, 0, 1]


def test_derived_seeds_differ_in_every_argument():
    seeds = [
        derive(s, name, *c) for s in (0, 1) for name in ("step", "augment") for c in ((0, 1), (1, 0), (1,), (0, 11))
    ]
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seed_all_seeds_all():
    def draw():
        seed_all(12345678901234567)
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()

    assert draw() == draw()
