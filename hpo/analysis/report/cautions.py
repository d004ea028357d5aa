"""What a reader of a report should beware of: each caution by a rule of its own, with its threshold.

A caution is {"kind": str, "text": str, "next": str}: what was seen, and what to do about it, a command where there is
one.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from hpo.analysis.report.cost import SPENT_IN_VAIN
from hpo.analysis.report.snapshot import Snapshot
from hpo.analysis.report.trials import held_out
from hpo.analysis.results.format import number
from hpo.space.trial_state import TERMINAL_STATES
from hpo.space.values import same
from hpo.text import command, counted

EDGE = 0.02  # of a range, in its scale
FEWEST_VALUES = 5  # of a whole number, below which the best lies at an edge by chance
FEW_TRIALS = 3  # of an option
TRIALS_PER_OPTION = 5  # before an option is missed
ERRORS = 2.0  # standard errors, or deviations, which chance exceeds about once in twenty times
FEWEST_GAPS = 10  # trials with a held-out value, from which their spread is taken
MANY = 0.25  # of the trials that have ended
FEWEST_ENDED = 4
FEWEST_COMPLETE = 5  # trials that a best one and shares of parameters are taken from
PERFECT = 1e-6  # how close to a perfect value is perfect
AT_MOST_ONE = ("acc", "accuracy", "auc", "auroc", "f1", "precision", "recall", "r2", "ndcg", "map", "iou", "dice")


def cautions(of: Snapshot, confirmed: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """All that hold, the gravest first. `confirmed` are the confirmations of `sure`."""
    best = _best(of)
    found = [
        *(leaked(of, best) if best else ()),
        *(overselected(of, best, confirmed) if best else ()),
        *few(of),
        *in_vain(of),
        *drifted(of),
        *(at_edge(of, best) if best else ()),
        *unexplored(of),
    ]
    return [{"kind": kind, "text": text, "next": what} for kind, text, what in found]


Caution = tuple[str, str, str]


def _best(of: Snapshot) -> Mapping[str, Any] | None:
    """With several objectives the best by the first."""
    numbers = [n for n, (front, _) in of.placed.items() if front == 0]
    first = min(numbers, key=lambda n: of.placed[n], default=None)
    return next((trial for trial in of.trials if trial["number"] == first), None)


def few(of: Snapshot) -> Iterator[Caution]:
    """Fewer than FEWEST_COMPLETE trials are complete, of FEWEST_ENDED at least that have ended: the others were stopped
    or came to nothing, so there is little to be best of."""
    complete, ended = len(of.placed), sum(trial["state"] in TERMINAL_STATES for trial in of.trials)
    if 0 < complete < FEWEST_COMPLETE and ended >= FEWEST_ENDED:
        text = f"only {complete} of {counted(ended, 'trial')} {'is' if complete == 1 else 'are'} complete"
        text += ": the best is one of few, and what mattered is a guess"
        yield "few", text, "ask for more by --trials, or prune fewer by --strategy"


def at_edge(of: Snapshot, best: Mapping[str, Any]) -> Iterator[Caution]:
    """A numeric parameter of the best trial lies within EDGE of an end of its range, on the scale that it is searched
    on: the optimum may be beyond. Whole numbers need FEWEST_VALUES values for it."""
    for path, one in of.space.items():
        if path not in best["params"] or "low" not in one or one["low"] == one["high"]:
            continue
        low, high, value = one["low"], one["high"], best["params"][path]
        log = bool(one.get("log") or one.get("powers_of_two"))
        if one["type"] == "Int" and _count(one) < FEWEST_VALUES:
            continue
        place = (_scaled(value, log) - _scaled(low, log)) / (_scaled(high, log) - _scaled(low, log))
        if min(place, 1 - place) <= EDGE:
            end = "lower" if place <= EDGE else "upper"
            text = f"{path} = {number(value)} of the best trial lies at the {end} end of its range, {low} to {high}"
            yield "edge", text, f"widen the range of {path} and search again under another --name"


def _count(one: Mapping[str, Any]) -> int:
    if one.get("powers_of_two"):
        return int(one["high"]).bit_length() - int(one["low"]).bit_length() + 1
    return (one["high"] - one["low"]) // one.get("step", 1) + 1


def _scaled(value: float, log: bool) -> float:
    return math.log(value) if log else float(value)


def unexplored(of: Snapshot) -> Iterator[Caution]:
    """An option of a choice has fewer than FEW_TRIALS ended trials, while the choice had TRIALS_PER_OPTION for each."""
    ended = [trial for trial in of.trials if trial["state"] in TERMINAL_STATES]
    for path, one in of.space.items():
        having = [trial["params"][path] for trial in ended if path in trial["params"]]
        if "options" not in one or len(having) < TRIALS_PER_OPTION * len(one["options"]):
            continue
        for option in one["options"]:
            count = sum(same(option, value) for value in having)
            if count < FEW_TRIALS:
                text = f"{path} = {json.dumps(option)} was tried in {count} of {counted(len(having), 'trial')}"
                what = f"try it by --enqueue, or pin it by -o {path}={json.dumps(option)} in a study of its own"
                yield "unexplored", text, what


def overselected(of: Snapshot, best: Mapping[str, Any], confirmed: Sequence[Mapping[str, Any]]) -> Iterator[Caution]:
    """The best trial is worse on held-out data than its selected value promises.

    Confirmed: under other seeds its held-out mean is worse than the selected value by more than ERRORS standard errors
    of that mean. Else: by how much its held-out value is worse is beyond the mean of that of all other complete trials
    by more than ERRORS of their standard deviations, FEWEST_GAPS of them at least.
    """
    for place, objective in enumerate(of.objectives):
        metric, sign = objective["metric"], 1.0 if objective["direction"] == "minimize" else -1.0
        again = next((one for one in confirmed if one["metric"] == metric), None)
        row = next((one for one in again["rows"] if one["trial"] == best["number"]), None) if again else None
        if again and row and row["held_out"] and row["held_out"]["error"] is not None:
            held, error = row["held_out"]["mean"], row["held_out"]["error"]
            worse, by = sign * (held - row["selected"]), f"{ERRORS:g} standard errors of {error:.2g}"
            if worse > ERRORS * error:
                text = (
                    f"trial {best['number']} was selected by {metric} {number(row['selected'])}, and under other seeds "
                )
                text += f"{again['hold_out']} is {number(held)}: worse by more than {by}"
                if row["again"] and sign * (row["again"]["mean"] - held) >= -error:
                    own = number(row["again"]["mean"])
                    text += f"; {metric} is {own} there itself, so the gain was its seed's luck"
                yield "overselected", text, "report the held-out value, not the selected one"
        elif key := of.hold_outs.get(metric):
            yield from _beyond_others(of, best, place, sign, key)


def _beyond_others(of: Snapshot, best: Mapping[str, Any], place: int, sign: float, key: str) -> Iterator[Caution]:
    gaps = {
        trial["number"]: sign * (held - trial["values"][place])
        for trial in of.trials
        if trial["number"] in of.placed and (held := held_out(of, trial, key)) is not None
    }
    own, others = gaps.pop(best["number"], None), list(gaps.values())
    if own is None or len(others) < FEWEST_GAPS:
        return
    usual, spread = fmean(others), stdev(others)
    if own > usual + ERRORS * spread:
        text = (
            f"trial {best['number']} is worse by {number(own)} on {key} than on {of.metrics[place]}; of the others that"
        )
        text += f" is {number(usual)} on average, with a standard deviation of {number(spread)}"
        yield "overselected", text, f"`{command(f'confirm --study {of.name}')}` shows what of it was luck"


def leaked(of: Snapshot, best: Mapping[str, Any]) -> Iterator[Caution]:
    """The best value is perfect to within PERFECT: 1 by a metric that is at most 1, told by its name, or a loss of 0.
    Data of the answer may be among the inputs."""
    for objective, value in zip(of.objectives, best["values"], strict=True):
        name = objective["metric"].rpartition("/")[2].lower()
        if objective["direction"] == "maximize":
            perfect = abs(value - 1.0) <= PERFECT and any(word in AT_MOST_ONE for word in name.split("_"))
        else:
            perfect = 0.0 <= value <= PERFECT
        if perfect:
            text = f"{objective['metric']} {number(value)} of trial {best['number']} is perfect"
            yield "leaked", text, "check that no answer is among the inputs, and that no sample is in both sets"


def in_vain(of: Snapshot) -> Iterator[Caution]:
    """More than MANY of the ended trials are infeasible, or have failed; FEWEST_ENDED have ended at least."""
    counts = Counter(trial["state"] for trial in of.trials)
    ended = sum(counts[state] for state in TERMINAL_STATES)
    for state in SPENT_IN_VAIN:
        if ended >= FEWEST_ENDED and counts[state] > MANY * ended:
            word = "are infeasible" if state == "infeasible" else "have failed"
            text = f"{counts[state]} of {counted(ended, 'ended trial')} {word}"
            errors = Counter((t["error"] or "").split("\n")[0] for t in of.trials if t["state"] == state)
            why, times = errors.most_common(1)[0]
            first = next(t["number"] for t in of.trials if t["state"] == state and (t["error"] or "").startswith(why))
            text += f"; {times} of them: {why}" if why else ""
            yield state, text, f"`{command(f'show {first} --study {of.name}')}` shows the first of them"


def drifted(of: Snapshot) -> Iterator[Caution]:
    """What decides the results changed in the middle of the study, or an attempt has reported other values again."""
    changed = [clause for one in of.befell if one["kind"] == "drift" for clause in one["fields"]["changed"]]
    if changed:
        text = f"trials before and after cannot be compared: {'; '.join(changed)}"
        yield "drift", text, "search again under another --name"
    if of.replays:
        text = f"{counted(of.replays, 'report')} came to another value when an attempt trained it again"
        yield "replays", text, f"`{command(f'verify --study {of.name}')}`; the first value stands"
