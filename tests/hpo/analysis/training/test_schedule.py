"""`hpo schedule`, the pictures, and the guide's tables."""

from __future__ import annotations

import re
import sys

import pytest
from places import ROOT
from pydantic import BaseModel
from typer.testing import CliRunner

from hpo.analysis.training.schedule import BARS, curve
from hpo.cli.main import app
from trainer.config.schedule import OWN_FIELDS, OWN_FUNCTION, WARMUPS
from trainer.diagnose import figures
from trainer.errors import ConfigError
from trainer.runtime.epochs import Epochs

GUIDE = ROOT / "docs/guide/schedules.md"


def schedule(*arguments: str):
    return CliRunner().invoke(app, ["schedule", "--study", "mlp", *arguments])


def test_the_text_shows_the_curve_of_the_studys_own_data():
    shown = schedule("-o", "train.schedule.name=linear", "-o", "train.optim.lr=0.1")
    assert shown.exit_code == 0
    head, bars, _, *rows = shown.stdout.splitlines()
    assert head == "mlp: linear (340 steps of 34 an epoch)"  # ceil(1077 / 32) windows, 10 epochs
    assert bars[0] == BARS[-1]
    assert [*bars] == sorted(bars, reverse=True)
    assert rows[0].split() == ["0", "0.00", "0.1"]
    assert rows[-1].split() == ["339", "9.97", f"{0.1 / 340:.4g}"]


def test_the_batch_size_rule_and_the_optimizers_default_count():
    given = {"train.schedule.scale_lr": "linear", "train.batch_size": 64, "train.optim.name": "sgd"}
    assert curve("mlp", given, steps_per_epoch=3).rates == [0.1 * 64 / 256] * 30


def test_what_only_a_run_knows_is_said_beside_the_curve(tmp_path, monkeypatch):
    given = ["-o", "train.schedule.name=plateau", "-o", "train.schedule.plateau.monitor=val/loss"]
    given += ["-o", "train.schedule.warmup_steps=10", "--steps-per-epoch", "1"]
    _, cold, note, bars, *rows = schedule(*given).stdout.splitlines()
    assert cold.startswith("the warmup of 10 steps outlasts the run of 10, so train.optim.lr is never reached")
    assert note == "falls to 0.5 of itself at each plateau of val/loss, which only a run knows"
    assert set(bars) <= set(BARS) and rows
    titles = []
    monkeypatch.setattr(
        figures, "learning_rates", lambda title, *rest: titles.append(title) or figures.figure(title)[0]
    )
    assert schedule(*given, "--to", str(tmp_path / "a.png")).exit_code == 0
    assert note in titles[0] and "outlasts" in titles[0]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_written(tmp_path, suffix):
    path = tmp_path / f"lr.{suffix}"
    saved = schedule("-o", "train.schedule.name=cyclical", "--steps-per-epoch", "5", "--to", str(path))
    assert saved.exit_code == 0, saved.output
    head = path.read_bytes()[:300]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in head or b"<!DOCTYPE svg" in head


def test_a_picture_shows_the_rates_it_was_given():
    drawn = figures.learning_rates("title", [1.0, 2.0, 3.0], Epochs(2))
    (line,) = drawn.axes[0].lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([0, 1, 2], [1.0, 2.0, 3.0])


def refused(result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_mistakes_are_one_sentence(tmp_path, monkeypatch):
    few = ("--steps-per-epoch", "2", "--to")
    assert "power=2.0 is not read by cosine" in refused(
        schedule("-o", "train.schedule.name=cosine", "-o", "train.schedule.power=2")
    )
    assert "give a file that ends in .png, .pdf or .svg." in refused(schedule(*few, str(tmp_path / "a.xyz")))
    assert "does not exist; make it" in refused(schedule(*few, str(tmp_path / "no" / "a.png")))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'hpo[plots]'" in refused(schedule(*few, str(tmp_path / "a.png")))
    with pytest.raises(ConfigError, match="needs matplotlib"):
        figures.figure("")


def test_a_study_that_trains_by_itself_has_no_schedule(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from pydantic import BaseModel\n"
        "from hpo import Objective, Study\n"
        "class Config(BaseModel):\n    x: float = 0.0\n"
        "STUDY = Study('own', Config(), 'own:Task', {}, [Objective('val/loss', 'minimize')])\n"
    )
    assert "has no TrainConfig in its field train" in refused(
        CliRunner().invoke(app, ["schedule", "--study", str(file)])
    )


# --- The guide


def rows(heading: str) -> dict[str, list[str]]:
    """The guide's table that begins with the column `heading`: first cell -> the others."""
    table = GUIDE.read_text().split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {first.strip("`"): rest for first, *rest in cells}


def written(fields: dict) -> dict[str, str]:
    """Field -> default as the guide writes them; "" where the default depends on the run."""
    flat: dict[str, str] = {}
    for name, value in fields.items():
        if isinstance(value, BaseModel):
            flat |= {f"{name}.{part}": "none" if default is None else str(default) for part, default in value}
        else:
            flat[name] = "" if value is None else "empty" if value == {} else str(value)
    return flat


def test_the_guide_lists_every_schedule_with_its_fields_and_defaults():
    table = rows("schedule")
    assert list(table) == [*OWN_FIELDS, "package.module:function"]
    for name, (_, cell, _) in table.items():
        told = dict(re.findall(r"`([\w.]+)` ([^,]+)", cell))
        expected = written(OWN_FIELDS.get(name, OWN_FUNCTION))
        assert told.keys() == expected.keys(), name
        assert all(told[field] == default for field, default in expected.items() if default), name


def test_the_guide_lists_every_warmup():
    assert list(rows("warmup")) == list(WARMUPS.__args__)
