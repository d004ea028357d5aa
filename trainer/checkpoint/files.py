"""A checkpoint on disk: a directory of safetensors files and a manifest.

    model.safetensors      one file for each item of the state that has tensors; if ranks hold parts of them, one
    optimizer.safetensors  from each rank: model-00001-of-00004.safetensors
    model-frozen...        parameters without gradient, if a MB or more
    model-buffers...       tensors of the same item that are not parameters, if a MB or more
    files/...              files that a task has saved in its own format
    manifest.json          sha256 and size of each file, the rest of the state, and its origin

Nothing is pickled; floats in JSON are written so that they read back exactly. Files of untrained tensors that equal
those of the previous checkpoint are hard links to them: each directory is complete, and a file is freed with its last
name.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from safetensors import SafetensorError, safe_open

from trainer.checkpoint import copied_files
from trainer.checkpoint.manifest import (
    APART,
    AVERAGE,
    FORMAT,
    MANIFEST,
    MODEL,
    Damaged,
    check,
    evaluated,
    files_of,
    manifest_in,
    weights,
)
from trainer.checkpoint.stored_tensors import Part, Stored, Take, whole
from trainer.files.durable import sha256, sync

if TYPE_CHECKING:
    from torch import Tensor

# {"$tensor": key} stands in the manifest for a tensor in a file; with "shape", for a tensor whose parts are in several
# files, and "offsets" of each file gives the start of its part.
_TENSOR = "$tensor"

_PLAIN = (str, int, float, type(None))  # the JSON types other than lists and dicts

SMALL = 1 << 20  # bytes; fewer untrained tensors are stored with the trained ones

Mine = Callable[["Tensor"], tuple["Tensor | None", Sequence[int] | None]]  # see saver.Alone.mine


class _Unsavable(TypeError):
    """Raised for a value that JSON cannot hold, with its path in the state's item and its type."""


@dataclass(frozen=True)
class Packed:
    """A state in parts: `tensors`, and the `offsets` of partial ones, by file and key; `rest` is JSON.

    A file's name here has no part that tells ranks apart: `model`, `model-frozen`.
    """

    rest: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]
    offsets: dict[str, dict[str, list[int]]]
    copied: Mapping[str, Path] = field(default_factory=dict)  # files saved whole, by their names


@dataclass(frozen=True)
class _Leaf:
    """A tensor of a state, the part that this process saves, and the part's offset (None for the whole)."""

    whole: Tensor
    part: Tensor
    offset: Sequence[int] | None


def pack(state: dict[str, Any], mine: Mine, copied: Mapping[str, Path] | None = None) -> Packed:
    """Returns `state` with this process's part of each tensor separated, and the files `copied` with it.

    The tensors are not copied; the rest is. Raises TypeError naming a value that JSON cannot hold.
    """
    packed = Packed({}, {}, {}, copied or {})
    for entry, value in state.items():
        leaves: dict[str, _Leaf] = {}
        try:
            split = _split_average if entry == AVERAGE else _split
            packed.rest[entry] = split(value, (), mine, leaves)
        except _Unsavable as error:
            raise TypeError(
                f"state[{entry!r}]{error} cannot be saved: a checkpoint holds tensors, numbers, text, None, and lists "
                "and dicts of them."
            ) from None
        for name, stored in _by_file(entry, leaves).items():
            packed.tensors[name] = {key: leaf.part for key, leaf in stored.items()}
            packed.offsets[name] = {key: [*leaf.offset] for key, leaf in stored.items() if leaf.offset is not None}
    return packed


def _by_file(item: str, leaves: Mapping[str, _Leaf]) -> dict[str, dict[str, _Leaf]]:
    """Returns the leaves by file: the trained ones, and the untrained ones apart if they are large enough."""
    if not leaves:
        return {}
    from torch import nn

    with_parameters = any(isinstance(leaf.whole, nn.Parameter) for leaf in leaves.values())
    files: dict[str, dict[str, _Leaf]] = {kind: {} for kind in ("", *APART)}
    for key, leaf in leaves.items():
        kind = "-buffers" if with_parameters else ""
        if isinstance(leaf.whole, nn.Parameter):
            kind = "" if leaf.whole.requires_grad else "-frozen"
        files[kind][key] = leaf
    for kind in APART:
        if sum(leaf.part.nbytes for leaf in files[kind].values()) < SMALL:
            files[""] |= files.pop(kind)
    return {f"{item}{kind}": stored for kind, stored in files.items() if stored}


