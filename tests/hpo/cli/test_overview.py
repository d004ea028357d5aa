"""What `hpo`, `hpo --help` and `hpo import` show first."""

from __future__ import annotations

import re
import shlex

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.cli.overview import FIRST, HEADINGS, OPTIONS


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, [*words], env={"COLUMNS": "80"})
    assert result.exit_code == 0 and not result.stderr
    return result.stdout


def test_hpo_alone_shows_five_commands_that_exist():
    text = shown()
    assert text == f"{FIRST}\n" and "`hpo --help`" in text and all(len(line) <= 80 for line in text.splitlines())
    lines = [re.split(r"\s{2,}", line.strip())[0] for line in text.splitlines() if line.startswith("  hpo ")]
    group = get_command(app)
    for line in lines:
        _, name, *rest = shlex.split(line)
        group.commands[name].make_context(name, rest)  # pyright: ignore[reportAttributeAccessIssue]
    assert [shlex.split(line)[1] for line in lines] == ["init", "run", "status", "best", "resume"]


def test_each_command_stands_below_one_heading():
    commands = [name for names in HEADINGS.values() for name in names]
    assert sorted(commands) == sorted(get_command(app).commands)  # pyright: ignore[reportAttributeAccessIssue]
    assert len(HEADINGS) <= 6


def test_the_list_of_commands_cuts_no_sentence_off_in_80_columns():
    lines = shown("--help").splitlines()
    for heading, names in HEADINGS.items():
        begin = lines.index(f"{heading}:") + 1
        rows = lines[begin : begin + len(names)]
        assert [row.split()[0] for row in rows] == [*names]
        assert all(row.endswith(".") and not row.endswith("...") and len(row) <= 80 for row in rows)


@pytest.mark.parametrize("command", ["run", "resume"])
def test_each_option_of_a_run_stands_below_one_heading(command):
    lines = shown(command, "--help").splitlines()
    assert [line[:-1] for line in lines if re.fullmatch(r"\w+:", line)] == [*OPTIONS]
    parameters = get_command(app).commands[command].params  # pyright: ignore[reportAttributeAccessIssue]
    listed = [name for names in OPTIONS.values() for name in names]
    assert len(listed) == len(set(listed)) and {parameter.name for parameter in parameters} <= {*listed}
    for parameter in parameters:
        flag = parameter.opts[0] if parameter.param_type_name == "option" else "[STUDY]"
        assert sum(line.startswith(f"  {flag} ") for line in lines) == 1, flag


def test_a_group_alone_shows_its_commands():
    assert shown("import") == shown("import", "--help")


@pytest.mark.parametrize("words", [["nosuch"], ["import", "nosuch"]])
def test_a_command_that_is_unknown_is_refused(words):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and result.stderr.startswith("error: No such command 'nosuch'")
