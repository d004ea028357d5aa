"""The proposals of samplers to a driver that asks and tells without a ledger; golden_search.py takes the digests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpo import Bool, Choice, Float, Int, Objective
from hpo.search.knowledge import regrets, teach
from hpo.search.samplers import auto
from hpo.search.samplers.base import Proposal, Sampler, TrialRecord
from hpo.search.samplers.registry import SAMPLERS, WARM, make_sampler
from hpo.search.samplers.reject import RejectingSampler
from hpo.space.space import Space

SEED = 5
WINDOW = 3  # trials that are open at a time
SPACE = Space(
    {
        "batch": Int(8, 64, powers_of_two=True),
        "clip": Float(0.5, 2.0),
        "dropout": Float(0.0, 0.5, step=0.1),
        "gat": Bool(),
        "heads": Int(1, 6),
        "hidden": Int(16, 128, multiple_of="heads"),
        "layers": Int(1, 7, step=2),
        "lr": Float(1e-4, 1e-1, log=True),
        "momentum": Float(0.0, 0.9, when={"name": "sgd"}),
        "name": Choice(["sgd", "adamw", "lion"]),
        "width": Int(8, 200_000, log=True),
    }
)
WITH_PRIORS = Space(
    {
        "clip": Float(0.5, 2.0, prior=0.6),
        "layers": Int(1, 9, prior=3, strength=1.0),
        "lr": Float(1e-4, 1e-1, log=True, prior=0.003, strength=0.75),
        "name": Choice(["sgd", "adamw", "lion"], prior="adamw"),
    }
)
COUNTED = Space(
    {
        "gat": Bool(),
        "layers": Int(1, 4),
        "momentum": Float(0.0, 0.8, step=0.4, when={"name": "sgd"}),
        "name": Choice(["sgd", "adamw"]),
    }
)
CORNERS = Space({"clip": Float(0.5, 2.0), "lr": Float(1e-4, 1e-1, log=True)})
RULED = Space(
    {
        "clip": Float(0.5, 2.0),
        "heads": Int(1, 8),
        "layers": Int(1, 6),
        "lr": Float(1e-4, 1e-1, log=True, prior=0.05),
        "name": Choice(["sgd", "adamw"]),
    },
    rules=("heads * layers <= 12", "lr * layers <= 0.2 or clip >= 1.5 or name == 'sgd'"),
)
LOSS, ACCURACY = Objective("val/loss"), Objective("val/accuracy", "maximize", "best")

# Options with which a model is asked after a few trials, and the trials that are asked for; MOST where none stand.
OPTIONS: dict[str, dict[str, int]] = {
    "tpe": {"n_startup_trials": 6},
    "grid": {"points": 3},
    "gp": {"n_startup_trials": 6},
    "nsga2": {"population_size": 4},
    "nsga3": {"population_size": 4},
}
TRIALS, MOST = {"gp": 10, "cmaes": 40, "bohb": 40}, 26
USE_PRIORS = ("random", "cmaes", "freeze-thaw", "bohb")  # those that draw around priors themselves

# The ends of trials, over and over: "nan" is stopped at a loss that is not finite, "lost" leaves its place untried.
ENDS = (
    *("complete", "complete", "pruned", "complete", "infeasible", "complete", "paused", "complete", "failed"),
    *("complete", "nan", "complete", "lost"),
)
THAW = 4  # asks after which a paused trial is complete


def sampler(name: str, chosen: Mapping[str, Any]) -> Any:
    """Returns the proposals of a sampler in each of several studies."""
    spec, trials = {"name": name, **OPTIONS.get(name, {})}, TRIALS.get(name, MOST)

    def run(
        objectives: Sequence[Objective],
        count: int,
        space: Space = SPACE,
        constrained: bool = False,
        known: Sequence[TrialRecord] = (),
    ) -> Any:
        made = make_sampler(spec, space, objectives, SEED, earlier=known, **chosen)
        return proposals(made, space, objectives, count, constrained)

    studies = {"one objective": run([LOSS], trials), "constrained": run([ACCURACY], trials, constrained=True)}
    if SAMPLERS[name].several:
        studies["two objectives"] = run([LOSS, ACCURACY], trials, constrained=True)
    if name in WARM:
        studies |= {f"warm by {count}": run([LOSS], 3, known=earlier(count)) for count in (3, 16)}
    if name in USE_PRIORS:
        studies["priors"] = run([LOSS], 20, WITH_PRIORS)
    if name == "grid":
        studies["all points"] = run([LOSS], 9, CORNERS)
        grid = make_sampler(spec, CORNERS, [LOSS], SEED, **chosen)
        studies["ended"] = [bool(grid.exhausted(number)) for number in (8, 9)]
    return studies


def auto_rule(chosen: Mapping[str, Any]) -> Any:
    """Returns which sampler `auto` chooses, and which points of a grid it asks for."""
    size = COUNTED.grid(4096).size
    spaces = {"counted": COUNTED, "many": SPACE, "priors": WITH_PRIORS, "empty": Space({})}
    budgets = (None, 1, 10, 11, size - 1, size, 100)
    plans = {title: [auto.plan(space, trials) for trials in budgets] for title, space in spaces.items()}
    choices = [
        auto.choice(objectives, number, warm, planned)
        for objectives in (1, 2, 3, 4)
        for number in (0, 9, 10, 249, 250, 499, 500, 1000)
        for warm in (False, True)
        for planned in (None, {}, {"qmc": 10}, {"grid": 6})
    ]
    records = [TrialRecord(0, "complete", {}, (1.0,), [(1, 1.0)]), TrialRecord(1, "complete", {}, (1.0,))]
    warm = [auto.without_curves(known) for known in ((), records, records[1:])]
    grid = make_sampler({"name": "grid", "points": 4096}, COUNTED, [LOSS], SEED, **chosen)
    points = [grid.ask(number).coordinates for number in range(size)]
    asked = make_sampler("auto", COUNTED, [LOSS], SEED, planned={"grid": size}, **chosen)
    places = [points.index(asked.ask(number).coordinates) for number in range(size + 3)]
    return {"plans": plans, "choices": choices, "warm": warm, "places": places}


def priors(chosen: Mapping[str, Any]) -> Any:
    """Returns draws around priors, and proposals after a queue."""
    units = [0.0, *((4 * k + 1) / 64 for k in range(16))]
    guided = {path: [dimension.guided(u) for u in units] for path, dimension in WITH_PRIORS.dimensions.items()}
    queue = [{"lr": 0.01, "name": "lion"}, {"clip": 0.75}, {}]

    def run(spec: Mapping[str, Any], space: Space, count: int) -> Any:
        return proposals(make_sampler(spec, space, [LOSS], SEED, queue, **chosen), space, [LOSS], count)

    return {
        "guided": guided,
        "then a model": run({"name": "tpe", "n_startup_trials": 6}, WITH_PRIORS, 9),
        "then a sequence": run({"name": "qmc"}, SPACE, 6),
        "then a grid": run({"name": "grid", "points": 3}, WITH_PRIORS, 6),
    }


def rules(chosen: Mapping[str, Any]) -> Any:
    """Returns proposals in a space with rules that are not kept to by construction."""
    queue = [{"heads": 8, "layers": 6}, {"heads": 8}]
    nearest = RejectingSampler(Places(RULED), RULED, SEED, (), near=True)
    return {
        "first": proposals(make_sampler("random", RULED, [LOSS], SEED, queue, **chosen), RULED, [LOSS], 26),
        "nearest": proposals(nearest, RULED, [LOSS], 16),
    }


def duplicates(chosen: Mapping[str, Any]) -> Any:
    """Returns proposals in a space of few configurations, until all are tried, and beyond."""
    queue = [{"layers": 2, "name": "adamw", "gat": True}] * 2
    made = make_sampler("random", COUNTED, [LOSS], SEED, queue, **chosen)
    size = COUNTED.grid().size
    asked = proposals(made, COUNTED, [LOSS], size + 8)
    return {"asked": asked, "ended": [bool(made.exhausted(number)) for number in (0, size + 8)]}


def warm_start(chosen: Mapping[str, Any]) -> Any:
    """Returns proposals after a study of the same seed, which has begun with the same random draws."""

    def run(name: str, space: Space) -> Any:
        drawn = make_sampler("random", space, [LOSS], SEED)
        known = [ended(number, drawn.ask(number), space, [LOSS], thawed=True) for number in range(6)]
        made = make_sampler(name, space, [LOSS], SEED, earlier=known, **chosen)
        return proposals(made, space, [LOSS], 8)

    return {"many": run("freeze-thaw", SPACE), "counted": run("freeze-thaw", COUNTED)}


def learning(chosen: Mapping[str, Any]) -> Any:
    """Returns what two earlier studies teach, and proposals after it: where they are alike and where they mislead."""

    def run(name: str, sign: float) -> Any:
        studies = {f"study {seed}": _searched(seed, sign) for seed in (1, 2)}
        knowledge = teach(SPACE, studies)
        made = make_sampler(name, SPACE, [LOSS], SEED, [{"lr": 0.01}], knowledge=knowledge, **chosen)
        return {"knowledge": knowledge, "asked": proposals(made, SPACE, [LOSS], 24)}

    return {"alike": run("tpe", 1.0), "misleading": run("tpe", -1.0), "curves": run("freeze-thaw", 1.0)}


def _searched(seed: int, sign: float) -> list[tuple[Mapping[str, Any], float]]:
    """Returns the trials of a study that has searched at random."""
    drawn = make_sampler("random", SPACE, [LOSS], seed)
    places = [drawn.ask(number) for number in range(24)]
    records = [ended(number, place, SPACE, [LOSS]) for number, place in enumerate(places)]
    losses = [None if not record.values else [sign * (record.values[0] or 0.0)] for record in records]
    return [(SPACE.decode(place.coordinates), loss) for place, loss in zip(places, regrets(losses), strict=True)]


# --- A study


class Places:
    """A sampler of fixed points that learns nothing."""

    def __init__(self, space: Space) -> None:
        self._space = space

    def adopt(self, record: TrialRecord) -> None: ...

    def tell(self, record: TrialRecord) -> None: ...

    def exhausted(self, number: int) -> str:
        return ""

    def ask(self, number: int) -> Proposal:
        return Proposal(place(self._space, number), number)


def proposals(
    sampler: Sampler, space: Space, objectives: Sequence[Objective], count: int, constrained: bool = False
) -> list[dict[str, Any]]:
    """Returns what is proposed for trials 0 to count - 1, trial k being told before ask k + WINDOW."""
    asked: list[Proposal] = []
    for number in range(count):
        for told in _due(number):
            sampler.tell(ended(told, asked[told], space, objectives, constrained, thawed=told < number - WINDOW))
        asked.append(sampler.ask(number))
    return [plain(proposal) for proposal in asked]


def _due(number: int) -> Iterator[int]:
    """Yields the trials that are told before an ask: one that ends or pauses, and one that has gone on since."""
    if number >= WINDOW:
        yield number - WINDOW
    thawed = number - WINDOW - THAW
    if thawed >= 0 and ENDS[thawed % len(ENDS)] == "paused":
        yield thawed


def earlier(count: int) -> list[TrialRecord]:
    """Returns complete trials of another study."""
    sampler = Places(SPACE)
    return [ended(number, sampler.ask(number), SPACE, [LOSS], thawed=True) for number in range(0, 13 * count, 13)]


def ended(
    number: int,
    proposal: Proposal,
    space: Space,
    objectives: Sequence[Objective],
    constrained: bool = False,
    thawed: bool = False,
) -> TrialRecord:
    """Returns a trial as it is told: ended by its number, or complete where it has paused and gone on."""
    end = "complete" if thawed else ENDS[number % len(ENDS)]
    state = {"nan": "pruned", "lost": "failed"}.get(end, end)
    losses = [loss(space, proposal.coordinates, number), 3.0 - loss(space, proposal.coordinates, number + 7)]
    signs = [-1 if objective.direction == "maximize" else 1 for objective in objectives]
    values: list[float | None] = [sign * value for sign, value in zip(signs, losses, strict=False)]
    epochs = 9 if end == "complete" else 1 + number % 4
    falling = [(epoch, signs[0] * (losses[0] + 1 / epoch - 1 / 9)) for epoch in range(1, epochs + 1)]
    curve = falling if len(objectives) == 1 else []
    if end == "nan" or (end == "infeasible" and not constrained):
        curve[-1:] = [(epochs, math.nan)] if curve else []
        values = [None] * len(values)
    violations = (0.5 + number / 64 if end == "infeasible" else -0.5,) if constrained and state != "failed" else ()
    known = state in ("complete", "infeasible") or (len(values) > 1 and state != "failed")
    return TrialRecord(
        number,
        state,
        proposal.coordinates,
        tuple(values) if known else None,
        () if state == "failed" else curve,
        proposal.trial_attrs,
        proposal.study_attrs,
        violations,
        proposal.parent,
        untried=end == "lost",
    )


def place(space: Space, number: int) -> dict[str, Any]:
    """Returns the coordinates of a fixed point, by arithmetic on the ranges that a sampler sees."""
    coordinates: dict[str, Any] = {}
    for axis, (path, (kind, *seen)) in enumerate(space.coordinates.items()):
        u = ((number * (2 * axis + 3) * 5 + axis * 7) % 16 + 0.5) / 16
        if kind == "choice":
            coordinates[path] = int(u * seen[0])
        elif kind == "unit":
            coordinates[path] = u
        else:
            low, high, _, step = seen
            steps = int(u * (round((high - low) / step) + 1)) if step else 0
            coordinates[path] = round(low + steps * step, 9) if step else low + u * (high - low)
    return coordinates


def loss(space: Space, coordinates: Mapping[str, Any], number: int) -> float:
    """Returns a loss in [0, 2]: the distance of the coordinates from a fixed point, and a little by the number."""
    squares = 0.0
    for axis, (path, (kind, *seen)) in enumerate(space.coordinates.items()):
        low, high = (0, seen[0]) if kind == "choice" else (0.0, 1.0) if kind == "unit" else seen[:2]
        offset = (coordinates[path] - low) / (high - low) - (3 * axis + 2) % 8 / 8
        squares += offset * offset
    return squares / len(space) + number * 37 % 101 / 1010


def plain(proposal: Proposal) -> dict[str, Any]:
    """Returns what a ledger keeps of a proposal."""
    kept = ("coordinates", "seed", "draw", "trial_attrs", "study_attrs", "parent")
    return {name: getattr(proposal, name) for name in kept}
