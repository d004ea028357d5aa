"""A checkpoint on disk: a directory of safetensors files and a manifest.

    model.safetensors      one file for each item of the state that holds tensors; from ranks that hold parts of them,
    optimizer.safetensors  one from each rank: model-00001-of-00004.safetensors
    model-frozen...        of a MB or more: parameters that take no gradient; and, beside parameters, other tensors
    model-buffers...
    files/...              what a task has saved as files of its own format
    manifest.json          sha256 and size of each file, the rest of the state, and where it comes from

Nothing is pickled; floats in JSON are written so that they read back exactly. Files of what is not trained, if they are
as in the checkpoint before, are second names (hard links) of its files: each directory is whole, a file goes with the
last of its names.
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

from trainer.checkpoint import copied
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
from trainer.checkpoint.stored import Part, Stored, Take, whole
from trainer.files.durable import sha256, sync

if TYPE_CHECKING:
    from torch import Tensor

# {"$tensor": key} stands in the manifest for a tensor in a file; with "shape", for one whose parts are in several
# files, of which each says in its "offsets" where its part begins.
_TENSOR = "$tensor"

_PLAIN = (str, int, float, type(None))  # what JSON holds beside lists and dicts

SMALL = 1 << 20  # bytes, below which what is not trained stays in one file with what is

Mine = Callable[["Tensor"], tuple["Tensor | None", Sequence[int] | None]]  # see saver.Alone.mine


class _Unsavable(TypeError):
    """Where in an item of a state there is what JSON cannot hold, and of which type."""


@dataclass(frozen=True)
class Packed:
    """A state taken apart: `tensors` and the `offsets` of those that are parts, by file and key; `rest` is JSON.

    A file is named here without what tells ranks apart: `model`, `model-frozen`.
    """

    rest: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]
    offsets: dict[str, dict[str, list[int]]]
    copied: Mapping[str, Path] = field(default_factory=dict)  # files saved whole, by their names


@dataclass(frozen=True)
class _Leaf:
    """A tensor of a state, what this process saves of it, and where in the whole that begins, if it is a part."""

    whole: Tensor
    mine: Tensor
    offset: Sequence[int] | None


def pack(state: dict[str, Any], mine: Mine, copied: Mapping[str, Path] | None = None) -> Packed:
    """`state` with what this process saves of each tensor set apart, and files `copied` beside it. The tensors are
    those in use, the rest copies.

    Raises TypeError naming what JSON cannot hold.
    """
    packed = Packed({}, {}, {}, copied or {})
    for item, value in state.items():
        leaves: dict[str, _Leaf] = {}
        try:
            split = _split_average if item == AVERAGE else _split
            packed.rest[item] = split(value, (), mine, leaves)
        except _Unsavable as error:
            raise TypeError(
                f"state[{item!r}]{error} cannot be saved: a checkpoint holds tensors, numbers, text, None, and lists "
                "and dicts of them."
            ) from None
        for name, found in _by_file(item, leaves).items():
            packed.tensors[name] = {key: leaf.mine for key, leaf in found.items()}
            packed.offsets[name] = {key: [*leaf.offset] for key, leaf in found.items() if leaf.offset is not None}
    return packed


def _by_file(item: str, leaves: Mapping[str, _Leaf]) -> dict[str, dict[str, _Leaf]]:
    """What steps of the optimizer change, and apart from it, where that is worth a file, what they do not."""
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
        if sum(leaf.mine.nbytes for leaf in files[kind].values()) < SMALL:
            files[""] |= files.pop(kind)
    return {f"{item}{kind}": found for kind, found in files.items() if found}


def write(directory: Path, state: dict[str, Any], header: dict[str, Any]) -> tuple[str, int]:
    """Write all of `state` into the existing, empty `directory`, as `complete` says. Raises OSError."""
    packed = pack(state, lambda tensor: (tensor, None))
    return complete(directory, packed, header, write_mine(directory, packed, ""))


def write_mine(directory: Path, packed: Packed, suffix: str) -> dict[str, dict[str, Any]]:
    """Write the tensors and the files into the existing `directory`, and sync them; what the manifest says of each.

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
    for name in copied.copy(packed.copied, directory):
        path = directory / name
        written[name] = {"sha256": sha256(path), "size": path.stat().st_size}
    return written


