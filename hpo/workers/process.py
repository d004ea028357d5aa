"""Keeps what a trial changes of its process from later trials, and what a study's code sets from other studies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from hpo.ledger import Ledger, transactions
from trainer.runtime.process_state import Snapshot, following, kept

CHANGED = "process_changed"  # the study's event of the first trial whose changes cannot be undone


class WorkerProcess:
    """The process of a worker. It is `spent` once a trial has changed what cannot be undone: where it is not `shared`
    with the driver, another one is to take its place."""

    def __init__(self, ledger: Ledger, *, shared: bool) -> None:
        self._ledger, self._shared = ledger, shared
        self._watched = ExitStack()
        self._begun: Snapshot | None = None
        self._loaded: dict[int, Snapshot] = {}
        self._study_id: int | None = None
        self._lasting: list[str] = []

    @property
    def spent(self) -> bool:
        return bool(self._lasting) and not self._shared

    @property
    def lasting(self) -> str:
        """The changes that cannot be undone, in words."""
        return " and ".join(self._lasting)

    @contextmanager
    def loading(self, study_id: int) -> Iterator[None]:
        """The block loads a study's code, in the state in which the process begins and not in another study's."""
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
    def trial(self, study_id: int, number: int) -> Iterator[None]:
        """The block trains a trial, or several as lanes of which this is the first."""
        with kept() as process:
            yield
        fresh = [name for name in process.lasting if name not in self._lasting]
        if not fresh:
            return
        self._lasting += fresh
        changed = f"trial {number} changed {self.lasting}, which a process cannot undo"
        told = f"{changed}: a fresh worker takes the place of one that trained such a trial"
        if self._shared:
            told = f"{changed}, and later trials trained in it: use --executor local, where each gets a fresh worker"
        note = {"reason": told, "trial": number}
        self._ledger.transact(lambda c: transactions.note(c, study_id, CHANGED, note, f"{study_id}.{CHANGED}"))

    def close(self) -> None:
        self._watched.close()
