"""A checkpoint store: exact, whole or not there, fenced, and frugal; on a disk and in a bucket of a real S3 server."""

from __future__ import annotations

import http.client
import itertools
import json
import math
import os
import resource
import shutil
import signal
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import trainer.files.s3
from trainer.checkpoint import files
from trainer.checkpoint.location import COPY, DISK, Disk, ObjectStore
from trainer.checkpoint.store import CheckpointStore, expired, load
from trainer.checkpoint.stored_tensors import Part, Stored
from trainer.config import AverageConfig, CheckpointConfig
from trainer.distributed import group
from trainer.errors import CheckpointError, ConfigError, Fenced
from trainer.files import scratch
from trainer.files.durable import on_disk
from trainer.files.s3 import Bucket, Unavailable
from trainer.model.averaging import Average
from trainer.report import CheckpointRef
from trainer.runtime import failpoint

KEEP = CheckpointConfig(keep_last=2, keep_best=1)
BY_LOSS = CheckpointConfig(keep_last=1, keep_best=2, monitor="loss")


def state(step: int) -> dict:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(4, 3, generator=generator)
    return {
        "model": {
            "w": weight,
            "tied": weight,
            "view": weight.T[1:],
            "half": weight.bfloat16(),
            "n": torch.tensor(step),
        },
        "optimizer": {"w": {"step": torch.tensor(float(step)), "exp_avg": weight * 0.1}},
        "meter": {"sums": {"loss": 0.1 + 0.2, "tiny": 5e-324, "nan": math.nan, "inf": math.inf}},
        "step": step,
        "report": None,
        "list": [1, [2.5, None], True],
        "empty": {},
    }


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "deep" / "trial", fence=1)


@pytest.fixture(params=["disk", "s3"])
def place(request, tmp_path, process) -> Disk:
    return DISK if request.param == "disk" else ObjectStore(Bucket(request.getfixturevalue("bucket")), tmp_path)


@pytest.fixture
def either(place, tmp_path) -> CheckpointStore:
    """On a disk, or in a bucket."""
    return CheckpointStore(tmp_path / "deep" / "trial", fence=1, location=place)


