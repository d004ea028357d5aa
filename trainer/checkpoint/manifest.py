"""The manifest of a checkpoint directory: what belongs to it, and whether all of it is as it was written. Torch-free.

Its own sha256 stands in the ledger, so whatever has changed on the disk since is noticed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.files.durable import sha256

FORMAT = 1
MANIFEST = "manifest.json"
MODEL, AVERAGE = "model", "average"  # the items of a state that hold weights
APART = ("-frozen", "-buffers")  # what the files of an item are called that hold what is not trained


class Damaged(Exception):
    """The checkpoint is not what was written; the text says how."""


def evaluated(state: Mapping[str, Any]) -> str:
    """The item with the weights that were evaluated: those of the average, once something has entered it."""
    average = state.get(AVERAGE)
    return AVERAGE if isinstance(average, Mapping) and average.get("model") else MODEL


def weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """The weights that were evaluated. Raises KeyError where the state holds none."""
    return state[AVERAGE]["model"] if evaluated(state) == AVERAGE else state[MODEL]


def manifest_in(directory: Path, expected: str | None) -> dict[str, Any]:
    """The manifest in `directory`; raises Damaged unless it is as written.

    `expected` is its sha256; None trusts it, as for a checkpoint that a user hands in.
    """
    with _damage():
        raw = (directory / MANIFEST).read_bytes()
        if expected is not None and hashlib.sha256(raw).hexdigest() != expected:
            raise Damaged(f"{MANIFEST} has another sha256 than the one committed")
        manifest = json.loads(raw)
        if manifest["format"] != FORMAT:
            raise Damaged(f"{MANIFEST} has format {manifest['format']}, and this version reads {FORMAT}")
        return manifest


def check(directory: Path, expected: str | None, *, weights_alone: bool = False) -> dict[str, Any]:
    """As `manifest_in`, and raises Damaged unless every byte of the checkpoint, or of the weights that were evaluated,
    is as written."""
    manifest = manifest_in(directory, expected)
    with _damage():
        names = manifest["files"]
        if weights_alone:
            names = files_of(evaluated(manifest["state"]), names)
        for name in names:
            _check_file(directory / name, manifest["files"][name])
    return manifest


@contextmanager
def _damage() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise Damaged(f"{Path(error.filename).name} is missing") from error
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} cannot be understood") from error


def files_of(item: str, names: Iterable[str]) -> list[str]:
    """Those of a checkpoint's files that hold the tensors of `item`: one or more, or so from each rank."""
    of_it = re.compile(re.escape(item) + rf"({'|'.join(APART)})?(-\d{{5}}-of-\d{{5}})?\.safetensors")
    return [name for name in names if of_it.fullmatch(name)]


def _check_file(path: Path, file: dict[str, Any]) -> None:
    if (size := path.stat().st_size) != file["size"]:
        raise Damaged(f"{path.name} has {size} bytes instead of {file['size']}")
    if sha256(path) != file["sha256"]:
        raise Damaged(f"{path.name} has another sha256 than its manifest says")
