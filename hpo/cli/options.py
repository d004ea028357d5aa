"""Holds what the commands share: their options, and how they end."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from hpo import text as phrases
from hpo.cli import completion, overview, secret_files
from hpo.errors import NO_TORCH, HpoError, UserError, needs_torch
from hpo.terminal import print
from trainer import redaction
from trainer.quote import in_one_line, quoted, shorten_quoted, shortened
from trainer.redaction import redacted

INTERRUPTED = 130
MOST = 2**31 - 1  # what a ledger's integers hold


_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class Commands(overview.Overview):
    """Errors raised on purpose become one sentence and an exit code; anything else is a bug, and shown whole."""

    def invoke(self, ctx: Any) -> Any:
        from trainer.errors import ConfigError, DataError, TrainerError

        before = signal.getsignal(signal.SIGINT)
        try:
            if callable(before):  # from here on what was begun is undone on the way out
                signal.signal(signal.SIGINT, signal.default_int_handler)
            _check_working_directory()
            _check_text([*ctx._protected_args, *ctx.args, *(v for k, v in os.environ.items() if k.startswith("HPO_"))])
            secret_files.read_into(os.environ)
            return super().invoke(ctx)
        except (HpoError, TrainerError) as error:
            print(f"error: {shorten_quoted(str(error))}", file=sys.stderr)
            code = 2 if isinstance(error, ConfigError | DataError) else getattr(error, "exit_code", 1)
        except ModuleNotFoundError as error:
            if not needs_torch(error):
                raise
            print(f"error: this command needs {NO_TORCH}.", file=sys.stderr)
            code = UserError.exit_code
        except _UsageError as error:
            print(f"error: {shorten_quoted(in_one_line(redacted(_misuse(error))))}", file=sys.stderr)
            code = 2
        except KeyboardInterrupt:
            print("interrupted.", file=sys.stderr)
            code = INTERRUPTED
        finally:
            phrases.forget()
            if callable(before):
                signal.signal(signal.SIGINT, before)
        raise typer.Exit(code)


def _misuse(error: Any) -> str:
    """What is wrong with the words that were typed, in one sentence with the value."""
    wrong = getattr(error.__cause__, "errors", list)()
    if wrong and (allowed := _allowed(error.param.get_runtime_param().adapter.json_schema())):
        name = next((opt for opt in error.param.opts if opt.startswith("-")), error.param.opts[0].upper())
        typed = str(wrong[0]["input"])
        return f"{name} {shortened(typed) if typed.strip() else repr(typed)}: give {allowed}."
    path = error.ctx.command_path if error.ctx else "hpo"
    given = f" (given: {quoted(wrong[0]['input'])})" if wrong else ""
    said = error.format_message().rstrip(".") + given
    return f"{said}{'' if said.endswith('?') else ':'} `{path} --help` shows what there is."


def _allowed(schema: Mapping[str, Any]) -> str:
    """What an option takes, of the JSON schema of its type: `a whole number from 1 to 2147483647`."""
    for one in schema.get("anyOf", (schema,)):
        if noun := {"integer": "a whole number", "number": "a number"}.get(one.get("type")):
            bounds = (("from", "minimum"), ("to", "maximum"))
            return noun + "".join(f" {word} {one[key]}" for word, key in bounds if key in one)
    return ""


def _check_working_directory() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise UserError("the working directory is gone: change to one that exists.") from error


def _check_text(words: Sequence[str]) -> None:
    """Refuse bytes that are no text: no database takes them."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{quoted(word)} is not UTF-8: write names, paths and values in UTF-8.") from error


class _Unprinted(Exception):
    """Standard output takes no more."""


