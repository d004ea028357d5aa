"""A checkpoint directory from elsewhere is refused in a sentence, before anything outside it is read, and soon."""

from __future__ import annotations

import json
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rounds import rounds
from safetensors.torch import save_file
from trainer_runs import MemoryReporter, Toy

from hpo.errors import HpoError
from studies.mlp import STUDY
from trainer.checkpoint import files
from trainer.checkpoint.manifest import MOST_BYTES
from trainer.checkpoint.store import CheckpointStore, load
from trainer.config import TrainConfig
from trainer.errors import CheckpointError, ConfigError
from trainer.files.durable import sha256
from trainer.loop import fit

SECRET = b"of another file"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A checkpoint as it should be, and beside it a file that no checkpoint may read."""
    directory = tmp_path_factory.mktemp("given") / "checkpoint"
    directory.mkdir()
    state = {"model": {"w": torch.ones(4, 3), "b": torch.ones(3)}, "step": 1}
    files.write(directory, state, {"step": 1, "epoch": 1, "config_hash": "h"})
    (directory / "config.json").write_text("{}")
    save_file({"w": torch.ones(4, 3)}, directory.parent / "outside.safetensors")
    (directory.parent / "secret").write_bytes(SECRET)
    return directory


def change(directory: Path, body: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    body(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))


def renamed(name: str) -> Callable[[Path], None]:
    def harm(directory: Path) -> None:
        def body(manifest: dict[str, Any]) -> None:
            named = name.format(parent=directory.parent)
            target = directory.parent / "outside.safetensors"
            manifest["files"] = {named: {"sha256": sha256(target), "size": target.stat().st_size}}

        change(directory, body)

    return harm


def manifest_is(text: str | bytes) -> Callable[[Path], object]:
    raw = text if isinstance(text, bytes) else text.encode()
    return lambda directory: (directory / "manifest.json").write_bytes(raw)


def file_is(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def harm(directory: Path) -> None:
        (directory / name).unlink()
        make(directory / name)

    return harm


def of_the_file(**values: Any) -> Callable[[Path], None]:
    return lambda directory: change(directory, lambda m: m["files"]["model.safetensors"].update(values))


def of_the_state(**values: Any) -> Callable[[Path], None]:
    return lambda directory: change(directory, lambda m: m["state"]["model"].update(values))


def rewritten(body: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Other bytes in the file of tensors, of which the manifest gives the size and the sha256."""

    def harm(directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(body(path.read_bytes()))
        of_the_file(size=path.stat().st_size, sha256=sha256(path))(directory)

    return harm


def deep(levels: int) -> str:
    return '{"format": 1, "files": {}, "state": {"model": ' + "[" * levels + "]" * levels + "}}"


HARMS = {
    "nested": (manifest_is(deep(100_000)), "cannot be understood"),
    "nested less": (manifest_is(deep(300)), "nested deeper than 100 levels"),
    "no JSON": (manifest_is(b"\xff\x00"), "cannot be understood"),
    "a list": (manifest_is("[]"), "cannot be understood"),
    "a long format": (manifest_is('{"format": "%s"}' % ("x" * 10_000)), "has format x"),
    "large": (lambda d: os.truncate(d / "manifest.json", 1 << 40), "larger than 64 MB"),
    "a state that is a list": (lambda d: change(d, lambda m: m.update(state=[])), "cannot be understood"),
    "an epoch in words": (lambda d: change(d, lambda m: m.update(epoch="one")), "cannot be understood"),
    "absolute": (renamed("{parent}/outside.safetensors"), "names a file outside itself"),
    "above": (renamed("../outside.safetensors"), "names a file outside itself"),
    "a device": (file_is("model.safetensors", lambda p: p.symlink_to("/dev/zero")), "a link that leads out of it"),
    "a manifest of a device": (file_is("manifest.json", lambda p: p.symlink_to("/dev/zero")), "link that leads out"),
    "a FIFO": (file_is("model.safetensors", os.mkfifo), "model.safetensors is not a file"),
    "a manifest that is a FIFO": (file_is("manifest.json", os.mkfifo), "manifest.json is not a file"),
    "a directory": (file_is("model.safetensors", os.mkdir), "model.safetensors is not a file"),
    "a link outside": (file_is("model.safetensors", lambda p: p.symlink_to("../outside.safetensors")), "a link that"),
    "a link to itself": (file_is("model.safetensors", lambda p: p.symlink_to(p)), "cannot be read"),
    "a secret as manifest": (file_is("manifest.json", lambda p: p.symlink_to("../secret")), "a link that leads out"),
    "a size in words": (of_the_file(size="1"), "cannot be understood"),
    "another size": (of_the_file(size=1 << 60), "instead of"),
    "a short offset": (of_the_file(offsets={"w": [0]}), "cannot be understood"),
    "an offset beyond": (of_the_file(offsets={"w": [1, 0]}), "cannot be understood"),
    "a negative offset": (of_the_file(offsets={"w": [-1, 0]}), "cannot be understood"),
    "an offset in words": (of_the_file(offsets={"w": ["0", "0"]}), "cannot be understood"),
    "offsets that are a list": (of_the_file(offsets=[1]), "cannot be understood"),
    "negative shape": (of_the_state(w={"$tensor": "w", "shape": [-4, -3]}), "cannot be understood"),
    "shape of other dimensions": (of_the_state(w={"$tensor": "w", "shape": [12]}), "cannot be understood"),
    "shape of fractions": (of_the_state(w={"$tensor": "w", "shape": [4.0, 3.0]}), "cannot be understood"),
    "shape of a number": (of_the_state(w={"$tensor": "w", "shape": 12}), "cannot be understood"),
    "a tensor twice": (of_the_state(again={"$tensor": "w"}), "cannot be understood"),
    "a tensor by a list": (of_the_state(w={"$tensor": ["w"]}), "cannot be understood"),
    "no such tensor": (of_the_state(w={"$tensor": "v"}), "cannot be understood"),
    "a header beyond the file": (rewritten(lambda raw: (1 << 62).to_bytes(8, "little") + raw[8:]), "cannot be read"),
    "offsets beyond the file": (rewritten(lambda raw: raw[:-4]), "cannot be read"),
    "an empty file": (rewritten(lambda raw: b""), "cannot be read"),
}


@rounds("harm", list(HARMS))
def test_a_directory_from_elsewhere_is_refused_in_a_sentence(whole, tmp_path, harm):
    directory = tmp_path / "checkpoint"
    shutil.copytree(whole, directory)
    for name in ("outside.safetensors", "secret"):
        shutil.copy(whole.parent / name, tmp_path)
    make, says = HARMS[harm]
    make(directory)
    began = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=says) as error:
            load(directory)
        assert tracemalloc.get_traced_memory()[1] < 2 * MOST_BYTES
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began < 5
    assert "\n" not in str(error.value) and len(str(error.value)) < 400 and SECRET.decode() not in str(error.value)
    with pytest.raises((CheckpointError, HpoError)):
        STUDY.load_model(directory)


