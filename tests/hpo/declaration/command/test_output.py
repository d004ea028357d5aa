"""Reports that patterns find in what a program prints: which values belong to a step, and when it is complete."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import regex
import yaml

from hpo import load
from hpo.declaration.command.output import Output
from hpo.declaration.command.reports import Lines, Said
from trainer.errors import TrainerError

STEP, LOSS, ACC = r"step[ =]([\d.]+)", r"loss[ =](\S+)", r"acc (\S+)"


def output(directory: Path, printed: str = "", silence: float = 60.0, **patterns: Any) -> Output:
    (directory / "output").write_text(printed)
    several = patterns.pop("several", "last")
    compiled = {name: regex.compile(text) for name, text in patterns.items()}
    return Output(Lines(directory / "output"), compiled, several, silence)


def told(said: Any) -> list[tuple[int | None, dict[str, float]]]:
    return [(one.epoch if one.step is None else one.step, one.metrics) for one in said]


def reports(directory: Path, *lines: str, **patterns: Any) -> list[tuple[int | None, dict[str, float]]]:
    """The reports of a program that has printed these lines and ended."""
    return told(output(directory, "".join(f"{line}\n" for line in lines), **patterns).new(code=0))


PPO = [f"global_step={step}, episodic_return=[{value}]" for step, value in [(8, 1), (8, 4), (8, 4), (24, 9), (32, 2)]]


@pytest.mark.parametrize(("several", "first"), [("last", 4.0), ("mean", 3.0)])
def test_a_step_with_several_values_is_reported_once(tmp_path, several, first):
    """As CleanRL's PPO prints: a line for each environment whose episode ends at the step."""
    patterns = {"step": r"global_step=(\d+)", "return": r"episodic_return=\[([\d.]+)"}
    said = reports(tmp_path, *PPO, several=several, **patterns)
    assert said == [(8, {"return": first}), (24, {"return": 9.0}), (32, {"return": 2.0})]


def test_a_step_is_complete_once_the_next_is_printed(tmp_path):
    read = output(tmp_path, "step 1 loss 3\n", step=STEP, loss=LOSS)
    assert told(read.new()) == []
    (tmp_path / "output").write_text("step 1 loss 3\nloss 2\nstep 2\n")
    assert told(read.new()) == [(1, {"loss": 2.0})]
    assert told(read.new(code=0)) == [], "the second has no value"


def test_a_step_is_complete_once_the_program_is_silent_and_reported_once(tmp_path):
    read = output(tmp_path, "step 1 loss 3\n", silence=0.2, step=STEP, loss=LOSS)
    assert told(read.new()) == []
    time.sleep(0.25)
    assert told(read.new()) == [(1, {"loss": 3.0})]
    (tmp_path / "output").write_text("step 1 loss 3\nstep 1 loss 7\nstep 2 loss 1\n")
    assert told(read.new()) == []
    assert told(read.new(code=1)) == [(2, {"loss": 1.0})], "what came after the report of step 1 does not count"


@pytest.mark.parametrize("code", [0, 1, -15])
def test_a_program_that_ends_has_completed_its_last_step(tmp_path, code):
    read = output(tmp_path, "step 1 loss 3\nstep 2 loss 2\nstep 3 loss 1", step=STEP, loss=LOSS)
    whole = [(1, {"loss": 3.0}), (2, {"loss": 2.0}), (3, {"loss": 1.0})]
    assert told(read.new(code)) == (whole if code == 0 else whole[:2]), "half a line counts where the program says so"


@pytest.mark.parametrize(("place", "key"), [("epoch", "epoch"), ("step", "step")])
def test_a_program_that_counts_from_0(tmp_path, place, key):
    lines = [f"{place} {n} loss {n / 10}" for n in range(3)]
    [*said] = output(tmp_path, "\n".join(lines), **{place: rf"{place} (\d+)", "loss": LOSS}).new(code=0)
    assert said == [Said({"loss": n / 10}, **{key: n + 1}) for n in range(3)]


@pytest.mark.parametrize(
    ("lines", "right"),
    [
        (["step 1", "loss 3", "acc 1", "step 2", "loss 2", "acc 2"], [(1, 3.0, 1.0), (2, 2.0, 2.0)]),
        (["loss 3", "acc 1", "step 1", "loss 2", "acc 2", "step 2"], [(1, 3.0, 1.0), (2, 2.0, 2.0)]),
        (["loss 3", "step 1 acc 1", "loss 2", "step 2 acc 2"], [(1, 3.0, 1.0), (2, 2.0, 2.0)]),
        (["loss 9 acc 9", "step 1 loss 3 acc 1", "step 2 loss 2 acc 2"], [(1, 3.0, 1.0), (2, 2.0, 2.0)]),
        (["step 1 loss 5", "step 2 loss 4", "step 3 loss 3 acc 1", "step 4 loss 2"], [(3, 3.0, 1.0)]),
        (["step 1 acc 1", "step 2 loss 3", "step 3 loss 2"], [(2, 3.0, 1.0)]),
    ],
    ids=["after", "ahead", "both", "once before training", "some steps lack one", "kept from a step without a report"],
)
def test_values_belong_to_their_step_wherever_it_is_printed(tmp_path, lines, right):
    said = reports(tmp_path, *lines, step=STEP, loss=LOSS, acc=ACC)
    assert said == [(step, {"loss": loss, "acc": acc}) for step, loss, acc in right]


def test_without_a_pattern_for_the_step_a_whole_set_is_a_report_at_once(tmp_path):
    read = output(tmp_path, "loss 3\nloss 2\nacc 1\nloss 1\n", loss=LOSS, acc=ACC)
    assert told(read.new()) == [(1, {"loss": 2.0, "acc": 1.0})]
    assert told(read.new(code=0)) == []


def test_a_step_that_is_no_whole_number_is_refused(tmp_path):
    with pytest.raises(TrainerError, match=r"output\.step has found 1\.5, not a whole number: narrow its group"):
        reports(tmp_path, "step 1.5 loss 1", step=STEP, loss=LOSS)


def test_a_pattern_that_backtracks_for_ever_is_ended(tmp_path):
    begun = time.monotonic()
    with pytest.raises(TrainerError, match=r"output\.loss='.*' needs more than 1 s for 'loss 1+!': write it without"):
        reports(tmp_path, "loss " + "1" * 60 + "!", loss=r"loss ((?:1|11)+)$")
    assert time.monotonic() - begun < 30


def test_a_later_key_at_its_default_leaves_the_meaning_of_a_file(tmp_path):
    """A study that was begun before the key came goes on; another way to take values is another study."""
    base = {
        "command": ["true"],
        "space": {"x": {"type": "int", "low": 1, "high": 9}},
        "minimize": "loss",
        "output": {"loss": "loss (.*)"},
    }
    meanings = []
    for declared in ({}, {"several": "last", "read_when": {}}, {"several": "mean"}):
        (tmp_path / "f.yaml").write_text(yaml.safe_dump(base | declared))
        meanings.append(load(str(tmp_path / "f.yaml")).task_class().source())
    assert meanings[0] == meanings[1] != meanings[2]
    assert meanings[0] == "05bf4348af7eced27bdac766c5f460f9e983ba9b573bdc133cbc814321eca290", "that of release 0.1.0"
