"""A checkpoint on disk: a directory of safetensors files and a manifest.

    model.safetensors      one file for each item of the state that holds tensors
    optimizer.safetensors
    manifest.json          sha256 and size of each file, the rest of the state, and where it comes from

The manifest's own sha256 stands in the ledger, so whatever has changed on the disk since is noticed. Nothing is
pickled; floats in JSON are written so that they read back exactly.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT = 1
MANIFEST = "manifest.json"
_TENSOR = "$tensor"  # {"$tensor": key} stands in the manifest for a tensor in a file


class Damaged(Exception):
    """The checkpoint is not what was written; the text says how."""


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
    with open(directory / MANIFEST, "wb") as f:
        f.write(manifest)
        f.flush()
        os.fsync(f.fileno())
    sync(directory)
    return hashlib.sha256(manifest).hexdigest(), len(manifest) + sum(file["size"] for file in files.values())


def read(directory: Path, expected: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state and the manifest in `directory`, tensors on the CPU; raises Damaged unless every byte is as written.

    `expected` is the manifest's sha256; None trusts the manifest, as for a checkpoint that a user hands in.
    """
    try:
        raw = (directory / MANIFEST).read_bytes()
        if expected is not None and hashlib.sha256(raw).hexdigest() != expected:
            raise Damaged(f"{MANIFEST} has another sha256 than the one committed")
        manifest = json.loads(raw)
        if manifest["format"] != FORMAT:
            raise Damaged(f"{MANIFEST} has format {manifest['format']}, and this version reads {FORMAT}")
        tensors = {name: _read_tensors(directory / name, file) for name, file in manifest["files"].items()}
        return {k: _join(v, tensors.get(f"{k}.safetensors", {})) for k, v in manifest["state"].items()}, manifest
    except FileNotFoundError as error:
        raise Damaged(f"{Path(error.filename).name} is missing") from error
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} cannot be understood") from error


def _read_tensors(path: Path, file: dict[str, Any]) -> dict[str, Tensor]:
    if (size := path.stat().st_size) != file["size"]:
        raise Damaged(f"{path.name} has {size} bytes instead of {file['size']}")
    if sha256(path) != file["sha256"]:
        raise Damaged(f"{path.name} has another sha256 than its manifest says")
    return {name: tensor.clone() for name, tensor in load_file(path).items()}  # apart from the mapped file


def sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make a file's bytes, or a directory's entries, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
