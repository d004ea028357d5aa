"""The convnet study's parts: pictures, CIFAR's bytes, augmentation, mixup, what a net needs, the table of recipes."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from torch import nn
from torch.nn import functional as F

from hpo.declaration.references import load
from studies.convnet import recipes, shapes, source
from studies.convnet.augment import GREY, Crop, Erase, Flip, augmentation
from studies.convnet.config import AugmentConfig, Config, DataConfig, LossConfig, ModelConfig, PicturesConfig
from studies.convnet.data import num_classes, split
from studies.convnet.task import ConvnetTask
from trainer.config import TrainConfig
from trainer.errors import DataError
from trainer.memory.estimate import estimate

# --- Pictures


def test_pictures_are_a_function_of_their_seed_with_balanced_classes():
    x, y = shapes.pictures(40, 16, 0.1, seed=3)
    again, same = shapes.pictures(40, 16, 0.1, seed=3)
    assert np.array_equal(x, again) and np.array_equal(y, same)
    assert (x.shape, x.dtype, y.dtype) == ((40, 3, 16, 16), np.uint8, np.int64)
    assert np.bincount(y).tolist() == [4] * shapes.CLASSES
    assert not np.array_equal(x, shapes.pictures(40, 16, 0.1, seed=4)[0])


def test_stripes_lie_or_stand_as_the_class_says():
    """Where they lie, neighbours below each other differ more; a mirror changes neither. Without noise and over many
    pictures, since shapes and distractors have edges of both kinds."""
    x, y = shapes.pictures(400, 24, 0.0, seed=0)
    down = abs(np.diff(x.astype(float), axis=2)).mean(axis=(1, 2, 3))
    right = abs(np.diff(x.astype(float), axis=3)).mean(axis=(1, 2, 3))
    lying = y % 2 == 0
    assert (down > right)[lying].mean() > 0.9
    assert (down < right)[~lying].mean() > 0.9


def test_shapes_have_the_areas_of_their_kind():
    """In radii, by counting places: a disc's pi .81, a ring's pi .75, a square's 1.6^2, a cross's two bars less one."""
    a, b = np.meshgrid(np.linspace(-1.5, 1.5, 601), np.linspace(-1.5, 1.5, 601), indexing="ij")
    areas = [shapes._inside(shape, a, b).mean() * 9 for shape in range(len(shapes.SHAPES))]
    triangle = 0.6 * 1.7**2  # height 1.7, half a base of 1.02
    expected = [np.pi * 0.81, np.pi * 0.75, 1.6**2, triangle, 2 * 2 * 0.6 - 0.6**2]
    assert areas == pytest.approx(expected, rel=0.03)


def test_splits_share_no_picture_and_do_not_depend_on_each_others_size():
    data = DataConfig(pictures=PicturesConfig(num_train=30, size=8), num_val=20)
    parts = {name: split(data, name)[0] for name in ("train", "val", "test")}
    rows = torch.cat([part.flatten(1) for part in parts.values()])
    assert len(rows.unique(dim=0)) == len(rows) == 30 + 20 + 1000
    larger = DataConfig(pictures=PicturesConfig(num_train=40, size=8), num_val=20)
    assert split(larger, "val")[0].equal(parts["val"])


def test_label_noise_is_in_the_training_classes_only():
    right, wrong = (
        DataConfig(pictures=PicturesConfig(num_train=600, size=8, mislabelled=share), num_val=20) for share in (0, 0.3)
    )
    for name in ("val", "test"):
        assert split(right, name)[1].equal(split(wrong, name)[1])
    (x, y), (same, other) = split(right, "train"), split(wrong, "train")
    assert x.equal(same)
    changed = y != other
    assert 0.2 < changed.float().mean() < 0.4
    assert np.bincount((other - y)[changed] % shapes.CLASSES, minlength=shapes.CLASSES)[1:].min() > 0


# --- CIFAR


def write(file: Path, labels: np.ndarray, images: np.ndarray, coarse: int | None = None) -> None:
    """CIFAR's records, one after another."""
    with file.open("wb") as out:
        for label, image in zip(labels, images, strict=True):
            out.write(bytes([label] if coarse is None else [coarse, label]) + image.tobytes())


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)


@pytest.fixture
def ten(tmp_path, images) -> Path:
    """CIFAR-10 with two batches of four images, and four to test with."""
    directory = tmp_path / "cifar"
    directory.mkdir()
    for name, part in (("data_batch_1", slice(0, 4)), ("data_batch_2", slice(4, 8)), ("test_batch", slice(8, 12))):
        write(directory / f"{name}.bin", np.arange(12)[part] % 10, images[part])
    return directory


