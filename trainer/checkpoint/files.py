"""A checkpoint on disk: a directory of safetensors files and a manifest.

    model.safetensors      one file for each item of the state that holds tensors
    optimizer.safetensors
    manifest.json          sha256 and size of each file, the rest of the state, and where it comes from

Nothing is pickled; floats in JSON are written so that they read back exactly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.durable import sha256, sync
from trainer.manifest import FORMAT, MANIFEST, WEIGHTS, Damaged, check

_TENSOR = "$tensor"  # {"$tensor": key} stands in the manifest for a tensor in a file


def write(directory: Path, state: dict[str, Any], header: dict[str, Any]) -> tuple[str, int]:
    """Write `state` into the existing, empty `directory`, and sync it: the manifest last.

    Gives the manifest's sha256 and the size of all files in bytes. Raises OSError.
    """
    files: dict[str, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for item, value in state.items():
        tensors: dict[str, Tensor] = {}
        rest[item] = _split(value, (), tensors)
        if tensors:
            path = directory / f"{item}.safetensors"
            try:
                save_file(_storable(tensors), path)
            except SafetensorError as error:
                raise OSError(str(error)) from error
            sync(path)
            files[path.name] = {"sha256": sha256(path), "size": path.stat().st_size}
    manifest = json.dumps({"format": FORMAT, **header, "files": files, "state": rest}, indent=1).encode()
    (directory / MANIFEST).write_bytes(manifest)
    sync(directory / MANIFEST)
    sync(directory)
    return hashlib.sha256(manifest).hexdigest(), len(manifest) + sum(file["size"] for file in files.values())


def read(directory: Path, expected: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state and the manifest in `directory`, tensors on the CPU; raises Damaged as `manifest.check` does."""
    manifest = check(directory, expected)
    return _restore(directory, manifest, manifest["state"]), manifest


def read_model(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's weights and the manifest, where nothing else of the checkpoint need be there; raises Damaged."""
    manifest = check(directory, None, only=WEIGHTS)
    return _restore(directory, manifest, ["model"])["model"], manifest


def _restore(directory: Path, manifest: dict[str, Any], items: Iterable[str]) -> dict[str, Any]:
    try:
        state, files = manifest["state"], {item: f"{item}.safetensors" for item in items}
        tensors = {item: _load(directory / file) for item, file in files.items() if file in manifest["files"]}
        return {item: _join(state[item], tensors.get(item, {})) for item in files}
    except (OSError, SafetensorError) as error:
        raise Damaged(f"cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} cannot be understood") from error


def _load(path: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(path).items()}  # apart from the mapped file


def _split(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    """`value` with each tensor moved to `tensors` under its path, joined by slashes."""
    if isinstance(value, Tensor):
        tensors["/".join(path)] = value
        return {_TENSOR: "/".join(path)}
    if isinstance(value, dict):
        return {str(k): _split(v, (*path, str(k)), tensors) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_split(v, (*path, str(i)), tensors) for i, v in enumerate(value)]
    return value


def _join(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {k: _join(v, tensors) for k, v in value.items()}
    return [_join(v, tensors) for v in value] if isinstance(value, list) else value


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
