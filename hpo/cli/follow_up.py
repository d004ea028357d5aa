"""Commands that train trials of a study again: confirm, ablate, extend."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.cli import completion, options
from hpo.cli.driving import drive
from hpo.cli.json_output import notes, print_json
from hpo.cli.options import (
    ConfigOption,
    ExecutorOption,
    HomeOption,
    JsonOption,
    OverrideOption,
    StorageOption,
    StudyOption,
    TrackingOption,
    TrialArgument,
    WorkersOption,
)
from hpo.door import option
from hpo.errors import HpoError, UserError
from hpo.terminal import print
from hpo.text import command, counted

if TYPE_CHECKING:
    from hpo.analysis.follow_up.derived_study import RunDefaults, SourceStudy
    from hpo.analysis.follow_up.rounds import Round
    from hpo.ledger import Ledger
    from hpo.search.confirming import Confirm

app = typer.Typer()
NameOption = Annotated[str | None, typer.Option("--name", help="Name of the new study.  [default: NAME-COMMAND]")]
AblatedOption = Annotated[
    int | None,
    typer.Option(
        "--trial",
        min=0,
        max=options.MOST,
        help="The complete trial to use.  [default: the best]",
        autocompletion=completion.trials,
    ),
]


@app.command()
def confirm(
    study: StudyOption = None,
    top: Annotated[int, typer.Option("--top", min=1, max=1000, help="Train this many of the best trials.")] = 5,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="Train each trial under this many seeds.")] = 3,
    folds: Annotated[
        bool, typer.Option("--folds", help="Train under each seed on another of the study's declared folds.")
    ] = False,
    hold_out: Annotated[
        str | None,
        typer.Option(
            "--hold-out",
            metavar="METRIC",
            help="Metric on data that no selection used.  [default: test/x for val/x]",
            autocompletion=completion.metrics,
        ),
    ] = None,
    name: NameOption = None,
    workers: WorkersOption = None,
    executor: ExecutorOption = None,
    override: OverrideOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Train the best trials again under other seeds. Held-out data judges them too.

    They train in rounds, a seed each, beside the default configuration; whoever is clearly worse leaves. They become
    trials of a new study, NAME-confirm, which can be interrupted and continued.
    """
    from hpo.analysis.follow_up import confirm as confirming
    from hpo.analysis.follow_up.derived_study import repeats
    from hpo.ledger.finished import confirmed_in
    from hpo.search.confirming import Confirm
    from hpo.tracking import mirror_process

    overrides = options.overrides(config, override)
    ledger, source, driven = _derived(home, storage, study, executor, workers, tracking_uri)
    driven = replace(driven, overrides={**source.study.hold_out, **overrides}, one_by_one=options.one_by_one(override))
    metrics = confirming.held_out(source, hold_out)
    confirmation = name or confirmed_in(source.name, by_fold=folds)
    confirming.check_measured(ledger, source, confirmation, hold_out, driven.overrides)

    if top > (complete := len(source.ranked)):
        there = counted(complete, "complete trial")
        print(f"{option('top', top)}: the study has only {there}", file=sys.stderr)

    def results() -> list[confirming.Confirmation]:
        return confirming.confirmations(source, confirmation, metrics, repeats(ledger, confirmation, metrics))

    for _ in _rounds(ledger, source, confirmation, Confirm(top, seeds, folds), driven, quiet=as_json):
        if hold_out is not None and not confirming.is_reported(results()):
            break  # more rounds would not measure it either
    with notes(as_json):  # the answer of the study is another one now, and its description in MLflow
        if problem := mirror_process.send(ledger, driven.home, source.name, tracking_uri):
            print(problem)
    confirmed = results()
    print_json(confirming.facts(confirmed)) if as_json else print(confirming.describe(confirmed, hold_out))
    confirming.check_reported(ledger, confirmed, hold_out)