def test_cifar_10_is_read_byte_by_byte_and_split(ten, images):
    data = DataConfig(path=str(ten)).model_copy(update={"num_val": 3})
    assert num_classes(data) == 10
    assert source.check(Config(data=data)) == {"train": 5, "val": 3, "test": 4}
    x, y = split(data, "test")
    assert x.equal(torch.from_numpy(images[8:]))
    assert y.tolist() == [8, 9, 0, 1]
    parts = [split(data, name) for name in ("train", "val")]
    found = dict(zip(torch.cat([y for _, y in parts]).tolist(), torch.cat([x for x, _ in parts]), strict=True))
    assert sorted(found) == list(range(8))
    assert all(found[label].equal(torch.from_numpy(images[label])) for label in found)
    few = split(data.model_copy(update={"limit": 2}), "train")
    assert few[1].equal(parts[0][1][:2])


def test_of_cifar_100_the_fine_label_counts(tmp_path, images):
    write(tmp_path / "train.bin", np.arange(88, 100), images, coarse=5)
    write(tmp_path / "test.bin", np.arange(12), images, coarse=6)
    data = DataConfig(path=str(tmp_path)).model_copy(update={"num_val": 3})
    assert num_classes(data) == 100
    x, y = split(data, "test")
    assert y.tolist() == list(range(12))
    assert x.equal(torch.from_numpy(images))


def cut(directory: Path) -> None:
    (directory / "data_batch_2.bin").write_bytes((directory / "data_batch_2.bin").read_bytes()[:-1])


def lacking(directory: Path) -> None:
    (directory / "data_batch_1.bin").unlink()


def emptied(directory: Path) -> None:
    (directory / "test_batch.bin").write_bytes(b"")


def mislabelled(directory: Path) -> None:
    record = bytearray((directory / "test_batch.bin").read_bytes())
    record[2 * 3073] = 17
    (directory / "test_batch.bin").write_bytes(record)


def pickled(directory: Path) -> None:
    for file in directory.iterdir():
        file.rename(file.with_suffix(""))


def gone(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "num_val", "sentence"),
    [
        (cut, 3, r".*data_batch_2\.bin has 12291 bytes, which is not a number of records of 3073"),
        (lacking, 3, r".*data_batch_1\.bin is not there, and the training pictures after it are: put it back"),
        (emptied, 3, r".*test_batch\.bin has 0 bytes"),
        (mislabelled, 3, r".*test_batch\.bin: record 2 has the label 17, and there are 10 classes"),
        (pickled, 3, r"data\.path=.* holds CIFAR's python version, whose pickles .* cifar-10-binary\.tar\.gz"),
        (gone, 3, r"data\.path=.* holds neither CIFAR's binary version .* nor a folder of images for each class"),
        (lambda directory: None, 10, r"data\.num_val=10 leaves none of the 8 training images"),
    ],
)
def test_a_directory_that_cannot_be_used_is_refused_in_one_sentence(ten, damage, num_val, sentence):
    damage(ten)
    with pytest.raises(DataError, match=sentence) as raised:
        source.check(Config(data=DataConfig(path=str(ten), num_val=10).model_copy(update={"num_val": num_val})))
    assert "\n" not in str(raised.value)


# --- Folders of images


@pytest.fixture
def folders(tmp_path, images) -> Path:
    """cat and dog below train, one of each below test; of several formats that lose nothing."""
    for n, name in enumerate(("train/cat/a.png", "train/cat/b.bmp", "train/dog/a.ppm", "train/dog/b.png")):
        save(tmp_path / name, images[n])
    save(tmp_path / "test/cat/c.png", images[4])
    save(tmp_path / "test/dog/c.png", images[5])
    (tmp_path / "train/dog/.hidden").write_text("no image")
    return tmp_path


def save(file: Path, image: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.transpose(1, 2, 0)).save(file)


def test_folders_are_classes_by_name_and_read_pixel_by_pixel(folders, images):
    data = DataConfig(path=str(folders))
    found = source.find(str(folders), None)
    assert num_classes(data) == 2
    x, y = found.read("train")
    assert np.array_equal(x, images[:4]) and y.tolist() == [0, 0, 1, 1]
    x, y = found.read("test")
    assert np.array_equal(x, images[4:6]) and y.tolist() == [0, 1]
    small = split(data.model_copy(update={"num_val": 1, "image_size": 8}), "train")[0]
    assert small.shape == (3, 3, 8, 8)