def test_a_whole_directory_and_links_within_it_are_read(whole, tmp_path):
    directory = tmp_path / "checkpoint"
    shutil.copytree(whole, directory)
    (directory / "model.safetensors").rename(directory / "blob")
    (directory / "model.safetensors").symlink_to("blob")
    (tmp_path / "named").symlink_to(directory)
    for path in (whole, directory, tmp_path / "named"):
        assert torch.equal(load(path)["model"]["w"], torch.ones(4, 3))


@rounds(
    ("make", "says"),
    [
        (lambda path: path.symlink_to("/etc/passwd"), "a link that leads out of it"),
        (lambda path: path.write_text("["), "config.json cannot be understood"),
        (lambda path: path.write_text("[" * 100_000), "config.json cannot be understood"),
        (os.mkfifo, "config.json is not a file"),
    ],
)
def test_a_configuration_beside_the_weights_is_read_as_carefully(whole, tmp_path, make, says):
    directory = tmp_path / "checkpoint"
    shutil.copytree(whole, directory)
    file_is("config.json", make)(directory)
    with pytest.raises(CheckpointError, match=says):
        STUDY.load_model(directory)


def started(config: TrainConfig, store: CheckpointStore) -> None:
    fit(Toy(SimpleNamespace(train=config)), config, MemoryReporter(), store)


def test_a_state_of_something_else_cannot_be_started_from(tmp_path):
    """Of a fit's state each item in turn is gone, or is a list."""
    store = CheckpointStore(tmp_path / "trial", fence=1)
    store.directory.mkdir()
    started(TrainConfig(num_epochs=1, batch_size=8), store)
    path = store.kept[0].path
    state, beginning = load(path), TrainConfig(num_epochs=2, batch_size=8)
    for item in state:
        for wrong in ({key: value for key, value in state.items() if key != item}, state | {item: ["x"]}):
            other = tmp_path / "other"
            shutil.rmtree(other, ignore_errors=True)
            other.mkdir()
            files.write(other, wrong, {"step": 1, "epoch": 1})
            try:
                started(beginning.model_copy(update={"resume_from": other}), CheckpointStore(tmp_path / "b", 1))
            except ConfigError as error:
                assert "checkpoint" in str(error) and len(str(error)) < 800
            else:  # what this configuration has no use for
                assert item in ("report", "loss_scale", "lookahead", "plateau", "early_stopping", "spikes", "average")
