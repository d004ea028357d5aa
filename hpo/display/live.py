"""Shows a running study: a live table on a terminal and in a notebook, one line per finished trial elsewhere.

The driver calls `tick`, which shows new rows of the ledger at most twice a second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import StringIO

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpo.analysis.results.format import duration, epochs, number, sparkline
from hpo.analysis.results.progress import Progress, Trial
from hpo.clock import Clock, SystemClock
from hpo.display.console import Console
from hpo.display.notices import data_report, kept_overrides, unasked
from hpo.ledger import Ledger
from hpo.text import counted, endings
from trainer.quote import visible

REFRESH_SECONDS = 0.5
SILENCE = 30.0  # seconds without a line after which a run prints its state
FIRST_SILENCE = 1.0  # the same, before the first epoch has ended
WIDE = 76  # columns from which curves have room
_STYLE = {
    "waiting": "dim",
    "running": "cyan",
    "paused": "blue",
    "complete": "green",
    "pruned": "yellow",
    "infeasible": "magenta",
    "failed": "red",
}


def animated(console: Console) -> bool:
    """Returns whether the output on `console` can be replaced; otherwise lines are printed."""
    return console.is_terminal and not console.is_dumb_terminal


class View:
    """Shows a study's progress on `console`, from `start` to `stop`; the driver calls `tick`."""

    def __init__(
        self,
        ledger: Ledger,
        name: str,
        console: Console,
        *,
        workers: int,
        given: Mapping[str, object] | None = None,
        clock: Clock | None = None,
        since: float | None = None,
    ) -> None:
        """Prepares the view.

        given  the overrides of a command that names a declaration; the study keeps its other overrides
        since  the clock's time at which the command began, some seconds before the view is made
        """
        self._clock = clock or SystemClock()
        self._since = self._clock.monotonic() if since is None else since
        self._console = console
        self._workers, self._given = workers, given
        self._due = self._printed_at = 0.0
        self._said_begins = False
        self.progress = Progress(ledger, name, self._clock)
        self._live = _live(console)
        self._by_lines = self._live is None

    def start(self) -> View:
        for why in unasked(self.progress.spec, self._workers, self.progress.last_epoch):
            self.say(why)
        if kept := kept_overrides(self.progress.spec, self._given):
            self.say(kept)
        for line in data_report(self.progress.data):
            self.say(line)
        if self._live:
            self._live.start()
        else:
            num_ended = self.progress.ended
            before = f"{num_ended} of them" if self.progress.requested else counted(num_ended, "trial")
            done = f", {before} done before" if num_ended else ""
            self.say(f"{self.progress.name}: {self.progress.asked_for()}{done}; {self._heading()}")
        return self

    @property
    def seconds(self) -> float:
        """Returns the time since the command began."""
        return self._clock.monotonic() - self._since

    def stop(self) -> None:
        """Removes the live table, and shows the trials that have ended since the last refresh."""
        if self._live:
            self._live.stop()
        self._live, self._due = None, 0.0
        self.tick()

    def tick(self, notice: str = "") -> None:
        """Refreshes the view if it is due; a notice takes the live table's place."""
        if notice:
            self.stop()
            self.say(notice)
            if going := [trial for trial in self.progress.trials.values() if trial.state == "running"]:
                named = ", ".join(f"{trial.number} (epoch {epochs(trial)})" for trial in going)
                self.say(f"waiting for {counted(len(going), 'trial')} to save and leave: {named}")
        now = self._clock.monotonic()
        if now < self._due:
            return
        self._due = now + REFRESH_SECONDS
        halted = self.progress.refresh()
        if untold := self.progress.untold():
            self.say(untold)
        if self._live:
            self._live.update(self.picture(), refresh=True)
        elif self._by_lines:
            for trial in halted:
                self.say(self._halted(trial, left=trial is halted[-1]))
            begins = self.progress.begins and not self._said_begins
            if not halted and now > self._printed_at + (FIRST_SILENCE if begins else SILENCE):
                self._said_begins = True
                trained = counted(self.progress.epochs, "epoch")
                self.say(f"{doing(self.progress)}, {trained} trained  ({self.progress.counts()})")

    def picture(self) -> Constrain:
        """Returns the live picture in the size of its console."""
        shown_by = self._live.console if self._live else self._console
        return screen(self.progress, self._heading(), *shown_by.size)

    def _heading(self) -> str:
        spec = self.progress.spec
        order = f"{spec.order}, window {spec.window}"
        workers = counted(self._workers, "worker")
        return f"{spec.sampler} · {spec.strategy['name']} · {workers} · {order} · seed {spec.seed}"

    def _halted(self, trial: Trial, *, left: bool) -> str:
        """Returns a line about a trial that has ended or paused; `left` adds the state of the study, once a refresh."""
        judged = zip(self.progress.metrics, trial.shown, strict=False)
        value = "".join(f"  {metric} {number(value)}" for metric, value in judged)
        front = "on the front so far" if len(self.progress.metrics) > 1 else "best so far"
        best = f"  {front}" if trial in self.progress.best else ""
        why = f"  {trial.why}" if trial.why else ""
        text = f"trial {trial.number} {trial.state}  epoch {epochs(trial)}{value}{best}{why}"
        if not left:
            return text
        return f"{text}  ({', '.join([self.progress.counts(), *_rates(self.progress)])})"

    def say(self, text: str) -> None:
        """Prints a line; on a terminal it breaks between words, in a pipe it stays one line."""
        self._printed_at = self._clock.monotonic()
        self._console.print(text, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)