def test_where_nothing_is_for_the_test_it_is_drawn_as_the_validation_is(tmp_path, images):
    for n in range(12):
        save(tmp_path / f"{n % 3}" / f"{n}.png", images[n])
    data = DataConfig(path=str(tmp_path)).model_copy(update={"num_val": 3})
    parts = [split(data, name)[0] for name in ("train", "val", "test")]
    assert [len(part) for part in parts] == [6, 3, 3]
    assert len(torch.cat(parts).flatten(1).unique(dim=0)) == 12
    with pytest.raises(DataError, match=r"num_val=6 to select by, and as many to test with, leaves none of the 12"):
        source.check(Config(data=data.model_copy(update={"num_val": 6})))


def broken(directory: Path) -> None:
    file = directory / "train/cat/a.png"
    file.write_bytes(file.read_bytes()[:100])


def text(directory: Path) -> None:
    (directory / "train/dog/notes.txt").write_text("no image")


def sixteen_bits(directory: Path) -> None:
    Image.fromarray(np.zeros((32, 32), np.uint16)).save(directory / "test/dog/c.png")


def larger(directory: Path) -> None:
    save(directory / "train/dog/z.png", np.zeros((3, 40, 36), np.uint8))


def unknown(directory: Path) -> None:
    (directory / "test/dog").rename(directory / "test/fox")


def empty(directory: Path) -> None:
    (directory / "train/fox").mkdir()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (broken, r".*train/cat/a\.png cannot be read as an image \(.*\): save it as PNG"),
        (text, r".*notes\.txt cannot be read as an image \(it is none, or of another format\)"),
        (sixteen_bits, r".*test/dog/c\.png has more than 8 bits a pixel \(mode I;16\): save it with 8"),
        (larger, r".*dog/z\.png has 36 x 40 pixels and .*cat/a\.png has 32 x 32: set data\.image_size"),
        (unknown, r".*test/fox has no folder beside it in .*train"),
        (empty, r".*train/fox has no file, so none of its class: put images there, or remove it"),
    ],
)
def test_an_image_that_cannot_be_used_is_named_in_one_sentence(folders, damage, sentence):
    damage(folders)
    with pytest.raises(DataError, match=sentence) as raised:
        source.check(Config(data=DataConfig(path=str(folders)).model_copy(update={"num_val": 1})))
    assert "\n" not in str(raised.value)


def test_what_only_folders_read_is_refused_elsewhere(ten):
    with pytest.raises(DataError, match=r"data\.image_size=16 is for folders of images, and .* holds CIFAR"):
        source.find(str(ten), 16)
    with pytest.raises(ValidationError, match="image_size is read only with path"):
        DataConfig(image_size=16)


def test_a_path_that_is_no_directory_is_named(tmp_path):
    with pytest.raises(DataError, match=r"data\.path='.*no/such' is not a directory"):
        source.check(Config(data=DataConfig(path=str(tmp_path / "no" / "such"))))


# --- Augmentation


@pytest.fixture
def sample() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(3 * 8 * 10, dtype=torch.uint8).reshape(3, 8, 10), torch.tensor(7)


def drawn(change, sample, times: int = 60) -> list[torch.Tensor]:
    before = sample[0].clone()
    found = [change(sample, torch.Generator().manual_seed(seed)) for seed in range(times)]
    assert all(y is sample[1] for _, y in found)
    assert sample[0].equal(before), "the data set's own image stays as it is"
    return [x for x, _ in found]


def test_a_flip_is_the_image_or_its_mirror_each_half_the_time(sample):
    x, _ = sample
    mirrored = [one.equal(x.flip(2)) for one in drawn(Flip(), sample, 200)]
    assert all(one.equal(x) or one.equal(x.flip(2)) for one in drawn(Flip(), sample))
    assert 70 < sum(mirrored) < 130


def test_a_crop_is_any_window_of_the_image_with_its_margin(sample):
    x, _ = sample
    padded = F.pad(x, (1, 1, 1, 1))
    windows = {(i, j): padded[:, i : i + 8, j : j + 10] for i in range(3) for j in range(3)}
    places = [next(at for at, window in windows.items() if window.equal(one)) for one in drawn(Crop(1), sample)]
    assert set(places) == set(windows)


