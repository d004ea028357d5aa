"""Data in the order of (seed, epoch), batch by batch, from any position on."""

from trainer.data.loader import Loader
from trainer.data.tensors import TensorDataset

__all__ = ["Loader", "TensorDataset"]
