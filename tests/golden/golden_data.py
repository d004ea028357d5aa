"""What the losses and the data sets of the trainer give for fixed inputs: a case for each name that they export."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from golden_task import Rows, numbers
from torch import Tensor

import trainer.data
import trainer.losses
from trainer.config import LossWeights
from trainer.config.data import CurriculumConfig
from trainer.data import (
    Bucketed,
    Cached,
    Curriculum,
    Mixture,
    Packed,
    Padded,
    TableDataset,
    TarShards,
    TensorDataset,
    TokenBlocks,
    TokenDocuments,
    TokenFile,
    block_diagonal_mask,
    next_tokens,
    pad,
    write_tokens,
)
from trainer.data.augment import Chain, Mask, MaskTokens, Noise, Permute
from trainer.data.text import BPE, Bytes
from trainer.losses import gradient_penalty, mse
from trainer.task import Loss

# --- Losses

MASK = numbers(4, 5, seed=9) > -0.5
LABELS = torch.tensor([[0, 2, 1, -100, 2], [1, 1, -100, 0, 2], [2, 0, 1, 2, 1], [0, 0, 0, 1, 2]])
TARGETS = numbers(4, 5, seed=11)
DAYS = numbers(12, 7, seed=12)
BLOCKS = torch.block_diag(torch.ones(1, 8), torch.ones(1, 4))
PAIRS = [numbers(6, seed=seed) - 2 for seed in (21, 22, 23, 24)]
DESIRABLE = torch.tensor([True, False, True, True, False, False])
LENGTHS = torch.tensor([6, 5, 2]), torch.tensor([3, 2, 3])

# Of each loss the shape of its predictions, the arguments that follow them, and the options of each call.
CASES: dict[str, tuple[tuple[int, ...], Sequence[Any], Sequence[Mapping[str, Any]]]] = {
    "mse": ((4, 5), (TARGETS,), ({}, {"mask": MASK})),
    "huber": ((4, 5), (TARGETS,), ({}, {"mask": MASK, "delta": 0.3})),
    "quantile": ((4, 5, 3), (TARGETS,), ({}, {"mask": MASK, "quantiles": (0.05, 0.4, 0.8)})),
    "cross_entropy": (
        (4, 5, 3),
        (LABELS,),
        (
            {},
            {"label_smoothing": 0.1, "temperature": 2.0},
            {"label_smoothing": torch.tensor(0.2)},
            {"weight": torch.tensor([1.0, 0.5, 2.0])},
        ),
    ),
    "focal": ((4, 5, 3), (LABELS,), ({}, {"gamma": 0.5, "alpha": torch.tensor([1.0, 0.5, 2.0]), "temperature": 2.0})),
    "ctc": ((3, 6, 4), (torch.tensor([[1, 2, 2], [3, 1, 0], [2, 3, 1]]), *LENGTHS), ({}, {"blank": 0})),
    "rank_ic": ((12, 7), (DAYS,), ({}, {"valid": DAYS > -0.6, "tau": 0.5, "min_items": 5})),
    "cs_ic": ((12, 7), (DAYS,), ({}, {"valid": DAYS > -0.6, "min_items": 5})),
    "sharpe": ((12, 7), (DAYS,), ({}, {"valid": DAYS > -0.6, "blocks": BLOCKS, "min_items": 5})),
    "causal_contrastive": (
        (6, 4),
        (numbers(6, 4, seed=13),),
        (
            {},
            {"valid": DESIRABLE, "times": torch.tensor([0, 2, 1, 1, 3, 0]), "temperature": 0.5},
            {"groups": torch.tensor([0, 0, 1, 1, 2, 2])},
        ),
    ),
    "dpo": ((6,), PAIRS[1:], ({}, {"beta": 0.5, "label_smoothing": 0.1})),
    "ipo": ((6,), PAIRS[1:], ({}, {"beta": 0.5})),
    "kto": (
        (6,),
        (PAIRS[1], DESIRABLE),
        ({}, {"kl": PAIRS[2] + 2.5, "beta": 0.5, "weight_desirable": 1.5, "weight_undesirable": 0.5}),
    ),
    "sequence_log_probs": ((4, 5, 3), (LABELS,), ({},)),
}
WEIGHTS = LossWeights.model_validate(
    {
        "phases": [{"weights": {"a": 1.0, "b": 0.5}}, {"start": 0.5, "weights": {"b": 1.0, "c": 0.25}}],
        "scale": {"b": 0.5},
        "blend": 0.2,
    }
)


# Names of trainer.losses that are no loss, or that came after the digest of version 1; tests/contract/test_losses.py
# holds the latter to their formulas.
UNDIGESTED = {"LOSSES", "uncertainty_sum"}


def losses() -> Any:
    """Returns the value, the count, the terms and the gradient of each loss for each of its cases, in float32 and from
    predictions in bfloat16; and of sums of them and penalties."""
    values: dict[str, Any] = {"weights": [WEIGHTS.at(tenth / 10) for tenth in range(11)]}
    for name in trainer.losses.__all__:
        if name == "weighted_sum":
            values[name] = _weighted()
        elif name == "gradient_penalty":
            values[name] = _penalties()
        elif name not in UNDIGESTED:
            shape, rest, options = CASES[name]
            dtypes = (torch.float32, torch.bfloat16)
            values[name] = [_loss(name, shape, rest, call, dtype) for call in options for dtype in dtypes]
    assert trainer.losses.LOSSES.keys() <= values.keys(), "every loss of the table has a case"
    return values


def _loss(name: str, shape: tuple[int, ...], rest: Sequence[Any], call: Mapping[str, Any], dtype: torch.dtype) -> Any:
    predictions = numbers(*shape, seed=10).to(dtype).requires_grad_()
    loss = getattr(trainer.losses, name)(predictions, *rest, **call)
    loss = loss if isinstance(loss, Loss) else Loss((loss[0] * PAIRS[0][: len(loss[0])]).sum(), loss[1])
    return _told(loss, predictions)


def _told(loss: Loss, by: Tensor) -> Any:
    [gradient] = torch.autograd.grad(loss.sum, [by])
    return [loss.sum, loss.count, loss.terms, gradient]


def _weighted() -> Any:
    p = numbers(4, 5, seed=10).requires_grad_()
    parts = {"all": mse(p, TARGETS), "some": mse(p, TARGETS, MASK), "none": mse(p, TARGETS, torch.zeros_like(MASK))}
    ways = ({"all": 0.5, "some": 2.0}, {"some": 0.3, "all": 1.0, "none": 1.0})
    results = []
    for weights in ways:
        loss = trainer.losses.weighted_sum(parts, weights)
        [gradient] = torch.autograd.grad(loss.sum, [p], retain_graph=True)
        results.append([loss.sum, loss.count, loss.terms, gradient])
    return results


def _penalties() -> Any:
    x = numbers(4, 5, seed=10).requires_grad_()
    return [_told(gradient_penalty(x.pow(3).sum(1), x, norm=norm), x) for norm in (1.0, 0.0)]


# --- Data


def data() -> Any:
    """Returns the samples, batches and orders of each data set that the trainer exports, and what augments them."""
    with TemporaryDirectory(prefix="hpo-golden-") as directory:
        made = {name: make(Path(directory)) for name, make in SETS.items()}
    missing = set(trainer.data.__all__) - made.keys() - ELSEWHERE - AFTER
    assert not missing, f"golden_data.py has no case for {', '.join(sorted(missing))}"
    return made


ELSEWHERE = {"Loader", "View", "check"}  # digested as the data order, by those made of it, and giving no samples
AFTER = {"Shards"}  # names that came after the digest of version 1; test_streams.py has its order
DOCUMENTS = [torch.arange(start, start + length) for start, length in enumerate((3, 9, 1, 5, 14, 2, 5, 7))]
ROWS = Rows(numbers(23, 2, seed=3))
GREEK = "\u03b1\u03b2\u03b3"


def _shown(dataset: Any, *, seed: int = 5, batch_size: int = 4, epochs: Sequence[int] = (0, 1, 4)) -> Any:
    """The orders of some epochs, and a batch and a sample of the last one."""
    orders = [list(dataset.order(seed, epoch, batch_size)) for epoch in epochs]
    some = orders[-1][:batch_size]
    read = getattr(dataset, "__getitems__", lambda indices: [dataset[index] for index in indices])
    return [len(dataset), orders, read(some), dataset[some[0]]]


def _tokens(directory: Path) -> TokenFile:
    write_tokens(directory / "tokens.json", DOCUMENTS, vocab_size=1000)
    return TokenFile(directory / "tokens.json")


def _written(directory: Path) -> Any:
    return [_tokens(directory).size, *map(Path.read_bytes, sorted(directory.glob("tokens.*")))]


def _tables(directory: Path) -> Any:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    columns = {"a": [0.5, 1.25, -3.0], "b": [1, 2, 3], "c": [True, False, True]}
    table = pa.table(columns)
    pa.csv.write_csv(table, directory / "table.csv")
    pa.parquet.write_table(table, directory / "table.parquet")
    files = [directory / "table.csv", directory / "table.parquet"]
    wanted: dict[str, Any] = {"x": ["a", "b"], "y": "b", "z": "c"}
    as_is = TableDataset(files, wanted)
    return [as_is[[0, 4, 5]], TableDataset(files[0], wanted, {"y": torch.float64})[[2, 1]]]


def _shards(directory: Path) -> Any:
    for shard in range(2):
        with tarfile.open(directory / f"{shard}.tar", "w") as archive:
            for place in range(3):
                for ending, text in (("cls", f"{place}"), ("txt", f"sample {shard} {place}"), ("raw", "bytes")):
                    member = tarfile.TarInfo(f"folder/{place}.{ending}")
                    member.size = len(text)
                    archive.addfile(member, io.BytesIO(text.encode()))
    shards = TarShards([directory / "0.tar", directory / "1.tar"], {"raw": len})
    return [shards[index] for index in range(len(shards))]


def _curricula(_: Path) -> Any:
    scores = numbers(23, seed=4).tolist()
    ways = [{}, *({"start": 0.4, "epochs": 3.0, "pacing": pacing} for pacing in ("root", "exponential", "linear"))]
    return [_shown(Curriculum(ROWS, scores, CurriculumConfig.model_validate(way))) for way in ways]


def _mixtures(_: Path) -> Any:
    other = Rows(numbers(5, 2, seed=6))
    return [
        _shown(Mixture([(ROWS, 0.62), (other, 0.38)], phases={2: (0.5, 0.5)})),
        _shown(Mixture([(ROWS, 5), (other, 3), (Rows(numbers(9, 2)), 1)], size=40)),
    ]


def _packed(_: Path) -> Any:
    packed = Packed(DOCUMENTS, 8, seed=3, pad_id=7)
    rows = [packed[index] for epoch in (0, 2) for index in packed.order(1, epoch, 4)]
    documents = torch.stack([row["documents"] for row in rows])
    return [rows, block_diagonal_mask(documents), block_diagonal_mask(documents, causal=False)]


def _targets(_: Path) -> Any:
    documents = torch.tensor([[0, 0, 1, 1, 1, -1], [0, 1, 1, 2, 2, 2]])
    return next_tokens(torch.arange(12).reshape(2, 6), documents)


def _buckets(_: Path) -> Any:
    lengths = [len(document) for document in DOCUMENTS] * 3
    rows = Rows(torch.arange(24))
    return [_shown(Bucketed(rows, lengths, bucket)) for bucket in (1, 2, 50)]


def _padded(_: Path) -> Any:
    samples = [{"tokens": each, "labels": each + 1, "weight": 0.5} for each in DOCUMENTS]
    both = Padded(samples, {"tokens": 0, "labels": -100}, side="left", multiple_of=4)
    return [Padded(DOCUMENTS).__getitems__([1, 3, 0]), both.__getitems__([2, 4])]


def _augmented(_: Path) -> Any:
    noise, mask = Noise(0.1), Mask(0.3, value=2.0)
    ways: list[tuple[Callable[..., Any], Any]] = [
        (noise, numbers(3, 4)),
        (Noise(0.5, on="x"), {"x": numbers(6), "y": 1}),
        (mask, numbers(3, 4)),
        (Mask(0.5, dim=-1, on=1), (0, numbers(3, 4))),
        (Permute(1), numbers(3, 4)),
        (MaskTokens(99, 50, share=0.4), torch.arange(30)),
        (Chain((noise, mask, Permute())), numbers(5, 2)),
    ]
    return [augment(sample, torch.Generator().manual_seed(8)) for augment, sample in ways]


def _texts(directory: Path) -> Any:
    text = f"the cat sat on the mat, the cat sat; {GREEK}"
    pairs = BPE.train([text] * 3, vocab_size=275)
    pairs.save(directory / "pairs.json")
    read = BPE.load(directory / "pairs.json")
    ids = [Bytes().encode(text), pairs.encode(text), read.encode(text)]
    return [ids, pairs.vocab_size, pairs.end, Bytes().decode(ids[0]), read.decode(ids[1])]


def _cached(directory: Path) -> Any:
    return [_shown(Cached(ROWS, directory / "cache", "key")) for _ in range(2)]


SETS: dict[str, Callable[[Path], Any]] = {
    "Bucketed": _buckets,
    "Cached": _cached,
    "Curriculum": _curricula,
    "Mixture": _mixtures,
    "Packed": _packed,
    "Padded": _padded,
    "TableDataset": _tables,
    "TarShards": _shards,
    "TensorDataset": lambda _: [ROWS[[3, 1]], ROWS[2], TensorDataset(x=numbers(3), y=numbers(3, 2))[[2, 0]]],
    "TokenBlocks": lambda directory: [*TokenBlocks(_tokens(directory), 8), *TokenBlocks(_tokens(directory), 8, 3)],
    "TokenDocuments": lambda directory: [*TokenDocuments(_tokens(directory))],
    "TokenFile": lambda directory: [_tokens(directory)[4:9], len(_tokens(directory)), _tokens(directory).ends],
    "write_tokens": _written,
    "block_diagonal_mask": _packed,
    "next_tokens": _targets,
    "pad": lambda _: [pad(DOCUMENTS[:3]), pad(DOCUMENTS[3:], value=-1, side="left", multiple_of=8)],
    "augment": _augmented,
    "text": _texts,
}
