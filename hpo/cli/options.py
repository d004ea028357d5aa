"""Holds the options that commands share, each under its name in Python."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from hpo import text as phrases
from hpo.cli import completion
from hpo.errors import UserError
from trainer.quote import quoted

MOST = 2**31 - 1  # what a ledger's integers hold


def _remember(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    """Remembers what was typed, without values from the environment or defaults, for the commands that messages
    suggest."""
    source = ctx.get_parameter_source(str(param.name))
    if value is not None and source is not None and source.name == "COMMANDLINE":
        phrases.given(str(param.name), value)
    return value


HomeOption = Annotated[
    str, typer.Option("--home", envvar="HPO_HOME", help="Directory that everything is written to.", callback=_remember)
]
StorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage",
        envvar="HPO_STORAGE",
        help="URL of the ledger's database: sqlite:///PATH or postgresql+psycopg://...  [default: in the home]",
        callback=_remember,
    ),
]
TrackingOption = Annotated[
    str | None,
    typer.Option(
        "--tracking-uri",
        envvar="HPO_TRACKING_URI",
        help="URI of MLflow's server or database.  [default: in the home]",
        callback=_remember,
    ),
]
TrackerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tracker",
        metavar="NAME:DIR",
        help="Also send results to tensorboard:DIR, wandb:DIR or your own tracker, module:Class:ARGUMENT; none sends "
        "them to MLflow only.  May be repeated.  [default: as in the last run]",
    ),
]
AlertOption = Annotated[
    list[str] | None,
    typer.Option(
        "--alert",
        metavar="TARGET [on EVENTS]",
        help="Send events such as end,failure,best to webhook:@FILE, command:PROGRAM or, through Apprise, "
        "apprise:@FILE, slack:@FILE, discord:@FILE or mail:ADDRESS; none sends nothing.  May be repeated.  "
        "[default: as in the last run]",
    ),
]
TagOption = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="KEY=VALUE", help="Add a tag to the study.  May be repeated."),
]
CheckpointsOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoints",
        metavar="s3://BUCKET/PREFIX",
        envvar="HPO_CHECKPOINTS",
        help="Store checkpoints and files of trials in this bucket.  [default: as the study began, else the home]",
    ),
]
StudyOption = Annotated[
    str | None,
    typer.Option(
        "--study",
        help="The study's name; optional if the home holds only one.",
        autocompletion=completion.studies,
    ),
]
DeclarationArgument = Annotated[
    str | None, typer.Argument(metavar="[STUDY]", help="The same as --study.", autocompletion=completion.declarations)
]
DeclarationOption = Annotated[
    str | None,
    typer.Option(
        "--study", help="A study's name, FILE.py[:NAME] or FILE.yaml.", autocompletion=completion.declarations
    ),
]
KnownStudyOption = Annotated[
    str, typer.Option("--study", help="A study's name, or FILE.py[:NAME].", autocompletion=completion.known)
]
BestTrialOption = Annotated[
    int | None,
    typer.Option(
        "--trial",
        min=0,
        max=MOST,
        help="A trial of the Pareto front, for several objectives; `hpo show N` shows any trial.",
        autocompletion=completion.trials,
    ),
]
TrialArgument = Annotated[
    int, typer.Argument(help="The trial's number.", min=0, max=MOST, autocompletion=completion.trials)
]
AllStudiesOption = Annotated[
    str | None,
    typer.Option("--study", help="The study's name.  [default: all studies]", autocompletion=completion.studies),
]
WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", min=0, help="Number of worker processes.  [default: as in the last run, else 2]"),
]
ExecutorOption = Annotated[
    str | None,
    typer.Option(
        "--executor",
        help="Where trials run: inline, local, ray or ray-tune.  [default: as in the last run, else local]",
        autocompletion=completion.among(completion.EXECUTORS),
    ),
]
CpusOption = Annotated[
    int | None,
    typer.Option("--cpus-per-worker", min=1, help="CPUs reserved for each worker.  [default: on Ray as needed]"),
]
GpusOption = Annotated[
    float | None,
    typer.Option(
        "--gpus-per-worker",
        min=0,
        help="GPUs for each worker; 0.5 is half a GPU and its memory.  [default: one per rank, shared if too few]",
    ),
]
SchedulerOption = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        help="Ray Tune scheduler (with --executor ray-tune): asha, bohb, fifo, hyperband, median, pb2 or pbt.  "
        "[default: as in the last run, else asha]",
        autocompletion=completion.among(completion.SCHEDULERS),
    ),
]
SamplerOption = Annotated[
    str | None,
    typer.Option(
        "--sampler",
        help="How trials are proposed: freeze-thaw, tpe, random, qmc, grid, gp, cmaes, nsga2, nsga3, bohb, or auto, "
        "which chooses one.  The strategies bohb and freeze-thaw use their own sampler.",
        autocompletion=completion.samplers,
    ),
]
StrategyOption = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        help="How trials end early.  Stopped: none, median, percentile, patient, threshold, wilcoxon, paired, halving, "
        "asha or hyperband.  Paused and promoted: asha-promote, hyperband-promote, pasha, freeze-thaw or bohb.  "
        "Populations: pbt or pb2.",
        autocompletion=completion.strategies,
    ),
]
WindowOption = Annotated[
    int | None,
    typer.Option(
        "--window",
        min=1,
        max=100_000,
        help="Number of trials that are open at a time.  [default: twice the workers or their lanes, at least 4; as "
        "many as workers if trials pause in async order; the size of a population]",
    ),
]
OrderOption = Annotated[
    str | None,
    typer.Option(
        "--order",
        help="ordered gives the same study for any number of workers, async never waits.  [default: ordered; async if "
        "the strategy pauses trials]",
        autocompletion=completion.among(completion.ORDERS),
    ),
]
FinishOption = Annotated[
    str | None,
    typer.Option(
        "--finish",
        help="auto trains stopped trials that were ahead of the best to their end after the search; none does not.",
        autocompletion=completion.among(completion.FINISHES),
    ),
]
ConfirmOption = Annotated[
    str | None,
    typer.Option(
        "--confirm",
        metavar="5x3",
        help="After the search, train the 5 best trials and the default again under 3 other seeds; 5x3folds also on 3 "
        "other folds; or none.",
    ),
]
EnqueueOption = Annotated[
    list[str] | None,
    typer.Option(
        "--enqueue",
        metavar="FILE.yaml",
        help="Try this configuration first; `hpo best --to` writes such a file.  May be repeated.",
        autocompletion=completion.yaml_files,
    ),
]
LearnFromOption = Annotated[
    list[str] | None,
    typer.Option(
        "--learn-from",
        metavar="auto|none|STUDY",
        help="Begin with knowledge from earlier studies of this home.  [default: auto]",
        autocompletion=completion.studies,
    ),
]
WarmStartOption = Annotated[
    str | None,
    typer.Option(
        "--warm-start",
        metavar="STUDY",
        help="The same as --learn-from STUDY.",
        autocompletion=completion.studies,
    ),
]
TrialsOption = Annotated[
    int | None,
    typer.Option("--trials", min=1, max=MOST, help="End the study after this many trials, over all resumptions."),
]
EpochsOption = Annotated[
    int | None, typer.Option("--epochs", min=1, max=MOST, help="End the study after this many epochs, over all trials.")
]
TimeOption = Annotated[
    str | None,
    typer.Option("--time", metavar="90m|2h|SECONDS", help="End the study after this time, over all resumptions."),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="VALUE|none",
        help="End the study once a complete trial reaches this value.  [default: as in the last run]",
    ),
]
PatienceOption = Annotated[
    str | None,
    typer.Option(
        "--patience",
        metavar="N|none",
        help="End the study after N trials without improvement.  [default: as in the last run]",
    ),
]
StopWhenOption = Annotated[
    str | None,
    typer.Option(
        "--stop-when",
        metavar="gain<VALUE|none",
        help="End the study once the next 20 trials are expected to gain less.  [default: as in the last run]",
    ),
]
BytesOption = Annotated[
    str | None,
    typer.Option(
        "--max-bytes",
        metavar="10GB",
        help="Keep checkpoints within this size: drop older ones of ended trials, worst trials first.  "
        "[default: as in the last run, else no limit]",
    ),
]
OwnerOption = Annotated[
    bool, typer.Option("--as-owner", help="Do it although somebody else began the study; `hpo log` keeps that.")
]
DriftOption = Annotated[
    bool, typer.Option("--allow-drift", help="Continue although space, data, seed or code have changed.")
]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        metavar="PATH=VALUE",
        help="Set a field of the configuration; it is then not searched.  May be repeated.",
        autocompletion=completion.overrides,
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="FILE.yaml", help="Set the fields in this file.", autocompletion=completion.yaml_files
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON value.")]
AllOption = Annotated[bool, typer.Option("--all", help="Show every metric.")]


def declared(argument: str | None, option: str | None) -> str:
    """Returns the study that was named as an argument or by --study. Before any slow import, raises UserError if no
    study was named, if both name one, or if the file does not exist."""
    if argument is None and option is None:
        begins, shows = phrases.command("run FILE.py --trials 20"), phrases.command("run --help")
        raise UserError(f"no study is named: `{begins}` searches one, and `{shows}` shows what there is.")
    if argument is not None and option is not None:
        raise UserError(f"{quoted(argument)} and --study {quoted(option)} both name the study: leave one of them out.")
    reference = argument or option or ""
    file = reference.rpartition(".py:")[0] + ".py" if ".py:" in reference else reference
    if file.endswith((".py", ".yaml", ".yml")) and not os.path.exists(path := os.path.expanduser(file)):
        noun = "study file " if file.endswith(".py") else ""
        raise UserError(f"{noun}{os.path.abspath(path)} cannot be read: No such file or directory; name another file.")
    return reference


def overrides(config: str | None, override: list[str] | None) -> dict[str, Any]:
    """Returns path -> value as set by a file and `-o`; `-o` wins."""
    from hpo.space.assignments import assignments, overrides

    return overrides(config, assignments(override))


def one_by_one(override: list[str] | None) -> dict[str, Any]:
    """Returns path -> value as set by `-o`; the last value of a path counts."""
    from hpo.space.assignments import assignments

    return assignments(override)
