"""Isolates trials and studies in a worker's process: undoes their changes to it, or has the process replaced."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from hpo.door import option
from hpo.ledger import Ledger, transactions
from trainer.runtime.process_state import Snapshot, following, kept

CHANGED = "process_changed"  # the study's event of the first trial whose changes cannot be undone


class WorkerProcess:
    """The process of a worker. It is `spent` once a trial has made changes that cannot be undone.

    Unless it is `shared` with the driver, another process then replaces it.
    """

    def __init__(self, ledger: Ledger, *, shared: bool) -> None:
        self._ledger, self.shared = ledger, shared
        self._watched = ExitStack()
        self._begun: Snapshot | None = None
        self._loaded: dict[int, Snapshot] = {}
        self._study_id: int | None = None
        self._lasting: list[str] = []

    @property
    def spent(self) -> bool:
        return bool(self._lasting) and not self.shared

    @property
    def lasting(self) -> str:
        """Returns the changes that cannot be undone, as text."""
        return " and ".join(self._lasting)

    @contextmanager
    def loading(self, study_id: int) -> Generator[None, None, None]:
        """Restores the initial state of the process for the block, in which a study's code is loaded."""
        self._begun = self._begun or self._watch()
        if study_id != self._study_id:
            (self._loaded.get(study_id) or self._begun).restore()
        yield
        self._study_id = study_id
        self._loaded[study_id] = self._loaded.get(study_id) or self._watch()

    def _watch(self) -> Snapshot:
        snapshot = Snapshot()
        self._watched.enter_context(following(snapshot))
        return snapshot

    @contextmanager
    def trial(self, study_id: int, number: int) -> Generator[None, None, None]:
        """Trains a trial in the block, or several at once of which this is the first."""
        with kept() as process:
            yield
        fresh = [name for name in process.lasting if name not in self._lasting]
        if not fresh:
            return
        self._lasting += fresh
        changed = f"trial {number} changed {self.lasting}, which a process cannot undo"
        notice = f"{changed}: a fresh worker takes the place of one that trained such a trial"
        if self.shared:
            local = option("executor", "local")
            notice = f"{changed}, and later trials trained in it: use {local}, where each gets a fresh worker"
        note = {"reason": notice, "trial": number}
        self._ledger.transact(lambda c: transactions.note(c, study_id, CHANGED, note, f"{study_id}.{CHANGED}"))

    def close(self) -> None:
        self._watched.close()