def put(store: CheckpointStore, step: int, keep: CheckpointConfig = KEEP, **metrics: float):
    ref = store.save(state(step), step=step, epoch=step // 4, metrics=metrics)
    store.commit(ref, keep)
    return ref


def reopen(store: CheckpointStore, **kwargs) -> CheckpointStore:
    return CheckpointStore(store.directory, store.fence + 1, list(store.kept), location=store.location, **kwargs)


def names(store: CheckpointStore) -> set[str]:
    return {path.name for path in store.location.entries(store.directory)}


def files_on_disk(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_what_was_saved_is_loaded_exactly(either):
    assert either.load_latest() is None
    ref = put(either, 7)
    loaded, found = reopen(either).load_latest()
    assert found == ref
    assert same(loaded, state(7))
    with either.location.opened(ref.path, ref.sha256) as directory:
        assert ref.size == sum(file.stat().st_size for file in directory.iterdir())
        assert same(load(directory), state(7))
    with either.location.opened(ref.path, ref.sha256, weights_only=True) as directory:
        assert files.read_model(directory)[0].keys() == state(7)["model"].keys()
    if either.location is not DISK:
        assert not files_on_disk(either.directory), "nothing of it stays on this host"


@pytest.mark.parametrize("shape", [(), (7,), (7, 5), (0, 3), (3, 4, 2)])
def test_any_box_of_a_tensor_is_read_from_its_parts_and_nothing_else_is(shape, tmp_path):
    """The parts are the quarters of the first two dimensions."""
    whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape).bfloat16()
    halves = [[(0, n // 2), (n // 2, n)] for n in shape[:2]] + [[(0, n)] for n in shape[2:]]
    corners = [box for box in itertools.product(*halves) if all(a < b for a, b in box)] or [[(0, n) for n in shape]]
    parts, sizes = [], []

    class Counted(Part):
        def read(self, box):
            sizes.append((piece := super().read(box)).numel())
            return piece

    for i, box in enumerate(corners):
        tensor = whole[tuple(slice(*side) for side in box)].contiguous()
        save_file({"t": tensor}, tmp_path / f"{i}")
        parts.append(Counted(safe_open(tmp_path / f"{i}", "pt"), "t", tensor.shape, [a for a, _ in box]))
    stored = Stored(shape, parts)
    assert same(stored.read(), whole)
    for seed in range(20):
        ends = [torch.randint(0, n + 1, (2,), generator=torch.Generator().manual_seed(seed)) for n in shape]
        box = [slice(*sorted(pair.tolist())) for pair in ends]
        sizes.clear()
        assert same(stored.read(box), whole[tuple(box)])
        assert sum(sizes) == whole[tuple(box)].numel()


def test_the_manifest_says_where_it_comes_from(tmp_path):
    store = CheckpointStore(tmp_path, fence=3, config_hash="abc")
    ref = put(store, 120)
    manifest = json.loads((ref.path / "manifest.json").read_text())
    assert ref.path.name.startswith("step-00000120.f3.")
    assert {"step": 120, "epoch": 30, "fence": 3, "config_hash": "abc", "torch": torch.__version__}.items() <= (
        manifest.items()
    )
    assert set(manifest["files"]) == {"model.safetensors", "optimizer.safetensors"}


def test_the_weights_alone_open_with_safetensors(store):
    weights = load_file(put(store, 7).path / "model.safetensors")
    assert torch.equal(weights["w"], state(7)["model"]["w"])


def test_an_uncommitted_save_is_never_loaded_and_is_swept(either):
    store = either
    put(store, 1)
    orphan = store.save(state(2), step=2, epoch=0)
    (store.directory / "step-00000003.f1.abcdef.tmp").mkdir()
    (store.directory / "notes.txt").touch()
    again = reopen(store)
    assert again.load_latest()[1].step == 1
    assert {path.name for path in again.sweep()} == {orphan.path.name, "step-00000003.f1.abcdef.tmp"}
    assert names(again) == {again.kept[0].path.name, "notes.txt"}


def test_a_fenced_attempt_sweeps_nothing_of_a_later_one(either):
    put(either, 1)
    later = reopen(either)
    put(later, 2)
    unfinished = later.save(state(3), step=3, epoch=0)
    either.sweep()
    assert unfinished.path.name in names(either)
    assert later.load_latest()[1].step == 2


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x80
    path.write_bytes(data)


def swap(path: Path) -> None:
    [other] = [entry for entry in path.parent.parent.iterdir() if entry != path.parent]
    shutil.copyfile(other / path.name, path)


def harm(store: CheckpointStore, ref: CheckpointRef, file: str, damage) -> None:
    """Damage a file where it lies: of a bucket, with a copy of all that has its name there."""
    if store.location is DISK:
        damage(ref.path / file)
        return
    bucket, root = store.location.bucket, store.directory.relative_to(store.location.root).as_posix()
    with tempfile.TemporaryDirectory() as copy:
        for name in names(store):
            (Path(copy) / name).mkdir()
            bucket.download(f"{root}/{name}/{file}", Path(copy) / name / file)
        harmed, key = Path(copy) / ref.path.name / file, f"{root}/{ref.path.name}/{file}"
        damage(harmed)
        bucket.upload(harmed, key) if harmed.exists() else bucket.delete(key)


DAMAGES = [truncate, empty, flip, flip_last, swap, Path.unlink]
DAMAGED = [(file, damage) for file in ("model.safetensors", "manifest.json") for damage in DAMAGES]
DAMAGED += [("optimizer.safetensors", swap)]
DAMAGED += [
    pytest.param("optimizer.safetensors", damage, marks=pytest.mark.slow) for damage in DAMAGES if damage is not swap
]


@pytest.mark.parametrize(("file", "damage"), DAMAGED)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_used(either, file, damage):
    store = either
    put(store, 1)
    newest = put(store, 2)
    harm(store, newest, file, damage)
    changes = []
    again = reopen(store, on_change=lambda given: changes.append(given) or ())
    loaded, ref = again.load_latest()
    assert ref.step == 1
    assert same(loaded, state(1))
    [found] = again.damaged
    assert (found.ref, found.path.name) == (newest, f"{newest.path.name}.corrupt")
    assert file in found.reason
    assert changes == [{newest.path.name: {"state": "damaged"}}]
    before = names(again)
    assert found.path.name in before
    assert again.sweep() == reopen(again).sweep() == []
    assert names(again) == before, "it stays to be looked at"


def test_a_checkpoint_that_is_gone_counts_as_damaged(either):
    put(either, 1)
    either.location.discard(put(either, 2).path)
    again = reopen(either)
    assert again.load_latest()[1].step == 1
    assert len(again.damaged) == 1


def test_none_left_is_none(either):
    for step in (1, 2):
        harm(either, put(either, step), "manifest.json", empty)
    again = reopen(either)
    assert again.load_latest() is None
    assert [damage.ref.step for damage in again.damaged] == [2, 1]


def test_another_trials_checkpoint_is_loaded_and_not_removed(either, tmp_path):
    ref = put(either, 1)
    child = CheckpointStore(tmp_path / "child", fence=1, committed=[ref], location=either.location)
    assert same(child.load_latest()[0], state(1))
    put(child, 2, CheckpointConfig(keep_last=1))
    assert [kept.step for kept in child.kept] == [2]
    assert ref.path.name in names(either)


def test_another_trials_damaged_checkpoint_is_an_error_and_stays(either, tmp_path):
    store = either
    ref = put(store, 1)
    harm(store, ref, "model.safetensors", flip)
    child = CheckpointStore(tmp_path / "child", fence=1, committed=[ref], location=store.location)
    with pytest.raises(
        CheckpointError, match=r"checkpoint .*step-00000001.* is damaged: model\.safetensors has another"
    ):
        child.load_latest()
    assert ref.path.name in names(store)


def test_a_users_damaged_checkpoint_is_an_error(store):
    ref = put(store, 1)
    flip(ref.path / "model.safetensors")
    with pytest.raises(CheckpointError, match="cannot be used: model"):
        load(ref.path)
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        load(store.directory)


def test_the_last_and_the_best_are_kept_and_rows_change_before_files(either):
    changes = []

    def on_change(given):
        assert names(either) >= given.keys()
        changes.append({int(name[5:13]): values for name, values in given.items()})
        return ()

    store = CheckpointStore(either.directory, fence=1, on_change=on_change, location=either.location)
    for step, loss in enumerate([3.0, 1.0, math.nan, 2.0, 1.0, 5.0]):
        put(store, step, BY_LOSS, loss=loss)
    assert {ref.step for ref in store.kept} == {1, 4, 5}
    assert names(store) == {ref.path.name for ref in store.kept}
    assert changes == [
        {0: {"best": 1}},
        {1: {"best": 1}, 0: {"best": 0}},
        {2: {"state": "deleted"}, 0: {"state": "deleted"}},
        {3: {"state": "deleted"}},
    ], "flags and deletions of one save are one change"


def test_what_another_trial_starts_from_is_not_deleted_until_it_may_be(either):
    needed = set()
    store = CheckpointStore(
        either.directory, fence=1, on_change=lambda given: needed & set(given), location=either.location
    )
    first = put(store, 1)
    needed.add(first.path.name)
    put(store, 2)
    put(store, 3)
    put(store, 4)
    assert first.path.name in names(store)
    needed.clear()
    put(store, 5)
    assert first.path.name not in names(store)


def test_a_sweep_spares_what_has_a_row_that_this_attempt_has_not_heard_of(either):
    """The commit went through, its answer was lost, and by the retry the trial was another's."""
    store = either
    committed, orphan = store.save(state(1), step=1, epoch=0), store.save(state(2), step=2, epoch=0)
    assert store.sweep({committed.path.name}) == [orphan.path]
    assert names(store) == {committed.path.name}


def test_a_fenced_attempt_keeps_its_files(either):
    store = either

    def on_change(given):
        raise Fenced("fenced")

    for step in (1, 2):
        put(store, step)
    again = reopen(store, on_change=on_change)
    with pytest.raises(Fenced):
        put(again, 3)
    assert len(names(again)) == 3


def test_expired_keeps_the_newest_and_the_best():
    refs = [CheckpointRef(Path(f"step-{step}"), step, 0, "", 0) for step in range(5, 0, -1)]
    assert [ref.step for ref in expired(refs, CheckpointConfig(keep_last=2), [refs[3]])] == [3, 1]
    assert expired(refs, CheckpointConfig(keep_last=9)) == []


def test_the_first_of_every_so_many_epochs_stays_after_each_save():
    epochs = (0, 1, 1, 2, 2, 3, 4, 4, 5)  # of steps 1 to 9
    keep, all_refs = CheckpointConfig(keep_last=1, keep_every=2), []
    for step, epoch in enumerate(epochs, 1):
        all_refs.insert(0, CheckpointRef(Path(f"step-{step}"), step, epoch, "", 0))
    refs = []
    for ref in reversed(all_refs):
        refs.insert(0, ref)
        refs = [one for one in refs if one not in expired(refs, keep)]
    assert [ref.step for ref in refs] == [9, 7, 4]
    assert [ref for ref in all_refs if ref not in expired(all_refs, keep)] == refs


def test_of_every_so_many_epochs_one_stays_where_not_every_epoch_is_saved():
    refs = [CheckpointRef(Path(f"step-{epoch}"), epoch, epoch, "", 0) for epoch in range(20, 0, -2)]
    gone = {ref.epoch for ref in expired(refs, CheckpointConfig(keep_last=1, keep_every=5))}
    assert [ref.epoch for ref in refs if ref.epoch not in gone] == [20, 16, 10, 6]


def refs_of(directory: Path, size: int, shared: int = 0) -> list[CheckpointRef]:
    """Six, newest first, each of a file of its own and one that all of them share."""
    first = directory / "step-1" / "shared"
    for step in range(1, 7):
        path = directory / f"step-{step}"
        path.mkdir(parents=True)
        (path / "own").write_bytes(bytes(size))
        if step == 1:
            first.write_bytes(bytes(shared))
        else:
            os.link(first, path / "shared")
    return [CheckpointRef(directory / f"step-{step}", step, 0, "", size + shared) for step in range(6, 0, -1)]


@pytest.mark.parametrize(
    ("max_bytes", "left"),
    [
        ("1kB", [6, 5, 4, 3, 2, 1]),
        (600, [6, 5, 4, 3, 2, 1]),
        (599, [6, 5, 4, 3, 2]),
        (400, [6, 5, 3, 2]),
        (1, [6, 3, 2]),
    ],
)
@pytest.mark.parametrize("shared", [0, 1000])
def test_a_byte_budget_drops_the_oldest_and_spares_newest_best_and_needed(max_bytes, left, shared, tmp_path):
    refs = refs_of(tmp_path, 100, shared)
    keep = CheckpointConfig(keep_last=6, max_bytes=max_bytes)
    keep = keep.model_copy(update={"max_bytes": keep.max_bytes + shared})
    gone = expired(refs, keep, best=[refs[3], refs[0]], needed=[refs[4]])
    assert [ref.step for ref in refs if ref not in gone] == left


def test_a_store_keeps_to_its_budget(either):
    store, size = either, 0
    for step in (1, 2, 3, 4):
        ref = store.save(state(step), step=step, epoch=0, metrics={"loss": abs(step - 2)})
        size = size or ref.size
        keep = CheckpointConfig(keep_last=3, monitor="loss", max_bytes=2 * size + size // 2)
        store.commit(ref, keep)
    assert [ref.step for ref in store.kept] == [4, 2]
    assert names(store) == {ref.path.name for ref in store.kept}


class Adapted(nn.Module):
    """A frozen base of 4 MB with a NaN in it, a table of 2 MB, and 16 kB that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(1024, 1024, bias=False).requires_grad_(False)
        self.base.weight[3, 5] = math.nan
        self.adapter = nn.Parameter(torch.zeros(1024, 4))
        self.register_buffer("table", torch.rand(512, 1024))


def saved(store: CheckpointStore, model: nn.Module, step: int, keep: CheckpointConfig | None = None) -> CheckpointRef:
    with torch.no_grad():
        model.adapter.fill_(step)
    ref = store.save({"model": model.state_dict(keep_vars=True), "step": step}, step=step, epoch=0)
    store.commit(ref, keep or CheckpointConfig(keep_last=9))
    return ref


def bytes_of(*refs: CheckpointRef) -> int:
    return sum({file: size for ref in refs for file, size in on_disk(ref.path).items()}.values())


def is_whole(ref: CheckpointRef, model: nn.Module) -> bool:
    """By itself, wherever it lies."""
    found, expected = load(ref.path)["model"], {**model.state_dict(), "adapter": torch.full((1024, 4), float(ref.step))}
    return found.keys() == expected.keys() and all(
        torch.equal(found[name].nan_to_num(nan=77.0), tensor.nan_to_num(nan=77.0)) for name, tensor in expected.items()
    )


def test_what_is_not_trained_is_stored_once(store):
    model = Adapted()
    refs = [saved(store, model, step) for step in (1, 2)]
    again = reopen(store)  # another attempt goes on with the same files
    refs += [saved(again, model, step) for step in (3, 4)]
    assert {path.name for path in refs[0].path.iterdir()} == {
        "manifest.json",
        "model.safetensors",
        "model-frozen.safetensors",
        "model-buffers.safetensors",
    }
    assert all(ref.size > 6 << 20 for ref in refs), "each is all of it"
    assert bytes_of(*refs) < 1.02 * refs[0].size
    again.tidy(CheckpointConfig(keep_last=1))
    assert names(again) == {refs[3].path.name}
    assert is_whole(refs[3], model)
    assert is_whole(CheckpointRef(shutil.copytree(refs[3].path, store.directory.parent / "copy"), 4, 0, "", 0), model)


def test_what_is_frozen_is_one_file_for_the_model_and_its_average(store):
    model = Adapted()
    average = Average(AverageConfig(name="ema", decay=0.5), model, total=9)
    refs = []
    for step in (1, 2, 3):
        with torch.no_grad():
            model.adapter.fill_(step)
        average.update(step)
        state = {"model": model.state_dict(keep_vars=True), "average": average.state(), "step": step}
        refs.append(store.save(state, step=step, epoch=0))
        store.commit(refs[-1], CheckpointConfig(keep_last=9))
    assert bytes_of(*refs) < 1.03 * (6 << 20)
    for ref in refs:
        for kind in ("frozen", "buffers"):
            assert (ref.path / f"average-{kind}.safetensors").samefile(ref.path / f"model-{kind}.safetensors")
        found = load(ref.path)["average"]["model"]
        assert found.keys() == model.state_dict().keys()
        assert torch.equal(found["base.weight"].nan_to_num(), model.base.weight.nan_to_num())
        assert torch.equal(found["table"], model.table)
    assert torch.equal(found["adapter"], average.model.adapter) and not torch.equal(found["adapter"], model.adapter)
    alone, _ = files.read_model(refs[0].path)
    assert alone.keys() == model.state_dict().keys()


def test_what_has_changed_after_all_is_written_anew(store):
    """A target network, say, which the task moves by hand."""
    model = Adapted()
    saved(store, model, 1)
    model.base.weight.data[0, 0] += 1
    second, first = saved(store, model, 2), store.kept[1]
    assert bytes_of(first, second) > first.size + (4 << 20)
    assert is_whole(second, model)
    assert (first.path / "model-buffers.safetensors").samefile(second.path / "model-buffers.safetensors")


@pytest.mark.parametrize("damage", [flip, flip_last, truncate, empty, Path.unlink])
def test_damage_is_not_shared_with_the_next_checkpoint(store, damage):
    model = Adapted()
    first = saved(store, model, 1)
    damage(first.path / "model-frozen.safetensors")
    second = saved(store, model, 2)
    assert is_whole(second, model)
    with pytest.raises(CheckpointError, match="model-frozen"):
        load(first.path)


def test_where_there_are_no_links_each_checkpoint_has_its_copy(store, monkeypatch):
    def link(*names):
        raise PermissionError(1, "no hard links here")

    monkeypatch.setattr(os, "link", link)
    model = Adapted()
    refs = [saved(store, model, step) for step in (1, 2)]
    assert bytes_of(*refs) == sum(ref.size for ref in refs)
    assert all(is_whole(ref, model) for ref in refs)


def test_a_budget_counts_what_is_shared_once(store):
    model = Adapted()
    keep = CheckpointConfig(keep_last=9, max_bytes="7MB")
    assert len([saved(store, model, step, keep) for step in (1, 2, 3)]) == len(store.kept)


def test_what_is_not_trained_and_small_gets_no_file_of_its_own(store):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model[0].requires_grad_(False)
    ref = store.save({"model": model.state_dict(keep_vars=True)}, step=1, epoch=0)
    assert {path.name for path in ref.path.iterdir()} == {"manifest.json", "model.safetensors"}
    assert load_file(ref.path / "model.safetensors").keys() == model.state_dict().keys()


def test_every_byte_is_synced_before_the_name_is_told(store, monkeypatch):
    """What a power cut may undo is what has not been synced: the order rules out a named, torn checkpoint."""
    done = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(fd: int) -> None:
        done.append(("sync", Path(os.readlink(f"/proc/self/fd/{fd}")).name.split(".tmp")[0]))
        fsync(fd)

    def record_rename(self: Path, target: Path) -> Path:
        done.append(("rename", target.name))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    name = store.save(state(1), step=1, epoch=0).path.name
    root = store.directory.parents[1].name
    assert done == [
        ("sync", root),
        ("sync", "deep"),
        ("sync", "model.safetensors"),
        ("sync", "optimizer.safetensors"),
        ("sync", "manifest.json"),
        ("sync", name),
        ("rename", name),
        ("sync", "trial"),
    ]


def test_no_space_is_one_sentence_and_harms_nothing(store):
    """RLIMIT_FSIZE stands in for a full disk: the first write beyond it fails with EFBIG."""
    kept = put(store, 1)
    big = state(2) | {"model": {"w": torch.zeros(100_000)}}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"checkpoint of step 2 could not be written to .*intact") as error:
            store.save(big, step=2, epoch=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(error.value)
    assert names(store) == {kept.path.name}
    assert reopen(store).load_latest()[1] == kept


@pytest.mark.parametrize("point", ["checkpoint.after_files", "checkpoint.before_rename"])
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_an_error_while_saving_leaves_nothing_behind(either, point, error, monkeypatch):
    store = either
    kept = put(store, 1)
    monkeypatch.setattr(failpoint, "_TESTING", True)
    monkeypatch.setattr(failpoint, "_POINTS", failpoint._parse(f"{point}=raise:{error}@1"))
    monkeypatch.setattr(failpoint, "_passed", {})
    with pytest.raises(CheckpointError, match="could not be written"):
        store.save(state(2), step=2, epoch=0)
    assert names(store) == {kept.path.name}


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    store = CheckpointStore(tmp_path / "file" / "trial", fence=1)
    with pytest.raises(CheckpointError, match="could not be written"):
        store.save(state(1), step=1, epoch=0)


def save_three(directory: Path, ledger: Path, place: Disk) -> None:
    """What an attempt does: save, commit the row, drop what has expired. `ledger` is a journal of the rows."""

    def write(*words: object) -> None:
        with open(ledger, "a") as journal:
            print(*words, file=journal)

    def on_change(changes):
        for name in changes:
            write("deleted", directory / name)
        return ()

    store = CheckpointStore(directory, fence=1, on_change=on_change, location=place)
    for step in (1, 2, 3):
        ref = store.save(state(step), step=step, epoch=0)
        write("kept", ref.path, ref.step, ref.epoch, ref.sha256, ref.size)
        store.commit(ref, CheckpointConfig(keep_last=1))


def rows(ledger: Path) -> list[CheckpointRef]:
    kept: dict[str, CheckpointRef] = {}
    for word, path, *rest in map(str.split, ledger.read_text().splitlines()):
        if word == "deleted":
            del kept[path]
        else:
            step, epoch, sha256, size = rest
            kept[path] = CheckpointRef(Path(path), int(step), int(epoch), sha256, int(size))
    return list(reversed(kept.values()))


@pytest.mark.parametrize(
    ("point", "newest"),
    [
        ("checkpoint.after_files", 1),
        ("checkpoint.before_rename", 1),
        ("checkpoint.after_rename", 1),
        ("retention.after_row", 3),
        ("retention.after_files", 3),
    ],
)
def test_sigkill_at_the_second_passing_of_a_point_loses_nothing_committed(point, newest, place, tmp_path):
    child = os.fork()
    if child == 0:
        failpoint._TESTING, failpoint._POINTS = True, failpoint._parse(f"{point}=kill@2")
        save_three(tmp_path / "trial", tmp_path / "ledger", place)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    shutil.rmtree(tmp_path / "trial") if place is not DISK else None  # the next worker is another host
    store = CheckpointStore(tmp_path / "trial", fence=2, committed=rows(tmp_path / "ledger"), location=place)
    loaded, ref = store.load_latest()
    assert ref.step == newest
    assert same(loaded, state(newest))
    assert not store.damaged
    store.sweep()
    assert names(store) == {ref.path.name for ref in store.kept}


def test_a_killed_upload_in_parts_is_aborted(bucket, tmp_path):
    """Between the parts of a file of many megabytes: what is there is no object, and costs all the same."""
    at = Bucket(bucket)
    store = CheckpointStore(tmp_path / "trial", fence=2, location=ObjectStore(at, tmp_path))
    [kept] = [put(store, 1)]
    key = at._key("trial/step-00000002.f1.0badcafe/model.safetensors")
    at._asked(lambda client: client.create_multipart_upload(Bucket=at._bucket, Key=key))
    assert len(names(store)) == 2
    store.sweep()
    assert names(store) == {kept.path.name}
    assert not at.uploads("trial")


def test_a_manifest_whose_answer_was_lost_is_committed_by_the_next_try(bucket, tmp_path):
    """And none is ever written over."""
    at = Bucket(bucket)
    at.put_new("manifest.json", b"one")
    at.put_new("manifest.json", b"one")
    with pytest.raises(Unavailable, match=r"refuses PutObject \(PreconditionFailed"):
        at.put_new("manifest.json", b"other")
    assert at.get("manifest.json") == b"one"


@pytest.mark.parametrize(
    ("points_to", "says"),
    [
        ("nobody", r"s3://.* cannot be reached \(no connection to its endpoint can be made\): check AWS_ENDPOINT_URL"),
        ("another bucket", r"s3://nowhere-at-all/x cannot be used: the bucket does not exist at AWS_ENDPOINT_URL"),
        ("no credentials", r"cannot be reached \(NoCredentialsError: Unable to locate credentials\)"),
    ],
)
def test_a_store_that_does_not_answer_is_one_sentence_and_damages_nothing(
    points_to, says, bucket, tmp_path, monkeypatch
):
    store = CheckpointStore(tmp_path / "trial", fence=1, location=ObjectStore(Bucket(bucket), tmp_path))
    ref = put(store, 1)
    trainer.files.s3._client.cache_clear()
    if points_to == "nobody":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:secret@127.0.0.1:9")
    elif points_to == "another bucket":
        store.location.bucket = Bucket("s3://nowhere-at-all/x")
    else:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    for act in (store.load_latest, lambda: store.save(state(2), step=2, epoch=0), store.sweep):
        with pytest.raises(CheckpointError, match=says) as error:
            act()
        assert "\n" not in str(error.value) and "secret" not in str(error.value)
    assert store.kept == [ref] and not store.damaged
    trainer.files.s3._client.cache_clear()


def test_credentials_in_the_url_are_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="'s3://key:\\*\\*\\*@bucket/x' is not a place") as error:
        Bucket("s3://key:secret@bucket/x")
    assert "secret" not in str(error.value)


class Between(ThreadingHTTPServer):
    """Between this process and the server, whose answers it passes on; as long as there are some, `answers` say how: a
    status and a code instead, "drop" for none at all, "cut" for one that breaks off in the middle, "pass"."""

    daemon_threads = True

    def __init__(self, server: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behind = server.removeprefix("http://")
        self.answers: list[str | tuple[int, str]] = []
        self.asked: list[str] = []


KEPT = ("content-length", "content-type", "etag", "last-modified")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Between

    def answer(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(self.command)
        own = self.server.answers.pop(0) if self.server.answers else None
        if own == "drop":
            self.close_connection = True
        elif isinstance(own, tuple):
            self.send(own[0], {}, f"<Error><Code>{own[1]}</Code><Message>as told</Message></Error>".encode())
        else:
            server = http.client.HTTPConnection(self.server.behind)
            server.request(self.command, self.path, data, dict(self.headers))
            given = server.getresponse()
            kept = {name.lower(): value for name, value in given.getheaders() if name.lower() in KEPT}
            self.send(given.status, kept, given.read(), cut=own == "cut")
            server.close()

    def send(self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in ({"content-length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = cut

    def log_message(self, *_: object) -> None:
        pass

    do_GET = do_PUT = do_HEAD = answer


@pytest.fixture
def between(bucket, monkeypatch):
    with Between(os.environ["AWS_ENDPOINT_URL"]) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()


CONFLICT = (409, "ConditionalRequestConflict")


@pytest.mark.parametrize(
    "answer", [CONFLICT, (503, "SlowDown"), pytest.param((500, "InternalError"), marks=pytest.mark.slow), "drop"]
)
def test_what_may_go_better_next_time_is_tried_again(answer, bucket, between):
    """AWS_MAX_ATTEMPTS is 2 here. The other request of a conflict may have been this one, its answer lost."""
    at = Bucket(bucket)
    for written_before in (False, True):
        between.answers, between.asked = [answer], []
        at.put_new("manifest.json", b"one")
        assert between.asked == ["PUT", "PUT"] + ["GET"] * written_before
    between.answers = [answer] if answer != CONFLICT else []
    assert at.get("manifest.json") == b"one"


def test_an_answer_that_breaks_off_is_asked_for_again(bucket, between, tmp_path):
    at = Bucket(bucket)
    at.put_new("manifest.json", b"one")
    between.answers, between.asked = ["cut"], []
    assert at.get("manifest.json") == b"one" and between.asked == ["GET", "GET"]
    at.put_new("file", bytes(1000))
    between.answers = ["pass", "cut"]  # what is asked first is how large it is
    assert at.download("file", tmp_path / "copy") and (tmp_path / "copy").read_bytes() == bytes(1000)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (CONFLICT, r"refuses PutObject \(ConditionalRequestConflict 409\): it was asked up to 2 times \(AWS_MAX_"),
        ((503, "SlowDown"), r"refuses PutObject \(SlowDown 503\): it was asked up to 2 times .*, try again later\.$"),
        ((403, "AccessDenied"), r"refuses PutObject \(AccessDenied 403\): check AWS_ENDPOINT_URL, .* credentials\.$"),
        ("drop", r"cannot be reached \(the connection broke\): check AWS_.*; it was tried up to 2 times \(AWS_MAX_"),
    ],
)
def test_what_is_given_up_says_how_often_it_was_tried(answer, says, bucket, between):
    between.answers = [answer] * 9
    with pytest.raises(Unavailable, match=says) as error:
        Bucket(bucket).put_new("manifest.json", b"one")
    assert len(between.asked) == (1 if answer == (403, "AccessDenied") else 2)
    assert "\n" not in str(error.value) and "127.0.0.1" not in str(error.value)


ELSEWHERE = "http://objects.example.org"
SERVICES = f"[default]\nservices = mine\n[services mine]\ns3 =\n  endpoint_url = {ELSEWHERE}\n"


@pytest.mark.parametrize(
    ("environ", "file", "begins"),
    [
        ({"AWS_ENDPOINT_URL_S3": ELSEWHERE}, "", f"{ELSEWHERE}/the-bucket/"),
        ({}, SERVICES, f"{ELSEWHERE}/the-bucket/"),
        ({"AWS_ENDPOINT_URL": ELSEWHERE}, "[default]\ns3 =\n  addressing_style = virtual\n", "http://the-bucket.obj"),
    ],
)
def test_endpoint_and_addressing_are_boto3s_to_find(environ, file, begins, bucket, tmp_path, monkeypatch):
    """One bucket is a path of any server, and a host name of one whose DNS knows it."""
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    (tmp_path / "config").write_text(file)
    for name, value in {"AWS_CONFIG_FILE": str(tmp_path / "config"), **environ}.items():
        monkeypatch.setenv(name, value)
    trainer.files.s3._client.cache_clear()
    wanted = {"Bucket": "the-bucket", "Key": "k"}
    url = Bucket("s3://the-bucket")._asked(lambda c: c.generate_presigned_url("get_object", Params=wanted))
    trainer.files.s3._client.cache_clear()
    assert url.startswith(begins)


def test_what_is_said_of_a_checkpoint_in_a_bucket_is_its_address(bucket, tmp_path):
    place = ObjectStore(Bucket(bucket), tmp_path)
    store = CheckpointStore(tmp_path / "trial", fence=1, location=place)
    ref = put(store, 1)
    harm(store, ref, "model.safetensors", flip)
    address = f"{bucket}/trial/{ref.path.name}"
    rank = group._Store(store, SimpleNamespace(first=False, agree=lambda _: ref))
    with pytest.raises(CheckpointError, match=rf"^checkpoint {address} cannot be read: model\.safetensors"):
        rank.load_latest()
    with place.opened(ref.path, ref.sha256) as copy, pytest.raises(CheckpointError, match=f"^checkpoint {address} c"):
        load(copy, shown=address)
    assert store.load_latest() is None
    assert store.damaged[0].shown == f"{address}.corrupt"


def killed(work) -> None:
    """Do it in a process that kills itself at it."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def kill_this(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_copy_of_a_reader_that_was_killed_goes_with_the_next_read(bucket, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    store = CheckpointStore(tmp_path / "trial", fence=1, location=ObjectStore(Bucket(bucket), tmp_path))
    ref = put(store, 1)

    def copies() -> set[Path]:
        return set((tmp_path / "tmp").glob(f"{COPY}*"))

    def read() -> None:
        with store.location.opened(ref.path, ref.sha256):
            kill_this()

    killed(read)
    [left] = copies()
    assert (left / "model.safetensors").exists()
    with store.location.opened(ref.path, ref.sha256) as one, store.location.opened(ref.path, ref.sha256) as other:
        assert copies() == {one, other}, "what is being read stays"
        assert same(load(one), state(1))
    assert not copies()


def test_a_killed_saves_leftovers_go_with_the_next_save_on_that_host(bucket, tmp_path):
    """Its trial may go on at another host. What others are at stays."""
    place, study = ObjectStore(Bucket(bucket), tmp_path), tmp_path / "study"

    def save() -> None:
        Bucket.upload = kill_this
        put(CheckpointStore(study / "00000", fence=1, location=place), 1)

    killed(save)
    assert {path.parent.suffix for path in files_on_disk(study)} == {".tmp"}
    under_way = study / "00001" / "step-00000001.f1.0badcafe.tmp"
    under_way.parent.mkdir()
    held = scratch.hold(under_way)
    other = CheckpointStore(study / "00002", fence=1, location=place)
    put(other, 1)
    assert not files_on_disk(study) and under_way.is_dir()
    os.close(held)
    put(other, 2)
    assert not list(study.glob("*/*.tmp"))


def test_files_are_kept_whole_and_come_back(either, tmp_path):
    """Of any format, in directories of their own; their names outlive the files that were given."""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "deep").mkdir(parents=True)
    held = {"model.bin": b"\x80\x04 no pickle of ours", "deep/config.json": b"{}"}
    for name, data in held.items():
        (source / name).write_bytes(data)
    ref = either.save({"n": 1}, step=1, epoch=1, files=source)
    shutil.rmtree(source)
    target.mkdir()
    assert sorted(either.copy_files(ref, target)) == sorted(held)
    assert {name: (target / name).read_bytes() for name in held} == held
    assert either.read(ref) == {"n": 1}
