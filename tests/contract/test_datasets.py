"""Every data set and every order: a run that enters an epoch anywhere, with any number of workers, reads the same."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from places import ROOT
from torch.utils.data import Subset

import trainer.data
from trainer.config import TrainConfig
from trainer.config.data import CurriculumConfig
from trainer.data import (
    Bucketed,
    Cached,
    Curriculum,
    Loader,
    Mixture,
    Packed,
    Padded,
    TableDataset,
    TarShards,
    TensorDataset,
    TokenBlocks,
    TokenDocuments,
    TokenFile,
    check,
    write_tokens,
)
from trainer.data.augment import Chain, Mask, MaskTokens, Noise, Permute
from trainer.data.transport import map_leaves
from trainer.task import Task

BATCH = 4


def documents(count: int = 23) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 90, (1 + 5 * i % 11,), generator=generator) for i in range(count)]


class Squares:
    """Plain map-style, one by one."""

    draws = False

    def __init__(self, count: int = 17, offset: int = 0) -> None:
        self.values = [torch.tensor([i + offset, (i + offset) ** 2]) for i in range(count)]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]


def token_file(tmp_path: Path) -> TokenFile:
    write_tokens(tmp_path / "tokens.json", documents(), 90)
    return TokenFile(tmp_path / "tokens.json")


def table(tmp_path: Path) -> TableDataset:
    pa.parquet.write_table(pa.table({"a": np.arange(19.0), "b": np.arange(19), "c": [True] * 19}), tmp_path / "t.pq")
    return TableDataset(tmp_path / "t.pq", {"x": ["a", "b"], "y": "b", "z": "c"})


def shards(tmp_path: Path) -> TarShards:
    paths = []
    for number in range(3):
        paths.append(tmp_path / f"{number}.tar")
        with tarfile.open(paths[-1], "w") as archive:
            for sample in range(5 + number):
                array = io.BytesIO()
                np.save(array, np.arange(3) + 10 * sample + 100 * number)
                for ending, data in (("npy", array.getvalue()), ("cls", str(sample).encode())):
                    info = tarfile.TarInfo(f"{number}/{sample:03}.{ending}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    return TarShards(paths)


DATASETS = {
    "list": lambda tmp_path: [torch.tensor(i) for i in range(17)],
    "subset": lambda tmp_path: Subset(Squares(), [1, 3, 5, 7, 9, 11, 13]),
    "tensors": lambda tmp_path: TensorDataset(x=torch.arange(18).view(9, 2)),
    "table": table,
    "shards": shards,
    "blocks": lambda tmp_path: TokenBlocks(token_file(tmp_path), 8),
    "documents": lambda tmp_path: Padded(TokenDocuments(token_file(tmp_path)), multiple_of=4),
    "padded left": lambda tmp_path: Padded(documents(), side="left"),
    "bucketed": lambda tmp_path: Bucketed(Padded(documents()), [len(d) for d in documents()], bucket=3),
    "packed": lambda tmp_path: Packed(documents(), 12),
    "packed file": lambda tmp_path: Packed(TokenDocuments(token_file(tmp_path)), 7, seed=3),
    "mixture": lambda tmp_path: Mixture([(Squares(), 0.7), (Squares(5, 100), 0.3)], size=14, phases={1: (1, 1)}),
    "mixture of packed": lambda tmp_path: Mixture([(Packed(documents(), 9), 2), (Packed(documents(7), 9), 1)]),
    "bucketed mixture": lambda tmp_path: Bucketed(
        Mixture([(Squares(), 1), (Squares(5, 100), 2)]), lambda index: index // 2 % 5
    ),
    "curriculum": lambda tmp_path: Curriculum(
        Squares(), [-i for i in range(17)], CurriculumConfig(start=0.3, epochs=2)
    ),
    "cached": lambda tmp_path: Cached(Squares(), tmp_path / "cache", "squares 1"),
    "cached packed": lambda tmp_path: Cached(Packed(TokenDocuments(token_file(tmp_path)), 9), tmp_path / "cache", "p"),
}


def hugging_face(tmp_path: Path):
    """An object of the library `datasets`, accepted as it is; a plain and a shuffled, selected one."""
    datasets = pytest.importorskip("datasets", reason="runs where make test has installed datasets")
    rows = datasets.Dataset.from_dict({"x": [[i, i * i] for i in range(21)], "name": [f"n{i}" for i in range(21)]})
    return rows.shuffle(seed=1).select(range(13)).with_format("torch")


DATASETS["hugging face"] = hugging_face


class Chained(Task):
    chain = Chain((Noise(0.5), Mask(0.3), Permute()))

    def augment(self, sample, generator):
        return self.chain(sample.float(), generator)


class Masked(Task):
    def augment(self, sample, generator):
        return MaskTokens(89, 90, share=0.5)(sample, generator)


TASKS = {"plain": Task, "chained": Chained, "masked": Masked}
CASES = [(name, "plain") for name in DATASETS] + [
    ("mixture", "chained"),
    ("curriculum", "masked"),
    ("blocks", "masked"),
]


def exact(window: list) -> str:
    """The window's micro-batches, bit for bit."""
    return repr(map_leaves(window, torch.Tensor, lambda t: (t.dtype, tuple(t.shape), t.numpy().tobytes())))


