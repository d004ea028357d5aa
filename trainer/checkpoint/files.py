"""A checkpoint on disk: a directory of safetensors files and a manifest.

    model.safetensors      one file for each item of the state that holds tensors; from ranks that hold parts of them,
    optimizer.safetensors  one from each rank: model-00001-of-00004.safetensors
    manifest.json          sha256 and size of each file, the rest of the state, and where it comes from

Nothing is pickled; floats in JSON are written so that they read back exactly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.durable import sha256, sync
from trainer.manifest import FORMAT, MANIFEST, Damaged, check, evaluated, files_of, weights

# {"$tensor": key} stands in the manifest for a tensor in a file; with "shape", for one whose parts are in several
# files, of which each says in its "offsets" where its part begins.
_TENSOR = "$tensor"

Mine = Callable[[Tensor], tuple[Tensor | None, Sequence[int] | None]]  # see saver.Alone.mine


@dataclass(frozen=True)
class Packed:
    """A state taken apart: `tensors` and the `offsets` of those that are parts, by item and key; `rest` is JSON."""

    rest: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]
    offsets: dict[str, dict[str, list[int]]]


def pack(state: dict[str, Any], mine: Mine) -> Packed:
    """`state` with what this process saves of each tensor set apart. The tensors are those in use, the rest copies."""
    packed = Packed({}, {}, {})
    for item, value in state.items():
        tensors, offsets = {}, {}
        packed.rest[item] = _split(value, (), mine, tensors, offsets)
        if tensors:
            packed.tensors[item], packed.offsets[item] = tensors, offsets
    return packed


def write(directory: Path, state: dict[str, Any], header: dict[str, Any]) -> tuple[str, int]:
    """Write all of `state` into the existing, empty `directory`, as `complete` says. Raises OSError."""
    packed = pack(state, lambda tensor: (tensor, None))
    return complete(directory, packed, header, write_mine(directory, packed, ""))


def write_mine(directory: Path, packed: Packed, suffix: str) -> dict[str, dict[str, Any]]:
    """Write the tensors into files of the existing `directory`, and sync them; what the manifest says of each.

    Raises OSError.
    """
    written: dict[str, dict[str, Any]] = {}
    for item, tensors in packed.tensors.items():
        path = directory / f"{item}{suffix}.safetensors"
        try:
            save_file(_storable(tensors), path)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        sync(path)
        written[path.name] = {"sha256": sha256(path), "size": path.stat().st_size}
        if packed.offsets[item]:
            written[path.name]["offsets"] = packed.offsets[item]
    return written


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


def read(directory: Path, expected: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state and the manifest in `directory`, tensors on the CPU; raises Damaged as `manifest.check` does."""
    manifest = check(directory, expected)
    return _restore(directory, manifest, manifest["state"]), manifest


def read_model(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights that were evaluated (the average's, where one was) and the manifest, where nothing else of the
    checkpoint need be there; raises Damaged."""
    manifest = check(directory, None, weights_alone=True)
    return weights(_restore(directory, manifest, [evaluated(manifest["state"])])), manifest


def _restore(directory: Path, manifest: dict[str, Any], items: Iterable[str]) -> dict[str, Any]:
    try:
        return {item: _joined(directory, manifest, item) for item in items}
    except (OSError, SafetensorError) as error:
        raise Damaged(f"cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Damaged(f"{MANIFEST} cannot be understood") from error


def _joined(directory: Path, manifest: dict[str, Any], item: str) -> Any:
    """An item of the state, with its tensors from its files and whole."""
    tensors: dict[str, Tensor] = {}
    parts: dict[str, list[tuple[Tensor, list[int]]]] = {}
    for name in files_of(item, manifest["files"]):
        offsets = manifest["files"][name].get("offsets", {})
        for key, tensor in load_file(directory / name).items():
            if key in offsets:
                parts.setdefault(key, []).append((tensor, offsets[key]))
            else:
                tensors[key] = tensor.clone()  # apart from the mapped file
    return _join(manifest["state"][item], tensors, parts)


def _split(
    value: Any, path: tuple[str, ...], mine: Mine, tensors: dict[str, Tensor], offsets: dict[str, list[int]]
) -> Any:
    """`value` with each tensor moved to `tensors` under its path, joined by slashes."""
    if isinstance(value, Tensor):
        key = "/".join(path)
        part, offset = mine(value)
        if part is not None:
            tensors[key] = part
        if offset is None:
            return {_TENSOR: key}
        if part is not None:
            offsets[key] = list(offset)
        return {_TENSOR: key, "shape": list(value.shape)}
    if isinstance(value, dict):
        return {str(k): _split(v, (*path, str(k)), mine, tensors, offsets) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_split(v, (*path, str(i)), mine, tensors, offsets) for i, v in enumerate(value)]
    return value


def _join(value: Any, tensors: dict[str, Tensor], parts: dict[str, list[tuple[Tensor, list[int]]]]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        if value.keys() == {_TENSOR, "shape"}:
            return _assembled(value["shape"], parts[value[_TENSOR]])
        return {k: _join(v, tensors, parts) for k, v in value.items()}
    return [_join(v, tensors, parts) for v in value] if isinstance(value, list) else value


def _assembled(shape: list[int], parts: list[tuple[Tensor, list[int]]]) -> Tensor:
    whole = torch.empty(shape, dtype=parts[0][0].dtype)
    if sum(part.numel() for part, _ in parts) != whole.numel():
        raise ValueError("the parts do not make up the whole")
    for part, offset in parts:
        whole[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))] = part
    return whole


def _storable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What safetensors takes: contiguous on the CPU, no storage twice (tied weights are written out for each name)."""
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
