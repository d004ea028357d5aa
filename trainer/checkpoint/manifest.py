"""The manifest of a checkpoint directory: what belongs to it, and whether all of it is as it was written. Torch-free.

Its own sha256 stands in the ledger, so whatever has changed on the disk since is noticed. A checkpoint from elsewhere
is read as any input is: no file outside its directory is opened, and texts are bounded.
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

from trainer.checkpoint import copied
from trainer.files.durable import sha256

FORMAT = 1
MANIFEST = "manifest.json"
MODEL, AVERAGE = "model", "average"  # the items of a state that hold weights
APART = ("-frozen", "-buffers")  # what the files of an item are called that hold what is not trained

MOST_BYTES = 64 << 20  # of a text from elsewhere, which holds some hundred bytes for each tensor
MOST_LEVELS = 100  # of lists and dicts in it; those who walk through it call themselves at each


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
        raw = _bytes(directory, MANIFEST, MOST_BYTES if expected is None else -1)
        if expected is not None and hashlib.sha256(raw).hexdigest() != expected:
            raise Damaged(f"{MANIFEST} has another sha256 than the one committed")
        manifest = _parsed(raw, MANIFEST) if expected is None else json.loads(raw)
        if manifest["format"] != FORMAT:
            raise Damaged(f"{MANIFEST} has format {str(manifest['format'])[:40]}, and this version reads {FORMAT}")
        _check_types(manifest)
        return manifest


def json_in(directory: Path, name: str) -> Any:
    """What a file of `directory` holds as JSON; raises Damaged where it lies elsewhere or cannot be read."""
    with _damage(name):
        return _parsed(_bytes(directory, name, MOST_BYTES), name)


def check(directory: Path, expected: str | None, *, weights_alone: bool = False) -> dict[str, Any]:
    """As `manifest_in`, and raises Damaged unless every byte of the checkpoint, or of the weights that were evaluated,
    is as written."""
    manifest = manifest_in(directory, expected)
    with _damage():
        names = manifest["files"]
        if weights_alone:
            names = files_of(evaluated(manifest["state"]), names)
        for name in names:
            _check_file(_inside(directory, name), manifest["files"][name])
    return manifest


def _inside(directory: Path, name: str) -> Path:
    """The file called `name` in `directory`; raises Damaged for a device, and for what leads elsewhere."""
    if not copied.is_name(name) or ("/" in name and not name.startswith(f"{copied.FILES}/")):
        raise Damaged(f"it names a file outside itself: {name[:80]!r}")
    path = directory / name
    root = os.path.realpath(directory)
    if os.path.commonpath([root, os.path.realpath(path)]) != root:
        raise Damaged(f"{name} is a link that leads out of it: put the file itself there")
    if not stat.S_ISREG(path.stat().st_mode):
        raise Damaged(f"{name} is no file")
    return path


def _bytes(directory: Path, name: str, most: int) -> bytes:
    """What the file holds, `most` bytes at most unless that is -1."""
    with _inside(directory, name).open("rb") as file:
        raw = file.read(most if most < 0 else most + 1)
    if len(raw) > most >= 0:
        raise Damaged(f"{name} is larger than {most >> 20} MB")
    return raw


def _parsed(raw: bytes, name: str) -> Any:
    value = json.loads(raw)
    level, depth = [value], 0
    while level:
        level = [child for one in level for child in (one.values() if isinstance(one, dict) else one)]
        level, depth = [one for one in level if isinstance(one, dict | list)], depth + 1
        if depth > MOST_LEVELS:
            raise Damaged(f"{name} is nested deeper than {MOST_LEVELS} levels")
    return value


def _check_types(manifest: dict[str, Any]) -> None:
    """Raise TypeError unless what others count on is what it should be."""
    counts = [manifest.get(name, 0) for name in ("step", "epoch")]
    counts += [file["size"] for file in manifest["files"].values()]
    if any(type(count) is not int or count < 0 for count in counts):
        raise TypeError("a count is none")
    if not isinstance(manifest.get("state", {}), dict) or not isinstance(manifest.get("config_hash", ""), str):
        raise TypeError("the state or the hash is none")


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
    """Those of a checkpoint's files that hold the tensors of `item`: one or more, or so from each rank."""
    of_it = re.compile(re.escape(item) + rf"({'|'.join(APART)})?(-\d{{5}}-of-\d{{5}})?\.safetensors")
    return [name for name in names if of_it.fullmatch(name)]


def _check_file(path: Path, file: dict[str, Any]) -> None:
    if (size := path.stat().st_size) != file["size"]:
        raise Damaged(f"{path.name} has {size} bytes instead of {file['size']}")
    if sha256(path) != file["sha256"]:
        raise Damaged(f"{path.name} has another sha256 than its manifest says")
