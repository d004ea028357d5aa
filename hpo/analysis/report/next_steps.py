"""What to do now, in the order in which it is worth doing.

A step is {"why": str, "command": str}; the command is empty where there is nothing to type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpo.analysis.report.cautions import FEWEST_COMPLETE
from hpo.analysis.report.cost import SPENT_IN_VAIN
from hpo.analysis.report.snapshot import Snapshot
from hpo.analysis.report.sure import steadiest
from hpo.space.trial_state import TERMINAL_STATES
from hpo.text import command, counted

LATE = 0.25  # of the trials that have ended: a best among the last of them may be bettered by more

Step = tuple[str, str]


def next_steps(
    of: Snapshot, answer: Mapping[str, Any], sure: Mapping[str, Any], cautions: Sequence[Mapping[str, str]]
) -> list[dict[str, str]]:
    """Of a study as it stands. `answer`, `sure` and `cautions` are those of its report."""
    found = [*_going_on(of)]
    if cautions:
        found.append(("Read what to beware of at the top, and what to do about it", ""))
    if not answer["best"]:
        found += _without_answer(of)
    elif answer["best"][0]["imported"]:
        found.append(("Search on from what was imported, in a study of your own", answer["best"][0]["train"]))
    else:
        found += [*_further(of, answer, sure), *_surer(of, answer, sure), *_kept(of, answer, sure)]
    return [{"why": why, "command": typed} for why, typed in found]


def _going_on(of: Snapshot) -> Iterator[Step]:
    if of.status.state == "running":
        yield "Wait for its end: it still runs", command(f"watch --study {of.name}")
    elif of.status.state == "interrupted":
        yield "Go on with it: it was interrupted, and trials wait", command(f"resume --study {of.name}")


def _without_answer(of: Snapshot) -> Iterator[Step]:
    vain = next((trial["number"] for trial in of.trials if trial["state"] in SPENT_IN_VAIN), None)
    if vain is not None:
        yield "See why the first trial came to nothing", command(f"show {vain} --study {of.name}")
    elif of.status.state in ("complete", "stopped"):
        yield (
            "Ask for more trials: none is complete",
            command(f"resume --study {of.name} --trials {2 * len(of.trials)}"),
        )


def _surer(of: Snapshot, answer: Mapping[str, Any], sure: Mapping[str, Any]) -> Iterator[Step]:
    best = answer["best"][0]["number"]
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
        row = steadiest(sure["confirm"], of.objectives[0]["direction"])
        trial = row["trial"] if row else best
        yield f"Train trial {trial} without each parameter, which tells what to keep", sure["commands"]["ablate"]


def _is_confirmed(of: Snapshot, best: int, sure: Mapping[str, Any]) -> bool:
    """Of several objectives, of which a front is the best, whether anything is."""
    known = [row["trial"] for one in sure["confirm"][:1] for row in one["rows"]]
    return best in known or len(of.objectives) > 1 or bool(sure["lacking"]["confirm"])


def _further(of: Snapshot, answer: Mapping[str, Any], sure: Mapping[str, Any]) -> Iterator[Step]:
    """Whether more trials promise something, by when the best one came among those that have ended, and by whether it
    is better than those before it by more than noise; of one objective and FEWEST_COMPLETE complete trials, of a study
    that has ended."""
    ended = [trial["number"] for trial in of.trials if trial["state"] in TERMINAL_STATES]
    if len(of.objectives) > 1 or of.status.state not in ("complete", "stopped") or len(of.placed) < FEWEST_COMPLETE:
        return
    best = answer["best"][0]["number"]
    after = len(ended) - ended.index(best) - 1
    gain, noise = _gain(of, best), sure["noise"].get(of.metrics[0], {}).get("deviation")
    if after + 1 > LATE * len(ended):
        found = f"the {counted(after, 'trial')} after the best have not bettered it"
    elif noise is not None and gain < noise:
        found = f"the best came late, but is better than the best before it by {gain:.2g}, "
        found += f"less than the noise of one run, {noise:.2g}"
    else:
        count = len(of.trials)
        more = command(f"resume --study {of.name} --trials {2 * count}")
        late = f"the best came late, with {counted(after, 'trial')} after it, so more may better it"
        yield f"Search on with {count} more, {2 * count} in all: {late}", more
        return
    yield f"Ask for no more trials of this space: {found}; a search of another space may come further", ""


def _gain(of: Snapshot, best: int) -> float:
    """By how much the best trial is better than the best complete one before it; infinite where there is none."""
    values = {trial["number"]: trial["values"][0] for trial in of.trials if trial["number"] in of.placed}
    before = [number for number in values if number < best]
    if not before:
        return math.inf
    return abs(values[best] - values[min(before, key=lambda number: of.placed[number][1])])


def _kept(of: Snapshot, answer: Mapping[str, Any], sure: Mapping[str, Any]) -> Iterator[Step]:
    """Promote the trial with the best mean under other seeds, once the best is among those that were trained so."""
    best, row = answer["best"][0], steadiest(sure["confirm"], of.objectives[0]["direction"])
    if row is None or not _is_confirmed(of, best["number"], sure):
        return
    if best["checkpoint"] and all(one["trial"] != row["trial"] for one in answer["promoted"]):
        typed = command(f"promote {row['trial']} --study {of.name}")
        yield f"Register trial {row['trial']}, the best under other seeds, in MLflow, for others to load", typed
