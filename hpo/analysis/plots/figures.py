"""Draws Optuna's plots of a study: each as a PNG with matplotlib, all of them on one page with plotly."""

from __future__ import annotations

import gc
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.analysis.plots import stopped, ticks
from hpo.analysis.plots.importance import Target, importances, lacking_importances, quiet
from hpo.analysis.plots.pictures import contour, curves, parallel
from hpo.analysis.results.format import duration, number
from hpo.door import option
from hpo.errors import UserError
from hpo.search.samplers.optuna_sampler import quiet_optuna
from hpo.text import counted, near

PAGE = "plots.html"
WIDTH = 1150  # pixels, of the page's plots
MOST_PARAMS = {"contour": 3, "slice": 5, "rank": 3, "parallel": 10}  # the most important ones; more would be unreadable


@dataclass(frozen=True)
class Kind:
    """A kind of plot: its function in `optuna.visualization` and `optuna.visualization.matplotlib`, and its caption."""

    function: str
    caption: str


KINDS: Mapping[str, Kind] = {
    "history": Kind("plot_optimization_history", "each trial's value, and the best so far"),
    "curves": Kind("plot_intermediate_values", "the objective over the epochs, a line for each trial"),
    "importances": Kind("plot_param_importances", "how much of the difference between trials a parameter explains"),
    "slice": Kind("plot_slice", "the value over each parameter"),
    "contour": Kind("plot_contour", "the value over each pair of parameters"),
    "rank": Kind("plot_rank", "the trials' ranks over each pair of parameters"),
    "parallel": Kind("plot_parallel_coordinate", "each trial as a line through its parameters, dotted if pruned"),
    "edf": Kind("plot_edf", "the share of complete trials with at most this value; below, where others stopped"),
    "timeline": Kind("plot_timeline", "when each trial ran, and how it ended"),
    "pareto": Kind("plot_pareto_front", "the trials that no other one is better than in every objective"),
}


@dataclass(frozen=True)
class Subject:
    """The subject of a plot: a study of Optuna's, and the one of its `metrics` whose values are shown."""

    study: optuna.Study
    metrics: Sequence[str]
    metric: str

    @property
    def index(self) -> int:
        return self.metrics.index(self.metric)

    @property
    def span(self) -> tuple[float, float]:
        """Returns the smallest and largest value of the complete trials."""
        complete = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        values = [self.value(trial) for trial in complete]
        return min(values), max(values)

    def directed(self) -> list[str]:
        """Returns the metrics, each with its direction."""
        least = [direction is StudyDirection.MINIMIZE for direction in self.study.directions]
        return [
            f"{name} ({'less' if low else 'more'} is better)" for name, low in zip(self.metrics, least, strict=True)
        ]

    def value(self, trial: FrozenTrial) -> float:
        return trial.values[self.index]

    @property
    def target(self) -> Target:
        """Returns the values that Optuna draws; None for a single objective, whose direction it knows."""
        return self.value if len(self.metrics) > 1 else None

    @property
    def loss(self) -> Target:
        """Returns the target, negated if it is maximized, because importances assume that less is better."""
        if len(self.metrics) == 1:
            return None
        sign = -1.0 if self.study.directions[self.index] is StudyDirection.MAXIMIZE else 1.0
        return lambda trial: sign * self.value(trial)


def subject(study: optuna.Study, metric: str | None) -> Subject:
    """Returns the subject for this metric, by default the first objective. Raises UserError for any other metric."""
    metrics = study.user_attrs["metrics"]
    if metric is not None and metric not in metrics:
        raise UserError(
            f"{option('metric', repr(metric))} is not an objective of this study: choose {' or '.join(metrics)}."
        )
    return Subject(study, metrics, metric or metrics[0])


