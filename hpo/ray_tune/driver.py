"""Drives `hpo run --executor ray-tune`: the sampler proposes, Ray Tune's scheduler decides, the ledger records."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune import TuneError, schedulers
from ray.tune.search import BasicVariantGenerator, Searcher

from hpo.clock import Clock
from hpo.declaration import compatibility, preflight
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.study import Study
from hpo.door import option
from hpo.driver.drivers import StudyDriver
from hpo.driver.request import DriverOptions
from hpo.errors import UserError
from hpo.ledger import Ledger, external, queries
from hpo.ledger.leases import Lease
from hpo.ledger.rows import ProposedTrial
from hpo.ledger.views import driver as driver_queries
from hpo.ray_tune.executor import RayTune
from hpo.ray_tune.job import ALIAS, Job
from hpo.ray_tune.trainable import Recorder, param_space, trainable
from hpo.search.population.base import changing
from hpo.search.strategies.asha import first_rung
from hpo.space.space import Space
from hpo.space.trial_state import OPEN_STATES
from hpo.workers.executors.placement import SCHEDULERS, one_of

_KEPT = 4  # checkpoints per trial in Tune's storage; another trial may be about to start from one of the last
POPULATIONS = ("pb2", "pbt")  # schedulers that Tune combines with no searcher
_SETTINGS = {
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # the driver handles Ctrl-C
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}


class _Leaving(BaseException):
    """Stops Tune's loop at once, as a kill would: every trial continues from its last checkpoint."""


