"""`hpo run --executor ray-tune`: the study's sampler proposes, a scheduler of Ray Tune decides, the ledger records."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune import TuneError, schedulers
from ray.tune.search import BasicVariantGenerator, Searcher

from hpo.declaration import compatibility
from hpo.declaration.study import Study
from hpo.driver.loop import Driver
from hpo.driver.ray_tune.executor import RayTune
from hpo.driver.ray_tune.job import ALIAS, Job
from hpo.driver.ray_tune.trainable import Recorder, param_space, trainable
from hpo.errors import UserError
from hpo.ledger import driver_queries, external, queries
from hpo.ledger.leases import Lease
from hpo.ledger.rows import RowMapping
from hpo.search.population.base import changing
from hpo.search.strategies.asha import first_rung
from hpo.space.space import Space
from hpo.space.trial_state import OPEN_STATES
from hpo.workers.executors.placement import SCHEDULERS, one_of

_KEPT = 4  # checkpoints of a trial in Tune's storage; another trial may be about to start from one of the last
POPULATIONS = ("pb2", "pbt")  # schedulers that Tune allows no searcher beside
_SETTINGS = {
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is the driver's
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}


class _Leaving(BaseException):
    """Ends Tune's loop where it stands, as a kill would: every trial goes on from its last checkpoint."""


