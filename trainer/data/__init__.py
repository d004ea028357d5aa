"""Reads data in the order of (seed, epoch), batch by batch, from any position. `view` defines a data set."""

from trainer.data.cache import Cached
from trainer.data.check import check
from trainer.data.lengths import Bucketed, Padded, pad
from trainer.data.loader import Loader
from trainer.data.mixture import Curriculum, Mixture
from trainer.data.packing import Packed, block_diagonal_mask, next_tokens
from trainer.data.shards import TarShards
from trainer.data.streams import Shards
from trainer.data.table import TableDataset
from trainer.data.tensors import TensorDataset
from trainer.data.tokens import TokenBlocks, TokenDocuments, TokenFile, write_tokens
from trainer.data.view import View

__all__ = [
    "Bucketed",
    "Cached",
    "Curriculum",
    "Loader",
    "Mixture",
    "Packed",
    "Padded",
    "Shards",
    "TableDataset",
    "TarShards",
    "TensorDataset",
    "TokenBlocks",
    "TokenDocuments",
    "TokenFile",
    "View",
    "block_diagonal_mask",
    "check",
    "next_tokens",
    "pad",
    "write_tokens",
]