@app.command()
def ablate(
    study: StudyOption = None,
    trial: AblatedOption = None,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, max=1000, help="Train each variant under this many seeds.")
    ] = 1,
    name: NameOption = None,
    workers: WorkersOption = None,
    executor: ExecutorOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Train the best trial again without each parameter. One parameter at a time is set back to its default.

    They become trials of a new study, NAME-ablate, which can be interrupted and continued.
    """
    from hpo.analysis.follow_up import ablate as ablating
    from hpo.analysis.follow_up.derived_study import repeats

    ledger, source, driven = _derived(home, storage, study, executor, workers, tracking_uri)
    best = source.chosen(trial)
    tried, ablation = ablating.variants(source, best), name or f"{source.name}-ablate"
    _drive(ledger, source, ablation, ablating.listed(source, tried, seeds), driven, quiet=as_json)
    results = ablating.ablations(source, ablation, best, tried, repeats(ledger, ablation))
    print_json(ablating.facts(results)) if as_json else print(ablating.describe(results))


@app.command()
def extend(
    number: TrialArgument,
    study: StudyOption = None,
    name: NameOption = None,
    workers: WorkersOption = None,
    executor: ExecutorOption = None,
    override: OverrideOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Continue a trial to its end or for more epochs.

    Give the epochs by -o train.num_epochs=50. It becomes a trial of a new study, NAME-extend, which can
    be interrupted and continued.
    """
    from hpo.analysis.follow_up import extend as extending
    from hpo.analysis.follow_up.derived_study import request
    from hpo.analysis.results.extended import extended
    from hpo.driver.request import waiting
    from hpo.tracking import mirror_process

    ledger, source, driven = _derived(home, storage, study, executor, workers, tracking_uri, complete=False)
    new, line = extending.entry(ledger, driven.home, source, number, options.one_by_one(override))
    extension = name or f"{source.name}-extend"
    print(line, file=sys.stderr)
    with waiting():
        drive(request(source, extension, extending.grown(ledger, extension, new), driven), None, quiet=as_json)
    with notes(as_json):  # the answer of the study may be another one now, and its description in MLflow
        if problem := mirror_process.send(ledger, driven.home, source.name, tracking_uri):
            print(problem)
    every = ledger.look(lambda connection: extended(connection, source.name))
    ends = [
        extension_end for extension_end in every if (extension_end.study, extension_end.trial) == (extension, number)
    ]
    if not ends:
        shows = command(f"compare --study {extension}")
        raise HpoError(f"trial {number} was not trained to an end: `{shows}` shows how the trials of that study stand.")
    if as_json:
        print_json([asdict(end) for end in ends])
    else:
        print("\n".join(end.described() for end in ends))


def _derived(
    home: str,
    storage: str | None,
    study: str | None,
    executor: str | None,
    workers: int | None,
    tracking_uri: str | None,
    *,
    complete: bool = True,
) -> tuple[Ledger, SourceStudy, RunDefaults]:
    """Returns the ledger, the source study, and the options of a study derived from it, by default those of the source.

    `complete` requires that a trial of the source is complete, and that the source is not a derived study itself.
    """
    from hpo.analysis.follow_up.derived_study import RunDefaults, found
    from hpo.storage.lookup import open_study
    from hpo.tracking.uri import tracking_uri_of
    from hpo.workers.executors.placement import PlacementRequest

    ledger, name, study_home = open_study(home, storage, study)
    uri = tracking_uri_of(ledger, name, study_home, tracking_uri)
    source = found(ledger, name, complete=complete)
    if complete and (first := source.spec.listed_of):
        raise UserError(f"study {name!r} has trained trials of study {first!r} again: give {option('study', first)}.")
    return ledger, source, RunDefaults(study_home, PlacementRequest(executor, workers), storage, uri)


def _drive(
    ledger: Ledger, of: SourceStudy, name: str, listed: Sequence[Mapping[str, Any]], driven: RunDefaults, *, quiet: bool
) -> None:
    """Runs the derived study to its end and shows it; `quiet` shows it on standard error."""
    from hpo.analysis.follow_up.derived_study import grown, request
    from hpo.driver.request import waiting

    with waiting():
        drive(request(of, name, grown(ledger, name, listed), driven), None, quiet=quiet)


def _rounds(
    ledger: Ledger, of: SourceStudy, name: str, wanted: Confirm, driven: RunDefaults, *, quiet: bool
) -> Iterator[Round]:
    """Runs the rounds of a race in study `name` and yields each afterwards; a race that is over is opened once, so that
    drift is refused."""
    from hpo.analysis.follow_up.rounds import planned
    from hpo.driver.request import waiting

    with waiting():
        step, last = planned(ledger, of, name, wanted, driven), None
        while step != last and not (step.over and last):
            if not step.over:
                print(step.line, file=sys.stderr)
            drive(step.request, None, quiet=quiet, concludes=False)
            yield step
            step, last = planned(ledger, of, name, wanted, driven), step
