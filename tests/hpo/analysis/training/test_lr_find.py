"""`hpo lr-find` on a real study."""

from __future__ import annotations

import pytest
from trainer_runs import Toy
from typer.testing import CliRunner

from hpo.cli.main import app
from trainer.config import ParallelConfig, ScheduleConfig, TrainConfig
from trainer.diagnose.trial import find_lr
from trainer.errors import ConfigError


def lr_find(*arguments: str):
    return CliRunner().invoke(app, ["lr-find", "--study", "mlp", *arguments])


def test_a_rate_that_trains_is_suggested_and_drawn(tmp_path):
    path = tmp_path / "lr.png"
    shown = lr_find("-o", "train.optim.name=sgd", "-o", "train.optim.momentum=0", "--steps", "60", "--to", str(path))
    assert shown.exit_code == 0, shown.output
    *_, advice, drawn = shown.stdout.splitlines()
    suggested = float(advice.split("train.optim.lr=")[1].split(",")[0])
    assert 1e-3 < suggested < 10
    assert drawn == f"drawn in {path}" and path.read_bytes().startswith(b"\x89PNG")


def test_it_is_a_function_of_the_configuration():
    assert lr_find("--steps", "30").stdout == lr_find("--steps", "30").stdout


def test_one_process_looks_for_all_ranks():
    alone = lr_find("--steps", "30")
    assert alone.exit_code == 0, alone.output
    assert lr_find("--steps", "30", "-o", "train.parallel.data=2").stdout == alone.stdout
    with pytest.raises(ConfigError, match="runs in one process"):
        find_lr(Toy(None), TrainConfig(parallel=ParallelConfig(data=2)))


@pytest.mark.parametrize("scale_lr", ["linear", "sqrt"])
def test_the_rate_is_the_one_to_configure_where_the_batch_scales_it(scale_lr):
    """Steps are then taken at an eighth of it, so the same losses, and what is suggested of them, stand beside rates
    eight times as high."""
    config = TrainConfig.model_validate({"batch_size": 12, "num_epochs": 2, "optim": {"name": "sgd", "lr": 0.1}})
    base = {"linear": 96, "sqrt": 12 * 64}[scale_lr]
    scaled = {"schedule": ScheduleConfig.model_validate({"scale_lr": scale_lr, "base_batch_size": base})}
    plain = find_lr(Toy(None), config, 2.0**-20, 2.0, steps=30)
    found = find_lr(Toy(None), config.model_copy(update=scaled), 2.0**-17, 16.0, steps=30)
    assert found.lrs == pytest.approx([8 * lr for lr in plain.lrs])
    assert found.losses == pytest.approx(plain.losses)


def test_the_rate_is_the_one_to_configure_where_a_task_takes_a_share():
    class Phased(Toy):
        def lr_scale(self, progress):
            return 0.125

    config = TrainConfig.model_validate({"batch_size": 12, "num_epochs": 2, "optim": {"name": "sgd", "lr": 0.1}})
    plain = find_lr(Toy(None), config, 2.0**-20, 2.0, steps=30)
    assert find_lr(Phased(None), config, 2.0**-17, 16.0, steps=30).losses == pytest.approx(plain.losses)


def test_bounds_in_the_wrong_order_are_refused():
    shown = lr_find("--low", "1", "--high", "0.1")
    assert shown.exit_code == 2
    assert "give two rates above 0" in shown.stderr
