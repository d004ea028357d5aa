"""Silences messages of libraries' imports that do not help a user. Imports none of them."""

from __future__ import annotations

import logging


def quiet_torchao() -> None:
    """Silences two messages of torchao; called before it is imported, also by transformers.

    They concern its own kernels that do not fit this machine, which are not needed, and its registration of Enums. All
    other messages are kept.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).addFilter(_of_use)


def _of_use(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not message.startswith("Failed to load") and "register_constant() on Enum" not in message
