"""Silences what libraries say while they are imported where it tells a user nothing. Imports none of them."""

from __future__ import annotations

import logging


def quiet_torchao() -> None:
    """Before torchao is imported, also by transformers: it says nothing of its own kernels that do not fit this
    machine, since float8 products are torch's, nor of how it registers Enums. Everything else it says is heard."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).addFilter(_of_use)


def _of_use(record: logging.LogRecord) -> bool:
    said = record.getMessage()
    return not said.startswith("Failed to load") and "register_constant() on Enum" not in said
