"""The home: the one directory everything is written to.

.hpo/
  ledger.db         the ledger, unless --storage names another
  mlflow.db         MLflow's store, unless --tracking-uri names another
  artifacts/        MLflow's artifacts
  checkpoints/      <study>/<trial number>/step-<step>.f<fence>.<random>/
  files/            <study>/<trial number>/f<fence>.<random>/: what trials handed over by Reporter.artifact;
                    <study>/study/: what is of the whole study, such as its plots
  plots/            <study>/: the plots drawn last, by their names
  shared/           what tasks keep for all trials (Task.shared), such as tokens; may be removed when nothing runs;
                    output/<study>/: what programs print, until it is an artifact
  logs/             what workers and the mirror print
  ray_tune/         what Ray Tune keeps of its experiments, its own copies of checkpoints among it
  optuna.db         Optuna's storage, of `hpo ui --optuna`
  ui.token, ui.html the token of `hpo ui` and `hpo serve`, and a page that takes a browser there

Only its owner enters a home that was made here, and its files are as open as the home itself.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpo.declaration.naming import check_name
from hpo.errors import HomeError, StorageError, UserError
from hpo.ledger.sqlite_url import url_of
from trainer.files.durable import write_text
from trainer.files.paths import expanded

MARKER = "study.uid"
PRIVATE = 0o700  # the mode of a new home
WHOLE = "study"  # the directory of what belongs to no single trial


@dataclass(frozen=True)
class Home:
    """Absolute paths below one directory."""

    root: Path

    def __fspath__(self) -> str:
        return str(self.root)

    @classmethod
    def at(cls, path: str | os.PathLike[str] | None = None) -> Home:
        """The home given, else $HPO_HOME, else ./.hpo. Nothing is created; UserError for what is a URL."""
        given = os.fspath(path or os.environ.get("HPO_HOME") or ".hpo")
        if "://" in given:
            raise UserError(
                f"home {given!r} is a URL, and a home is a directory: a bucket for checkpoints is named by "
                "--checkpoints, the ledger of several hosts by --storage postgresql+psycopg://..."
            )
        return cls(expanded(given).absolute())

    def create(self) -> Home:
        """Make the directory, for its owner alone; raise HomeError in one sentence where that, or writing there, is not
        allowed."""
        try:
            self.root.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.root).close()
        except OSError as error:
            kind = StorageError if error.errno == errno.ENOSPC else HomeError
            raise kind(
                f"home {self.root} cannot be written ({error.strerror}): choose another with --home or HPO_HOME."
            ) from error
        return self

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Make what is written in the block, by processes started in it too, no more open than the home; one for a team
        is a directory that is there, with the mode it is to have."""
        try:
            mode = self.root.stat().st_mode
        except OSError:  # it is made as PRIVATE, or cannot be used, which `create` says
            mode = PRIVATE
        before = os.umask(~PRIVATE & 0o777)
        os.umask(before | (~mode & 0o077))
        try:
            yield
        finally:
            os.umask(before)

    @property
    def storage(self) -> str:
        return url_of(self.root / "ledger.db")

    @property
    def tracking_uri(self) -> str:
        return url_of(self.root / "mlflow.db")

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    @property
    def tune(self) -> Path:
        return self.root / "ray_tune"

    @property
    def shared(self) -> Path:
        return self.root / "shared"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def with_checkpoints(self, study: str = "*") -> Path | None:
        """The directory of a study that has checkpoints here, whether or not a ledger knows it."""
        found = next(self.root.glob(f"checkpoints/{study}/*/step-*"), None)
        return found.parents[1] if found else None

    def checkpoints(self, study: str, number: int) -> Path:
        return self.root / "checkpoints" / check_name(study) / f"{number:05d}"

    def plots(self, study: str) -> Path:
        """Where the plots drawn last are to be looked at."""
        return self.root / "plots" / check_name(study)

    def output(self, study: str) -> Path:
        """Where `CommandTask` keeps what programs print until it is an artifact."""
        return self.shared / "output" / check_name(study)

    def mark(self, study: str, uid: str) -> None:
        """Leave the study's uid beside its checkpoints, by which a worker knows that it sees this very directory."""
        marker = self.checkpoints(study, 0).parent / MARKER
        if not marker.is_file() or marker.read_text() != uid:
            write_text(marker, uid)

    def check_mark(self, study: str, uid: str, host: str) -> None:
        """Raise UserError unless `mark` was called with this uid on this directory."""
        marker = self.checkpoints(study, 0).parent / MARKER
        if not marker.is_file() or marker.read_text() != uid:
            raise UserError(
                f"home {self.root} is not the one study {study!r} is driven from on {host}: checkpoints must lie where "
                "every worker sees them, so share that directory and name it with --home, or begin the study with "
                "--checkpoints s3://BUCKET/PREFIX."
            )

    def files(self, study: str, number: int | None) -> Path:
        """What trial `number` has handed over; None: what is of the whole study."""
        return self.root / "files" / check_name(study) / (WHOLE if number is None else f"{number:05d}")
