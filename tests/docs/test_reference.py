"""docs/reference has what the code has: strategies and samplers with options and defaults, and all commands."""

from __future__ import annotations

import re
from typing import Any

import typer.main
from places import ROOT
from typer._click import Context

from hpo.cli.main import app
from hpo.search.samplers.registry import SAMPLERS
from hpo.search.strategies.registry import STRATEGIES, make_strategy

REFERENCE = ROOT / "docs" / "reference"
NEEDED: dict[str, dict[str, Any]] = {"patient": {"strategy": {"name": "asha"}}, "threshold": {"upper": 1.0}}
NOT_FOR_PEOPLE = {"node"}  # says which line replaces it


def fields(strategy: str) -> dict[str, Any]:
    """Returns the options of a strategy, by name."""
    made: Any = make_strategy({"name": strategy, **NEEDED.get(strategy, {})})
    return dict(type(made).model_fields)


def rows(page: str) -> list[list[str]]:
    """Returns the cells of each row of a page's tables."""
    lines = (REFERENCE / page).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("| `")]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_strategy_has_a_row_and_its_options_are_listed():
    table = rows("strategies.md")
    strategies = [name for row in table if len(row) == 3 for name in names(row[0])]
    assert sorted(strategies) == sorted(STRATEGIES)
    listed = {name for row in table if len(row) == 4 for name in names(row[0])}
    assert listed == {option for name in STRATEGIES for option in fields(name)} - {"name"}


def test_numbers_among_defaults_are_those_of_the_page():
    shown = {names(row[0])[0]: row[1] for row in rows("strategies.md") if len(row) == 4 and len(names(row[0])) == 1}
    for name in STRATEGIES:
        for option, field in fields(name).items():
            if option in shown and isinstance(field.default, int | float):
                assert f"{field.default:g}" in re.findall(r"[\d.]+", shown[option]), (name, option)


def test_every_sampler_has_a_row_with_its_options():
    table = {name: row for row in rows("samplers.md") if len(row) == 4 for name in names(row[0])}
    assert sorted(table) == sorted(SAMPLERS)
    for name, kind in SAMPLERS.items():
        shown = {option: int(value) for option, value in re.findall(r"`(\w+)` \((\d+)\)", table[name][2])}
        assert shown == dict(kind.options), name
        assert table[name][3] == ("any" if kind.several else "one"), name


def test_every_command_has_a_row():
    group: Any = typer.main.get_command(app)
    shown = {command for row in rows("commands.md") for command in re.findall(r"`hpo ([a-z-]+)", row[0])}
    assert {*group.list_commands(Context(group))} - NOT_FOR_PEOPLE == {name for name in shown if name[0] != "-"}