def chosen(kinds: Sequence[str]) -> list[str]:
    """Returns the kinds named, by default all. Raises UserError for an unknown kind."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UserError(
            f"plot {unknown[0]!r} does not exist: choose of {', '.join(KINDS)}{near(unknown[0], KINDS) or '.'}"
        )
    return list(dict.fromkeys(kinds)) or list(KINDS)


def lacking(kind: str, of: Subject) -> str:
    """Returns why the plot cannot be drawn; empty if it can."""
    complete = of.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if kind == "pareto" and len(of.metrics) == 1:
        return "the study has one objective"
    if kind == "curves":
        known = any(trial.intermediate_values for trial in of.study.get_trials(deepcopy=False))
        return "" if known else "no trial has reported the objective by epoch"
    if kind == "timeline":
        return "" if any(t.datetime_start for t in of.study.get_trials(deepcopy=False)) else "no trial has begun"
    if kind == "importances":
        return lacking_importances(of.study, of.loss)
    if not complete:
        return "no trial is complete"
    if kind in stopped.PAIRS and len({name for trial in complete for name in trial.params}) < 2:
        return "the study searches one parameter"
    if kind in stopped.PAIRS and len(_varied(of)) < 2:
        return "the complete trials differ in one parameter at most"
    return ""


def _varied(of: Subject) -> set[str]:
    """Returns the parameters in which the complete trials differ."""
    complete = of.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    pairs = {(name, value) for trial in complete for name, value in trial.params.items()}
    times = Counter(name for name, _ in pairs)
    return {name for name, count in times.items() if count > 1}


def draw(of: Subject, kinds: Sequence[str], directory: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Writes `<kind>.png` for each of `kinds` and a page of all; returns the files by name and the failures by kind.

    A plot that cannot be drawn does not prevent the others. Raises UserError if matplotlib or plotly is missing, or the
    directory cannot be written.
    """
    _check_installed()
    params = _by_importance(of)
    parts, failed = dict[str, str](), dict[str, str]()
    with quiet_optuna(), _uncollected():
        warnings.filterwarnings("ignore", "Attempt(ing)? to set", UserWarning)  # axes on which all trials are equal
        quiet()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for kind in kinds:
                try:
                    _picture(of, kind, params, directory / f"{kind}.png")
                    parts[kind] = _figure(of, kind, params).to_html(
                        full_html=False, include_plotlyjs=not parts, div_id=kind
                    )
                except OSError:
                    raise
                except Exception as error:  # the libraries raise errors of any class
                    reason = " ".join(str(error).split())
                    failed[kind] = f"{type(error).__name__}{f': {reason}' if reason else ''} while it was drawn"
            (directory / PAGE).write_text(_page(of, parts), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{directory} cannot be written ({error.strerror}): name another directory.") from error
    return {name: directory / name for name in (*(f"{kind}.png" for kind in parts), PAGE)}, failed


def copy(picture: Path, path: Path) -> None:
    """Copies a file that `draw` has written. Raises UserError if the copy cannot be written."""
    try:
        shutil.copyfile(picture, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): name another file.") from error


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disables garbage collection for the block: with the many small objects of plots it took a sixth of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _check_installed() -> None:
    try:
        import matplotlib  # noqa: F401
        import plotly  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"plots need {error.name}: pip install 'hpo[plots]'.") from error


def _by_importance(of: Subject) -> list[str]:
    """Returns the parameters of complete trials, the most important first; those without importance follow by name."""
    complete = of.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    every = sorted({name for trial in complete for name in trial.params})
    known = [] if lacking_importances(of.study, of.loss) else list(importances(of.study, target=of.loss))
    return known + [name for name in every if name not in known]


def _options(of: Subject, kind: str, params: Sequence[str]) -> dict[str, Any]:
    if kind in ("curves", "timeline"):
        return {}
    if kind == "pareto":
        return {"target_names": of.directed()} if len(of.metrics) <= 3 else {}
    options: dict[str, Any] = {"target_name": of.metric, "target": of.loss if kind == "importances" else of.target}
    varied = _varied(of) if kind in stopped.PAIRS else params
    shown = [name for name in params if name in varied]
    return options | ({"params": shown[: MOST_PARAMS[kind]]} if kind in MOST_PARAMS else {})


def _drawn_study(of: Subject, kind: str, early: stopped.Stopped) -> optuna.Study:
    """Returns the study that Optuna draws; for parallel lines it includes the trials that were stopped `early`."""
    return stopped.with_values(of.study, early, of.span) if kind == "parallel" and early else of.study


def _pairs(kind: str, options: Mapping[str, Any]) -> list[str]:
    """Returns the parameters of a plot of pairs, in the order of its panels."""
    params = options.get("params", [])
    return sorted(params) if kind == "contour" else list(params)


def _picture(of: Subject, kind: str, params: Sequence[str], path: Path) -> None:
    import matplotlib.pyplot as plt
    from optuna.visualization import matplotlib as drawing

    plt.switch_backend("agg")
    options, early = _options(of, kind, params), stopped.trials(of.study, of.index)
    axes = getattr(drawing, KINDS[kind].function)(_drawn_study(of, kind, early), **options)
    panels = np.atleast_1d(axes)
    rows, columns = panels.shape if panels.ndim == 2 else (1, len(panels))
    drawn = panels.flat[0].figure
    for panel in panels.flat if panels.size > 1 else ():
        panel.minorticks_off()  # each of them takes longer to draw than a line
    drawn.set_size_inches(*((3.2 * columns + 1, 3.2 * rows + 1) if panels.size > 1 else (10, 6)))
    if kind == "curves":
        curves(panels[0], of.metric)
    if kind == "contour":
        contour(panels, of.metric, of.span)
    if kind == "timeline":
        ticks.clock(panels[0].xaxis)
    if kind in stopped.KINDS:
        stopped.on_picture(panels, kind, early, _pairs(kind, options), of.span)
    whole = ticks.whole_numbers(of.study)
    if kind == "parallel":
        stopped.lines_on_picture(panels[0], len(early))
        parallel(panels[0], _parallel_names(of, params), whole)
    ticks.tidy(drawn, panels, whole)
    ticks.lay_out(drawn)
    drawn.set_layout_engine(None)
    room = drawn.get_tightbbox().padded(plt.rcParams["savefig.pad_inches"])  # "tight" would draw it twice
    drawn.savefig(path, dpi=drawn.dpi, bbox_inches=room)
    plt.close(drawn)


