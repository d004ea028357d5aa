"""Shows a run while it runs: a live table on a terminal and in a notebook, one line per finished trial elsewhere.

Two refreshes a second at most, of what is new in the ledger. The driver calls `tick`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpo.analysis.results.format import duration, epochs, judgement, number, sparkline
from hpo.analysis.results.progress import Progress, Trial
from hpo.analysis.results.status import aligned, behind_by, next_commands
from hpo.cli.console import Console
from hpo.clock import Clock, SystemClock
from hpo.ledger import Ledger
from hpo.search.samplers import auto
from hpo.search.samplers.registry import SLOW_ASKS
from hpo.space.trial_state import STATES
from hpo.text import command, counted, endings, portion
from trainer.config.lanes import LANES
from trainer.quote import visible

if TYPE_CHECKING:
    from hpo.driver.request import RunResult

REFRESH_SECONDS = 0.5
SILENCE = 30.0  # seconds after which a run that prints lines says what it is doing
FIRST_SILENCE = 1.0  # the same, before anything has been trained
MOST_SHOWN = 5  # trials of a front that a run ends with
WIDE = 76  # columns from which on there is room for curves
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
    """Whether what stands on `console` can be replaced; else lines are printed."""
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
        given: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`given` are the overrides of a command that names a declaration; what it leaves out, the study keeps."""
        self._clock = clock or SystemClock()
        self._console = console
        self._workers, self._given = workers, given
        self._due = self._told = 0.0
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
            ended = self.progress.ended
            before = f"{ended} of them" if self.progress.requested else counted(ended, "trial")
            done = f", {before} done before" if ended else ""
            self.say(f"{self.progress.name}: {self.progress.asked_for()}{done}; {self._heading()}")
        return self

    def stop(self) -> None:
        """Take the live table away, and show what has ended since the last refresh."""
        if self._live:
            self._live.stop()
        self._live, self._due = None, 0.0
        self.tick()

    def tick(self, notice: str = "") -> None:
        """Refresh if it is time to; a notice takes the live table's place."""
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
            if not halted and now > self._told + (FIRST_SILENCE if begins else SILENCE):
                self._said_begins = True
                trained = counted(self.progress.epochs, "epoch")
                self.say(f"{doing(self.progress)}, {trained} trained  ({self.progress.counts()})")

    def picture(self) -> Constrain:
        """The live picture, as large as what shows it."""
        shown_by = self._live.console if self._live else self._console
        return screen(self.progress, self._heading(), *shown_by.size)

    def _heading(self) -> str:
        spec = self.progress.spec
        order = f"{spec['order']}, window {spec['window']}"
        workers = counted(self._workers, "worker")
        return f"{spec['sampler']} · {spec['strategy']['name']} · {workers} · {order} · seed {spec['seed']}"

    def _halted(self, trial: Trial, *, left: bool) -> str:
        """A trial that has ended or paused, and, if asked, how much is `left`: of several at a time once."""
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
        """On a terminal lines break between words; what is piped stays in one line."""
        self._told = self._clock.monotonic()
        self._console.print(text, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)


def _live(console: Console) -> Live | CellLive | None:
    """What shows a picture in place of the last one, if there is anything that can."""
    if console.is_jupyter:
        return None if console.quiet else CellLive()
    return Live(console=console, auto_refresh=False, transient=True) if animated(console) else None


class CellLive:
    """The picture in the output of a notebook's cell, as `rich.live.Live` shows it on a terminal."""

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


def kept_overrides(spec: Mapping[str, Any], given: Mapping[str, Any] | None) -> str:
    """The overrides with which the study was begun and that this command does not repeat; a preset replaces all.

    The lanes, whose number the study may have found by itself and keeps under a preset too, are told apart.
    """
    if given is None:
        return ""
    kept = {path: value for path, value in spec["overrides"].items() if path not in given}
    lanes = kept.pop(LANES, 1)
    kept = {} if "preset" in given else kept
    told = " ".join(f"{path}={json.dumps(value)}" for path, value in kept.items())
    said = [f"overrides kept from before: {told}; a study without them takes another --name"] if kept else []
    return "\n".join([*said, f"{LANES}={lanes}, with which this study began"] if lanes != 1 else said)


def unasked(spec: Mapping[str, Any], workers: int = 1, last: float = math.inf) -> Iterator[str]:
    """Where `asha` stops trials whose last epoch is `last`, by default or as a study declares it, that a threshold has
    no bounds, what `auto` chooses, which sampler takes seconds, and which workers find nothing to do."""
    strategy = spec["strategy"]
    if strategy["name"] == "asha":
        yield from _rungs(strategy, " before it" if spec["order"] == "ordered" else "", last)
    if strategy["name"] == "threshold" and strategy.get("lower") is None and strategy.get("upper") is None:
        yield (
            "strategy: threshold has no bounds, so it stops only a loss that is not finite: declare them in the study, "
            'strategy={"name": "threshold", "upper": 0.7}.'
        )
    if spec["sampler"] == "auto":
        bare = bool(spec["earlier"]) and not any(one.get("curve") for one in spec["earlier"])
        yield f"sampler: auto, which is {auto.rule(len(spec['objectives']), bare, spec.get('planned'))}"
    if spec["sampler"] in SLOW_ASKS:
        yield f"sampler: {spec['sampler']}, which takes {SLOW_ASKS[spec['sampler']]}: workers wait for it"
    if spec["order"] == "ordered" and workers > spec["window"]:
        yield (
            f"of {workers} workers {spec['window']} can work at a time, since that is the study's window: a wider one, "
            f"hpo run --window {2 * workers} --allow-drift, makes it another study from here on"
        )