def _live(console: Console) -> Live | CellLive | None:
    """Returns the display that can replace its last picture; None if the console has none."""
    if console.is_jupyter:
        return None if console.quiet else CellLive()
    return Live(console=console, auto_refresh=False, transient=True) if animated(console) else None


class CellLive:
    """Shows the picture in the output of a notebook's cell, as `rich.live.Live` does on a terminal."""

    def __init__(self) -> None:
        from IPython.display import DisplayHandle

        self.console = Console(file=StringIO(), record=True, force_jupyter=False, width=110, height=24)
        self._shown = DisplayHandle()

    def start(self) -> None:
        from IPython.display import HTML

        self._shown.display(HTML(""))

    def update(self, picture: RenderableType, *, refresh: bool) -> None:
        from IPython.display import HTML

        self.console.print(picture)
        page = '<pre style="line-height:normal;overflow-x:auto">{code}</pre>'
        self._shown.update(HTML(self.console.export_html(code_format=page, inline_styles=True)))

    def stop(self) -> None:
        from IPython.display import HTML

        self._shown.update(HTML(""))


def doing(progress: Progress) -> str:
    """Returns what the run is waiting for."""
    if running := progress.states["running"]:
        at_rung = len(progress.at_rung)
        waits = f", {at_rung} of them at a rung until earlier ones come there" if at_rung else ""
        return f"{counted(running, 'trial')} running" + (", in the first epoch" if progress.begins else waits)
    return "workers are starting" if progress.starts or not progress.epochs else "no trial is running"


def screen(progress: Progress, heading: str, width: int, height: int) -> Constrain:
    """Returns the live picture: two lines of totals, then the best trial and as many of the newest as fit in `height`.

    A terminal writes `^C` at the cursor, at the end of the last line. The picture leaves room for it, because a line
    that wraps would not be removed.
    """
    width = max(width - 3, 20)
    counts, rates = progress.counts(noun=True), _rates(progress, epochs=width >= WIDE)
    head = Text.assemble((progress.name, "bold"), "  ", (heading, "dim"), no_wrap=True, overflow="ellipsis")
    text = Text.assemble((counts, "bold"), "   ".join(["", *rates]), no_wrap=True, overflow="ellipsis")
    total, done = (progress.requested, progress.ended) if progress.requested else (progress.max_epochs, progress.epochs)
    left = max(6, min(32, width - len(text) - 2))
    bar = ProgressBar(total=total or max(done, 1), completed=done, width=left)
    totals = Table.grid(padding=(0, 2))
    totals.add_row(bar, text)
    waited = [Text(f"{doing(progress)} ...", style="dim", no_wrap=True)] if progress.begins or progress.at_rung else []
    return Constrain(Group(head, totals, *waited, _table(progress, width, max(height - 7 - len(waited), 3))), width)