def _parallel_names(of: Subject, params: Sequence[str]) -> list[str]:
    """Returns the names of the parallel axes in Optuna's order."""
    return [of.metric, *sorted(params[: MOST_PARAMS["parallel"]])]


def _page(of: Subject, drawn: Mapping[str, str]) -> str:
    """Returns one self-contained page of all plots, which includes plotly's script once."""
    title = escape(f"{of.study.study_name}: {of.metric}")
    parts = [f"<!doctype html><html><head><meta charset='utf-8'><title>{title}</title></head>"]
    parts.append(f"<body style='font-family: sans-serif; max-width: 1150px; margin: 2em auto'><h1>{title}</h1>")
    parts += [f"<p>{escape(line)}</p>" for line in heading(of)]
    parts += [f"<h2>{kind}</h2><p>{KINDS[kind].caption}</p>{body}" for kind, body in drawn.items()]
    return "\n".join([*parts, "</body></html>\n"])


def heading(of: Subject) -> list[str]:
    """Returns lines about the best trial, the trials by state, and their cost."""
    trials = of.study.get_trials(deepcopy=False)
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE and trial.values]
    lines: list[str] = []
    if complete:
        pick = min if of.study.directions[of.index] is StudyDirection.MINIMIZE else max
        first = pick(complete, key=of.value)
        params = ", ".join(f"{name} {number(value)}" for name, value in first.params.items())
        lines.append(f"best: trial {first.number}, {of.metric} {of.value(first):.6g} ({params})")
    counts = Counter(trial.user_attrs.get("state", trial.state.name.lower()) for trial in trials)
    lines.append(f"{counted(len(trials), 'trial')}: " + ", ".join(f"{n} {state}" for state, n in counts.most_common()))
    epochs = sum(max(trial.intermediate_values, default=0) for trial in trials)
    took = [trial.duration.total_seconds() for trial in trials if trial.duration is not None]
    lines.append(f"cost: {counted(epochs, 'epoch')}, {duration(sum(took))} from begin to end of all trials together")
    return lines


def figure(of: Subject, kind: str) -> Any:
    """Returns a plot as a plotly figure. Raises UserError if plotly is missing."""
    _check_installed()
    with quiet_optuna(), warnings.catch_warnings():
        quiet()
        return _figure(of, kind, _by_importance(of))


def png(of: Subject, kind: str) -> bytes:
    """Returns a plot as a PNG. Raises UserError if matplotlib is missing."""
    _check_installed()
    with quiet_optuna(), warnings.catch_warnings(), tempfile.TemporaryDirectory() as directory:
        warnings.filterwarnings("ignore", "Attempt(ing)? to set", UserWarning)
        quiet()
        _picture(of, kind, _by_importance(of), Path(directory, "plot.png"))
        return Path(directory, "plot.png").read_bytes()


def _figure(of: Subject, kind: str, params: Sequence[str]) -> Any:
    from optuna import visualization

    options, whole = _options(of, kind, params), ticks.whole_numbers(of.study)
    early = stopped.trials(of.study, of.index)
    drawn = getattr(visualization, KINDS[kind].function)(_drawn_study(of, kind, early), **options)
    rows = len(options.get("params", ())) if kind in stopped.PAIRS else 1
    drawn.update_layout(title_text="", width=WIDTH, height=max(450, 240 * rows))
    if kind == "parallel":
        ticks.on_page_parallel(drawn, _parallel_names(of, params), whole)
        stopped.lines_on_page(drawn, early)
    elif kind in MOST_PARAMS:
        ticks.on_page(drawn, whole)
    if kind == "contour":
        drawn.update_traces(zmin=of.span[0], zmax=of.span[1], selector={"type": "contour"})
    if kind in stopped.KINDS:
        stopped.on_page(drawn, kind, early, _pairs(kind, options), of.span)
    if kind == "curves":
        drawn.update_layout(xaxis_title="epoch", yaxis_title=of.metric)
    return drawn
