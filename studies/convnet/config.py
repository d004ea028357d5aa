"""Configures the convnet study. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config import CheckpointConfig, Frozen, NonNegative, OptimConfig, ScheduleConfig, Share, TrainConfig

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class PicturesConfig(Frozen):
    """The generated task, see `shapes.py`: the number of training pictures, and their difficulty."""

    num_train: Annotated[int, Field(ge=10)] = 600
    size: Annotated[int, Field(ge=8)] = 16  # pixels
    noise: NonNegative = 0.1  # standard deviation, of intensities from 0 to 1
    mislabelled: Share = 0.1  # share of the training pictures; validation and test have the right classes


class DataConfig(Frozen):
    """Generated pictures, or a directory: CIFAR-10 or CIFAR-100 in the binary version, or images in folders.

    There is one folder for each class; the folders may be within `train` and `test`.
    """

    path: str | None = None
    image_size: Annotated[int, Field(ge=8)] | None = None  # pixels that images in folders are scaled to; None: as is
    pictures: PicturesConfig = PicturesConfig()
    num_val: Annotated[int, Field(ge=10)] = 1000  # for a directory: taken from its training images
    limit: Count | None = None  # for a directory: number of training images; None: all that are left
    seed: Seed = 0  # draws the pictures, or the split
    test: bool = False  # also measure test/..., on 1000 pictures, or on the directory's own

    @model_validator(mode="after")
    def _size_is_a_directorys(self) -> DataConfig:
        if self.path is None and self.image_size is not None:
            raise ValueError("image_size is read only with path: generated pictures have pictures.size; leave it out.")
        return self


class ModelConfig(Frozen):
    """A residual net: three stages of `num_blocks` blocks, `width`, 2 `width` and 4 `width` channels."""

    width: Count = 8
    num_blocks: Count = 1
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # before the last layer
    channels_last: bool = True  # memory layout of images: quicker convolutions

    @model_validator(mode="after")
    def _kernels_are_sound(self) -> ModelConfig:
        if self.channels_last and self.width < 8:
            raise ValueError(
                f"width={self.width} with channels_last: torch 2.13's CPU kernels write beyond their memory below 8 "
                "channels; set channels_last=false, or width to 8 or more."
            )
        return self


class LossConfig(Frozen):
    """The loss to minimise: cross-entropy, or focal loss, in which easy images weigh less."""

    name: Literal["cross_entropy", "focal"] = "cross_entropy"
    label_smoothing: Share = 0.0
    gamma: NonNegative = 2.0  # focal

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> LossConfig:
        if self.name == "focal" and self.label_smoothing:
            raise ValueError(f"label_smoothing={self.label_smoothing} is not read by focal: leave it 0.")
        if self.name != "focal" and self.gamma != 2.0:
            raise ValueError(f"gamma={self.gamma} is read only by focal: set name=focal, or leave it out.")
        return self


class AugmentConfig(Frozen):
    """Changes to training images; each draw is a function of (seed, epoch, index), for mixup of the step."""

    flip: bool = True  # half of them, left to right
    crop: Annotated[int, Field(ge=0)] = 2  # crops from the image with this many black pixels around it
    erase: Share = 0.0  # share of images in which a rectangle becomes grey
    mixup: NonNegative = 0.0  # alpha of Beta(alpha, alpha), by which two images are mixed; 0: not mixed


class Config(Frozen):
    """The whole configuration of the study."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    augment: AugmentConfig = AugmentConfig()
    train: TrainConfig = TrainConfig(
        num_epochs=30,
        batch_size=32,
        optim=OptimConfig(name="sgd", lr=0.1, weight_decay=5e-4),
        schedule=ScheduleConfig(name="one_cycle"),
        checkpoint=CheckpointConfig(monitor="val/accuracy", mode="max"),
    )
