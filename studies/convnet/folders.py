"""Reads images in folders, one folder for each class, as arrays. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.errors import ConfigError, DataError

FORMATS = ("PNG", "JPEG", "PPM", "BMP", "WEBP")  # accepted formats, whatever a file's name
WIDE = ("I", "F")  # prefixes of modes whose pixels are not bytes


@dataclass(frozen=True)
class Folders:
    """The images of each class, in the order of the classes' names. `size`: the size to scale them to, if any."""

    names: tuple[str, ...]
    files: dict[str, list[tuple[Path, int]]]  # by "train", and "test" if there are any: each with its class
    size: int | None

    @property
    def classes(self) -> int:
        return len(self.names)

    def read(self, part: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns x [n, 3, height, width] uint8 and y [n] int64.

        Raises DataError with the file for one that is not an image, and for images of several sizes.
        """
        images = [_pixels(file, self.size) for file, _ in self.files[part]]
        for (file, _), image in zip(self.files[part], images, strict=True):
            if image.shape != images[0].shape:
                raise DataError(
                    f"{file} has {_shown(image)} pixels and {self.files[part][0][0]} has {_shown(images[0])}: set "
                    "data.image_size, to which all are scaled."
                )
        return np.stack(images), np.array([label for _, label in self.files[part]])


def find(directory: Path, size: int | None) -> Folders | None:
    """Returns the images in `train` and `test` of a directory, else in the directory itself.

    Returns None if no folder has a file. Raises DataError for a class without a file, and for a test class without
    training images.
    """
    train, test = directory / "train", directory / "test"
    named = train.is_dir()
    classes = _classes(train if named else directory)
    names = tuple(classes)
    files = {"train": [(file, label) for label, name in enumerate(names) for file in classes[name]]}
    if named and test.is_dir():
        tested = _classes(test)
        if unknown := sorted(tested.keys() - classes.keys()):
            raise DataError(f"{test / unknown[0]} has no folder beside it in {train}: give that class there too.")
        files["test"] = [(file, names.index(name)) for name in tested for file in tested[name]]
    return Folders(names, files, size) if names else None


def _classes(directory: Path) -> dict[str, list[Path]]:
    """Returns the files of each folder, by name, if any has one; hidden ones are skipped."""
    folders = {
        folder.name: sorted(file for file in folder.iterdir() if file.is_file() and file.name[0] != ".")
        for folder in sorted(directory.iterdir())
        if folder.is_dir() and folder.name[0] != "."
    }
    empty = [name for name, files in folders.items() if not files]
    if 0 < len(empty) < len(folders):
        raise DataError(f"{directory / empty[0]} has no file, so none of its class: put images there, or remove it.")
    return {} if empty else folders


def _pixels(file: Path, size: int | None) -> np.ndarray:
    """Returns [3, height, width] uint8."""
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