def _rungs(asha: Mapping[str, Any], before: str, last: float) -> Iterator[str]:
    eta, first, bound = asha["eta"], asha["min_epochs"], min(asha["max_epochs"] or math.inf, last)
    rungs = [rung for rung in (first * eta**k for k in range(3)) if rung < bound]
    if last <= first:
        each = counted(int(last), "epoch")
        yield f"strategy: asha: no trial is stopped, since each has {each} and the first rung is epoch {first}"
    elif rungs:
        more = " ..." if rungs[-1] * eta < bound else ""
        yield (
            f"strategy: asha: at {'epochs' if more or rungs[1:] else 'epoch'} "
            f"{', '.join(map(str, rungs))}{more} a trial stops unless it is among the best 1/{eta} of those that came "
            f"there{before}; --strategy none trains each to its end"
        )


def doing(progress: Progress) -> str:
    """What is waited for."""
    if running := progress.states["running"]:
        held = len(progress.at_rung)
        waits = f", {held} of them at a rung until earlier ones come there" if held else ""
        return f"{counted(running, 'trial')} running" + (", in the first epoch" if progress.begins else waits)
    return "workers are starting" if progress.starts or not progress.epochs else "no trial is running"


def data_report(data: Mapping[str, Any]) -> Iterator[str]:
    """What the study's check found: its counts that are not 0 in one line, each text and list in one of its own."""
    texts = {what: value for what, value in data.items() if isinstance(value, str | list)}
    counts = {what: value for what, value in data.items() if what not in texts and value}
    if counts:
        yield "data: " + ", ".join(f"{what.replace('_', ' ')} {value}" for what, value in counts.items())
    for what, value in texts.items():
        yield f"  {what.replace('_', ' ')}: {value if isinstance(value, str) else ', '.join(map(str, value))}"


def screen(progress: Progress, heading: str, width: int, height: int) -> Constrain:
    """The live picture: two lines of totals, then the best trial and as many of the newest as fit in `height`.

    A terminal writes `^C` where the cursor stands, at the end of the last line: the picture leaves it room, since a
    line that wraps would not be taken away.
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
    held = progress.at_rung
    order = by_difference([trial.params for trial in progress.trials.values()])
    cells = [_cells(trial, trial in progress.best, judged, trial.number in held, order) for trial in newest]
    if width < WIDE:  # where there is no room for curves there is still some for parameters
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


def summary(progress: Progress, result: RunResult) -> str:
    """What a run leaves behind: how it ended, the best trial, where the rest is, what to do next."""
    states = progress.states
    counts = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    ended = portion(progress.ended, progress.requested, "trial")
    lines = [f"{progress.name}: {result.state}, {ended} ended" + (f" ({counts})" if counts else "")]
    lines[0] += f" in {duration(progress.elapsed)}"
    lines[0] += f", perturbed {counted(progress.replaced, 'time')}" if progress.replaced else ""
    for best in progress.best[:MOST_SHOWN]:
        text = judgement(dict(zip(progress.metrics, best.values, strict=True)), best.judged, best.epoch)
        lines.append(f"{'best' if len(progress.metrics) == 1 else 'on the front'}: trial {best.number}, {text}")
        lines += (
            [f"  {path} = {number(value)}" for path, value in best.params.items()] if len(progress.best) == 1 else []
        )
    if more := progress.best[MOST_SHOWN:]:
        lines.append(f"and {counted(len(more), 'more trial')} on the front")
    lines += progress.remarks()
    if result.behind:
        lines.append(behind_by(result.behind, result.damage))
    study, resumes = f"--study {progress.name}", result.state == "interrupted" and not result.reason
    failed = [trial.number for trial in progress.trials.values() if trial.state == "failed"]
    following = next_commands(progress.name, failed, resumes)
    if progress.best and not resumes:
        following[command(f"best {study}")] = (
            "its checkpoint, and " if progress.keeps_best else ""
        ) + "how to train it"
    following[command(f"compare {study}")] = "trials side by side"
    pages = progress.tracking_uri
    following[pages if pages.startswith("http") else command("ui")] = "everything in MLflow"
    return "\n".join([*lines, *aligned(following)])


def short_params(params: Mapping[str, Any], order: Sequence[str] = ()) -> str:
    """`lr=0.003 batch_size=32`: as much of each path as tells it apart, those of `order` first."""
    ends = endings(params)
    paths = [*(path for path in order if path in params), *(path for path in params if path not in order)]
    return " ".join(f"{ends[path]}={number(params[path])}" for path in paths)


def by_difference(params: Sequence[Mapping[str, Any]]) -> list[str]:
    """The parameters in which trials differ, those first that have the most values for their trials."""
    values: dict[str, list[str]] = {}
    for one in params:
        for path, value in one.items():
            values.setdefault(path, []).append(json.dumps(value))
    share = {path: len(set(found)) / len(found) for path, found in values.items() if len(set(found)) > 1}
    return sorted(share, key=lambda path: -share[path])


def whole_words(text: str, width: int) -> str:
    """As many whole words as fit, and an ellipsis for the rest; of a single long word what fits."""
    if len(text) <= width:
        return text
    cut = text[: max(width - 1, 0)]
    kept = cut if text[len(cut) : len(cut) + 1] == " " else cut.rpartition(" ")[0]
    return f"{(kept or cut).rstrip()}…"


def _rates(progress: Progress, *, epochs: bool = False) -> list[str]:
    """How fast it goes, and when it ends at this rate; nothing before there is a rate."""
    per_minute, per_second = progress.rates()
    rates = [f"{per_minute:.1f} trials/min"] if per_minute else []
    rates += [f"{per_second:.1f} epochs/s"] if epochs and per_second else []
    left = progress.eta()
    return rates if left is None else [*rates, f"ETA {duration(left)}"]
