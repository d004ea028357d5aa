"""What a run shows while it runs: a live table on a terminal, one line per finished trial elsewhere.

It only reads the ledger: two queries a refresh, two refreshes a second at most. The driver calls `tick`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from sqlalchemy import select
from sqlalchemy.engine import Connection

from hpo.budget import spelled
from hpo.clock import Clock, SystemClock
from hpo.ledger import Ledger, reads
from hpo.ledger.tables import OPEN_STATES, STATES, TERMINAL_STATES, asks, machine_dependent, trials

if TYPE_CHECKING:
    from hpo.analysis.compare import Comparison
    from hpo.run import Result

REFRESH_SECONDS = 0.5
_BARS = "▁▂▃▄▅▆▇█"
_STYLE = {
    "waiting": "dim",
    "running": "cyan",
    "paused": "blue",
    "complete": "green",
    "pruned": "yellow",
    "infeasible": "magenta",
    "failed": "red",
}


@dataclass
class Trial:
    """One trial as it is shown. `curve` holds the first objective's values so far, `value` what it was judged by."""

    number: int
    state: str
    epoch: int
    num_epochs: int | None
    value: float | None
    params: dict[str, Any]
    error: str | None
    curve: list[float] = field(default_factory=list)

    @property
    def shown_value(self) -> float | None:
        return self.value if self.value is not None else self.curve[-1] if self.curve else None


class Progress:
    """A study as far as the ledger tells. `refresh` brings it up to date and returns the trials that have ended since.

    Terminal trials never change, so only those from the lowest open number on are read again.
    """

    def __init__(self, ledger: Ledger, name: str, clock: Clock) -> None:
        self._ledger, self._clock = ledger, clock
        self.name = name
        self.trials: dict[int, Trial] = {}
        self.best: Trial | None = None
        row = ledger.look(lambda connection: reads.study_row(connection, name))
        self._id: int = row["id"]
        self.requested: int | None = row["requested"] or None
        self.max_epochs: int | None = row["max_epochs"]
        self.max_seconds: float | None = row["max_seconds"]
        self.spec: dict[str, Any] = row["spec"]
        self.data: dict[str, Any] = row["environment"].get("data", {})
        self._floor = 0
        self.refresh()
        self._began = clock.monotonic()
        self._ended_before, self._epochs_before = self.ended, self.epochs

    @property
    def metric(self) -> str:
        return self.spec["objectives"][0]["metric"]

    @property
    def ended(self) -> int:
        return sum(trial.state in TERMINAL_STATES for trial in self.trials.values())

    @property
    def epochs(self) -> int:
        return sum(trial.epoch for trial in self.trials.values())

    @property
    def elapsed(self) -> float:
        return self._clock.monotonic() - self._began

    def rates(self) -> tuple[float, float]:
        """Trials a minute and epochs a second, since this process began to watch."""
        elapsed = max(self.elapsed, 1e-9)
        return 60 * (self.ended - self._ended_before) / elapsed, (self.epochs - self._epochs_before) / elapsed

    def eta(self) -> float | None:
        """Seconds left at the rate so far, by trials or by epochs; None until a trial has ended."""
        per_minute, per_second = self.rates()
        if not per_minute:
            return None
        left = [] if self.requested is None else [60 * max(self.requested - self.ended, 0) / per_minute]
        if self.max_epochs is not None and per_second:
            left.append(max(self.max_epochs - self.epochs, 0) / per_second)
        return min(left, default=None)

    def asked_for(self) -> str:
        """`50 trials or 200 epochs or 2h`: the budget, of which what is reached first ends the study."""
        bounds = [
            f"{self.requested} trials" if self.requested else "",
            f"{self.max_epochs} epochs" if self.max_epochs else "",
        ]
        return " or ".join(filter(None, [*bounds, spelled(self.max_seconds) if self.max_seconds else ""]))

    def counts(self, noun: str = "") -> str:
        """`3/50 trials`, `3 trials, 40/200 epochs`: how much of what was asked for has ended."""
        text = f"{self.ended}{f'/{self.requested}' if self.requested else ''}{noun}"
        return text + (f", {self.epochs}/{self.max_epochs} epochs" if self.max_epochs else "")

    def _fresh(self, connection: Connection) -> tuple[list[Trial], dict[int, list[float]]]:
        """The trials from the lowest open number on, and by number the curves of those that have moved."""
        rows = connection.execute(_TRIALS.where(trials.c.study_id == self._id, trials.c.number >= self._floor))
        fresh = [_trial(row) for row in rows.mappings()]
        numbers = [trial.number for trial in fresh if trial.state != "waiting" and self._moved(trial)]
        found: dict[int, list[float]] = {}
        if numbers:
            for number, _, _, _, value in reads.curves(connection, self._id, [self.metric], numbers):
                found.setdefault(number, []).append(value)
        return fresh, found

    def refresh(self) -> list[Trial]:
        fresh, found = self._ledger.look(self._fresh)
        ended = [trial for trial in fresh if trial.state in TERMINAL_STATES and self._was_open(trial.number)]
        for trial in fresh:
            known = self.trials.get(trial.number)
            trial.curve = found.get(trial.number, known.curve if known else [])
            self.trials[trial.number] = trial
        for trial in ended:
            if self._better(trial):
                self.best = trial
        is_open = [number for number, trial in self.trials.items() if trial.state in OPEN_STATES]
        self._floor = min(is_open, default=max(self.trials, default=-1) + 1)
        return ended

    def _was_open(self, number: int) -> bool:
        return number not in self.trials or self.trials[number].state in OPEN_STATES

    def _moved(self, trial: Trial) -> bool:
        return trial.state in OPEN_STATES or self._was_open(trial.number)

    def _better(self, trial: Trial) -> bool:
        if trial.state != "complete" or trial.value is None or math.isnan(trial.value):
            return False
        if self.best is None or self.best.value is None:
            return True
        sign = -1.0 if self.spec["objectives"][0]["direction"] == "maximize" else 1.0
        return sign * trial.value < sign * self.best.value


