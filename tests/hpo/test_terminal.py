"""Nothing that a user or an import has named acts on a terminal: every command shows it as escapes."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from crafted import open_crafted, put_trial
from places import ROOT
from sqlalchemy import insert, update
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.display.console import Console
from hpo.errors import UserError
from hpo.ledger.database import tables
from hpo.storage.home import Home
from hpo.terminal import print as tell
from hpo.terminal import rewrite
from trainer.errors import ConfigError
from trainer.quote import in_one_line, unseen, visible

EVIL = "\x1b]0;OWNED\x07\x1b[2J\u202egpj\u2066\x9b31m\r\x08\u200b\u2028end"
SHOWN = r"\u001b]0;OWNED\u0007\u001b[2J\u202egpj\u2066\u009b31m\u000d\u0008\u200b\u2028end"
_STYLES = re.compile(
    r"\x1b\[[0-9;]*m|\x1b\[\?25[hl]|\x1b\[[0-9]*[AKJG]|\r"
)  # what tables and the live view are drawn with


class Terminal(io.StringIO):
    """A stream that commands take for a terminal."""

    encoding = "utf-8"  # pyright: ignore

    def isatty(self) -> bool:
        return True


def unseen_in(text: str) -> list[str]:
    """The characters of an output that a terminal may obey, but for the codes of styles and of the cursor."""
    return sorted({repr(one) for one in _STYLES.sub("", text) if unseen(one)})


def test_what_is_unseen_is_every_control_and_format_and_nothing_else():
    every = map(chr, range(0x110000))
    assert {one for one in every if unseen(one)} == {
        one for one in map(chr, range(0x110000)) if unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    } - {"\n", "\t"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (EVIL, SHOWN),
        ("größe 精度 😀 a\u00a0b\u3000c", "größe 精度 😀 a\u00a0b\u3000c"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
        (r"\u202e", r"\u202e"),
    ],
)
def test_a_text_is_shown_with_what_is_unseen_as_escapes(text, shown):
    assert visible(text) == shown and visible(shown) == shown
    assert in_one_line(text) == shown.replace("\n", r"\n").replace("\t", r"\t")


def test_a_printed_text_an_error_and_a_rewritten_line_are_visible(capsys):
    tell("a", EVIL, sep="|", end="!")
    assert capsys.readouterr().out == f"a|{SHOWN}!"
    assert str(UserError(EVIL)) == str(ConfigError(EVIL)) == SHOWN
    terminal = Terminal()
    rewrite(EVIL, terminal)
    assert terminal.getvalue() == f"\r\x1b[K{SHOWN}"


@pytest.mark.parametrize("terminal", [io.StringIO(), Terminal()])
def test_a_console_shows_texts_as_escapes_and_keeps_its_own_styles(terminal):
    from rich.table import Table
    from rich.text import Text

    console = Console(file=terminal, width=200, color_system="standard" if terminal.isatty() else None)
    table = Table(title=EVIL, caption=Text(EVIL))
    table.add_column(EVIL)
    table.add_row(Text(EVIL, style="bold red"))
    for one in (EVIL, Text(EVIL), table, Text.assemble((EVIL, "bold"), "b")):
        console.print(one, markup=False, highlight=False, style="green")
    assert unseen_in(terminal.getvalue()) == []
    assert ("\x1b[" in terminal.getvalue()) is terminal.isatty() and r"\u202egpj" in terminal.getvalue()


def _modules() -> list[Path]:
    return sorted((ROOT / "hpo").rglob("*.py"))


_APART = {"hpo/terminal.py", "hpo/cli/console.py"}
_APART |= {"hpo/client.py", "hpo/declaration/my_study.py"}  # where a user's program prints its own words
_APART |= {"hpo/declaration/command/guard.py"}  # which writes into the log of such a program
_WAYS = re.compile(
    r"sys\.(__)?std(out|err)(__)?\.(buffer\.)?write|typer\.(echo|secho)|click\.|traceback\.print_|pprint"
)
_WAYS = re.compile(rf"{_WAYS.pattern}|builtins\.print|warnings\.warn|rich\.(get_console|print)|faulthandler")


@pytest.mark.parametrize("module", _modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_prints_by_the_one_function(module):
    if str(module.relative_to(ROOT)) in _APART:
        return
    source = module.read_text()
    tree = ast.parse(source)
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    imports = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert "print" not in calls or "hpo.terminal.print" in imports, "import print from hpo.terminal"
    assert "rich.console.Console" not in imports, "take the Console of hpo.display.console"
    assert not [call for call in calls if _WAYS.match(call)], "print by hpo.terminal"
    assert not re.search(r"os\.write\((1|2), (?!b.|.*visible\()", source), "write visible(text)"


# A ledger that holds EVIL wherever a person, a program or an import can write


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Home:
    at = Home.at(tmp_path_factory.mktemp("evil") / "home").create()
    objectives = [{"metric": f"val/{EVIL}", "direction": "minimize", "select": "last"}]
    ledger = open_crafted(
        at.root / "ledger.db",
        objectives=objectives,
        constraints=[{"metric": EVIL, "lower": None, "upper": 1.0}],
        metrics=["*"],
        overrides={EVIL: EVIL},
        reference=f"{EVIL}.py",
    )
    with ledger.write() as connection:
        environment = {"host": EVIL, "home": str(at.root), "tracking_uri": at.tracking_uri, "versions": {EVIL: EVIL}}
        environment |= {"data": {EVIL: 3, f"b{EVIL}": EVIL, "c": [EVIL]}, "git": {"commit": EVIL}}
        environment |= {"python": EVIL, "workers": 2}
        values = {"environment": environment, "identity": {"data": {EVIL: EVIL}}}
        connection.execute(update(tables.studies).values(**values))
        connection.execute(update(tables.workers).values(host=EVIL))
    trials = []
    states = ("complete", "complete", "pruned", "infeasible", "failed", "running", "paused", "waiting")
    for number, state in enumerate(states):
        params = {f"model.{EVIL}": EVIL + str(number), f"x.{EVIL}": 0.1 * number, "same": EVIL}
        words = {"error": f"{EVIL}: {EVIL}", "traceback": f'Traceback\n  File "{EVIL}", line 1\n{EVIL}', "start": EVIL}
        words = words if state in ("failed", "infeasible", "pruned") else {}
        curve = (0.5 + number, 0.25 + number) if state != "waiting" else ()
        trials.append(put_trial(ledger, number, state, curve, params=params, metrics={EVIL: 1.0}, **words))
    with ledger.write() as connection:
        key = tables.reports.c.key
        connection.execute(update(tables.reports).where(key == "val/accuracy").values(key=f"val/{EVIL}"))
        for number in (-1, *range(len(states))):
            tag = {"study_id": 1, "number": number, "key": EVIL, "value": EVIL, "at": 0.0}
            connection.execute(insert(tables.tags).values(tag))
        for trial in trials:
            event = {"study_id": 1, "trial_id": trial, "kind": "skipped_step", "fields": {EVIL: EVIL, "step": 1}}
            connection.execute(insert(tables.events).values(**event, revision=1, uid=f"{trial}", at=0.0))
            decision = {"trial_id": trial, "step": 20, "fold": 0, "verdict": "stop", "reason": EVIL, "params": {}}
            decision |= {"strategy": EVIL, "fence": 1, "revision": 1, "checkpoint": EVIL}
            connection.execute(insert(tables.decisions).values(decision))
            checkpoint = {"trial_id": trial, "step": 20, "epoch": 2, "path": EVIL, "sha256": "0" * 64, "size": 1}
            checkpoint |= {"state": "kept", "metrics": {f"val/{EVIL}": 0.5}, "fence": 1, "revision": 1, "at": 0.0}
            connection.execute(insert(tables.checkpoints).values(checkpoint))
    ledger.close()
    return at


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> tuple[Home, str]:
    """A home with a study that was imported from such a table, and what the import printed."""
    place = tmp_path_factory.mktemp("imported")
    rows = [{f"params.{EVIL}": EVIL, "values.loss": 0.5, f"user_attrs_{EVIL}": EVIL, f"x{EVIL}": 1, "number": EVIL}]
    (place / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    home = Home.at(place / "home")
    patch = pytest.MonkeyPatch()
    said = _said(f"import csv {place}/runs.jsonl --metric loss", home, False, patch)
    return home, said


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_what_an_import_has_named_does_not_act_on_a_terminal(imported, terminal, monkeypatch):
    home, said = imported
    for line in ("show 0", "compare", "best", "status", "export --to T.json --force"):
        said += _said(line.replace("T.json", str(home.root / "T.json")), home, terminal, monkeypatch)
    assert unseen_in(said) == [] and said.count(r"\u202egpj") > 5
    assert "imported from csv" in said and "Traceback" not in said


COMMANDS = [
    *(
        "status",
        "best",
        "best --trial 0",
        "compare",
        "compare --all",
        "tag study",
        "tag 0",
        "watch --once",
        "importance",
    ),
    *("show 0", "show 0 --all", "show 2", "show 3 --all", "show 4", "show 4 --all", "show 5", "show 6", "show 7"),
    *("verify", "gc --dry-run", "rm --study crafted --dry-run", "tag 0 --remove nothing", "show 99", "doctor"),
    *(
        "confirm --top 1 --seeds 1",
        "ablate",
        "soup",
        "diagnose 0",
        "report --to REPORT.html",
        "export --to T.csv --force",
    ),
    *("run --study crafted", "resume --study crafted", "plot history --to PLOTS", "schedule --study crafted"),
]


def _said(line: str, home: Home, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """All that the command prints, standard output and error together."""
    stream = Terminal() if terminal else io.StringIO()
    words = line.split()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stream)
        patch.setattr("sys.stderr", stream)
        patch.setenv("COLUMNS", "240")
        patch.setenv("TERM", "xterm-256color")
        with contextlib.suppress(SystemExit):
            app([*words, "--home", str(home.root)])
    return stream.getvalue()


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
@pytest.mark.parametrize("line", COMMANDS)
def test_no_command_lets_a_name_act_on_a_terminal(line, terminal, home, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    said = _said(line, home, terminal, monkeypatch)
    assert said.strip() and "Traceback (most recent" not in said
    assert unseen_in(said if terminal else said.replace("\x1b", "\x07")) == []
    if line.startswith(("show", "compare", "tag")) and "nothing" not in line and "99" not in line:
        assert r"\u001b]0;OWNED" in said and r"\u202egpj" in said


_STUDY = f"""
import hpo

