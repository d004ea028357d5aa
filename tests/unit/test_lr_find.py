"""`hpo lr-find` on a real study."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from hpo.cli import app


def lr_find(*arguments: str):
    return CliRunner().invoke(app, ["lr-find", "--study", "mlp", *arguments])


def test_a_rate_that_trains_is_suggested_and_drawn(tmp_path):
    path = tmp_path / "lr.png"
    shown = lr_find("-o", "train.optim.name=sgd", "-o", "train.optim.momentum=0", "--steps", "60", "--save", str(path))
    assert shown.exit_code == 0, shown.output
    *_, advice, drawn = shown.stdout.splitlines()
    suggested = float(advice.split("train.optim.lr=")[1].split(",")[0])
    assert 1e-3 < suggested < 10
    assert drawn == f"drawn in {path}" and path.read_bytes().startswith(b"\x89PNG")


def test_it_is_a_function_of_the_configuration():
    assert lr_find("--steps", "30").stdout == lr_find("--steps", "30").stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--low", "1", "--high", "0.1"], "give two rates above 0"),
        (["-o", "train.parallel.data=2"], "leave train.parallel out"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(arguments, sentence):
    shown = lr_find(*arguments)
    assert shown.exit_code == 2
    assert sentence in shown.stderr