def test_erasing_leaves_one_grey_rectangle_of_its_size(sample):
    x, _ = sample
    seen = set()
    for one in drawn(Erase(1.0), sample):
        changed = (one != x).any(dim=0)
        rows, columns = changed.any(dim=1).nonzero()[:, 0], changed.any(dim=0).nonzero()[:, 0]
        part = one[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert (part == GREY).all()
        seen.add((len(rows), len(columns)))
    assert seen <= {(h, w) for h in (2, 3, 4) for w in (2, 3, 4)} and len(seen) > 4
    assert all(one.equal(x) for one in drawn(Erase(0.0), sample, 5))


def test_what_is_switched_off_draws_nothing(sample):
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    x, _ = augmentation(AugmentConfig(flip=False, crop=0))(sample, generator)
    assert x.equal(sample[0]) and generator.get_state().equal(state)


# --- Loss


@pytest.mark.parametrize("loss", [LossConfig(), LossConfig(label_smoothing=0.1), LossConfig(name="focal")])
def test_mixup_is_its_formula(loss):
    """Of cross-entropy: against targets mixed by the same share, which torch's takes as probabilities."""
    config = Config(loss=loss, augment=AugmentConfig(mixup=0.4))
    task, net = ConvnetTask(config), nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 5))
    x, y = torch.randint(256, (6, 3, 4, 4), dtype=torch.uint8), torch.tensor([0, 1, 2, 3, 4, 0])
    random.seed(5)
    found = task.loss(net, (x, y))
    random.seed(5)
    share = random.betavariate(0.4, 0.4)
    logits = net(share * x.float() + (1 - share) * x.float().flip(0))
    if loss.name == "focal":
        log_p = logits.log_softmax(dim=1)
        each = -((1 - log_p.exp()) ** 2) * log_p
        expected = sum(share * each[i, y[i]] + (1 - share) * each[i, y[5 - i]] for i in range(6))
    else:
        targets = share * F.one_hot(y, 5).float() + (1 - share) * F.one_hot(y.flip(0), 5).float()
        expected = F.cross_entropy(logits, targets, label_smoothing=loss.label_smoothing, reduction="sum")
    assert found.count == 6
    torch.testing.assert_close(found.sum, expected)


def test_without_mixup_the_loss_is_cross_entropy_and_draws_nothing():
    task, net = ConvnetTask(Config()), nn.Sequential(nn.Flatten(), nn.Linear(48, 5))
    x, y = torch.rand(6, 3, 4, 4), torch.tensor([0, 1, 2, 3, 4, 0])
    state = random.getstate()
    found = task.loss(net, (x, y))
    torch.testing.assert_close(found.sum, F.cross_entropy(net(x), y, reduction="sum"))
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": "focal", "label_smoothing": 0.1}, "label_smoothing=0.1 is not read by focal"),
        ({"gamma": 1.0}, "gamma=1.0 is read only by focal"),
    ],
)
def test_what_a_loss_does_not_read_is_refused(fields, sentence):
    with pytest.raises(ValidationError, match=re.escape(sentence)):
        LossConfig(**fields)


# --- What a net needs


def test_channels_last_is_refused_where_torch_would_damage_memory():
    with pytest.raises(ValidationError, match=r"width=4 with channels_last: .* set channels_last=false"):
        ModelConfig(width=4)
    assert ModelConfig(width=4, channels_last=False).width == 4


def test_what_a_step_needs_of_memory_is_estimated():
    config = Config(train=TrainConfig(batch_size=4))
    found = estimate(ConvnetTask(config), config.train, (torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.long)))
    assert found.parameters >= sum(p.nbytes for p in ConvnetTask(config).model().parameters())


# --- The study and its table


def test_every_preset_and_recipe_is_a_configuration():
    study = load("convnet")
    for preset in study.presets:
        study.configure({"preset": preset})
    declared = load(str(Path(recipes.__file__))).configure({})
    built = [declared.build(entry) for entry in declared.enqueue]
    assert len({one.model_dump_json() for one in built}) == len(recipes.RECIPES) * len(recipes.SEEDS)


def row(recipe: str, accuracy: float, state: str = "complete") -> dict:
    params = {f"params.{path}": value for path, value in recipes.RECIPES[recipe].items()}
    return {"state": state, "values.val/accuracy": accuracy, "params.train.seed": 0, **params}


def test_the_table_has_means_and_standard_errors_best_first():
    rows = [row("SGD, cosine", 0.5), *(row("SGD, one cycle, focal", value) for value in (0.7, 0.8, 0.9))]
    rows.append(row("SGD, one cycle", 0.99, state="failed"))
    assert recipes.table(rows).splitlines()[2:] == [
        "| SGD, one cycle, focal | 0.800 ± 0.058 | 3 |",
        "| SGD, cosine | 0.500 | 1 |",
    ]