def _table(progress: Progress, width: int, rows: int) -> Table:
    newest = [progress.trials[number] for number in sorted(progress.trials)[-rows:]]
    leading = [trial for trial in progress.best if trial not in newest][: max(rows // 2, 1)]
    newest = [*leading, *newest[len(leading) :]]
    judged = len(progress.metrics)
    names = ["trial", "epoch", "state", *map(visible, progress.metrics), "curve"]
    at_rung = progress.at_rung
    order = by_difference([trial.params for trial in progress.trials.values()])
    cells = [_cells(trial, trial in progress.best, judged, trial.number in at_rung, order) for trial in newest]
    if width < WIDE:  # parameters still have room where curves do not
        names, cells = names[:-1], [[*row[:-2], row[-1]] for row in cells]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(names):
        widest = max(len(text) for text in [name, *(row[i].plain for row in cells)])
        table.add_column(
            name, justify="right" if i in (0, 1, *range(3, 3 + judged)) else "left", no_wrap=True, min_width=widest
        )
    used = sum(max(len(text) for text in [name, *(row[i].plain for row in cells)]) + 2 for i, name in enumerate(names))
    table.add_column("parameters")
    for row in cells:
        row[-1].plain = whole_words(row[-1].plain, max(width - used, 1))
        table.add_row(*row)
    return table


def _cells(trial: Trial, best: bool, judged: int, held: bool, order: Sequence[str]) -> list[Text]:
    marked = "bold green" if best else ""
    shown = [number(value) for value in trial.shown]
    return [
        Text(f"{'★ ' if best else ''}{trial.number}", style=marked),
        Text(epochs(trial)),
        Text("at rung" if held else trial.state, style="dim" if held else _STYLE[trial.state]),
        *(Text(text, style=marked) for text in [*shown, *[""] * judged][:judged]),
        Text(sparkline(trial.curve)),
        Text(visible(trial.why or short_params(trial.params, order)), "red" if trial.why else "dim", no_wrap=True),
    ]


def short_params(params: Mapping[str, object], order: Sequence[str] = ()) -> str:
    """Returns text such as `lr=0.003 batch_size=32`, with the shortest distinct end of each path, `order` first."""
    ends = endings(params)
    paths = [*(path for path in order if path in params), *(path for path in params if path not in order)]
    return " ".join(f"{ends[path]}={number(params[path])}" for path in paths)


def by_difference(params: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns the parameters in which trials differ, first those with the most values relative to their trials."""
    values: dict[str, list[str]] = {}
    for trial_params in params:
        for path, value in trial_params.items():
            values.setdefault(path, []).append(json.dumps(value))
    share = {path: len(set(texts)) / len(texts) for path, texts in values.items() if len(set(texts)) > 1}
    return sorted(share, key=lambda path: -share[path])


def whole_words(text: str, width: int) -> str:
    """Returns as many whole words as fit and an ellipsis for the rest; a single long word is cut."""
    if len(text) <= width:
        return text
    cut = text[: max(width - 1, 0)]
    kept = cut if text[len(cut) : len(cut) + 1] == " " else cut.rpartition(" ")[0]
    return f"{(kept or cut).rstrip()}…"


def _rates(progress: Progress, *, epochs: bool = False) -> list[str]:
    """Returns the speed and the time left at this speed; empty before a speed is known."""
    per_minute, per_second = progress.rates()
    rates = [f"{per_minute:.1f} trials/min"] if per_minute else []
    rates += [f"{per_second:.1f} epochs/s"] if epochs and per_second else []
    left = progress.eta()
    return rates if left is None else [*rates, f"ETA {duration(left)}"]
