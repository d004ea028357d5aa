"""`--json`: every command that prints facts takes it, and prints what docs/guide/json.md says, as strict JSON alone."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crafted import open_crafted, put_trial
from places import ROOT
from typer.main import get_command
from typer.testing import CliRunner

import hpo as library
from hpo.analysis.follow_up.ablate import Ablation
from hpo.analysis.follow_up.confirm import Confirmation
from hpo.cli.json_output import notes, print_json
from hpo.cli.main import app
from hpo.storage.home import Home

# Each with the reason.
WITHOUT = {
    "init": "it writes a file, whose name is its argument",
    "migrate": "its exit code says all",
    "node": "it serves until it is ended",
    "serve": "it serves until it is ended",
    "ui": "it serves until it is ended",
    "watch": "it shows what `status --json` prints, again and again",
    "worker": "it serves until it is ended",
}
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
GROUPS = {"import"}  # whose commands take it


def hpo(*arguments: str, home: Home) -> Any:
    return CliRunner().invoke(app, [*arguments, "--home", str(home.root)])


def strict(text: str) -> Any:
    """What a reader of JSON makes of `text`; fails for what is none, such as NaN, and for a second line."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert text.isascii() and text.count("\n") == 1 and text.endswith("\n")
    return json.loads(text, parse_constant=refuse)


def documented() -> dict[str, set[str]]:
    """Command -> the keys that the guide's table has; `params.<path>` stands for every key that begins so."""
    page = (ROOT / "docs" / "guide" / "json.md").read_text(encoding="utf-8")
    found = {}
    for section in page.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        rows = [line.split("|")[1] for line in body.splitlines() if line.startswith("| `")]
        for command in title.split(", "):
            found[command.removeprefix("hpo ")] = {key for row in rows for key in re.findall("`([^`]+)`", row)}
    return found


def test_every_command_takes_json_or_has_its_reason():
    leaves = {name: [one] if name not in GROUPS else [*one.commands.values()] for name, one in COMMANDS.items()}
    takes = {
        name for name, few in leaves.items() if all("--json" in [o for p in one.params for o in p.opts] for one in few)
    }
    assert takes | WITHOUT.keys() == COMMANDS.keys() and not takes & WITHOUT.keys()
    assert takes == documented().keys(), "docs/guide/json.md has a section for each"


@dataclass
class Found:
    values: dict[Any, Any]
    path: Path


def test_whatever_is_printed_is_strict_json(capsys):
    values = {1: math.nan, "inf": [-math.inf, 0.1 + 0.2], "numpy": np.float64("nan"), "array": np.array([1.5, np.inf])}
    print_json(Found(values, Path("/ä\ud800")))
    found = strict(capsys.readouterr().out)
    assert found["values"] == {"1": None, "inf": [None, 0.1 + 0.2], "numpy": None, "array": [1.5, None]}
    assert found["path"] == "/ä\ud800"
    with pytest.raises(TypeError):  # never a value's repr
        print_json({"a": object()})


def test_notes_go_to_standard_error_beside_json(capsys):
    for as_json in (False, True):
        with notes(as_json):
            print("a note")
    assert capsys.readouterr() == ("a note\n", "a note\n")


def test_tables_with_values_that_are_not_finite(home):
    ledger = open_crafted(home.create().root / "ledger.db")
    put_trial(ledger, 0, "complete", (0.1, math.inf))
    put_trial(ledger, 1, "complete", (None,))
    ledger.close()
    rows = strict(hpo("compare", "--json", home=home).stdout)
    assert [row["values.val/accuracy"] for row in rows] == [None, None]
    assert strict(hpo("show", "0", "--json", home=home).stdout)["values"] == {"val/accuracy": None}


def test_an_error_leaves_standard_output_empty(home):
    ledger = open_crafted(home.create().root / "ledger.db")
    ledger.close()
    for command in ("best", "show 7", "compare --study nobody", "rm --study crafted"):
        said = hpo(*command.split(), "--json", home=home)
        assert (said.exit_code, said.stdout) != (0, "") and said.stdout == "", command
        assert [line for line in said.stderr.splitlines() if line.startswith("error: ")], command


# Each command on one small study.
RUN = "run --study mlp --trials 2 --executor inline --sampler random -o train.num_epochs=1 -o model.hidden_size=16"
PINNED = "-o model.num_layers=1 -o train.batch_size=256"
QUICK = (
    "status",
    "best",
    "show 1",
    "compare --all",
    "verify",
    "sync",
    "gc --study mlp --dry-run",
    "rm --study mlp --yes",
)
DEAR = (
    "resume --study mlp --trials 10",  # from which a forecast is made
    "importance",
    "forecast",
    "plot history",
    "doctor",
    "soup --study mlp --top 2",
    "promote --study mlp",
    "promote --study mlp --undo",  # or its models keep the study from being deleted
    "export 1 --study mlp --to {home}/model.safetensors",
    "schedule --study mlp",
    "lr-find --study mlp --steps 20",
    "batch-find --study mlp --steps 10",
    "plan --study mlp --memory 6GB",
    "diagnose --study mlp --print-only --steps 2 --points 0",
)


@pytest.fixture(scope="module", params=[(), pytest.param(DEAR, marks=pytest.mark.slow)], ids=["quick", "all"])
def said(request, tmp_path_factory, process) -> dict[str, Any]:
    """Command -> what it prints; `handle` the same by Python, while the study was there."""
    home = Home.at(tmp_path_factory.mktemp("facts") / "home")
    found: dict[str, Any] = {}
    for line in (f"{RUN} {PINNED}", "resume --study mlp --trials 3", *request.param, *QUICK):
        if line.startswith("rm"):
            study = library.open("mlp", home=home.root)
            found["handle"] = {"best": study.best, "show": study.trial(1), "digest": study.digest}
        command = hpo(*line.format(home=home.root).split(), "--json", home=home)
        assert command.exit_code == 0, (line, command.output)
        found[line.split()[0]] = strict(command.stdout)
    return found


@pytest.mark.whole
def test_the_keys_are_those_of_the_guide(said):
    guide = documented()
    derived = {"confirm": Confirmation, "ablate": Ablation}
    for command in guide.keys() & (said.keys() | derived.keys()):
        if command in derived:
            keys = {one.name for one in fields(derived[command])}
        else:
            [printed, *_] = said[command] if isinstance(said[command], list) else [said[command]]
            keys = {*printed}
        expected = guide[command] | (guide["status"] if command in ("run", "resume") else set())
        if command == "compare":
            expected, keys = {key for key in expected if "<" not in key}, {key for key in keys if "." not in key}
            keys |= {"front"}  # of several objectives
        assert keys == expected, command


@pytest.mark.whole
def test_they_are_the_facts_that_python_gives(said):
    assert said["best"] == said["handle"]["best"]
    assert said["show"] == said["handle"]["show"]
    assert said["status"]["digest"] == said["resume"]["digest"] == said["handle"]["digest"]
    assert said["run"]["damage"] == said["run"]["reason"] == ""
    ended = 10 if "forecast" in said else 3  # of the last resume
    assert said["run"]["requested"] == 2 and said["resume"]["trials"]["complete"] == said["rm"]["trials"] == ended


@pytest.mark.whole
def test_files_that_are_named_are_there(said):
    assert said["best"]["checkpoint"] and said["rm"]["deleted"]
    assert said["verify"]["differences"] == [] and said["sync"][0]["behind"] == 0