class _Output(io.FileIO):
    """Standard output, whose failures are told apart from those of files."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise _Unprinted from error


def main(app: typer.Typer) -> None:
    """Run the command that was typed; a reader that has left ends it as SIGPIPE would."""
    redaction.install()
    if sys.stdout is not None:
        lines, encoding = sys.stdout.isatty(), sys.stdout.encoding
        buffer = io.BufferedWriter(_Output(sys.stdout.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(buffer, encoding=encoding, errors="replace", line_buffering=lines)
    if sys.stderr is not None:
        sys.stderr.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except _Unprinted as unprinted:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left is not tried again
        if isinstance(unprinted.__cause__, BrokenPipeError):
            sys.exit(128 + signal.SIGPIPE)
        print(f"error: standard output cannot be written ({unprinted.__cause__}).", file=sys.stderr)
        sys.exit(1)


def _remember(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    """Keep what was typed, not what the environment or the default gave, for the commands that are named next."""
    source = ctx.get_parameter_source(str(param.name))
    if value is not None and source is not None and source.name == "COMMANDLINE":
        phrases.given(param.opts[0], value)
    return value


HomeOption = Annotated[
    str, typer.Option("--home", envvar="HPO_HOME", help="Where everything is written.", callback=_remember)
]
StorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage",
        envvar="HPO_STORAGE",
        help="The ledger's URL: sqlite:///PATH or postgresql+psycopg://...",
        callback=_remember,
    ),
]
TrackingOption = Annotated[
    str | None,
    typer.Option(
        "--tracking-uri",
        envvar="HPO_TRACKING_URI",
        help="MLflow's URI; by default in the home.",
        callback=_remember,
    ),
]
TrackerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tracker",
        metavar="NAME:DIR",
        help="Show it there besides MLflow: tensorboard:DIR or wandb:DIR; none for nowhere.  [default: as last time]",
    ),
]
AlertOption = Annotated[
    list[str] | None,
    typer.Option(
        "--alert",
        metavar="TARGET [on EVENTS]",
        help="Tell slack:@FILE, discord:@FILE, webhook:@FILE, mail:ADDRESS or command:PROGRAM what happens, such as "
        "end,failure,best; none tells nobody.  [default: as last time]",
    ),
]
TagOption = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="KEY=VALUE", help="A tag of the study, beside those it has; may be repeated."),
]
CheckpointsOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoints",
        metavar="s3://BUCKET/PREFIX",
        envvar="HPO_CHECKPOINTS",
        help="A bucket for checkpoints and the files of trials.  [default: as begun, else the home]",
    ),
]
StudyOption = Annotated[
    str | None,
    typer.Option(
        "--study",
        help="The study's name; may be left out where the home holds only one.",
        autocompletion=completion.studies,
    ),
]
DeclarationOption = Annotated[
    str,
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
        help="Which one of the Pareto front, where several objectives leave several; `hpo show N` has any trial.",
        autocompletion=completion.trials,
    ),
]
TrialArgument = Annotated[
    int, typer.Argument(help="The trial's number.", min=0, max=MOST, autocompletion=completion.trials)
]
AllStudiesOption = Annotated[
    str | None,
    typer.Option("--study", help="The study's name; by default every one.", autocompletion=completion.studies),
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", min=1, help="Worker processes.  [default: as last time, else 2]")
]
ExecutorOption = Annotated[
    str | None,
    typer.Option(
        "--executor",
        help="Where trials run: inline, local, ray or ray-tune.  [default: as last time, else local]",
        autocompletion=completion.among(completion.EXECUTORS),
    ),
]
CpusOption = Annotated[
    int | None,
    typer.Option("--cpus-per-worker", min=1, help="CPUs that each worker has to itself.  [default: on Ray as needed]"),
]
GpusOption = Annotated[
    float | None,
    typer.Option(
        "--gpus-per-worker",
        min=0,
        help="GPUs of each worker; 0.5 is half of one, and of its memory.  [default: one a rank, shared if too few]",
    ),
]
SchedulerOption = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        help="Of Ray Tune, for ray-tune: asha, bohb, fifo, hyperband, median, pb2 or pbt.  "
        "[default: as last, else asha]",
        autocompletion=completion.among(completion.SCHEDULERS),
    ),
]
SamplerOption = Annotated[
    str | None,
    typer.Option(
        "--sampler",
        help="Proposes trials: freeze-thaw, tpe, random, qmc, grid, gp, cmaes, nsga2, nsga3, bohb, or auto, which "
        "chooses one; the strategies bohb and freeze-thaw bring their own.",
        autocompletion=completion.samplers,
    ),
]
StrategyOption = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        help="Stops trials: none, median, percentile, patient, threshold, wilcoxon, halving, asha or hyperband; "
        "pauses them: asha-promote, hyperband-promote, pasha, freeze-thaw or bohb; breeds them: pbt or pb2.",
        autocompletion=completion.strategies,
    ),
]
WindowOption = Annotated[
    int | None,
    typer.Option(
        "--window",
        min=1,
        max=100_000,
        help="Trials open at a time.  [default: twice the workers or their lanes, at least 4; under strategies that "
        "pause as many as workers, of a population its size]",
    ),
]
OrderOption = Annotated[
    str | None,
    typer.Option(
        "--order", help="ordered (reproducible) or async.", autocompletion=completion.among(completion.ORDERS)
    ),
]
EnqueueOption = Annotated[
    list[str] | None,
    typer.Option(
        "--enqueue",
        metavar="FILE.yaml",
        help="A configuration to try first, as `best --to` writes it.",
        autocompletion=completion.yaml_files,
    ),
]
WarmStartOption = Annotated[
    str | None,
    typer.Option(
        "--warm-start",
        metavar="STUDY",
        help="Have the sampler learn from another study of this home.",
        autocompletion=completion.studies,
    ),
]
TrialsOption = Annotated[
    int | None, typer.Option("--trials", min=1, max=MOST, help="How many trials in total, over all resumptions.")
]
EpochsOption = Annotated[
    int | None, typer.Option("--epochs", min=1, max=MOST, help="How many epochs in total, over all trials.")
]
TimeOption = Annotated[
    str | None, typer.Option("--time", metavar="90m|2h|SECONDS", help="How long in total, over all resumptions.")
]
BytesOption = Annotated[
    str | None,
    typer.Option(
        "--max-bytes",
        metavar="10GB",
        help="Drop older checkpoints of ended trials, the worst trials first, while the study's take more.  "
        "[default: as last time, else no bound]",
    ),
]
DriftOption = Annotated[
    bool, typer.Option("--allow-drift", help="Continue although the space, the data, the seed or the code has changed.")
]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        metavar="PATH=VALUE",
        help="Set a field, or pin a dimension; the last one given counts.",
        autocompletion=completion.overrides,
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE.yaml", help="Fields to set, as YAML.", autocompletion=completion.yaml_files),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AllOption = Annotated[bool, typer.Option("--all", help="Show every metric.")]


def size(text: str | None) -> int | None:
    """The bytes of `--max-bytes`."""
    from trainer.config.fields import size as bytes_of

    try:
        found = bytes_of(text)
    except ValueError as error:
        raise UserError(f"--max-bytes {quoted(text)} is no size: {error}.") from error
    if found == 0:
        raise UserError(f"--max-bytes {quoted(text)} leaves room for nothing: give a number of bytes, or such as 10GB.")
    return found


def overrides(config: str | None, override: list[str] | None) -> dict[str, Any]:
    """Returns what a file and `-o` set; where both set a path, what `-o` sets."""
    from hpo.space.config import flatten, load_yaml

    return (flatten(load_yaml(config)) if config else {}) | one_by_one(override)


def one_by_one(override: list[str] | None) -> dict[str, Any]:
    """Returns what `-o` sets, by path; the last value of a path counts."""
    from hpo.space.config import flatten, parse_override

    values: dict[str, Any] = {}
    for path, value in map(parse_override, override or ()):
        if value == "":
            raise UserError(f"-o {path}= gives no value: write {path}=null for none, or {path}='\"\"' for empty text.")
        values |= flatten({path: value})
    return values