def write(directory: Path, state: dict[str, Any], header: dict[str, Any]) -> tuple[str, int]:
    """Writes all of `state` into the existing, empty `directory`, and returns as `complete` does. Raises OSError."""
    packed = pack(state, lambda tensor: (tensor, None))
    return complete(directory, packed, header, write_mine(directory, packed, ""))


def write_mine(directory: Path, packed: Packed, suffix: str) -> dict[str, dict[str, Any]]:
    """Writes and syncs the tensors and files in the existing `directory`. Returns the manifest's entry for each.

    Raises OSError.
    """
    written: dict[str, dict[str, Any]] = {}
    for name, tensors in packed.tensors.items():
        path = directory / f"{name}{suffix}.safetensors"
        storable = _storable(tensors)
        if not (name.endswith(APART) and _linked(path, storable)):
            from safetensors.torch import save_file

            try:
                save_file(storable, path)
            except SafetensorError as error:
                raise OSError(str(error)) from error
        sync(path)
        written[path.name] = {"sha256": sha256(path), "size": path.stat().st_size}
        if packed.offsets[name]:
            written[path.name]["offsets"] = packed.offsets[name]
    for name in copied_files.copy(packed.copied, directory):
        path = directory / name
        written[name] = {"sha256": sha256(path), "size": path.stat().st_size}
    return written


