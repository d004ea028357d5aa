"""A study as Python sees it: what `hpo.run`, `hpo.resume` and `hpo.open` give.

It reads the ledger and changes nothing, also while another process runs the study; every call reads anew.
"""

from __future__ import annotations

import os
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.analysis.results import best as bests
from hpo.analysis.results import compare as tables
from hpo.analysis.results import status as statuses
from hpo.analysis.results.trial import detail
from hpo.errors import UserError
from hpo.ledger import Ledger, ends, live_queries, queries
from hpo.ledger.names import machine_dependent
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.terminal import print

if TYPE_CHECKING:
    import optuna
    import pandas as pd
    from plotly.graph_objects import Figure
    from torch import nn

    from hpo.declaration.study import Study

SHOWN = 10  # trials of a notebook's table


class StudyHandle:
    """One study of a home, read-only.

    name      its name
    home      the directory of the home
    storage   the ledger's URL
    state     how the run that gave this handle has left it: complete, interrupted; else None
    """

    def __init__(self, ledger: Ledger, name: str, home: Home, state: str | None = None) -> None:
        self.name, self.home, self.storage, self.state = name, home.root, ledger.url, state
        self._ledger, self._home = ledger, home

    # --- Trials

    def trials(self) -> pd.DataFrame:
        """A row for each trial, by number.

        `number`, `state`, `value` (with several objectives `values.<metric>`), `tags.<key>`, `params.<path>`,
        `metrics.<key>` of the epoch that it was judged by, `epoch` and `step` it was trained to, `seconds` from its
        begin to its end, `reason` why it was stopped or has failed, `checkpoint` the path of the one kept, None where
        there is none.
        """
        import pandas as pd

        with self._ledger.read() as connection:
            study = queries.study_row(connection, self.name)
            found = tables.compare(connection, self.name)
            ended = {trial["number"]: trial for trial in queries.trial_rows(connection, study["id"])}
            stopped, kept = ends.stop_reasons(connection, study["id"]), ends.kept_paths(connection, study["id"])
        place, rows = locations.place(self._home, study), []
        for row in sorted(found.rows, key=lambda row: row["number"]):
            trial, root = ended[row["number"]], self._home.checkpoints(self.name, row["number"])
            path, times = kept.get(trial["id"]), (trial["started_at"], trial["ended_at"])
            end = {
                "seconds": None if None in times else times[1] - times[0],
                "reason": trial["error"] or (stopped.get(trial["id"], "") if trial["state"] == "pruned" else ""),
                "checkpoint": place.shown(root / path) if path and place.is_there(root / path) else None,
            }
            rows.append(_named(row, found.objectives) | end)
        return pd.DataFrame(rows, columns=_ordered(rows))

    def curves(self, metric: str | None = None) -> pd.DataFrame:
        """Every value reported of a metric, by default of the first objective: `number`, `step`, `epoch` (missing where
        none was closed) and `value`.

        Raises UserError, naming those there are, for a metric that no trial has reported.
        """
        import pandas as pd

        with self._ledger.read() as connection:
            study = queries.study_row(connection, self.name)
            key: str = metric or study["spec"]["objectives"][0]["metric"]
            rows = [
                (number, step, epoch, value)
                for number, _, step, epoch, value in queries.curves(connection, study["id"], [key])
            ]
            if not rows:
                raise live_queries.unreported(connection, study, key)
        frame = pd.DataFrame(rows, columns=["number", "step", "epoch", "value"])
        frame["epoch"] = frame["epoch"].astype("Int64")
        return frame

    def trial(self, number: int) -> dict[str, Any]:
        """All that the ledger holds of a trial, as `hpo show --json` prints it. Raises UserError for no such trial."""
        with self._ledger.read() as connection:
            return detail(connection, self._home, self.name, number)

    @property
    def best(self) -> dict[str, Any]:
        """The best complete trial, as `hpo best --json` prints it; of several objectives the first of the front.

        Raises HpoError where no trial is complete.
        """
        return self.front[0]

    @property
    def front(self) -> list[dict[str, Any]]:
        """The trials that no other one is better than in every objective; with one objective the best alone."""
        with self._ledger.read() as connection:
            return bests.best_trials(connection, self._home, self.name)

    # --- The study

    def status(self) -> queries.Status:
        """How far it is."""
        with self._ledger.read() as connection:
            return queries.status(connection, self.name)

    @property
    def digest(self) -> str:
        """sha256 over all trials: equal digests mean the same study to the last bit."""
        with self._ledger.read() as connection:
            return queries.digest(connection, queries.study_row(connection, self.name))

    def compare(self, other: StudyHandle) -> pd.DataFrame:
        """The trials of both, with a column `study`; what only one of them has is missing in the other's rows."""
        import pandas as pd

        frames = [one.trials().assign(study=one.name) for one in (self, other)]
        together = pd.concat(frames, ignore_index=True)
        return pd.DataFrame(together, columns=["study", *(one for one in together.columns if one != "study")])

    # --- Pictures and models

    def to_optuna(self) -> optuna.Study:
        """The study as an Optuna study in memory, for whatever Optuna and its dashboard do with one."""
        from hpo.analysis.models.checkpoints import searched
        from hpo.analysis.plots.optuna_study import to_optuna

        with self._ledger.read() as connection:
            study = searched(connection, self.name)
        curve = study.objectives[0].metric
        return to_optuna(study, self._home.root, self.name, self.storage, curve)

    def plot(self, kind: str = "history", metric: str | None = None) -> Figure:
        """A plotly figure: history, curves, importances, slice, contour, rank, parallel, edf, timeline or pareto.

        Raises UserError for another kind, and where there is nothing to draw yet.
        """
        from hpo.analysis.plots import figures

        [kind] = figures.chosen([kind])
        of = figures.subject(self.to_optuna(), metric)
        if why := figures.lacking(kind, of):
            raise UserError(f"study {self.name!r} has no plot {kind!r} yet: {why}.")
        return figures.figure(of, kind)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the page that `hpo report` makes, one file that needs no network, and give its path.

        Raises UserError where it cannot be written, or the extra `report` is missing.
        """
        from hpo.analysis.report import data, page

        page.check_installed()
        return page.write([data.read(self._ledger, self._home, self.name)], Path(path))

    def importance(self, evaluator: str = "ped-anova", metric: str | None = None) -> dict[str, float]:
        """Parameter -> its share in the difference between trials, the largest first. Raises HpoError where there are
        too few trials; says on standard error where few make the shares uncertain."""
        from hpo.analysis.plots import figures
        from hpo.analysis.plots.importance import caution, importances

        of = figures.subject(self.to_optuna(), metric)
        shares = importances(of.study, evaluator, of.loss)
        if beware := caution(of.study):
            print(beware, file=sys.stderr)
        return shares

    def load_model(self, number: int | None = None) -> nn.Module:
        """The trained model of a trial, by default of the best, in eval mode, with the weights that were evaluated.

        Raises UserError where no checkpoint of it is kept, or the study trains no torch model of its own.
        """
        from hpo.analysis.models.checkpoints import model_of

        number = int(self.best["number"]) if number is None else number
        with self._ledger.read() as connection:
            study, kept = model_of(connection, self._home, self.name, number)
        with kept.place.opened(kept.path, kept.sha256, weights_alone=True) as directory:
            return study.load_model(directory, study.rebuild(kept.config, kept.config_hash))

    def _declared(self) -> Study:
        from hpo.analysis.models.checkpoints import declared

        with self._ledger.read() as connection:
            return declared(connection, self.name)

    # --- Shown

    def __repr__(self) -> str:
        return statuses.line(self.status())

    def _repr_html_(self) -> str:
        """In a notebook: how far it is, the best trials, and the history once there is one."""
        with self._ledger.read() as connection:
            found = tables.compare(connection, self.name, SHOWN)
        import pandas as pd

        frame = pd.DataFrame([_named(row, found.objectives) for row in found.rows])
        shown = [name for name in frame.columns if not name.startswith("metrics.")]
        frame = frame[shown].astype(object).where(frame[shown].notna(), "")  # absent values are blank, as in tables
        parts = [f"<p>{escape(repr(self))}</p>", frame.to_html(index=False, border=0) if len(frame) else ""]
        if self.status().trials["complete"]:
            from hpo.analysis.plots import figures

            image = b64encode(figures.png(figures.subject(self.to_optuna(), None), "history")).decode()
            parts.append(f'<img alt="history" width="600" src="data:image/png;base64,{image}">')
        return "".join(parts)


def _named(row: Mapping[str, Any], objectives: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """With one objective its value is `value`. What the machine did is left out."""
    only = f"values.{objectives[0]['metric']}" if len(objectives) == 1 else None
    kept = (column for column in row if not machine_dependent(column.removeprefix("metrics.")))
    return {"value" if column == only else column: row[column] for column in kept}


def _ordered(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns: which trial and what it came to, its parameters, its metrics, how far it got and how it ended."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    last = ["judged_epoch", "epoch", "step", "seconds", "reason", "checkpoint"]

    def rank(column: str) -> int:
        return (
            3
            if column in last
            else next((n for n, one in ((1, "params."), (2, "metrics.")) if column.startswith(one)), 0)
        )

    return sorted(columns, key=lambda column: (rank(column), last.index(column) if column in last else 0))
