"""`--log-format json`: each event is one line of JSON on standard error, through the logging module."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import warnings
from typing import Any

from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.event_log import json_lines
from hpo.terminal import print, urgent


def events(text: str) -> list[dict[str, Any]]:
    assert text.isascii()
    return [json.loads(line) for line in text.splitlines()]


def test_a_print_is_one_event_and_standard_output_stays_empty(capsys):
    with json_lines("worker"):
        print("trial 3 begins")
        print("two\nlines", "ünd \x1b[31m", file=sys.stderr)
        print("", flush=True)
        print("error: the disk is full.", file=sys.stderr)
    out, err = capsys.readouterr()
    logged = events(err)
    assert out == ""
    assert [(event["level"], event["message"]) for event in logged] == [
        ("INFO", "trial 3 begins"),
        ("INFO", "two\nlines ünd \\u001b[31m"),
        ("ERROR", "error: the disk is full."),
    ]
    assert {(event["logger"], event["pid"]) for event in logged} == {("hpo.worker", os.getpid())}
    assert all(event["time"].endswith("Z") and event["host"] for event in logged)


def test_libraries_warnings_and_bugs_are_events_too(capsys):
    with json_lines("run"):
        logging.getLogger("a.library").warning("slow: %d s", 3)
        logging.getLogger("a.library").info("not shown")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(True)
            warnings.warn("old", stacklevel=1)
        try:
            raise ValueError("postgresql://hpo:secret@host/hpo")
        except ValueError as error:
            sys.stderr.failed(error)  # pyright: ignore[reportAttributeAccessIssue]
    err = capsys.readouterr().err
    slow, old, bug = events(err)
    assert (slow["logger"], slow["message"]) == ("a.library", "slow: 3 s")
    assert old["logger"] == "py.warnings" and "UserWarning: old" in old["message"]
    assert bug["level"] == "CRITICAL" and "Traceback" in bug["traceback"] and "secret" not in err


def test_threads_do_not_share_a_line(capsys):
    with json_lines("run"):
        sys.stdout.write("begun ")
        thread = threading.Thread(target=lambda: print("whole"))
        thread.start()
        thread.join()
        sys.stdout.write("and ended\n")
    assert [event["message"] for event in events(capsys.readouterr().err)] == ["whole", "begun and ended"]


def test_a_signal_handler_writes_an_event_at_once(monkeypatch):
    written: list[bytes] = []
    monkeypatch.setattr("os.write", lambda number, data: written.append(data) or len(data))
    urgent("leaving")
    with json_lines("worker"):
        urgent("leaving: é")
    assert written[0] == b"\nleaving\n"
    assert events(written[1].decode())[0]["message"] == "leaving: é" and written[1].count(b"\n") == 1


def test_a_command_ends_with_an_event_and_an_unknown_format_is_refused(tmp_path):
    flags = ["--storage", f"sqlite:///{tmp_path / 'none.db'}", "--home", str(tmp_path)]
    result = CliRunner().invoke(app, ["worker", *flags, "--log-format", "json"])
    [event] = events(result.stderr)
    assert result.exit_code == 2 and result.stdout == "" and event["level"] == "ERROR"
    assert event["message"].startswith("error: the ledger ") and event["logger"] == "hpo.worker"
    result = CliRunner().invoke(app, ["worker", *flags, "--log-format", "xml"])
    assert result.exit_code == 2 and result.stderr == "error: --log-format 'xml': give text or json.\n"
    assert not any(type(h).__module__ == "hpo.event_log" for h in logging.root.handlers)
