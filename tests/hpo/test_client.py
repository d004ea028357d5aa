"""The client of a program: by itself, under a study, and without anything else of hpo."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpo import client


def test_without_a_study_reports_are_printed_and_nobody_says_stop(monkeypatch, capsys):
    for name in (client.TRIAL, client.REPORTS, client.ANSWERS):
        monkeypatch.delenv(name, raising=False)
    trial = client.Trial()
    assert not trial.runs and trial.resume() is None and trial.params.get("lr", 0.1) == 0.1
    trial.save("/nowhere")
    assert trial.report(1, {"val/loss": 0.5}) is False
    assert trial.report(step=20, metrics={"val/loss": 0.25}) is False
    assert capsys.readouterr().out.splitlines() == [
        'report: {"metrics": {"val/loss": 0.5}, "epoch": 1}',
        'report: {"metrics": {"val/loss": 0.25}, "step": 20}',
    ]
    for metrics in ({"val/loss": "0.5"}, {0: 0.5}, {"val/loss": b"1"}):
        with pytest.raises(TypeError, match="name it by text, and give a float of its value"):
            trial.report(2, metrics)
    with pytest.raises(AttributeError, match="unknown parameter 'lr'; known: none, since no study runs"):
        trial.params.lr  # noqa: B018


def test_it_reads_its_answer_among_others_and_half_a_line(monkeypatch, tmp_path):
    told = {"params": {"lr": 0.5}, "epoch": 2, "step": 20, "seed": 7, "resumed": True, "checkpoint": str(tmp_path)}
    (tmp_path / "trial.json").write_text(json.dumps(told | {"steps_per_epoch": 10}))
    files = {client.TRIAL: "trial.json", client.REPORTS: "reports", client.ANSWERS: "answers"}
    for name, file in files.items():
        monkeypatch.setenv(name, str(tmp_path / file))
    trial = client.Trial()
    assert (trial.params.lr, trial.params["lr"], trial.seed, trial.epoch) == (0.5, 0.5, 7, 2)
    assert trial.resume() == tmp_path
    answers = (tmp_path / "answers").open("a")
    looks = iter(['{"id": "other", "stop": true}\n{"id": "', None, '", "stop": false}\n'])

    def answer(seconds: float) -> None:
        part = next(looks)
        [line] = (tmp_path / "reports").read_text().splitlines()[-1:]
        answers.write(json.loads(line)["id"] if part is None else part)
        answers.flush()

    answers.flush()
    monkeypatch.setattr(client.time, "sleep", answer)
    trial.save({"a": tmp_path / "a"})
    assert trial.report(step=35, metrics={"val/loss": 1}) is False
    answers.close()
    assert (trial.step, trial.epoch) == (35, 3)
    [line] = (tmp_path / "reports").read_text().splitlines()
    said = json.loads(line)
    assert (said["checkpoint"], said["step"], said["metrics"]) == ({"a": str(tmp_path / "a")}, 35, {"val/loss": 1.0})


def test_it_needs_the_standard_library_alone_and_may_be_copied(tmp_path):
    text = Path(client.__file__).read_text()
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text, feature_version=(3, 8)))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
    }
    assert imported <= sys.stdlib_module_names


@pytest.mark.usefixtures("process")
def test_importing_it_loads_nothing_of_the_platform():
    code = "import sys, hpo.client; print([name for name in sys.modules if name.startswith(('hpo', 'trainer'))])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['hpo.version', 'hpo', 'hpo.client']"
