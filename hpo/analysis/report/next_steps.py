"""Lists the next steps for a study, the most worthwhile first.

A step is {"why": str, "command": str}; the command is empty if there is nothing to type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpo.analysis.report.cautions import FEWEST_COMPLETE
from hpo.analysis.report.certainty import steadiest
from hpo.analysis.report.cost import SPENT_IN_VAIN
from hpo.analysis.report.snapshot import Snapshot
from hpo.space.trial_state import TERMINAL_STATES
from hpo.text import command, counted

LATE = 0.25  # share of the ended trials: if the best is among the last of them, more may improve on it

Step = tuple[str, str]


def next_steps(
    of: Snapshot, answer: Mapping[str, Any], sure: Mapping[str, object], cautions: Sequence[Mapping[str, str]]
) -> list[dict[str, str]]:
    """Returns the next steps for a study; `answer`, `sure` and `cautions` are parts of its report."""
    steps = [*_going_on(of)]
    if cautions:
        steps.append(("Read the cautions, each of which names a remedy", ""))
    if not answer["best"]:
        steps += _without_answer(of)
    elif answer["best"][0]["imported"]:
        steps.append(("Search on from what was imported, in a study of your own", answer["best"][0]["train"]))
    else:
        steps += [*_further(of, sure), *_surer(of, sure), *_kept(of, answer, sure)]
    return [{"why": why, "command": typed} for why, typed in steps]


def _going_on(of: Snapshot) -> Iterator[Step]:
    if of.status.state == "running":
        yield "Wait for its end: it still runs", command(f"watch --study {of.name}")
    elif of.status.state == "interrupted":
        yield "Go on with it: it was interrupted, and trials wait", command(f"resume --study {of.name}")


def _without_answer(of: Snapshot) -> Iterator[Step]:
    first = next((trial.number for trial in of.trials if trial.state in SPENT_IN_VAIN), None)
    if first is not None:
        yield "See why the first trial came to nothing", command(f"show {first} --study {of.name}")
    elif of.status.state in ("complete", "stopped"):
        yield (
            "Ask for more trials: none is complete",
            command(f"resume --study {of.name} --trials {2 * of.asked}"),
        )


def _selected(of: Snapshot) -> int:
    """Returns the number of the trial that the search itself ranks first, whatever its result under other seeds."""
    return min(of.placed, key=lambda number: of.placed[number])


def _surer(of: Snapshot, sure: Mapping[str, Any]) -> Iterator[Step]:
    best = _selected(of)
    if not sure["confirm"] and not sure["lacking"]["confirm"]:
        yield "Train the best trials under other seeds, which tells gain from luck", sure["commands"]["confirm"]
        return
    if not _is_confirmed(of, best, sure):
        yield f"Train the best trials under other seeds again: trial {best} came after that", sure["commands"]["anew"]
        return
    if sure["undecided"] and sure["commands"]["seeds"]:
        why = sure["undecided"].partition(";")[0]
        yield f"Train the confirmed trials under more seeds: {why}", sure["commands"]["seeds"]
    if not sure["ablate"] and not sure["lacking"]["ablate"]:
        entry = steadiest(sure["confirm"], of.objectives[0]["direction"])
        trial = entry["trial"] if entry else best
        yield f"Train trial {trial} without each parameter, which tells what to keep", sure["commands"]["ablate"]


def _is_confirmed(of: Snapshot, best: int, sure: Mapping[str, Any]) -> bool:
    """Returns whether the best trial is confirmed; with several objectives, whether anything is."""
    known = [entry["trial"] for table in sure["confirm"][:1] for entry in table["rows"]]
    return best in known or len(of.objectives) > 1 or bool(sure["lacking"]["confirm"])


def _further(of: Snapshot, sure: Mapping[str, Any]) -> Iterator[Step]:
    """Yields a step on whether to train more trials.

    It depends on when the best trial ended among all trials, and on whether its gain over earlier ones exceeds the
    noise. It applies to ended studies of one objective with FEWEST_COMPLETE complete trials.
    """
    ended_numbers = [trial.number for trial in of.trials if trial.state in TERMINAL_STATES]
    if len(of.objectives) > 1 or of.status.state not in ("complete", "stopped") or len(of.placed) < FEWEST_COMPLETE:
        return
    best = _selected(of)
    after = len(ended_numbers) - ended_numbers.index(best) - 1
    gain, noise = _gain(of, best), sure["noise"].get(of.metrics[0], {}).get("deviation")
    if after + 1 > LATE * len(ended_numbers):
        evidence = f"the {counted(after, 'trial')} after the best have not bettered it"
    elif noise is not None and gain < noise:
        evidence = f"the best came late, but is better than the best before it by {gain:.2g}, "
        evidence += f"less than the noise of one run, {noise:.2g}"
    else:
        count = of.asked
        more = command(f"resume --study {of.name} --trials {2 * count}")
        late = f"the best came late, with {counted(after, 'trial')} after it, so more may better it"
        yield f"Search on with {count} more, {2 * count} in all: {late}", more
        return
    yield f"Ask for no more trials of this space: {evidence}; a search of another space may come further", ""


def _gain(of: Snapshot, best: int) -> float:
    """Returns the best trial's gain over the best complete trial before it; infinite if there is none."""
    values = {trial.number: trial.values[0] for trial in of.trials if trial.number in of.placed and trial.values}
    before = [number for number in values if number < best]
    if not before:
        return math.inf
    return abs(values[best] - values[min(before, key=lambda number: of.placed[number][1])])


def _kept(of: Snapshot, answer: Mapping[str, Any], sure: Mapping[str, Any]) -> Iterator[Step]:
    """Yields the promotion of the trial with the best mean under other seeds, once the best trial is confirmed.

    A trial that the default configuration beats is not promoted.
    """
    best, entry = answer["best"][0], steadiest(sure["confirm"], of.objectives[0]["direction"])
    if entry is None or sure["beaten"] or not _is_confirmed(of, _selected(of), sure):
        return
    if best["checkpoint"] and all(promoted["trial"] != entry["trial"] for promoted in answer["promoted"]):
        typed = command(f"promote {entry['trial']} --study {of.name}")
        yield f"Register trial {entry['trial']}, the best under other seeds, in MLflow, for others to load", typed
