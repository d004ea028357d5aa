"""Defines the home, the one directory for everything that is written.

.hpo/
  ledger.db         the ledger, unless --storage names another
  mlflow.db         MLflow's store, unless --tracking-uri names another
  artifacts/        MLflow's artifacts
  checkpoints/      <study>/<trial number>/step-<step>.f<fence>.<random>/
  files/            <study>/<trial number>/f<fence>.<random>/: files that trials hand over by Reporter.artifact;
                    <study>/study/: files of the whole study, such as its plots
  plots/            <study>/: the newest plots, by their names
  shared/           files that tasks keep for all trials (Task.shared), such as tokens; removable while nothing runs;
                    output/<study>/: the output of programs, until it is an artifact
  logs/             the output of workers and the mirror
  ray_tune/         Ray Tune's files on its experiments, with its own copies of checkpoints
  ui.token, ui.html the token of `hpo ui` and `hpo serve`, and a page that leads a browser there
  metrics.token     the token of `--metrics`, which opens nothing else

Only its owner can enter a home created by this code, and its files are as open as the home itself.
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
from hpo.door import option
from hpo.errors import HomeError, StorageError, UserError
from hpo.ledger.database.sqlite_url import url_of
from trainer.files.durable import write_text
from trainer.files.paths import expanded

MARKER = "study.uid"
PRIVATE = 0o700  # the mode of a new home
WHOLE = "study"  # the directory of files that belong to no single trial


@dataclass(frozen=True)
class Home:
    """Holds absolute paths below one directory."""

    root: Path

    def __fspath__(self) -> str:
        return str(self.root)

    @classmethod
    def at(cls, path: str | os.PathLike[str] | None = None) -> Home:
        """Returns the home at `path`, else at $HPO_HOME, else at ./.hpo.

        Creates nothing; raises UserError for a URL, HomeError for a path that no file system takes.
        """
        directory = os.fspath(path or os.environ.get("HPO_HOME") or ".hpo")
        if "://" in directory:
            raise UserError(
                f"home {directory!r} is a URL, and a home is a directory: a bucket for checkpoints is named by "
                f"{option('checkpoints')}, the ledger of several hosts by "
                f"{option('storage', 'postgresql+psycopg://...')}"
            )
        root = expanded(directory).absolute()
        try:
            os.stat(root)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise HomeError(
                    f"home {root} cannot be used ({error.strerror}): choose another with {option('home')} or HPO_HOME."
                ) from error
        return cls(root)

    def create(self) -> Home:
        """Makes the directory for its owner alone.

        Raises HomeError in one sentence if making it or writing there fails.
        """
        try:
            self.root.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.root).close()
        except OSError as error:
            kind = StorageError if error.errno == errno.ENOSPC else HomeError
            raise kind(
                f"home {self.root} cannot be written ({error.strerror}): choose another with {option('home')} or "
                "HPO_HOME."
            ) from error
        return self

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Makes files written in the block, also by its child processes, no more open than the home.

        A home for a team is a directory that exists already, with the intended mode.
        """
        try:
            mode = self.root.stat().st_mode
        except OSError:  # it will be made as PRIVATE, or is unusable, which `create` reports
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
        """Returns the directory of a study with checkpoints here, whether or not the ledger knows the study."""
        checkpoint = next(self.root.glob(f"checkpoints/{study}/*/step-*"), None)
        return checkpoint.parents[1] if checkpoint else None

    def checkpoints(self, study: str, number: int) -> Path:
        return self.root / "checkpoints" / check_name(study) / f"{number:05d}"

    def plots(self, study: str) -> Path:
        """Returns the directory of the newest plots."""
        return self.root / "plots" / check_name(study)

    def output(self, study: str) -> Path:
        """Returns the directory where `CommandTask` keeps the output of programs until it is an artifact."""
        return self.shared / "output" / check_name(study)

    def mark(self, study: str, uid: str) -> None:
        """Writes the study's uid beside its checkpoints; workers recognize the directory by it."""
        marker = self.checkpoints(study, 0).parent / MARKER
        if not marker.is_file() or marker.read_text() != uid:
            write_text(marker, uid)

    def check_mark(self, study: str, uid: str, host: str) -> None:
        """Raises UserError unless `mark` was called with this uid on this directory."""
        marker = self.checkpoints(study, 0).parent / MARKER
        if not marker.is_file() or marker.read_text() != uid:
            raise UserError(
                f"home {self.root} is not the one study {study!r} is driven from on {host}: checkpoints must lie where "
                f"every worker sees them, so share that directory and name it with {option('home')}, or begin the "
                "study with "
                f"{option('checkpoints', 's3://BUCKET/PREFIX')}."
            )

    def files(self, study: str, number: int | None) -> Path:
        """Returns the directory of the files that trial `number` has handed over; None stands for the whole study."""
        return self.root / "files" / check_name(study) / (WHOLE if number is None else f"{number:05d}")
