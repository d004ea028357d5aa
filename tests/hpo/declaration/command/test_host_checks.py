"""A command that cannot run here is refused before a trial is claimed; what cannot be known is not."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpo import load
from hpo.errors import StudyError

SPACE = {"lr": {"type": "float", "low": 0.1, "high": 0.9}}


def check(place: Path, command: Any, **declared: Any) -> None:
    document = {"command": command, "space": SPACE, "minimize": "loss"} | declared
    (place / "mine.yaml").write_text(yaml.safe_dump(document))
    load(str(place / "mine.yaml")).check_task()


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A directory with a script, packages, and one below that is empty; the working directory is another one."""
    for file in ("fit.py", "tool.sh", "with_main/__main__.py", "package/__init__.py", "package/fit.py", "fit.js"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "below").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "bin").mkdir()
    for program in ("torchrun", "node"):
        (tmp_path / "bin" / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "{python} nofit.py",
        "{python} -u -W ignore -Xdev nofit.py --lr={lr}",
        "python3 nofit.py {lr}",
        "env A=b python3 nofit.py",
        "/usr/bin/env python3 nofit.py",
        "sh nofit.py",
        "bash -eo pipefail nofit.py",
        "torchrun --nproc-per-node 2 nofit.py --lr={lr}",
    ],
)
def test_a_script_that_is_missing_is_named_with_the_like_of_it(place, command):
    with pytest.raises(StudyError) as refused:
        check(place, command)
    where = f"{place / 'mine.yaml'}: command: the script 'nofit.py' is missing in {place}, where the command runs"
    assert str(refused.value) == f"{where}; did you mean 'fit.py'?"


@pytest.mark.parametrize(
    ("command", "declared", "said"),
    [
        ("{python} fit.py", {"directory": "below"}, "in {place}/below, where the command runs; it is in {place}: say"),
        ("{python} quite_another", {}, ": correct its path, or name another directory."),
        ("{python} package", {}, "'package' is a directory: name the script in it."),
        ("node absent.js", {}, "the script 'absent.js' is missing in {place}"),
        ("python3.99 fit.py", {}, "'python3.99' is not a program that this host can run"),
        ("env no-such-python fit.py", {}, "'no-such-python' is not a program that this host can run"),
        ("tool.sh", {}, "'tool.sh' is not a program that this host can run: correct its name, or write"),
        ("tool.sh", {}, "./tool.sh for the file of that name there."),
        ("./tool.sh {lr}", {}, "'./tool.sh' is a file that may not be executed: run `chmod +x {place}/tool.sh`"),
        ("{python} -m nopackage --lr={lr}", {}, "finds no module 'nopackage', in {place} or where its packages are"),
        ("{python} -um package.nofit", {}, "finds no module 'package.nofit'"),
        ("{python} -m package", {}, "finds no module 'package.__main__'"),
        ("{python} -mjson.absent", {}, "finds no module 'json.absent'"),
        ("{python} -m package.fit.deeper", {}, "finds no module 'package.fit.deeper'"),
    ],
)
def test_what_is_missing_is_named_with_the_fix(place, command, declared, said):
    with pytest.raises(StudyError) as refused:
        check(place, command, **declared)
    assert said.replace("{place}", str(place)) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "command",
    [
        "{python} fit.py nofit.py",
        "{python} with_main",
        "{python} -c 'print(1)' nofit.py",
        "{python} -um package.fit",
        "{python} -m json.tool",
        "{python} -m with_main",
        "{python} {lr}.py",
        "{python} - nofit.py",
        "python3 -m only_there",
        "env -u A python3 nofit.py",
        "env A={lr} python3 fit.py",
        "sh -c 'exec nofit.py'",
        "sh ls",
        "bash --rcfile a tool.sh",
        "node --require ./setup fit.js",
        "nice -n 5 python3 nofit.py",
        [sys.executable, "fit.py"],
    ],
)
def test_what_runs_or_cannot_be_known_is_not_refused(place, command):
    check(place, command)


def test_a_module_that_the_files_own_path_may_hold_is_not_refused(place):
    check(place, "{python} -m nopackage", environment={"PYTHONPATH": "../lib"})


PROGRAM = "import sys\nprint('loss:', float(sys.argv[1]) {})\n"


@pytest.mark.parametrize(
    ("words", "program", "unseen"),
    [
        ("train.py {lr}", "", ["momentum", "size"]),
        ("train.py {lr} {momentum} {size}", "", []),
        ("train.py ${args}", "", []),
        ("train.py {lr}", "+ float(os.environ['HPO_PARAM_momentum'])", []),
        ("train.py {lr} --momentum={momentum}", "", ["size"]),
    ],
)
def test_a_searched_name_that_the_command_lacks_is_told_of(tmp_path, words, program, unseen):
    (tmp_path / "train.py").write_text(PROGRAM.format(program))
    (tmp_path / "study.yaml").write_text(
        f"command: '{{python}} {words}'\nminimize: loss\noutput: {{loss: 'loss: (.*)'}}\n"
        "space:\n  lr: {type: float, low: 0.1, high: 1.0}\n  momentum: {type: float, low: 0.1, high: 0.9}\n"
        "  size: {type: int, low: 1, high: 9}\n"
    )
    study = load(f"{tmp_path}/study.yaml")
    assert study.task.command.unseen(study.space.paths) == unseen
