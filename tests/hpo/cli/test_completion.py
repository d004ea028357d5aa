"""Completion: what is offered, out of which ledger, at what cost, and that bash, zsh and fish take it."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
from crafted import open_crafted, put_trial
from places import ROOT
from typer.testing import CliRunner

from hpo.analysis.models import export as models
from hpo.analysis.models import quantize
from hpo.analysis.plots import figures, importance
from hpo.cli import completion
from hpo.cli.main import app
from hpo.interchange import export as exports
from hpo.storage.home import Home
from hpo.workers.executors import placement
from trainer.model import export, language_model, quantized


@pytest.fixture
def studied(home: Home) -> Home:
    """A home with a study of two trials."""
    ledger = open_crafted(home.create().root / "ledger.db")
    put_trial(ledger, 0, "complete", (0.1, 0.2))
    put_trial(ledger, 1, "failed")
    ledger.close()
    return home


def offered(*words: str, environment: dict[str, str] | None = None) -> list[str]:
    """What bash gets for the last of `words`."""
    env = {"COMP_WORDS": "\n".join(["hpo", *words]), "COMP_CWORD": str(len(words)), "_HPO_COMPLETE": "complete_bash"}
    done = CliRunner().invoke(app, [], prog_name="hpo", env=env | (environment or {}))
    assert done.exit_code == 0 and done.stderr == "", done.output
    return done.stdout.split()


def test_studies_are_those_of_the_home_that_was_typed(studied, tmp_path):
    at = str(studied.root)
    for command in ("status", "rm", "ui", "worker", "resume"):
        assert offered(command, "--home", at, "--study", "") == ["crafted"], command
    assert offered("status", "--home", at, "--study", "x") == []
    assert offered("status", "--study", "cr", environment={"HPO_HOME": at}) == ["crafted"]
    assert offered("status", "--storage", f"sqlite:///{at}/ledger.db", "--study", "") == ["crafted"]
    (tmp_path / "url").write_text(f"sqlite:///{at}/ledger.db\n")
    assert offered("status", "--study", "", environment={"HPO_STORAGE_FILE": str(tmp_path / "url")}) == ["crafted"]


def test_trials_and_metrics_are_those_of_the_study(studied):
    at = ("--home", str(studied.root))
    assert offered("show", *at, "") == ["0", "1"] == offered("export", *at, "--study", "crafted", "")
    assert offered("best", *at, "--trial", "1") == ["1"]
    assert offered("plot", *at, "--metric", "") == ["val/accuracy"]
    assert offered("confirm", *at, "--hold-out", "val/") == ["val/accuracy"]


def test_a_name_that_a_shell_would_print_raw_is_not_offered(home):
    ledger = open_crafted(home.create().root / "ledger.db")
    put_trial(ledger, 0, "complete", (0.1,), metrics={"\x1b[2Jmetric": 1.0, "val/\u202emetric": 1.0})
    ledger.close()
    assert offered("confirm", "--home", str(home.root), "--hold-out", "") == ["val/accuracy"]


def test_what_a_run_begins_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("mlp_here.py", "space.yaml", "notes.txt", "mine/deep.py", "mine/.hidden.py", "mine/_shared.py"):
        (tmp_path / name).write_text("raise SystemExit('a file that is completed is not run')")
    assert offered("run", "--study", "m") == ["mlp", "mine/deep.py", "mlp_here.py"]
    assert offered("run", "--study", f"{tmp_path}/s") == [f"{tmp_path}/space.yaml"]
    assert offered("run", "--study", "mlp", "--config", "") == ["space.yaml"]
    assert offered("run", "--study", "mlp_here.py", "-o", "train.optim.nam") == [
        "train.optim.name=",
        "train.optim.name=adamw",
    ]


def test_paths_of_overrides(studied):
    assert "model.hidden_size=" in offered("run", "--study", "mlp", "-o", "model.")
    # Two offers leave the shell without the space that it sets after the only one.
    assert offered("run", "--study", "mlp", "-o", "model.hidden") == ["model.hidden_size=", "model.hidden_size=64"]
    own = offered("schedule", "--home", str(studied.root), "--study", "crafted", "-o", "")
    assert own and not any(path.startswith("model.hidden") for path in own)


def test_names_are_those_of_the_tables():
    assert (*figures.KINDS,) == completion.KINDS and (*importance.EVALUATORS,) == completion.EVALUATORS
    of_models = {*export.FORMATS, *language_model.WRITERS}
    assert {*of_models, *exports.FORMATS} == {*completion.FORMATS} and {*models.FORMATS} == of_models
    assert (*quantized.KINDS,) == completion.QUANTIZED == quantize.KINDS
    assert (*placement.EXECUTORS,) == completion.EXECUTORS
    assert placement.SCHEDULERS == completion.SCHEDULERS
    assert offered("plot", "h") == ["history"] and offered("run", "--strategy", "asha") == ["asha", "asha-promote"]
    assert offered("run", "--sampler", "nsga") == ["nsga2", "nsga3"]


def test_nothing_is_said_where_there_is_nothing_to_know(home, tmp_path):
    for at in (home.root, tmp_path / "file"):
        (tmp_path / "file").write_text("no directory")
        assert offered("status", "--home", str(at), "--study", "") == []
        assert offered("show", "--home", str(at), "") == []
    assert not home.root.exists(), "nothing is made"
    home.create().root.joinpath("ledger.db").write_bytes(b"no database" * 1000)
    assert offered("status", "--home", str(home.root), "--study", "") == []
    assert offered("run", "--study", f"{tmp_path}/nowhere/x") == []
    assert offered("status", "--storage", "postgresql+psycopg://me:pw@127.0.0.1:9/x", "--study", "") == []


LOADS = """
import sys
from typer.testing import CliRunner
from hpo.cli.main import app
CliRunner().invoke(app, [], prog_name="hpo")
heavy = {"torch", "mlflow", "optuna", "ray", "scipy", "pandas", "pyarrow", "alembic", "sklearn"} & {*sys.modules}
assert not heavy, heavy
"""


@pytest.mark.usefixtures("process")
def test_completion_loads_nothing_heavy(studied):
    for words in ("status --study", "run --study mlp -o", "show", "plot --metric", "run --sampler", "run --study"):
        line = ["hpo", *words.split(), *(["--home", str(studied.root)] if words == "show" else []), ""]
        env = {"COMP_WORDS": "\n".join(line), "COMP_CWORD": str(len(line) - 1), "_HPO_COMPLETE": "complete_bash"}
        env |= {"HPO_HOME": str(studied.root), "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", LOADS], check=True, env=os.environ | env)


class Shell:
    """An interactive shell at a terminal, with the completion that `hpo --show-completion` prints there."""

    START: ClassVar = {
        "bash": ("--norc", "--noprofile", "-i"),
        "zsh": ("-f", "-i"),
        "fish": ("--no-config", "-i"),
    }

    def __init__(self, name: str, directory: Path) -> None:
        binary = directory / "bin" / "hpo"
        binary.parent.mkdir()
        binary.write_text(f"#!{sys.executable}\nfrom hpo.__main__ import main\nmain()\n")
        binary.chmod(0o755)
        env = {k: v for k, v in os.environ.items() if not k.startswith("HPO_")} | {
            "PATH": f"{binary.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(directory),
            "TERM": "xterm",
            "COLUMNS": "200",
        }
        child, self.terminal = pty.fork()
        if child == 0:
            os.chdir(directory)
            os.execvpe(name, [name, *self.START[name]], env)
        self.child = child
        if name == "zsh":
            self.write("autoload -Uz compinit && compinit -u\n")
        # It finds out by itself which shell has started it.
        self.write("hpo --show-completion > completion && source ./completion && echo be''gun\n")
        self.until("begun")

    def write(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def until(self, expected: str, seconds: float = 40.0) -> str:
        """What is shown until `expected` is."""
        seen, end = "", time.monotonic() + seconds
        while expected not in seen:
            assert time.monotonic() < end, f"{expected!r} is not in {seen!r}"
            if select.select([self.terminal], [], [], 0.2)[0]:
                seen += os.read(self.terminal, 4096).decode(errors="replace")
        return seen

    def close(self) -> None:
        os.close(self.terminal)
        os.waitpid(self.child, 0)


@pytest.fixture
def shell(request: Any, tmp_path: Path, process: None) -> Any:
    if shutil.which(request.param) is None:
        pytest.skip(f"runs where {request.param} is installed")
    directory = tmp_path / "shell"
    directory.mkdir()
    opened = Shell(request.param, directory)
    yield opened
    opened.close()


@pytest.mark.whole
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"], indirect=True)
def test_a_real_shell_completes(shell, studied):
    shell.write(f"hpo status --home {studied.root} --study cra\t")
    shown = shell.until("fted")
    shell.write("\x15hpo run --study mlp -o model.hid\t")  # ^U takes the line away
    shown += shell.until("den_size=")
    assert "Traceback" not in shown, "nothing but what is completed"