_TRIALS = (
    select(
        trials.c.number,
        trials.c.state,
        trials.c.epoch,
        trials.c["values"].label("objectives"),
        trials.c.error,
        asks.c.params,
        asks.c.config[("train", "num_epochs")].as_integer().label("num_epochs"),
    )
    .join(asks, asks.c.trial_id == trials.c.id)
    .order_by(trials.c.number)
)


def _trial(row: Any) -> Trial:
    value = row["objectives"][0] if row["objectives"] else None
    return Trial(row["number"], row["state"], row["epoch"], row["num_epochs"], value, row["params"], row["error"])


class View:
    """Shows a study's progress on `console`, from `start` to `stop`; the driver calls `tick`."""

    def __init__(
        self, ledger: Ledger, name: str, console: Console, *, workers: int, clock: Clock | None = None
    ) -> None:
        self._clock = clock or SystemClock()
        self._console = console
        self._workers = workers
        self._due = 0.0
        self.progress = Progress(ledger, name, self._clock)
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def start(self) -> View:
        for line in data_report(self.progress.data):
            self._line(line)
        if self._live:
            self._live.start()
        else:
            of = "of them" if self.progress.requested else "trials"
            done = f", {self.progress.ended} {of} done before" if self.progress.ended else ""
            self._line(f"{self.progress.name}: {self.progress.asked_for()}{done}; {self._heading()}")
        return self

    def stop(self) -> None:
        """Take the live table away, and show what has ended since the last refresh."""
        if self._live:
            self._live.stop()
        self._live, self._due = None, 0.0
        self.tick()

    def tick(self) -> None:
        """Refresh if it is time to."""
        now = self._clock.monotonic()
        if now < self._due:
            return
        self._due = now + REFRESH_SECONDS
        ended = self.progress.refresh()
        if self._live:
            self._live.update(screen(self.progress, self._heading(), self._console.height), refresh=True)
        elif not self._console.is_terminal:
            for trial in ended:
                self._line(self._ended(trial))

    def _heading(self) -> str:
        spec = self.progress.spec
        order = f"ordered, window {spec['window']}" if spec["order"] == "ordered" else "async"
        workers = f"{self._workers} worker{'s' if self._workers != 1 else ''}"
        return f"{spec['sampler']} · {spec['strategy']['name']} · {workers} · {order} · seed {spec['seed']}"

    def _ended(self, trial: Trial) -> str:
        per_minute, _ = self.progress.rates()
        value = "" if trial.shown_value is None else f"  {self.progress.metric} {number(trial.shown_value)}"
        best = "  best so far" if trial is self.progress.best else ""
        why = f"  {trial.error.splitlines()[0]}" if trial.error and trial.state in ("failed", "infeasible") else ""
        left = f"{self.progress.counts()}, {per_minute:.1f} trials/min, ETA {_eta(self.progress)}"
        return f"trial {trial.number} {trial.state}  epoch {epochs(trial)}{value}{best}{why}  ({left})"

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def data_report(data: Mapping[str, Any]) -> Iterator[str]:
    """What the study's check found: its counts that are not 0 in one line, each text and list in one of its own."""
    texts = {what: value for what, value in data.items() if isinstance(value, str | list)}
    counts = {what: value for what, value in data.items() if what not in texts and value}
    if counts:
        yield "data: " + ", ".join(f"{what.replace('_', ' ')} {value}" for what, value in counts.items())
    for what, value in texts.items():
        yield f"  {what.replace('_', ' ')}: {value if isinstance(value, str) else ', '.join(map(str, value))}"


