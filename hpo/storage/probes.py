"""Answers an orchestrator's questions about a process, on a port of its own: whether it runs, and whether it is ready.

`/healthz` and `/health` answer 200 while the process runs, `/readyz` 200 while the ledger answers and 503 otherwise.
Answers are empty, so nobody needs a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from hpo.errors import HpoError
from hpo.ledger import Ledger, leases
from hpo.storage.port import Answer, answered

_ALIVE = ("/healthz", "/health")


def answering(address: str | None, ledger: Ledger) -> AbstractContextManager[None]:
    """Answers on `[HOST:]PORT`, of this host's loopback by default, within the block; not at all without an address.

    Raises UserError if the address cannot be used.
    """

    def answer(path: str, headers: Mapping[str, str]) -> Answer:
        if path == "/readyz":
            return Answer(200 if _answers(ledger) else 503)
        return Answer(200 if path in _ALIVE else 404)

    return answered("probes", address, answer)


def _answers(ledger: Ledger) -> bool:
    try:
        with ledger.read() as connection:
            leases.holders(connection)
    except HpoError:
        return False
    return True