class TuneDriver(Driver):
    """Drives a study by Tune: each run is an experiment of Tune's, and takes up what those before it have left open."""

    _executor: RayTune

    def acquire(self) -> None:
        if len(objectives := [one.metric for one in self._study.objectives]) > 1:
            raise UserError(
                "--executor ray-tune: its schedulers judge by one objective, and the study has "
                f"{', '.join(objectives)}: choose another executor, or leave one objective."
            )
        if (lanes := self._study.shape.lanes) > 1:
            raise UserError(
                f"--executor ray-tune: it trains each trial on its own, and train.lanes is {lanes}: leave that out, or "
                "choose another executor."
            )
        make_scheduler(self._options.placement.scheduler, self._study)  # refused before anything is written
        super().acquire()

    def _drive(self, on_tick: Callable[[], None]) -> None:
        os.environ.update(_SETTINGS)
        row = self._ledger.look(lambda connection: queries.study_row(connection, self._spec.name))
        job = Job(
            storage=self._options.storage,
            home=self._options.home,
            study_id=self._id,
            name=self._spec.name,
            uid=row["uid"],
            who=f"ray-tune:{self._options.placement.scheduler}",
            directory=Path.cwd(),
            carried=self._executor.carried,
            gpus_asked=self._options.placement.resources.gpus is not None,
        )
        train = trainable(self._study, job)
        for place in count():
            lost = self._given_up()
            self._tune(train, f"{self._lease.fence}.{place}", on_tick)
            self._adopt()  # what the trials' own processes have asked for and ended
            if self._executor.leaving or self._given_up() == lost or not self._remaining():
                return  # else others are asked for in place of those that were lost too often

    def _tune(self, train: Any, key: str, on_tick: Callable[[], None]) -> None:
        """One experiment of Tune's."""
        objective = self._study.objectives[0]
        search, space, samples = self._searched(key)
        config = tune.TuneConfig(
            metric=objective.metric,
            mode="max" if objective.direction == "maximize" else "min",
            num_samples=samples,
            scheduler=make_scheduler(self._options.placement.scheduler, self._study),
            search_alg=search,
            reuse_actors=True,  # torch stays imported
        )
        run = tune.RunConfig(
            name=f"{self._spec.name}-{key}",
            storage_path=str(self._options.home.tune),
            callbacks=[_Watched(train, self._lease, lambda: self._look(on_tick), self._note_ends)],
            failure_config=tune.FailureConfig(max_failures=-1),  # how often a trial may be lost the ledger knows
            checkpoint_config=tune.CheckpointConfig(num_to_keep=_KEPT),
            verbose=0,
        )
        each = tune.with_resources(train, self._executor.each)
        try:
            tune.Tuner(each, param_space=space, tune_config=config, run_config=run).fit()
        except _Leaving:
            pass
        except TuneError:
            self._lease.renew()  # Busy, which Tune has made its own error of, where the lease is lost
            raise

    def _searched(self, experiment: str) -> tuple[Any, dict[str, Any] | None, int]:
        """What proposes trials, from which space, and how many: all at once where they are a population."""
        left, space = self._left(), self._study.space
        samples = len(left) + self._remaining()
        proposals = _Proposals(left, self._renamed, self._proposed, space)
        if self._options.placement.scheduler not in POPULATIONS:
            return proposals, None, samples
        points = []
        for place in range(samples):
            key = f"{experiment}.{place}"
            if (found := proposals.suggest(key)) != Searcher.FINISHED:
                points.append({**found, ALIAS: key})
        domains = param_space(self._study) | {ALIAS: tune.choice([point[ALIAS] for point in points])}
        return BasicVariantGenerator(points_to_evaluate=points), domains, len(points)

    def _look(self, on_tick: Callable[[], None]) -> None:
        """Between two steps of Tune's."""
        self._heartbeat.check()
        self._reclaimer.reclaim()
        on_tick()
        if self._executor.leaving:
            raise _Leaving

    def all_ended(self) -> bool:
        return not (self._left() or self._remaining())

    def _all(self) -> list[RowMapping]:
        return list(self._ledger.look(lambda connection: driver_queries.all_rows(connection, self._id)))

    def _given_up(self) -> int:
        """How many trials were lost too often."""
        return sum(row["outcome"] == "lost" for row in self._all())

    def _left(self) -> list[int]:
        """The trials that an earlier run has left open."""
        return [row["number"] for row in self._all() if row["state"] in OPEN_STATES]

    def _remaining(self) -> int:
        """How many more may be proposed: those that went on from another's checkpoint are no trials of Tune's own."""
        own = sum(row["parent"] is None and row["outcome"] != "lost" for row in self._all())
        return 0 if self._streak.full else max(0, (self._budget.trials or 0) - own)

    def _renamed(self, number: int, key: str) -> dict[str, Any]:
        """A trial that was left open, as Tune calls it now: its parameters."""
        self._lease.write(lambda connection: external.rename(connection, self._id, number, key))
        [row] = self._ledger.look(lambda connection: driver_queries.rows(connection, self._id, [number]))
        return row["params"]

    def _proposed(self, key: str) -> dict[str, Any] | None:
        """The parameters of a new trial, which the ledger has; None where the sampler has nothing left to propose, or
        failures end the study."""
        self._note_ends()
        while not self._streak.full and self._remaining():
            self._catch_up()
            if self._asking.exhausted(self._asked):
                return None
            ask = self._asking.ask(self._asked, told=self._told)
            if self._lease.write(lambda c, ask=ask: external.insert(c, self._id, lambda _: ask, key)) is None:
                self._adopt()  # a trial has gone on as a new one meanwhile; the sampler believes that number its own
                continue
            self._asked += 1
            if not ask.refused:
                return dict(ask.params)
            self._note_ends()  # it has ended as it was asked for, and the next one takes its place
        return None

    def _catch_up(self) -> None:
        """Tell the sampler of the trials and the ends that it does not know of."""
        known = (self._id, self._asked, self._told)
        ends, new = self._ledger.look(lambda connection: driver_queries.since(connection, *known))
        for row in new:
            if row["told"] is None:
                self._asking.adopt(row)
        for row in ends:
            self._asking.tell(row)
        self._asked, self._told = self._asked + len(new), self._told + len(ends)

    def _note_ends(self) -> None:
        for row in self._lease.write(lambda connection: external.tell(connection, self._id)):
            self._streak.note(row)


