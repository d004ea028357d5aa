"""The one line on a run: its text, and that it says what the epoch's reports say without asking the device."""

from __future__ import annotations

import math
import re
import time

import pytest
import torch
from trainer_runs import Toy, Trial

from trainer.checkpoint.store import CheckpointStore
from trainer.loop import fit
from trainer.metrics.meter import Meter
from trainer.metrics.progress import Display, Numbers
from trainer.task import Task

LINE = Numbers(
    step=5000,
    total=100000,
    loss=2.3466,
    lr=2.8e-4,
    rate=1.2351e6,
    unit="tokens",
    grad_norm=0.6712,
    clipped=0.003,
    data=0.012,
    left=22 * 3600 + 15 * 60 + 20,
    memory=(72_000_000_000, 80_000_000_000),
)


def test_the_line_is_the_one_that_was_asked_for():
    assert str(LINE) == (
        "Step 5000/100000 | loss 2.347 | ppl 10.45 | lr 2.8e-4 | 1.24M tok/s | mem 72/80 GB | grad norm 0.671 | "
        "clipped 0.3% | data 1.2% | ETA 22h15m"
    )


@pytest.mark.parametrize(
    ("changed", "shown", "gone"),
    [
        ({"unit": "samples", "rate": 12.345}, "12.3 samples/s", "ppl"),
        ({"rate": 0.0}, "0.00 tok/s", "nan"),
        ({"rate": 999.6}, "1000 tok/s", "K"),
        ({"clipped": None}, "grad norm 0.671 | data", "clipped"),
        ({"memory": None}, "tok/s | grad norm", "mem"),
        ({"memory": (350_000_000, 4_100_000_000)}, "mem 0.3/4.1 GB", "nan"),
        ({"loss": math.nan, "left": math.nan}, "loss nan | ppl nan", "ETA n"),
        ({"loss": 800.0}, "ppl inf", "nan"),
        ({"lr": 0.0}, "lr 0.0e0", "nan"),
        ({"left": 45.4}, "ETA 45s", "0m"),
        ({"left": 200.0}, "ETA 3m20s", "0h"),
        ({"left": 3599.7}, "ETA 1h00m", "60m"),
        ({"left": 50 * 3600.0}, "ETA 2d02h", "50h"),
    ],
)
def test_each_part_has_a_form_for_every_size(changed, shown, gone):
    text = str(Numbers(**{**vars(LINE), **changed}))
    assert shown in text and gone not in text


class Tokens(Toy):
    unit = "tokens"
    augment = Task.augment


def shown(tmp_path, every: float, **config) -> tuple[list[str], Trial]:
    trial, lines = Trial(tmp_path, task=Tokens, num_epochs=3, **config), []
    display = Display(lines.append, every)
    assert fit(Tokens(None), trial.config, trial.reporter, CheckpointStore(tmp_path, 1), display).kind == "complete"
    return lines, trial


def test_the_lines_of_an_epoch_say_what_its_report_does(tmp_path):
    """One line per step: the means of their losses and norms are the epochs'."""
    lines, trial = shown(tmp_path, 0.0, batch_size=11, micro_batch_size=None)
    read = [re.search(r"Step (\d+)/12 \| loss (\S+) \| ppl (\S+) \| .* \| grad norm (\S+)", line) for line in lines]
    assert [int(found[1]) for found in read if found] == list(range(1, 13))
    for epoch in range(3):
        of_epoch = read[4 * epoch : 4 * epoch + 4]
        for column, key in ((2, "train/loss"), (4, "train/grad_norm")):
            mean = sum(float(found[column]) for found in of_epoch) / 4
            assert mean == pytest.approx(trial.reporter.values[4 * epoch + 4, key], rel=2e-3)
    assert float(read[0][3]) == pytest.approx(math.exp(float(read[0][2])), rel=2e-3)
    assert lines[-1].endswith("ETA 0s") and "tok/s" in lines[-1]
    assert trial.reporter.values[4, "train/tokens_per_sec"] > 0


def test_a_line_over_several_epochs_holds_all_of_them(tmp_path):
    """The line after the last step is the only one: its loss is that of every sample of the run."""
    [line], trial = shown(tmp_path, 3600.0)
    found = re.search(r"Step 12/12 \| loss (\S+)", line)
    losses = [trial.reporter.values[step, "train/loss"] for step in (4, 8, 12)]
    assert found and float(found[1]) == pytest.approx(sum(losses) / 3, rel=2e-3)


def test_time_spent_waiting_for_data_is_its_own_share(tmp_path):
    class Waiting(Tokens):
        def train_set(self):
            data = super().train_set()

            class Slow(type(data)):
                def __getitems__(self, indices):
                    time.sleep(0.02)
                    return super().__getitems__(indices)

            return Slow(*data[:])

    lines: list[str] = []
    trial = Trial(tmp_path, num_epochs=3)
    fit(Waiting(None), trial.config, trial.reporter, CheckpointStore(tmp_path, 1), Display(lines.append, 3600.0))
    share = float(re.search(r"data (\S+)%", lines[0])[1])
    assert 30 < share < 100


def test_nothing_is_read_from_the_device_for_it(tmp_path, monkeypatch):
    """Windows are read as often as without it."""
    reads: list[int] = []
    drain = Meter.drain
    monkeypatch.setattr(Meter, "drain", lambda self: reads.append(1) or drain(self))
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(2) or item(self))
    lines, _ = shown(tmp_path / "shown", 0.0)
    with_it, _ = len(reads), reads.clear()
    trial = Trial(tmp_path / "plain", task=Tokens, num_epochs=3)
    trial.attempt()
    assert (len(lines), len(reads)) == (12, with_it)


def test_on_no_terminal_it_is_a_line_on_standard_error(tmp_path, capsys):
    trial = Trial(tmp_path, task=Tokens)
    with Display() as display:
        fit(Tokens(None), trial.config, trial.reporter, CheckpointStore(tmp_path, 1), display)
    captured = capsys.readouterr()
    assert captured.out == "" and re.fullmatch(r"Step 8/8 \| loss .*ETA 0s\n", captured.err)