def _linked(path: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Make `path` a second name of this file of the newest checkpoint beside it, or of the model's, if an average's,
    where that holds these tensors bit for bit.

    A file that is damaged does not, and one that is gone, or on a disk without links, is written anew.
    """
    others = path.parent.parent.glob(f"step-*/{path.name}")
    newest = max((one for one in others if one.parent.suffix not in (".tmp", ".corrupt")), default=None)
    twin = path.with_name(path.name.replace(AVERAGE, MODEL, 1))
    try:
        other = next((one for one in (twin, newest) if one and one.exists() and _holds(one, tensors)), None)
        if other is not None:
            os.link(other, path)
        return other is not None
    except (OSError, SafetensorError):
        return False


def _holds(path: Path, tensors: Mapping[str, Tensor]) -> bool:
    from trainer.runtime.tensors import same_bits  # and with it torch, which a function's trials may do without

    with safe_open(path, "pt") as file:
        return {*file.keys()} == tensors.keys() and all(
            same_bits(file.get_tensor(key), tensor) for key, tensor in tensors.items()
        )


def complete(
    directory: Path, packed: Packed, header: dict[str, Any], written: dict[str, dict[str, Any]]
) -> tuple[str, int]:
    """Write the manifest of what all ranks have `written` into `directory`, and sync both.

    Gives the manifest's sha256 and the size of all files in bytes. Raises OSError.
    """
    manifest = json.dumps({"format": FORMAT, **header, "files": written, "state": packed.rest}, indent=1).encode()
    (directory / MANIFEST).write_bytes(manifest)
    sync(directory / MANIFEST)
    sync(directory)
    return hashlib.sha256(manifest).hexdigest(), len(manifest) + sum(file["size"] for file in written.values())


def read(
    directory: Path, expected: str | None, take: Take = whole, *, weights_alone: bool = False, verified: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state and the manifest in `directory`; raises Damaged as `manifest.check` does. `take(keys, stored)` reads
    what it wants of each tensor. `weights_alone`: of the state the item that was evaluated, if it is there. `verified`:
    another process has just found the files whole."""
    manifest = manifest_in(directory, expected) if verified else check(directory, expected, weights_alone=weights_alone)
    try:
        items = [evaluated(manifest["state"])] if weights_alone else manifest["state"]
        state = {item: _opened(directory, manifest, item) for item in items if item in manifest["state"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} cannot be understood") from error
    except (OSError, SafetensorError) as error:
        raise Damaged(f"cannot be read: {error}") from error
    try:
        return _taken(state, (), take), manifest
    except SafetensorError as error:
        raise Damaged(f"cannot be read: {error}") from error


def read_model(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights that were evaluated (the average's, where one was) and the manifest, where nothing else of the
    checkpoint need be there; raises Damaged."""
    state, manifest = read(directory, None, weights_alone=True)
    if not state:
        raise Damaged("it holds no model")
    return weights(state), manifest


def _opened(directory: Path, manifest: dict[str, Any], item: str) -> Any:
    """An item of the state, its tensors as Stored."""
    parts: dict[str, list[Part]] = {}
    for name in files_of(item, manifest["files"]):
        offsets = manifest["files"][name].get("offsets", {})
        file = safe_open(directory / name, "pt")
        for key in file.keys():  # noqa: SIM118
            shape = file.get_slice(key).get_shape()
            offset = offsets.get(key) or [0] * len(shape)
            if len(offset) != len(shape) or not _counts(offset):
                raise ValueError("an offset is none of its tensor")
            parts.setdefault(key, []).append(Part(file, key, shape, offset))
    return _join(manifest["state"][item], parts)


def _split(value: Any, path: tuple[str, ...], mine: Mine, leaves: dict[str, _Leaf]) -> Any:
    """`value` with each tensor moved to `leaves` under its path, joined by slashes."""
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
    """Returns True for a tensor; there is none in a process that has not loaded torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _split_average(value: Any, path: tuple[str, ...], mine: Mine, leaves: dict[str, _Leaf]) -> Any:
    """With the keys of the model's: what is frozen is then one file for both."""
    if not isinstance(value, dict) or value.keys() != {"updates", MODEL}:
        return _split(value, path, mine, leaves)
    return value | {MODEL: _split(value[MODEL], path, mine, leaves)}


def _join(value: Any, parts: dict[str, list[Part]]) -> Any:
    """`value` with its tensors as Stored. Each stands in one place: a manifest could ask for one without end."""
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
    """Raises ValueError where the parts do not make up the whole."""
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
    """What safetensors takes: contiguous on the CPU, no storage twice (tied weights are written out for each name)."""
    import torch

    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        seen.add(storage.data_ptr())
        result[name] = tensor
    return result