def _linked(path: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Links `path` to the same file of the newest checkpoint next to it if that holds these tensors bit for bit.

    The file of an average may also be linked to the model's. Returns False if the other file is damaged or gone, or the
    file system has no links; the file is then written anew.
    """
    others = path.parent.parent.glob(f"step-*/{path.name}")
    newest = max((file for file in others if file.parent.suffix not in (".tmp", ".corrupt")), default=None)
    twin = path.with_name(path.name.replace(AVERAGE, MODEL, 1))
    try:
        other = next((file for file in (twin, newest) if file and file.exists() and _holds(file, tensors)), None)
        if other is not None:
            os.link(other, path)
        return other is not None
    except (OSError, SafetensorError):
        return False


def _holds(path: Path, tensors: Mapping[str, Tensor]) -> bool:
    from trainer.runtime.tensors import same_bits  # imports torch, which a function's trials may do without

    with safe_open(path, "pt") as file:
        return {*file.keys()} == tensors.keys() and all(
            same_bits(file.get_tensor(key), tensor) for key, tensor in tensors.items()
        )


def complete(
    directory: Path, packed: Packed, header: dict[str, Any], written: dict[str, dict[str, Any]]
) -> tuple[str, int]:
    """Writes into `directory` the manifest of the files that all ranks have `written`, and syncs both.

    Returns the manifest's sha256 and the size of all files in bytes. Raises OSError.
    """
    manifest = json.dumps({"format": FORMAT, **header, "files": written, "state": packed.rest}, indent=1).encode()
    (directory / MANIFEST).write_bytes(manifest)
    sync(directory / MANIFEST)
    sync(directory)
    return hashlib.sha256(manifest).hexdigest(), len(manifest) + sum(file["size"] for file in written.values())


def read(
    directory: Path, expected: str | None, take: Take = whole, *, weights_only: bool = False, verified: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the state and the manifest in `directory`; raises Damaged as `manifest.check` does.

    `take(keys, stored)` reads the wanted part of each tensor. With `weights_only` the state has only the item that was
    evaluated, if it is there. `verified` means that another process has just checked the files.
    """
    manifest = manifest_in(directory, expected) if verified else check(directory, expected, weights_only=weights_only)
    try:
        items = [evaluated(manifest["state"])] if weights_only else manifest["state"]
        state = {name: _opened(directory, manifest, name) for name in items if name in manifest["state"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} cannot be understood") from error
    except (OSError, SafetensorError) as error:
        raise Damaged(f"cannot be read: {error}") from error
    try:
        return _taken(state, (), take), manifest
    except SafetensorError as error:
        raise Damaged(f"cannot be read: {error}") from error


def read_model(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the weights that were evaluated (the average's, if one was) and the manifest; raises Damaged.

    The checkpoint's other files may be missing.
    """
    state, manifest = read(directory, None, weights_only=True)
    if not state:
        raise Damaged("it holds no model")
    return weights(state), manifest


def _opened(directory: Path, manifest: dict[str, Any], item: str) -> Any:
    """Returns an item of the state, with its tensors as Stored."""
    parts: dict[str, list[Part]] = {}
    for name in files_of(item, manifest["files"]):
        offsets = manifest["files"][name].get("offsets", {})
        file = safe_open(directory / name, "pt")
        for key in file.keys():  # noqa: SIM118
            shape = file.get_slice(key).get_shape()
            offset = offsets.get(key) or [0] * len(shape)
            if len(offset) != len(shape) or not _counts(offset):
                raise ValueError("an offset does not fit its tensor")
            parts.setdefault(key, []).append(Part(file, key, shape, offset))
    return _join(manifest["state"][item], parts)


def _split(value: Any, path: tuple[str, ...], mine: Mine, leaves: dict[str, _Leaf]) -> Any:
    """Returns `value` with each tensor moved to `leaves` under its path, joined by slashes."""
    if _is_tensor(value):
        key = "/".join(path)
        part, offset = mine(value)
        if part is not None:
            leaves[key] = _Leaf(value, part, offset)
        return {_TENSOR: key} if offset is None else {_TENSOR: key, "shape": list(value.shape)}
    if isinstance(value, dict):
        return {str(k): _split(v, (*path, str(k)), mine, leaves) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_split(v, (*path, str(i)), mine, leaves) for i, v in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, _PLAIN):
        raise _Unsavable(f"{''.join(f'[{key!r}]' for key in path)}, a {type(value).__name__},")
    return value


def _is_tensor(value: Any) -> TypeGuard[Tensor]:
    """Returns True for a tensor; a process that has not loaded torch has none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _split_average(value: Any, path: tuple[str, ...], mine: Mine, leaves: dict[str, _Leaf]) -> Any:
    """Returns `_split` of an average, under the model's keys: frozen parameters are then one file for both."""
    if not isinstance(value, dict) or value.keys() != {"updates", MODEL}:
        return _split(value, path, mine, leaves)
    return value | {MODEL: _split(value[MODEL], path, mine, leaves)}


def _join(value: Any, parts: dict[str, list[Part]]) -> Any:
    """Returns `value` with its tensors as Stored. Each tensor is used once, since a manifest could request it without
    end."""
    if isinstance(value, dict):
        if value.keys() in ({_TENSOR}, {_TENSOR, "shape"}):
            return _stored(value, parts.pop(value[_TENSOR]))
        return {k: _join(v, parts) for k, v in value.items()}
    return [_join(v, parts) for v in value] if isinstance(value, list) else value


def _taken(value: Any, path: tuple[str, ...], take: Take) -> Any:
    if isinstance(value, Stored):
        return take(path, value)
    if isinstance(value, dict):
        return {k: _taken(v, (*path, k), take) for k, v in value.items()}
    return [_taken(v, (*path, str(i)), take) for i, v in enumerate(value)] if isinstance(value, list) else value


def _stored(leaf: dict[str, Any], parts: Sequence[Part]) -> Stored:
    """Returns the tensor that the parts make up. Raises ValueError if they do not cover the whole exactly once."""
    shape = tuple(leaf.get("shape", parts[0].shape))
    ends = [[o + n for o, n in zip(part.offset, part.shape, strict=True)] for part in parts]
    within = _counts(shape) and all(len(end) == len(shape) and all(map(operator.le, end, shape)) for end in ends)
    apart = len({tuple(part.offset) for part in parts if math.prod(part.shape)}) == sum(
        math.prod(part.shape) > 0 for part in parts
    )
    if not within or not apart or sum(math.prod(part.shape) for part in parts) != math.prod(shape):
        raise ValueError("the parts do not make up the whole")
    return Stored(shape, parts)


def _counts(numbers: Sequence[Any]) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)


def _storable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors as safetensors takes them: contiguous, on the CPU, each storage once.

    Tied weights are written under each name.
    """
    import torch

    seen: set[int] = set()
    storable = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        seen.add(storage.data_ptr())
        storable[name] = tensor
    return storable