def screen(progress: Progress, heading: str, height: int) -> Group:
    """The live picture: two lines of totals, then the best trial and as many of the newest as fit in `height`."""
    per_minute, per_second = progress.rates()
    counts = progress.counts(" trials")
    rates = f"{per_minute:.1f} trials/min   {per_second:.1f} epochs/s   ETA {_eta(progress)}"
    head = Table.grid(padding=(0, 2))
    head.add_row(Text(progress.name, style="bold"), Text(heading, style="dim"))
    total, done = (progress.requested, progress.ended) if progress.requested else (progress.max_epochs, progress.epochs)
    bar = ProgressBar(total=total or max(done, 1), completed=done, width=32)
    totals = Table.grid(padding=(0, 2))
    totals.add_row(bar, Text(counts, style="bold"), Text(rates))
    return Group(head, totals, _table(progress, max(height - 7, 3)))


def _table(progress: Progress, rows: int) -> Table:
    newest = [progress.trials[number] for number in sorted(progress.trials)[-rows:]]
    if progress.best and progress.best not in newest:
        newest = [progress.best, *newest[1:]]
    cells = [_cells(trial, trial is progress.best) for trial in newest]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(("trial", "epoch", "state", progress.metric, "curve")):
        width = max(len(text) for text in [name, *(row[i].plain for row in cells)])
        table.add_column(name, justify="right" if i in (0, 1, 3) else "left", no_wrap=True, min_width=width)
    table.add_column("parameters")  # rich narrows only columns that may wrap; the text itself never does
    for row in cells:
        table.add_row(*row)
    return table


def _cells(trial: Trial, best: bool) -> list[Text]:
    marked = "bold green" if best else ""
    return [
        Text(f"{'★ ' if best else ''}{trial.number}", style=marked),
        Text(epochs(trial)),
        Text(trial.state, style=_STYLE[trial.state]),
        Text("" if trial.shown_value is None else number(trial.shown_value), style=marked),
        Text(sparkline(trial.curve)),
        Text(short_params(trial.params), style="dim", no_wrap=True, overflow="ellipsis"),
    ]