class TuneDriver(StudyDriver):
    """Drives a study by Tune: each run is a Tune experiment and continues the open trials of earlier ones.

    Tune decides which trials train, so the frontier follows: it proposes configurations and counts failures.
    """

    def __init__(
        self,
        ledger: Ledger,
        resolved: ResolvedStudy,
        options: DriverOptions,
        executor: RayTune,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(ledger, resolved, options, executor, clock)
        self._tune_executor = executor

    def acquire(self) -> None:
        """Becomes the study's driver.

        Raises Busy if another one is alive, and UserError for options that Tune does not support.
        """
        study = self._resolved.study
        if len(objectives := [objective.metric for objective in study.objectives]) > 1:
            raise UserError(
                f"{option('executor', 'ray-tune')}: its schedulers judge by one objective, and the study has "
                f"{', '.join(objectives)}: choose another executor, or leave one objective."
            )
        preflight.check_one_by_one(study.shape, option("executor", "ray-tune"))
        make_scheduler(self._options.placement.scheduler, study)  # raises its UserError before anything is written
        super().acquire()

    def all_ended(self) -> bool:
        """Returns whether nothing is left to train."""
        return not (self._left() or self._remaining())

    def drive(self, on_tick: Callable[[], None]) -> None:
        os.environ.update(_SETTINGS)
        study, options, name = self.study, self._options, self._resolved.spec.name
        row = study.ledger.look(lambda connection: queries.study_row(connection, name))
        job = Job(
            storage=options.storage,
            home=options.home,
            study_id=study.id,
            name=name,
            uid=row.uid,
            who=f"ray-tune:{options.placement.scheduler}",
            directory=Path.cwd(),
            carried=self._tune_executor.carried,
            gpus_asked=options.placement.resources.gpus is not None,
        )
        train = trainable(self._resolved.study, job)
        for index in count():
            lost = self._given_up()
            self._tune(train, f"{study.lease.fence}.{index}", on_tick)
            study.replay()  # the trials that their own processes have begun and ended
            if self._tune_executor.leaving or self._given_up() == lost or not self._remaining():
                return  # otherwise propose replacements of the trials that were lost too often

    def _tune(self, train: Any, key: str, on_tick: Callable[[], None]) -> None:
        """Runs one Tune experiment."""
        declared, lease = self._resolved.study, self.study.lease
        objective = declared.objectives[0]
        search, space, samples = self._searched(key)
        config = tune.TuneConfig(
            metric=objective.metric,
            mode="max" if objective.direction == "maximize" else "min",
            num_samples=samples,
            scheduler=make_scheduler(self._options.placement.scheduler, declared),
            search_alg=search,
            reuse_actors=True,  # torch stays imported
        )
        run = tune.RunConfig(
            name=f"{self._resolved.spec.name}-{key}",
            storage_path=str(self._options.home.tune),
            callbacks=[_Watched(train, lease, lambda: self._look(on_tick), self._note_ends)],
            failure_config=tune.FailureConfig(max_failures=-1),  # the ledger counts losses
            checkpoint_config=tune.CheckpointConfig(num_to_keep=_KEPT),
            verbose=0,
        )
        sized = tune.with_resources(train, self._tune_executor.each)
        try:
            tune.Tuner(sized, param_space=space, tune_config=config, run_config=run).fit()
        except _Leaving:
            pass
        except TuneError:
            lease.renew()  # raises Busy, which Tune has wrapped, if the lease is lost
            raise

    def _searched(self, experiment: str) -> tuple[Any, dict[str, Any] | None, int]:
        """Returns the searcher, its space, and the number of trials; a population is proposed at once."""
        left, space = self._left(), self._resolved.study.space
        samples = len(left) + self._remaining()
        proposals = _Proposals(left, self._renamed, self._proposed, space)
        if self._options.placement.scheduler not in POPULATIONS:
            return proposals, None, samples
        points = []
        for index in range(samples):
            key = f"{experiment}.{index}"
            if (point := proposals.suggest(key)) != Searcher.FINISHED:
                points.append({**point, ALIAS: key})
        domains = param_space(self._resolved.study) | {ALIAS: tune.choice([point[ALIAS] for point in points])}
        return BasicVariantGenerator(points_to_evaluate=points), domains, len(points)

    def _look(self, on_tick: Callable[[], None]) -> None:
        """Maintains the study between two steps of Tune."""
        self.study.keep()
        self.study.reclaim()
        on_tick()
        if self._tune_executor.leaving:
            raise _Leaving

    def _all(self) -> list[ProposedTrial]:
        return list(self.study.ledger.look(lambda connection: driver_queries.all_rows(connection, self.study.id)))

    def _given_up(self) -> int:
        """Returns how many trials were lost too often."""
        return sum(row.outcome == "lost" for row in self._all())

    def _left(self) -> list[int]:
        """Returns the trials that an earlier run has left open."""
        return [row.number for row in self._all() if row.state in OPEN_STATES]

    def _remaining(self) -> int:
        """Returns how many more trials may be proposed; a trial that continues from another's checkpoint does not
        count."""
        proposed_count = sum(row.parent is None and row.outcome != "lost" for row in self._all())
        frontier = self.study.frontier
        return 0 if frontier.streak.full else max(0, (frontier.rules.budget.trials or 0) - proposed_count)

    def _renamed(self, number: int, key: str) -> dict[str, Any]:
        """Gives a trial that was left open its current name in Tune; returns its parameters."""
        study = self.study
        study.lease.write(lambda connection: external.rename(connection, study.id, number, key))
        [row] = study.ledger.look(lambda connection: driver_queries.rows(connection, study.id, [number]))
        return row.params

    def _proposed(self, key: str) -> dict[str, Any] | None:
        """Returns the parameters of a new trial, recorded in the ledger.

        Returns None if the sampler has nothing left to propose, or failures end the study.
        """
        study = self.study
        self._note_ends()
        while not (frontier := study.frontier).streak.full and self._remaining():
            if frontier.proposer.exhausted(frontier.asked):
                return None
            ask = frontier.ask()
            if study.lease.write(lambda c, ask=ask: external.insert(c, study.id, lambda _: ask, key)) is None:
                study.replay()  # another trial has taken the number that the sampler expected
                continue
            if not ask.refused:
                return dict(ask.params)
            self._note_ends()  # it was refused, and the next one takes its place
        return None

    def _note_ends(self) -> None:
        """Records ended trials, and those that Tune's processes have begun, in the ledger and the frontier."""
        study, frontier = self.study, self.study.frontier
        study.lease.write(lambda connection: external.tell(connection, study.id))
        known = study.id, frontier.asked, frontier.told
        ends, new = study.ledger.look(lambda connection: driver_queries.since(connection, *known))
        frontier.follow(new, ends)


class _Proposals(Searcher):
    """Proposes trials to Tune: first those that were left open, then the sampler's."""

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
        """Returns nothing: Tune pickles the searcher for a restore that never happens."""
        return {}

    def on_trial_complete(self, trial_id: str, result: object = None, error: bool = False) -> None:
        """Does nothing: the ledger has the result."""

    def on_pause(self, trial_id: str) -> None:
        """Does nothing: when HyperBandForBOHB pauses a trial, Tune asks for a new one by itself."""

    def on_unpause(self, trial_id: str) -> None: ...

    def save(self, checkpoint_path: str) -> None:
        """Does nothing: the ledger has everything."""

    def restore(self, checkpoint_path: str) -> None: ...


class _Watched(Recorder):
    """A Recorder whose driver holds the lease and maintains the study between two steps of Tune."""

    def __init__(
        self, trainable: object, lease: Lease, look: Callable[[], None], note_ends: Callable[[], None]
    ) -> None:
        super().__init__(trainable)
        self._held, self._note_ends = (lease, look, lambda: None), note_ends

    def _hold(self) -> tuple[Lease, Callable[[], None], Callable[[], None]]:
        return self._held

    def _tell(self) -> None:
        self._note_ends()


def every(space: Space, params: Mapping[str, object]) -> dict[str, Any]:
    """Returns a value for each dimension, the midpoint for inactive ones, since a scheduler perturbs only named
    ones."""
    middle = space.from_unit([0.5] * len(space))
    return {path: params.get(path, dimension.value(middle[path])) for path, dimension in space.dimensions.items()}


def make_scheduler(name: str | None, study: Study) -> Any:
    """Returns a Tune scheduler by name, with epochs as its time.

    Raises UserError if the study gives it nothing to do.
    """
    name = name or "asha"
    one_of("scheduler", name, SCHEDULERS)
    epochs = study.shape.epochs
    if not isinstance(epochs, int):
        raise UserError(
            f"{option('scheduler', name)} must know how long a trial trains: give the study train.num_epochs."
        )
    floats = changing(study.space)
    if name in POPULATIONS:
        compatibility.whole(option("scheduler", name), study)
    if name in POPULATIONS and not floats:
        raise UserError(
            f"{option('scheduler', name)} perturbs every Float that may change in the middle of training, and the "
            "space "
            f"({', '.join(study.space.paths) or 'which is empty'}) has none: choose another scheduler."
        )
    # A bracket of Tune's HyperBand may end, at eta^k epochs, before the last: its survivors train on.
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

    return PB2(**population, hyperparam_bounds={path: [domain.low, domain.high] for path, domain in floats.items()})