EVIL = {EVIL!r}


@hpo.study(
    space={{"x": hpo.Float(0.0, 1.0), "opt": hpo.Choice([EVIL, EVIL + "b"])}},
    minimize=EVIL, num_epochs=1, strategy="none", sampler="random", metrics=["*"],
)
def evil(trial):
    trial.tag("team", EVIL)
    if trial.number:
        raise type(EVIL, (Exception,), {{}})(EVIL)
    trial.report(1, {{EVIL: 0.5, EVIL + "2": 1.0}})
"""


@pytest.mark.whole
@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_a_run_lets_no_name_act_on_a_terminal(tmp_path, terminal, monkeypatch):
    (tmp_path / "evil.py").write_text(_STUDY)
    home = Home.at(tmp_path / "home")
    said = _said(f"run --study {tmp_path}/evil.py --executor inline --trials 3", home, terminal, monkeypatch)
    for line in ("show 0", "show 1", "compare", "best"):
        said += _said(line, home, terminal, monkeypatch)
    assert unseen_in(said if terminal else said.replace("\x1b", "\x07")) == []
    assert said.count(SHOWN) > 10 and "on purpose" not in said


@pytest.mark.parametrize("line", ["status", "best", "show 4", "compare", "tag 0"])
def test_json_holds_every_text_as_it_is(line, home):
    ran = CliRunner().invoke(app, [*line.split(), "--json", "--home", str(home.root)])
    assert EVIL in _texts(json.loads(ran.stdout)) or line == "status"
    assert ran.stdout.isascii()


def _texts(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {*value} | {text for one in value.values() for text in _texts(one)}
    if isinstance(value, list):
        return {text for one in value for text in _texts(one)}
    return {value} if isinstance(value, str) else set()