def summary(progress: Progress, result: Result) -> str:
    """What a run leaves behind: how it ended, the best trial, where the rest is, what to do next."""
    states = Counter(trial.state for trial in progress.trials.values())
    counts = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    of = f" of {progress.requested}" if progress.requested else ""
    lines = [f"{progress.name}: {result.state}, {progress.ended}{of} trials ended ({counts})"]
    lines[0] += f" in {duration(progress.elapsed)}"
    if best := progress.best:
        lines.append(f"best: trial {best.number}, {progress.metric} {number(best.value)}")
        lines += [f"  {path} = {number(value)}" for path, value in best.params.items()]
    if result.behind:
        lines.append(f"MLflow is behind by {result.behind} transactions: `hpo sync` sends them; nothing is lost.")
    study = f"--study {progress.name}"
    if result.state == "interrupted" and not result.reason:
        following = {f"hpo resume {study}": "goes on from the last checkpoints"}
    else:
        following = {f"hpo best {study}": "its checkpoint, and how to train it"}
    following |= {f"hpo compare {study}": "trials side by side", "hpo ui": "everything in MLflow"}
    width = max(map(len, following))
    return "\n".join([*lines, *(f"{command:<{width}}  {what}" for command, what in following.items())])


def comparison(found: Comparison, width: int | None) -> Table:
    """Trials side by side: what they were judged by, the parameters that differ, then the metrics that fit `width`."""
    judged = [column for column in found.columns if column.startswith("values.")]
    shown = [column.removeprefix("metrics.") for column in found.columns if column.startswith("metrics.")]
    metrics = [f"metrics.{key}" for key in shown if not machine_dependent(key) and f"values.{key}" not in judged]
    columns = ["number", "state", "epoch", *judged, *found.differing(), *metrics]
    cells = {column: [_cell(row[column]) for row in found.rows] for column in columns}
    shown, used = [], 0
    for column in columns:
        used += max(len(text) for text in [_title(column), *cells[column]]) + 2
        if width is None or used <= width or not shown:
            shown.append(column)
    left = f"{len(columns) - len(shown)} more columns: --json, --csv FILE or --parquet FILE has them all"
    table = Table(box=None, pad_edge=False, header_style="bold", caption=left if len(shown) < len(columns) else None)
    for column in shown:
        numeric = all(isinstance(row[column], int | float | None) for row in found.rows)
        table.add_column(Text(_title(column)), justify="right" if numeric else "left", no_wrap=True)
    for i in range(len(found.rows)):
        table.add_row(*(Text(cells[column][i]) for column in shown))
    return table


def _title(column: str) -> str:
    """`params.train.optim.lr` is headed by its last part, a metric by its name."""
    kind, _, rest = column.partition(".")
    return rest.rpartition(".")[2] if kind == "params" else rest or column


def _cell(value: Any) -> str:
    return "" if value is None else number(value)


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """The last `width` values between their own minimum and maximum, one block each; a gap where one is not finite."""
    values = list(values)[-width:]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, span = min(finite), max(finite) - min(finite)

    def block(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return _BARS[round((value - low) / span * (len(_BARS) - 1))] if span else _BARS[0]

    return "".join(block(value) for value in values)


def short_params(params: dict[str, Any]) -> str:
    """`lr=0.003 batch_size=32`: the last part of each path, or the whole path where that is not unique."""
    leaves = [path.rpartition(".")[2] for path in params]
    pairs = zip(params.items(), leaves, strict=True)
    return " ".join(f"{leaf if leaves.count(leaf) == 1 else path}={number(value)}" for (path, value), leaf in pairs)


def number(value: Any) -> str:
    """A float to four significant digits; anything else as it is written."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def epochs(trial: Trial) -> str:
    return f"{trial.epoch}/{trial.num_epochs}" if trial.num_epochs else str(trial.epoch)


def duration(seconds: float) -> str:
    """`4:05`, or `1:02:03` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _eta(progress: Progress) -> str:
    left = progress.eta()
    return "-" if left is None else duration(left)
