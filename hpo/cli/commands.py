"""Runs the typed command and reports its end: an error as one sentence, and an exit code."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from hpo import text as phrases
from hpo.cli import overview, secret_files
from hpo.errors import NO_TORCH, HpoError, Mistakes, UserError, needs_torch
from hpo.terminal import number_of, print
from trainer import redaction
from trainer.quote import in_one_line, quoted, shorten_quoted, shortened
from trainer.redaction import redacted

OPTUNAS = {  # option of Optuna -> its counterpart here
    "--pruner": "--strategy",
    "--n-trials": "--trials",
    "--timeout": "--time",
    "--n-jobs": "--workers",
    "--study-name": "--name",
    "--direction": "minimize= or maximize= of the declaration",
}


INTERRUPTED = 130

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class Commands(overview.Overview):
    """Turns deliberate errors into one sentence and an exit code; any other error is a bug and shown in full."""

    def invoke(self, ctx: Any) -> Any:
        from trainer.errors import ConfigError, DataError, TrainerError

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
        try:
            for number in before:  # from here on a signal unwinds the stack, so that cleanup runs
                signal.signal(number, _interrupt)
            _check_working_directory()
            _check_text([*ctx._protected_args, *ctx.args, *(v for k, v in os.environ.items() if k.startswith("HPO_"))])
            secret_files.read_into(os.environ)
            return super().invoke(ctx)
        except (HpoError, TrainerError) as error:
            sentence = str(error) if isinstance(error, Mistakes) else in_one_line(str(error))
            print(f"error: {shorten_quoted(sentence)}", file=sys.stderr)
            code = 2 if isinstance(error, ConfigError | DataError) else getattr(error, "exit_code", 1)
        except ModuleNotFoundError as error:
            if not needs_torch(error):
                raise
            print(f"error: this command needs {NO_TORCH}.", file=sys.stderr)
            code = UserError.exit_code
        except _UsageError as error:
            print(f"error: {shorten_quoted(in_one_line(redacted(_misuse(error))))}", file=sys.stderr)
            code = 2
        except BrokenPipeError as error:  # Typer would end with 1 and without a word
            raise RuntimeError("a process that this command writes to has ended") from error
        except KeyboardInterrupt as interruption:
            print("interrupted.", file=sys.stderr)
            code = 128 + number_of(interruption)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if (log := getattr(sys.stderr, "failed", None)) is None:  # of hpo.event_log
                raise
            log(error)
            code = 1
        finally:
            phrases.forget()
            for number, handler in before.items():
                signal.signal(number, handler)
        raise typer.Exit(code)


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)


def _misuse(error: Any) -> str:
    """Returns the sentence that explains the error in the typed words."""
    wrong = getattr(error.__cause__, "errors", list)()
    if wrong and (allowed := _allowed(error.param.get_runtime_param().adapter.json_schema())):
        name = next((opt for opt in error.param.opts if opt.startswith("-")), error.param.opts[0].upper())
        typed = str(wrong[0]["input"])
        return f"{name} {shortened(typed) if typed.strip() else repr(typed)}: give {allowed}."
    path = error.ctx.command_path if error.ctx else "hpo"
    value = f" (given: {quoted(wrong[0]['input'])})" if wrong else ""
    sentence = error.format_message().rstrip(".") + value
    if "Missing" in type(error).__name__ and (about := getattr(error.param, "help", None)):
        sentence += f", {about[:1].lower()}{about[1:].rstrip('.')}"
    if option := OPTUNAS.get(getattr(error, "option_name", "")):
        sentence = f"{error.option_name} is Optuna's: here it is {option}"
    return f"{sentence}{'' if sentence.endswith('?') else ':'} `{path} --help` shows what there is."


def _allowed(schema: Mapping[str, Any]) -> str:
    """Returns the values that an option takes, from the JSON schema of its type: `a whole number from 1 to 9`."""
    for kind in schema.get("anyOf", (schema,)):
        if noun := {"integer": "a whole number", "number": "a number"}.get(kind.get("type")):
            bounds = (("from", "minimum"), ("to", "maximum"))
            return noun + "".join(f" {word} {kind[key]}" for word, key in bounds if key in kind)
    return ""


def _check_working_directory() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise UserError("the working directory is gone: change to one that exists.") from error


def _check_text(words: Sequence[str]) -> None:
    """Refuses words that are not valid UTF-8: databases do not accept them."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{quoted(word)} is not UTF-8: write names, paths and values in UTF-8.") from error


class _Unprinted(Exception):
    """Raised when standard output cannot be written."""


class _Output(io.FileIO):
    """Standard output, whose failures can be distinguished from those of files."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise _Unprinted from error


def main(app: typer.Typer) -> None:
    """Runs the typed command; a closed pipe ends it as SIGPIPE would."""
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the rest of the output is dropped
        if isinstance(unprinted.__cause__, BrokenPipeError):
            sys.exit(128 + signal.SIGPIPE)
        print(f"error: standard output cannot be written ({unprinted.__cause__}).", file=sys.stderr)
        sys.exit(1)
