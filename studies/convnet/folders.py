"""Images in folders, one folder for each class: what is in a directory, and its pixels as arrays. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.errors import ConfigError, DataError

FORMATS = ("PNG", "JPEG", "PPM", "BMP", "WEBP")  # what is opened, whatever a file is called
WIDE = ("I", "F")  # how the modes begin whose pixels are no bytes


@dataclass(frozen=True)
class Folders:
    """The images of each class, in the order of the classes' names. `size`: what they are scaled to, if anything."""

    names: tuple[str, ...]
    files: dict[str, list[tuple[Path, int]]]  # of "train", and of "test" where there are any: each with its class
    size: int | None

    @property
    def classes(self) -> int:
        return len(self.names)

    def read(self, part: str) -> tuple[np.ndarray, np.ndarray]:
        """x [n, 3, height, width] uint8 and y [n] int64. Raises DataError with the file for what is no image, and for
        images of several sizes."""
        found = [_pixels(file, self.size) for file, _ in self.files[part]]
        for (file, _), one in zip(self.files[part], found, strict=True):
            if one.shape != found[0].shape:
                raise DataError(
                    f"{file} has {_shown(one)} pixels and {self.files[part][0][0]} has {_shown(found[0])}: set "
                    "data.image_size, to which all are scaled."
                )
        return np.stack(found), np.array([label for _, label in self.files[part]])


def find(directory: Path, size: int | None) -> Folders | None:
    """What lies in `train` and `test` of a directory, else in the directory itself; None where no folder has a file.
    Raises DataError for a class without a file, and for one to test that there is none of to train on."""
    train, test = directory / "train", directory / "test"
    named = train.is_dir()
    classes = _classes(train if named else directory)
    names = tuple(classes)
    files = {"train": [(file, label) for label, name in enumerate(names) for file in classes[name]]}
    if named and test.is_dir():
        held = _classes(test)
        if unknown := sorted(held.keys() - classes.keys()):
            raise DataError(f"{test / unknown[0]} has no folder beside it in {train}: give that class there too.")
        files["test"] = [(file, names.index(name)) for name in held for file in held[name]]
    return Folders(names, files, size) if names else None


def _classes(directory: Path) -> dict[str, list[Path]]:
    """The files of each folder, by name, if any has one; what is hidden is passed over."""
    found = {
        folder.name: sorted(file for file in folder.iterdir() if file.is_file() and file.name[0] != ".")
        for folder in sorted(directory.iterdir())
        if folder.is_dir() and folder.name[0] != "."
    }
    empty = [name for name, files in found.items() if not files]
    if 0 < len(empty) < len(found):
        raise DataError(f"{directory / empty[0]} has no file, so none of its class: put images there, or remove it.")
    return {} if empty else found


def _pixels(file: Path, size: int | None) -> np.ndarray:
    """[3, height, width] uint8."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("folders of images need pillow: pip install 'hpo[images]'.") from error
    try:
        with Image.open(file, formats=FORMATS) as image:
            if image.mode.startswith(WIDE):
                raise DataError(f"{file} has more than 8 bits a pixel (mode {image.mode}): save it with 8.")
            rgb = image.convert("RGB")
            return np.asarray(rgb if size is None else rgb.resize((size, size))).transpose(2, 0, 1)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = "it is none, or of another format" if isinstance(error, Image.UnidentifiedImageError) else error
        raise DataError(f"{file} cannot be read as an image ({reason}): save it as PNG, or take it away.") from error


def _shown(x: np.ndarray) -> str:
    return f"{x.shape[2]} x {x.shape[1]}"
