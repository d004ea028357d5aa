"""Holds the study handle that `hpo.run`, `hpo.resume` and `hpo.open` return.

It only reads the ledger, also while another process runs the study; every call reads it again.
"""

from __future__ import annotations

import os
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.analysis.results import best as bests
from hpo.analysis.results import compare as tables
from hpo.analysis.results import status as statuses
from hpo.analysis.results.differences import differences, incomparable, settings
from hpo.analysis.results.forecast import StudyForecast, required
from hpo.analysis.results.trial import detail
from hpo.door import of_python
from hpo.errors import UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.names import machine_dependent
from hpo.ledger.views import ends
from hpo.ledger.views import live as live_queries
from hpo.search.forecast import HORIZON
from hpo.space import optuna_names
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.terminal import print

if TYPE_CHECKING:
    import optuna
    import pandas as pd
    from plotly.graph_objects import Figure
    from torch import nn


SHOWN = 10  # trials in a notebook's table


class StudyHandle:
    """A study of a home, read-only.

    name      its name
    home      the directory of the home
    storage   the ledger's URL
    state     how the run that returned this handle ended: complete or interrupted; else None
    """

    def __init__(self, ledger: Ledger, name: str, home: Home, state: str | None = None) -> None:
        self.name, self.home, self.storage, self.state = name, home.root, ledger.url, state
        self._ledger, self._home = ledger, home

    def __getattr__(self, name: str) -> Any:
        raise optuna_names.missing("a study", name, optuna_names.OF_STUDY)

    # --- Trials

    def trials(self) -> pd.DataFrame:
        """Returns a row for each trial, by number.

        Columns: `number`, `state`, `value` (with several objectives `values.<metric>`), `tags.<key>`, `params.<path>`,
        `metrics.<key>` at the epoch that the trial was judged by (`judged_epoch`, also of `value`), the `epoch` and
        `step` it was trained to, `seconds` from its begin to its end, and `reason`, why it was stopped or failed.
        `checkpoint` is the path of the checkpoint kept and `checkpoint_epoch` its epoch, both None if there is none.
        """
        import pandas as pd

        with self._ledger.read() as connection:
            study = queries.study_row(connection, self.name)
            table = tables.compare(connection, self.name)
            trial_of = {trial.number: trial for trial in queries.trial_rows(connection, study.id)}
            stopped, kept = ends.stop_reasons(connection, study.id), ends.kept(connection, study.id)
        location, rows = locations.of(self._home, study), []
        for row in sorted(table.rows, key=lambda row: row["number"]):
            trial, root = trial_of[row["number"]], self._home.checkpoints(self.name, row["number"])
            path, epoch = kept.get(trial.id, ("", None))
            is_there = bool(path) and location.is_there(root / path)
            end = {
                "seconds": trial.seconds,
                "reason": trial.error or (stopped.get(trial.id, "") if trial.state == "pruned" else ""),
                "checkpoint": location.shown(root / path) if is_there else None,
                "checkpoint_epoch": epoch if is_there else None,
            }
            rows.append(_named(row, table.objectives) | end)
        return pd.DataFrame(rows, columns=_ordered(rows))

    def curves(self, metric: str | None = None) -> pd.DataFrame:
        """Returns every value reported of a metric, by default of the first objective.

        Columns: `number`, `step`, `epoch` (missing if the step closed none) and `value`. For a metric that no trial has
        reported it raises UserError, which names the reported ones.
        """
        import pandas as pd

        with self._ledger.read() as connection:
            study = queries.study_row(connection, self.name)
            key: str = metric or study.spec.objectives[0]["metric"]
            rows = [
                (number, step, epoch, value)
                for number, _, step, epoch, value in queries.curves(connection, study.id, [key])
            ]
            if not rows:
                raise live_queries.unreported(connection, study, key)
        frame = pd.DataFrame(rows, columns=["number", "step", "epoch", "value"])
        frame["epoch"] = frame["epoch"].astype("Int64")
        return frame

    def trial(self, number: int) -> dict[str, Any]:
        """Returns all that the ledger holds of a trial, as `hpo show --json` prints it.

        Raises UserError for an unknown number.
        """
        with self._ledger.read() as connection:
            return detail(connection, self._home, self.name, number)

    @property
    def best(self) -> dict[str, Any]:
        """Returns the best complete trial, as `hpo best --json` prints it; of several objectives the front's first.

        Raises HpoError if no trial is complete.
        """
        return self.front[0]

    @property
    def front(self) -> list[dict[str, Any]]:
        """Returns the trials that no other trial surpasses in every objective; with one objective only the best."""
        with self._ledger.read() as connection:
            return bests.best_trials(connection, self._home, self.name)

    # --- The study

    def status(self) -> queries.Status:
        """Returns the study's progress."""
        with self._ledger.read() as connection:
            return queries.status(connection, self.name)

    def forecast(self, trials: int = HORIZON) -> StudyForecast:
        """Returns what so many more trials are expected to bring. Raises UserError if too few have ended to tell."""
        with self._ledger.read() as connection:
            return required(connection, self.name, trials)

    @property
    def digest(self) -> str:
        """Returns a sha256 over all trials; equal digests mean that two studies are equal to the last bit."""
        with self._ledger.read() as connection:
            return queries.digest(connection, queries.study_row(connection, self.name))

    def compare(self, other: StudyHandle) -> pd.DataFrame:
        """Returns the trials of both studies in one table.

        Its first columns are `study` and `settings.<name>` for each setting in which they differ, first those that
        change the measure; then follow the columns of `trials`. A value that a study lacks is missing. A notice on
        standard error warns if the values of the two are not comparable.
        """
        import pandas as pd

        handles = (self, other)
        names, settings_of_both = [handle.name for handle in handles], [handle._settings() for handle in handles]
        unlike = differences(settings_of_both)
        if warning := incomparable(names, unlike):
            print(warning, file=sys.stderr)
        frames = [
            handle.trials().assign(
                study=handle.name, **{f"settings.{difference.name}": difference.values[index] for difference in unlike}
            )
            for index, handle in enumerate(handles)
        ]
        together = pd.concat(frames, ignore_index=True)
        first = ["study", *(f"settings.{difference.name}" for difference in unlike)]
        return pd.DataFrame(together, columns=[*first, *(name for name in together.columns if name not in first)])

    def _settings(self) -> dict[str, str]:
        with self._ledger.read() as connection:
            return settings(queries.study_row(connection, self.name))

    # --- Pictures and models

    def to_optuna(self) -> optuna.Study:
        """Returns an in-memory Optuna study, for use with Optuna and its dashboard."""
        from hpo.analysis.models.checkpoints import searched
        from hpo.analysis.plots.optuna_study import to_optuna

        with self._ledger.read() as connection:
            study = searched(connection, self.name)
        curve = study.objectives[0].metric
        return to_optuna(study, self._home.root, self.name, self.storage, curve)

    def plot(self, kind: str = "history", metric: str | None = None) -> Figure:
        """Returns a plotly figure of a kind.

        The kinds are history, curves, importances, slice, contour, rank, parallel, edf, timeline and pareto. Raises
        UserError for another kind, and if there is nothing to draw yet.
        """
        from hpo.analysis.plots import figures

        [kind] = figures.chosen([kind])
        subject = figures.subject(self.to_optuna(), metric)
        if why := figures.lacking(kind, subject):
            raise UserError(f"study {self.name!r} has no plot {kind!r} yet: {why}.")
        return figures.figure(subject, kind)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page of `hpo report`, one file that needs no network, and returns its path.

        Raises UserError if it cannot be written, or the extra `report` is missing.
        """
        from hpo.analysis.report import data, page

        page.check_installed()
        return page.write([data.read(self._ledger, self._home, self.name)], Path(path))

    def importance(self, evaluator: str = "ped-anova", metric: str | None = None) -> dict[str, float]:
        """Returns parameter -> its share in the difference between trials, the largest first.

        Raises HpoError if there are too few trials. If few trials make the shares uncertain, standard error says so.
        """
        from hpo.analysis.models.checkpoints import searched
        from hpo.analysis.plots import figures
        from hpo.analysis.plots.importance import caution, importances
        from hpo.analysis.plots.optuna_study import complete_trials

        with self._ledger.read() as connection:
            subject = figures.subject(complete_trials(connection, searched(connection, self.name), self.name), metric)
        shares = importances(subject.study, evaluator, subject.loss)
        if beware := caution(subject.study):
            print(beware, file=sys.stderr)
        return shares

    def load_model(self, number: int | None = None) -> nn.Module:
        """Returns the trained model of a trial, by default the best, in eval mode with the weights that were evaluated.

        Raises UserError if none of its checkpoints is kept, or the study does not train a torch model.
        """
        from hpo.analysis.models.checkpoints import model_of

        number = int(self.best["number"]) if number is None else number
        with self._ledger.read() as connection:
            study, kept = model_of(connection, self._home, self.name, number)
        with kept.location.opened(kept.path, kept.sha256, weights_only=True) as directory:
            return study.load_model(directory, study.rebuild(kept.config, kept.config_hash))

    def export_model(
        self,
        to: str | os.PathLike[str],
        number: int | None = None,
        *,
        format: str | None = None,
        quantize: str | None = None,
        force: bool = False,
    ) -> dict[str, object]:
        """Writes a trial's model, by default the best's, and returns what `hpo export --json` prints.

        Raises UserError if none of its checkpoints is kept, or for a format that cannot hold the model.
        """
        from hpo.analysis.models.export import check, export_trial

        with of_python(("to", "format", "quantize", "force")):
            number = int(self.best["number"]) if number is None else number
            wanted = check(os.fspath(to), format, quantize, force=force)
            done = export_trial(self._ledger, self._home, self.name, number, wanted, os.fspath(to), quantize)
        return {name: os.fspath(fact) if isinstance(fact, Path) else fact for name, fact in asdict(done).items()}

    # --- Shown

    def __repr__(self) -> str:
        return statuses.line(self.status())

    def _repr_html_(self) -> str:
        """Returns HTML for a notebook: the progress, the best trials, and the history once a trial is complete."""
        with self._ledger.read() as connection:
            table = tables.compare(connection, self.name, SHOWN)
        import pandas as pd

        frame = pd.DataFrame([_named(row, table.objectives) for row in table.rows])
        shown = [name for name in frame.columns if not name.startswith("metrics.")]
        frame = frame[shown].astype(object).where(frame[shown].notna(), "")  # absent values are blank, as in tables
        parts = [f"<p>{escape(repr(self))}</p>", frame.to_html(index=False, border=0) if len(frame) else ""]
        if self.status().trials["complete"]:
            from hpo.analysis.plots import figures

            image = b64encode(figures.png(figures.subject(self.to_optuna(), None), "history")).decode()
            parts.append(f'<img alt="history" width="600" src="data:image/png;base64,{image}">')
        return "".join(parts)


def _named(row: Mapping[str, object], objectives: Sequence[Mapping[str, object]]) -> dict[str, Any]:
    """Returns a trial's row with a single objective named `value`, without columns about the machine."""
    only = f"values.{objectives[0]['metric']}" if len(objectives) == 1 else None
    kept = (column for column in row if not machine_dependent(column.removeprefix("metrics.")))
    return {"value" if column == only else column: row[column] for column in kept}


def _ordered(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns the columns in order: identity and values, parameters, metrics, then progress and end."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    last = ["judged_epoch", "epoch", "step", "seconds", "reason", "checkpoint", "checkpoint_epoch"]

    def rank(column: str) -> int:
        return (
            3
            if column in last
            else next((n for n, prefix in ((1, "params."), (2, "metrics.")) if column.startswith(prefix)), 0)
        )

    return sorted(columns, key=lambda column: (rank(column), last.index(column) if column in last else 0))