class Reading:
    """Loaders over one data set, anew for each as for each attempt of a trial."""

    def __init__(self, name: str, task: str, tmp_path: Path) -> None:
        self.name, self.task, self.tmp_path = name, TASKS[task], tmp_path

    def loader(self, num_workers: int = 0, **config) -> Loader:
        made = self.task(None)
        made.train_set = lambda: DATASETS[self.name](self.tmp_path)
        config = {"batch_size": BATCH, "micro_batch_size": 3, "seed": 5, "num_workers": num_workers} | config
        return Loader(made, TrainConfig(**config), torch.device("cpu"))

    def windows(self, epoch: int, position: int = 0, **config) -> list[str]:
        loader = self.loader(**config)
        windows = [exact(window) for window in loader.epoch(epoch, position)]
        loader.close()
        return windows


@pytest.fixture(params=CASES, ids="-".join)
def reading(request, tmp_path) -> Reading:
    return Reading(*request.param, tmp_path)


def test_an_epoch_entered_anywhere_with_any_number_of_workers_is_the_same(reading):
    loader = reading.loader(num_workers=2)
    for epoch in (0, 2):
        whole = reading.windows(epoch)
        for position in range(0, len(whole) + 1, 1 + epoch):
            assert reading.windows(epoch, position) == whole[position:]
            assert [exact(window) for window in loader.epoch(epoch, position)] == whole[position:]
    loader.close()


def test_every_epoch_has_the_same_number_of_windows_and_another_order(reading):
    epochs = [reading.windows(epoch) for epoch in range(4)]
    assert {len(windows) for windows in epochs} == {reading.loader().sampler.windows}
    assert len({str(windows) for windows in epochs}) == 4
    assert reading.windows(0, seed=6) != epochs[0]


def test_shares_of_ranks_make_the_whole(reading):
    """Two ranks together see the indices that one sees, window by window."""
    one = reading.loader(micro_batch_size=None).sampler
    config = TrainConfig(batch_size=BATCH, seed=5)
    two = [type(one)(one.data, config, share, 2) for share in range(2)]
    for epoch in (0, 1):
        for sampler in (one, *two):
            sampler.epoch = epoch
        whole = [index for _, indices in one for index in indices]
        shared = {i for sampler in two for _, indices in sampler for i in indices}
        assert shared == set(whole)


def test_it_passes_its_own_check_and_a_validated_start_changes_nothing(reading):
    check(DATASETS[reading.name](reading.tmp_path))
    assert reading.windows(0, validate_data=True) == reading.windows(0)


def test_the_guide_runs(tmp_path, monkeypatch):
    guide = (ROOT / "docs" / "guide" / "data.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 5 and {"mixture", "augment"} <= names.keys()


def test_the_guide_names_every_data_set():
    guide = (ROOT / "docs" / "guide" / "data.md").read_text(encoding="utf-8")
    assert not [name for name in trainer.data.__all__ if name not in guide and name not in ("Loader", "pad")]
    for field, default in (
        ("num_workers", 0),
        ("data_timeout", 600.0),
        ("data_retry", False),
        ("validate_data", False),
    ):
        assert f"| `train.{field}` | {str(default).lower().removesuffix('.0')} |" in guide
        assert getattr(TrainConfig(), field) == default
