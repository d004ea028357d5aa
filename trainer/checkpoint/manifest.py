"""Reads and checks the manifest of a checkpoint directory: its files, with their sizes and sums. Torch-free.

The ledger holds the manifest's own sha256, so any later change on disk is noticed. A checkpoint from elsewhere is
treated as untrusted input: no file outside its directory is opened, and the size of JSON files is bounded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.checkpoint import copied_files
from trainer.files.durable import sha256

FORMAT = 1
MANIFEST = "manifest.json"
MODEL, AVERAGE = "model", "average"  # the items of a state that hold weights
APART = ("-frozen", "-buffers")  # suffixes of an item's files with untrained tensors

MOST_BYTES = 64 << 20  # of untrusted JSON, which has some hundred bytes for each tensor
MOST_LEVELS = 100  # of its lists and dicts; functions recurse once for each


class Damaged(Exception):
    """Raised for a checkpoint that differs from what was written; the text says how."""


def evaluated(state: Mapping[str, Any]) -> str:
    """Returns the item with the weights that were evaluated: the average's, once it is not empty."""
    average = state.get(AVERAGE)
    return AVERAGE if isinstance(average, Mapping) and average.get("model") else MODEL


def weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the weights that were evaluated. Raises KeyError if the state holds none."""
    return state[AVERAGE]["model"] if evaluated(state) == AVERAGE else state[MODEL]


def manifest_in(directory: Path, expected: str | None) -> dict[str, Any]:
    """Returns the manifest in `directory`; raises Damaged unless it is as written.

    `expected` is its sha256; None trusts it, as for a checkpoint that a user passes in.
    """
    with _damage():
        raw = _bytes(directory, MANIFEST, MOST_BYTES if expected is None else -1)
        if expected is not None and hashlib.sha256(raw).hexdigest() != expected:
            raise Damaged(f"{MANIFEST} has another sha256 than the one committed")
        manifest = _parsed(raw, MANIFEST) if expected is None else json.loads(raw)
        if manifest["format"] != FORMAT:
            raise Damaged(f"{MANIFEST} has format {str(manifest['format'])[:40]}, and this version reads {FORMAT}")
        _check_types(manifest)
        return manifest


def json_in(directory: Path, name: str) -> Any:
    """Returns the JSON value of a file in `directory`; raises Damaged if it is elsewhere or cannot be read."""
    with _damage(name):
        return _parsed(_bytes(directory, name, MOST_BYTES), name)


def check(directory: Path, expected: str | None, *, weights_only: bool = False) -> dict[str, Any]:
    """Returns `manifest_in` and checks every file's bytes; raises Damaged if one differs from what was written.

    With `weights_only` only the files of the weights that were evaluated are checked.
    """
    manifest = manifest_in(directory, expected)
    with _damage():
        names = manifest["files"]
        if weights_only:
            names = files_of(evaluated(manifest["state"]), names)
        for name in names:
            _check_file(_inside(directory, name), manifest["files"][name])
    return manifest


def _inside(directory: Path, name: str) -> Path:
    """Returns the path of the file `name` in `directory`; raises Damaged for a device or a path that leads out."""
    if not copied_files.is_name(name) or ("/" in name and not name.startswith(f"{copied_files.FILES}/")):
        raise Damaged(f"it names a file outside itself: {name[:80]!r}")
    path = directory / name
    root = os.path.realpath(directory)
    if os.path.commonpath([root, os.path.realpath(path)]) != root:
        raise Damaged(f"{name} is a link that leads out of it: put the file itself there")
    if not stat.S_ISREG(path.stat().st_mode):
        raise Damaged(f"{name} is not a file")
    return path


def _bytes(directory: Path, name: str, most: int) -> bytes:
    """Returns the file's content; raises Damaged for more than `most` bytes, unless that is -1."""
    with _inside(directory, name).open("rb") as file:
        raw = file.read(most if most < 0 else most + 1)
    if len(raw) > most >= 0:
        raise Damaged(f"{name} is larger than {most >> 20} MB")
    return raw


def _parsed(raw: bytes, name: str) -> Any:
    value = json.loads(raw)
    level, depth = [value], 0
    while level:
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
        level, depth = [node for node in level if isinstance(node, dict | list)], depth + 1
        if depth > MOST_LEVELS:
            raise Damaged(f"{name} is nested deeper than {MOST_LEVELS} levels")
    return value


def _check_types(manifest: dict[str, Any]) -> None:
    """Raises TypeError unless the fields that callers rely on have their types."""
    counts = [manifest.get(name, 0) for name in ("step", "epoch")]
    counts += [file["size"] for file in manifest["files"].values()]
    if any(type(count) is not int or count < 0 for count in counts):
        raise TypeError("a count is not a whole number")
    if not isinstance(manifest.get("state", {}), dict) or not isinstance(manifest.get("config_hash", ""), str):
        raise TypeError("the state or the hash has the wrong type")


@contextmanager
def _damage(name: str = MANIFEST) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise Damaged(f"{Path(error.filename).name} is missing") from error
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{name} cannot be understood") from error


def files_of(item: str, names: Iterable[str]) -> list[str]:
    """Returns the checkpoint's files that hold the tensors of `item`: one or more, from each rank or from one."""
    of_it = re.compile(re.escape(item) + rf"({'|'.join(APART)})?(-\d{{5}}-of-\d{{5}})?\.safetensors")
    return [name for name in names if of_it.fullmatch(name)]


def _check_file(path: Path, file: dict[str, Any]) -> None:
    if (size := path.stat().st_size) != file["size"]:
        raise Damaged(f"{path.name} has {size} bytes instead of {file['size']}")
    if sha256(path) != file["sha256"]:
        raise Damaged(f"{path.name} has another sha256 than its manifest says")
