"""Finds the files of a split in a directory of Hugging Face's library `datasets`. Torch-free.

Such a directory was saved by `save_to_disk`, or holds data files as on the Hub. The library, the extra `datasets`, is
imported when one is read; it finds the files, and needs no network for that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from trainer.errors import ConfigError, DataError
from trainer.files import scratch

SAVED, SAVED_SPLITS, _CARD = "state.json", "dataset_dict.json", "README.md"
_NUMBERED = re.compile(r"(train|test|validation|valid|dev|eval)\w*-\d{5}-of-\d{5}(-\w+)?\.\w+")


def is_dataset(directory: Path) -> bool:
    """Returns True for a directory of `save_to_disk`, or with a card of the Hub or files numbered as there."""
    if any((directory / name).is_file() for name in (SAVED, SAVED_SPLITS)):
        return True
    if (card := directory / _CARD).is_file():
        with open(card, "rb") as opened:
            if opened.read(4).rstrip(b"\r") in (b"---\n", b"---"):
                return True
    return any(_NUMBERED.fullmatch(file.name) for file in directory.glob("**/*-of-*"))


def files(directory: Path, split: str) -> list[Path]:
    """Returns the files of a split in their order; with an empty `split`, those of the only one.

    Raises DataError for a directory that holds no such split, and ConfigError if the extra is missing.
    """
    if find_spec("datasets") is None:
        raise ConfigError(f"{directory} is a directory of Hugging Face's datasets: pip install 'hpo[datasets]'.")
    is_saved = any((directory / name).is_file() for name in (SAVED, SAVED_SPLITS))
    try:
        return _saved(directory, split) if is_saved else _downloaded(directory, split)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split()).rstrip(".")[:200]
        raise DataError(f"{directory} cannot be read as a directory of datasets ({reason}): save it again.") from error


def _saved(directory: Path, split: str) -> list[Path]:
    import datasets

    saved = datasets.load_from_disk(str(directory))
    if isinstance(saved, datasets.DatasetDict):
        saved = saved[_chosen(directory, split, saved)]
    elif split and str(saved.split or split) != split:
        _chosen(directory, split, [str(saved.split)])
    return [Path(file["filename"]) for file in saved.cache_files]


def _downloaded(directory: Path, split: str) -> list[Path]:
    import datasets

    with scratch.temporary("hpo-datasets-") as cache:
        try:
            by_split = datasets.load_dataset_builder(str(directory), cache_dir=str(cache)).config.data_files or {}
        except ValueError as error:
            if "Config name is missing" not in str(error):
                raise
            raise DataError(
                f"{directory} holds several configurations of data: give the files of one, by a pattern such as "
                f"{directory}/*.parquet."
            ) from error
    return [Path(file) for file in by_split[_chosen(directory, split, by_split)]]


def _chosen(directory: Path, split: str, splits: Iterable[object]) -> str:
    names = [str(name) for name in splits]
    if split and split not in names:
        raise DataError(f"{directory} has no split {split!r}: it has {', '.join(names)}.")
    if not split and len(names) > 1:
        raise DataError(f"{directory} has the splits {', '.join(names)}: name one of them as the split.")
    return split or names[0]
