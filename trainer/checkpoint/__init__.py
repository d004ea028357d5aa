"""Checkpoints that are whole or not there."""

from trainer.checkpoint.store import CheckpointStore, Damage, expired

__all__ = ["CheckpointStore", "Damage", "expired"]