class _Proposals(Searcher):
    """What Tune tries: first the trials that were left open, then the sampler's proposals."""

    def __init__(
        self,
        left: list[int],
        renamed: Callable[[int, str], dict[str, Any]],
        proposed: Callable[[str], dict[str, Any] | None],
        space: Space,
    ) -> None:
        super().__init__()
        self.left, self._renamed, self._proposed, self._space = left, renamed, proposed, space

    def suggest(self, trial_id: str) -> Any:
        params = self._renamed(self.left.pop(0), trial_id) if self.left else self._proposed(trial_id)
        return Searcher.FINISHED if params is None else every(self._space, params)

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles what it is given, for a restore that is never asked of it."""
        return {}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """The ledger knows."""

    def on_pause(self, trial_id: str) -> None:
        """HyperBandForBOHB tells so: a paused trial makes room for a new one, for which Tune asks by itself."""

    def on_unpause(self, trial_id: str) -> None: ...

    def save(self, checkpoint_path: str) -> None:
        """There is nothing that the ledger has not."""

    def restore(self, checkpoint_path: str) -> None: ...


class _Watched(Recorder):
    """A Recorder under a driver, which holds the lease, and looks around between two steps of Tune's."""

    def __init__(self, trainable: Any, lease: Lease, look: Callable[[], None], note_ends: Callable[[], None]) -> None:
        super().__init__(trainable)
        self._held, self._note_ends = (lease, look, lambda: None), note_ends

    def _hold(self) -> tuple[Lease, Callable[[], None], Callable[[], None]]:
        return self._held

    def _tell(self) -> None:
        self._note_ends()


def every(space: Space, params: Mapping[str, Any]) -> dict[str, Any]:
    """A value for each dimension, those that conditions leave out in the middle: a scheduler perturbs what it names."""
    middle = space.from_unit([0.5] * len(space))
    return {path: params.get(path, one.value(middle[path])) for path, one in space.dimensions.items()}


def make_scheduler(name: str | None, study: Study) -> Any:
    """A scheduler of Tune's by name, its time the epochs. Raises UserError where the study gives it nothing to do."""
    name = name or "asha"
    one_of("--scheduler", name, SCHEDULERS)
    epochs = study.shape.epochs
    if not isinstance(epochs, int):
        raise UserError(f"--scheduler {name} must know how long a trial trains: give the study train.num_epochs.")
    floats = changing(study.space)
    if name in POPULATIONS:
        compatibility.whole(f"--scheduler {name}", study.shape)
    if name in POPULATIONS and not floats:
        raise UserError(
            f"--scheduler {name} perturbs every Float that may change in the middle of training, and the space "
            f"({', '.join(study.space.paths) or 'which is empty'}) has none: choose another scheduler."
        )
    # A bracket of Tune's HyperBand ends at eta^k epochs, which may be short of the last: who survives it trains on.
    population = {"time_attr": "epoch", "perturbation_interval": max(1, epochs // 5)}
    match name:
        case "fifo":
            return schedulers.FIFOScheduler()
        case "asha":
            first = min(first_rung(epochs), epochs)
            return schedulers.ASHAScheduler(time_attr="epoch", max_t=epochs, grace_period=first)
        case "hyperband":
            return schedulers.HyperBandScheduler(time_attr="epoch", max_t=epochs, stop_last_trials=False)
        case "bohb":
            return schedulers.HyperBandForBOHB(time_attr="epoch", max_t=epochs, stop_last_trials=False)
        case "median":
            return schedulers.MedianStoppingRule(time_attr="epoch", grace_period=1)
        case "pbt":
            drawn = {path: domain for path, domain in param_space(study).items() if path in floats}
            return schedulers.PopulationBasedTraining(**population, hyperparam_mutations=drawn)
    from ray.tune.schedulers.pb2 import PB2

    return PB2(**population, hyperparam_bounds={path: [one.low, one.high] for path, one in floats.items()})
