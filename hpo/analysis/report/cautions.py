"""Finds the cautions that a reader of a report should know; each has its own rule and threshold.

A caution is {"kind": str, "text": str, "next": str}: the observation, and the remedy, a command if there is one.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from hpo.analysis.report.cost import SPENT_IN_VAIN
from hpo.analysis.report.snapshot import REPLAYED, Snapshot
from hpo.analysis.report.trials import held_out
from hpo.analysis.results import stopped
from hpo.analysis.results.format import number
from hpo.door import option
from hpo.ledger.rows import AskedTrial, EventRow
from hpo.space.trial_state import TERMINAL_STATES
from hpo.space.values import same
from hpo.text import command, counted

EDGE = 0.02  # share of a range, on its scale
FEWEST_VALUES = 5  # values of a whole number, below which the best lies at an edge by chance
FEW_TRIALS = 3  # trials of an option
FEW_NAMED = 5  # trials that a sentence names
TRIALS_PER_OPTION = 5  # trials per option, from which on an option can be missing
ERRORS = 2.0  # standard errors or deviations, which chance exceeds about once in twenty times
FEWEST_GAPS = 10  # trials with a held-out value, needed for their spread
MANY = 0.25  # share of the ended trials
FEWEST_ENDED = 4
FEWEST_COMPLETE = 5  # complete trials, needed for a best one and for shares of parameters
PERFECT = 1e-6  # distance from a perfect value that counts as perfect
AT_MOST_ONE = ("acc", "accuracy", "auc", "auroc", "f1", "precision", "recall", "r2", "ndcg", "map", "iou", "dice")


def cautions(
    of: Snapshot, confirmed: Sequence[Mapping[str, object]], answer: int | None = None
) -> list[dict[str, str]]:
    """Returns all cautions that apply, the most serious first.

    `confirmed` are the confirmations of `sure`. `answer` is the trial that the report names as the best; without it the
    best of the search is examined.
    """
    best = _best(of, answer)
    applying = [
        *(leaked(of, best) if best else ()),
        *(overselected(of, best, confirmed) if best else ()),
        *few(of),
        *in_vain(of),
        *late(of),
        *drifted(of),
        *(at_edge(of, best) if best else ()),
        *unexplored(of),
    ]
    return [{"kind": kind, "text": text, "next": remedy} for kind, text, remedy in applying]


Caution = tuple[str, str, str]


def _best(of: Snapshot, answer: int | None) -> AskedTrial | None:
    """Returns the answer, else the first trial of the search; of a front the best by the first objective."""
    numbers = [n for n, (front, _) in of.placed.items() if front == 0]
    first = answer if answer in of.placed else min(numbers, key=lambda n: of.placed[n], default=None)
    return next((trial for trial in of.trials if trial.number == first), None)


def few(of: Snapshot) -> Iterator[Caution]:
    """Yields a caution if fewer than FEWEST_COMPLETE of at least FEWEST_ENDED ended trials are complete.

    The others were stopped or failed, so the best is chosen among few.
    """
    complete, num_ended = len(of.placed), sum(trial.state in TERMINAL_STATES for trial in of.trials)
    if 0 < complete < FEWEST_COMPLETE and num_ended >= FEWEST_ENDED:
        text = f"only {complete} of {counted(num_ended, 'trial')} {'is' if complete == 1 else 'are'} complete"
        text += ": the best is one of few, and what mattered is a guess"
        yield "few", text, f"ask for more by {option('trials')}, or prune fewer by {option('strategy')}"


def at_edge(of: Snapshot, best: AskedTrial) -> Iterator[Caution]:
    """Yields a caution if a number of the best trial lies within EDGE of an end of its range, on the range's scale.

    The optimum may be beyond the range. Whole numbers need FEWEST_VALUES values for this caution.
    """
    for path, dimension in of.space.items():
        if path not in best.params or "low" not in dimension or dimension["low"] == dimension["high"]:
            continue
        low, high, value = dimension["low"], dimension["high"], best.params[path]
        log = bool(dimension.get("log") or dimension.get("powers_of_two"))
        if dimension["type"] == "Int" and _count(dimension) < FEWEST_VALUES:
            continue
        share = (_scaled(value, log) - _scaled(low, log)) / (_scaled(high, log) - _scaled(low, log))
        if min(share, 1 - share) <= EDGE:
            end = "lower" if share <= EDGE else "upper"
            text = f"{path} = {number(value)} of the best trial lies at the {end} end of its range, {low} to {high}"
            yield "edge", text, f"widen the range of {path} and search again under another {option('name')}"


def _count(dimension: Mapping[str, Any]) -> int:
    if dimension.get("powers_of_two"):
        return int(dimension["high"]).bit_length() - int(dimension["low"]).bit_length() + 1
    return (dimension["high"] - dimension["low"]) // dimension.get("step", 1) + 1


def _scaled(value: float, log: bool) -> float:
    return math.log(value) if log else float(value)


def unexplored(of: Snapshot) -> Iterator[Caution]:
    """Yields a caution for an option with fewer than FEW_TRIALS ended trials.

    Choosing among options takes TRIALS_PER_OPTION trials each.
    """
    ended = [trial for trial in of.trials if trial.state in TERMINAL_STATES]
    for path, dimension in of.space.items():
        tried_values = [trial.params[path] for trial in ended if path in trial.params]
        if "options" not in dimension or len(tried_values) < TRIALS_PER_OPTION * len(dimension["options"]):
            continue
        for value in dimension["options"]:
            count = sum(same(value, tried) for tried in tried_values)
            if count < FEW_TRIALS:
                text = f"{path} = {json.dumps(value)} was tried in {count} of {counted(len(tried_values), 'trial')}"
                pin = option("overrides", f"{path}={json.dumps(value)}")
                remedy = f"try it by {option('enqueue')}, or pin it by {pin} in a study of its own"
                yield "unexplored", text, remedy


def overselected(of: Snapshot, best: AskedTrial, confirmed: Sequence[Mapping[str, Any]]) -> Iterator[Caution]:
    """Yields a caution if the best trial is worse on held-out data than its selected value promises.

    If it is confirmed: its held-out mean under other seeds is worse than the selected value by more than ERRORS
    standard errors of that mean. Otherwise: its held-out value is worse than its selected value by an amount that
    exceeds the mean amount of the other complete trials by more than ERRORS of their standard deviations, with at least
    FEWEST_GAPS of them.
    """
    for index, objective in enumerate(of.objectives):
        metric, sign = objective["metric"], 1.0 if objective["direction"] == "minimize" else -1.0
        confirmation = next((table for table in confirmed if table["metric"] == metric), None)
        entry = (
            next((entry for entry in confirmation["rows"] if entry["trial"] == best.number), None)
            if confirmation
            else None
        )
        selected, retrained, unseen = (
            (entry["selected"], entry["again"], entry["held_out"]) if entry else (0.0, None, None)
        )
        if confirmation and unseen and unseen["error"] is not None:
            mean, error = unseen["mean"], unseen["error"]
            worse, by = sign * (mean - selected), f"{ERRORS:g} standard errors of {error:.2g}"
            if worse > ERRORS * error:
                text = f"trial {best.number} was selected by {metric} {number(selected)}, and under other seeds "
                text += f"{confirmation['hold_out']} is {number(mean)}: worse by more than {by}"
                if retrained and sign * (retrained["mean"] - mean) >= -error:
                    text += f"; {metric} is {number(retrained['mean'])} there itself, so the gain was its seed's luck"
                yield "overselected", text, "report the held-out value, not the selected one"
        elif key := of.hold_outs.get(metric):
            yield from _beyond_others(of, best, index, sign, key)


def _beyond_others(of: Snapshot, best: AskedTrial, index: int, sign: float, key: str) -> Iterator[Caution]:
    gaps = {
        trial.number: sign * (unseen - trial.values[index])
        for trial in of.trials
        if trial.number in of.placed and trial.values and (unseen := held_out(of, trial, key)) is not None
    }
    gap, others = gaps.pop(best.number, None), list(gaps.values())
    if gap is None or len(others) < FEWEST_GAPS:
        return
    usual, spread = fmean(others), stdev(others)
    if gap > usual + ERRORS * spread:
        text = f"trial {best.number} is worse by {number(gap)} on {key} than on {of.metrics[index]}; of the others that"
        text += f" is {number(usual)} on average, with a standard deviation of {number(spread)}"
        yield "overselected", text, f"`{command(f'confirm --study {of.name}')}` shows what of it was luck"


def _largest(replays: Sequence[EventRow]) -> str:
    """Returns the metric that differed most for its size, with both values, as ` (val/loss 0.5 and then 0.51)`.

    It is empty if no metric has two finite values.
    """
    pairs = [(name, *both.values()) for event in replays for name, both in event.fields.get("metrics", {}).items()]
    finite = [pair for pair in pairs if all(isinstance(value, float) and math.isfinite(value) for value in pair[1:])]
    if not finite:
        return ""
    name, first, again = max(finite, key=lambda pair: abs(pair[2] - pair[1]) / (abs(pair[1]) or 1.0))
    return f" ({name} {number(first)} and then {number(again)})"


def leaked(of: Snapshot, best: AskedTrial) -> Iterator[Caution]:
    """Yields a caution if the best value is perfect to within PERFECT: the inputs may contain the answer.

    Perfect is 1 for a metric whose name says that it is at most 1, and 0 for a loss.
    """
    for objective, value in zip(of.objectives, best.values or [], strict=True):
        name = objective["metric"].rpartition("/")[2].lower()
        if objective["direction"] == "maximize":
            perfect = abs(value - 1.0) <= PERFECT and any(word in AT_MOST_ONE for word in name.split("_"))
        else:
            perfect = 0.0 <= value <= PERFECT
        if perfect:
            text = f"{objective['metric']} {number(value)} of trial {best.number} is perfect"
            yield "leaked", text, "check that no answer is among the inputs, and that no sample is in both sets"


def in_vain(of: Snapshot) -> Iterator[Caution]:
    """Yields a caution if more than MANY of at least FEWEST_ENDED ended trials are infeasible or have failed."""
    counts = Counter(trial.state for trial in of.trials)
    num_ended = sum(counts[state] for state in TERMINAL_STATES)
    for state in SPENT_IN_VAIN:
        if num_ended >= FEWEST_ENDED and counts[state] > MANY * num_ended:
            word = "are infeasible" if state == "infeasible" else "have failed"
            text = f"{counts[state]} of {counted(num_ended, 'ended trial')} {word}"
            errors = Counter((t.error or "").split("\n")[0] for t in of.trials if t.state == state)
            why, times = errors.most_common(1)[0]
            first = next(t.number for t in of.trials if t.state == state and (t.error or "").startswith(why))
            text += f"; {times} of them: {why}" if why else ""
            yield state, text, f"`{command(f'show {first} --study {of.name}')}` shows the first of them"


def late(of: Snapshot) -> Iterator[Caution]:
    """Yields a caution if trials were stopped where complete ones end, which saved nothing."""
    undeclared = [(trial.state, trial.epoch) for trial in of.trials if of.planned(trial) is None]
    if observed := stopped.at_the_end(undeclared):
        yield "late", *observed


def drifted(of: Snapshot) -> Iterator[Caution]:
    """Yields cautions if what determines the results changed during the study, or attempts reported other values."""
    changed = [clause for event in of.befell if event.kind == "drift" for clause in event.fields["changed"]]
    if changed:
        text = f"trials before and after cannot be compared: {'; '.join(changed)}"
        yield "drift", text, f"search again under another {option('name')}"
    if replays := of.befell_trials(REPLAYED):
        numbers = list(dict.fromkeys(number for number, _ in replays if number is not None))
        named = f" of trial{'s' if numbers[1:] else ''} {', '.join(map(str, numbers[:FEW_NAMED]))}" if numbers else ""
        more = " and others" if numbers[FEW_NAMED:] else ""
        text = f"{counted(len(replays), 'report')}{named}{more} had another value when an attempt trained it again"
        text += _largest([event for _, event in replays])
        text += ", so the training does not repeat exactly; the first value stands"
        shows = command(f"show {numbers[0]} --study {of.name}") if numbers else command(f"verify --study {of.name}")
        yield "replays", text, f"`{shows}` lists both values"
