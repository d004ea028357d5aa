"""Studies made through the ledger's own transactions, as workers make them, without training anything."""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import insert, update

from hpo.ledger import Ledger, checkpoints, claims, tags, transactions, worker_rows
from hpo.ledger.database import tables
from hpo.ledger.process_id import Process
from hpo.storage.home import Home
from hpo.storage.metrics_json import Results
from hpo.tracking import mirror_process
from hpo.tracking.mlflow.tracker import MlflowTracker
from trainer.report import CheckpointRef, Outcome, Report, Verdict

ME = Process.current()
SPEC = {
    "reference": "studies.fake",
    "name": "s",
    "sampler": "random",
    "seed": 3,
    "strategy": {"name": "asha", "min_epochs": 1},
    "objectives": [{"metric": "val/loss", "direction": "minimize", "select": "last"}],
    "metrics": ["val/*"],
}
ENVIRONMENT = {
    "python": "3.11.7",
    "versions": {"torch": "2.13.0", "ray": None},
    "git": {"commit": "c0ffee", "dirty": False},
    "tracking_uri": "http://me:hunter2@host",
    "home": "/x",
}


class Made:
    """A study in a home of its own, and the hands to move it on."""

    def __init__(self, home: Home, name: str = "s", storage: str | None = None) -> None:
        self.home, self.name = home.create(), name
        self.ledger = Ledger(storage or home.storage)
        row = {"name": name, "uid": os.urandom(16).hex(), "created_at": time.time(), "state": "open", "requested": 9}
        row |= {"spec": SPEC | {"name": name}, "identity": {}, "environment": ENVIRONMENT}
        with self.ledger.write() as connection:
            self.id = connection.execute(insert(tables.studies).values(row).returning(tables.studies.c.id)).scalar_one()
            worker_rows.register(connection, ME, "inline")
        self.uid = row["uid"]
        self.count = 0

    def ask(self, n: int = 1, **config: Any) -> None:
        numbers = range(self.count, self.count + n)
        base = {"b": [1.5, None], **config}
        asks = [
            transactions.Ask(
                k, 0, 7, 0, {"train.optim.lr": 0.1 / (k + 1), "opt": "adamw"}, {}, {"a": k, **base}, "h" * 64
            )
            for k in numbers
        ]
        self.ledger.transact(lambda connection: transactions.ask(connection, self.id, asks))
        self.count += n

    def claim(self) -> claims.Claim:
        token = uuid.uuid4().hex
        [taken] = self.ledger.transact(lambda connection: claims.claim(connection, ME.id, token, [self.id]))
        return taken

    def report(
        self,
        taken: claims.Claim,
        step: int,
        metrics: dict[str, float],
        *,
        epoch: int | None = None,
        fold: int = 0,
        stop: str = "",
        checkpoint: CheckpointRef | None = None,
    ) -> None:
        checkpoint = checkpoint and replace(checkpoint, metrics=metrics)
        told = transactions.TrialReport(
            taken,
            Report(step, metrics, epoch, checkpoint, fold),
            decide=(lambda connection: Verdict("stop", step, stop)) if stop else None,
            strategy="asha",
        )
        self.ledger.transact(lambda connection: transactions.commit(connection, [told]))

    def tag(self, number: int, **given: str | None) -> None:
        """Tags of a trial, or of the study (-1); None removes one."""
        self.ledger.transact(lambda connection: tags.put(connection, self.id, number, given))

    def finish(self, taken: claims.Claim, kind: str, step: int = 1, values=None, error: str = "") -> None:
        outcome = Outcome(kind, step, error=error)  # type: ignore[arg-type]
        self.ledger.transact(lambda connection: transactions.finish(connection, taken, outcome, values))

    def checkpoint(self, taken: claims.Claim, step: int) -> CheckpointRef:
        """Files as trainer.checkpoint writes them."""
        name = f"step-{step:08d}.f{taken.fence}.{os.urandom(4).hex()}"
        path = self.home.checkpoints(self.name, taken.number) / name
        path.mkdir(parents=True)
        weights = os.urandom(1000)
        (path / "model.safetensors").write_bytes(weights)
        files = {"model.safetensors": {"sha256": hashlib.sha256(weights).hexdigest(), "size": 1000}}
        manifest = json.dumps({"format": 1, "files": files}).encode()
        (path / "manifest.json").write_bytes(manifest)
        return CheckpointRef(path, step, step, hashlib.sha256(manifest).hexdigest(), 1000 + len(manifest))

    def end(self) -> None:
        """Tell the sampler of every trial and close the study, as a driver does at the end."""
        told = [(number, number) for number in range(self.count)]
        values = {"state": "complete", "requested": self.count, "revision": tables.studies.c.revision + 1}

        def body(connection) -> None:
            transactions.ask(connection, self.id, [], told)
            connection.execute(update(tables.studies).where(tables.studies.c.id == self.id).values(values))

        self.ledger.transact(body)
        Results(self.ledger, self.name, self.home).write()

    def drop(self, taken: claims.Claim, ref: CheckpointRef, state: str = "deleted") -> None:
        """Retention, or the finding that a checkpoint is damaged: the row first, then the files."""
        self.ledger.transact(lambda c: checkpoints.change(c, taken, {ref.path.name: {"state": state}}))
        if state == "deleted":
            for file in ref.path.iterdir():
                file.unlink()
            ref.path.rmdir()
        else:
            ref.path.rename(f"{ref.path}.corrupt")

    def artifact(self, taken: claims.Claim, name: str, text: str) -> None:
        target = self.home.files(self.name, taken.number) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(f"{target}.tmp")
        partial.write_text(text)
        os.replace(partial, target)
        uid = os.urandom(16).hex()
        self.ledger.transact(lambda c: transactions.record(c, taken, "artifact", {"path": name}, uid))

    def complete(self, steps: int = 10, keys: int = 3) -> claims.Claim:
        """One trial from ask to end."""
        self.ask()
        taken = self.claim()
        for step in range(1, steps + 1):
            self.report(taken, step, {f"val/m{k}": k + 1 / step for k in range(keys)}, epoch=step)
        self.finish(taken, "complete", steps, [1 / steps])
        return taken


def sync(made: Made) -> None:
    """Send the study to MLflow, all of it."""
    tracker = MlflowTracker(made.home.tracking_uri, made.home.artifacts)
    assert mirror_process.drain(made.ledger, tracker, made.name, made.home).behind == 0
    tracker.close()
