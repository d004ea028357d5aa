"""How many trials of a study that begins train as lanes: as asked where they are alike, by measurement for auto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lane_studies import LANES, groups
from places import HARNESS
from rounds import rounds
from study_runs import hpo, known

from hpo.driver import lane_width
from hpo.driver.lane_width import settled
from hpo.driver.request import RunRequest
from hpo.driver.resolve import declare
from hpo.storage.home import Home
from hpo.workers import lane_probe
from hpo.workers.executors.placement import Placement

LOCAL = Placement("local", 2)
ONE_SIZE = {"model.hidden_size": 8}


def asked(lanes: Any, home: Path, **flags: Any) -> tuple[RunRequest, Any]:
    reference, overrides = flags.pop("reference", str(LANES)), flags.pop("overrides", {})
    request = RunRequest(Home(home), reference=reference, overrides={"train.lanes": lanes, **overrides}, **flags)
    return request, declare(request, None, workers=2)


def chosen(home: Path, lanes: Any, **flags: Any) -> tuple[int, str]:
    request, resolved = asked(lanes, home, **flags)
    after, why = settled(request, resolved, None, LOCAL)
    assert (after == request) == (not why)
    return after.overrides["train.lanes"], why


def test_a_search_over_shapes_trains_one_by_one(tmp_path):
    """The quickstart's space: 8 lanes would hold 8 models of 50 kinds."""
    lanes, why = chosen(tmp_path, 8, reference="mlp")
    assert lanes == 1
    assert why == (
        "train.lanes=8: trials train one by one, since they differ in train.optim.name, train.batch_size, which is the "
        "same for all lanes of a model: set them by -o to have them fused"
    )


@rounds(
    ("lanes", "kinds", "order", "fused"),
    [
        (4, 1, "ordered", True),
        (3, 1, "ordered", False),
        (8, 2, "ordered", False),  # with rungs in order a group takes no trial beyond one of another kind
        (8, 2, "async", True),
        (7, 2, "async", False),
    ],
)
def test_lanes_are_fused_where_four_of_them_are_alike(tmp_path, lanes, kinds, order, fused):
    _, resolved = asked(lanes, tmp_path, order=order, overrides=ONE_SIZE if kinds == 1 else {})
    assert (lane_width._scattered(resolved, lanes, ("model.dropout",)) == "") is fused


def test_on_a_gpu_is_said_what_lanes_cannot_promise_there(tmp_path, monkeypatch):
    def told(lanes: int, **overrides: Any) -> str:
        request, resolved = asked(lanes, tmp_path, overrides={**ONE_SIZE, **overrides})
        after, words = settled(request, resolved, None, LOCAL)
        assert after == request
        return words

    assert not told(8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert told(8) == f"train.lanes=8: {lane_width.ON_GPUS}"
    assert not told(8, **{"train.device": "cpu"}) and not told(1)


def test_a_study_that_has_begun_keeps_its_number(tmp_path):
    """Also one of several kinds that fused them before; and the same command again is no change."""
    for before, now, after in ((4, "auto", 4), (1, "auto", 1), (1, 8, 1), (8, 8, 8), (4, 8, 8)):
        _, begun = asked(before, tmp_path, order="async")
        request, resolved = asked(now, tmp_path, order="ordered", reference="mlp" if after == 1 else str(LANES))
        found, _ = settled(request, resolved, begun.spec, LOCAL)
        assert found.overrides["train.lanes"] == after, (before, now)


@rounds(
    ("flags", "placement", "words"),
    [
        ({}, LOCAL, "at the rungs of strategy asha lanes wait for each other"),
        ({"strategy": "none"}, Placement("ray-tune", 2), "workers of ray-tune are not measured from here"),
        ({"strategy": "none", "trials": 6}, LOCAL, "fewer than 4 trials for each worker"),
        ({"strategy": "none", "overrides": {"train.compile": True}}, LOCAL, "cannot do with compile=true"),
        ({"strategy": "none", "reference": "mlp"}, LOCAL, "they differ in train.optim.name, train.batch_size"),
    ],
)
def test_auto_is_one_by_one_where_lanes_cannot_pay_and_says_why(tmp_path, monkeypatch, flags, placement, words):
    """Before anything is measured."""
    monkeypatch.setattr(lane_width, "ask", lambda *_: pytest.fail("it asks the task"))
    request, resolved = asked("auto", tmp_path, **flags)
    found, why = settled(request, resolved, None, placement)
    assert found.overrides["train.lanes"] == 1 and words in why, why


@rounds(
    ("seconds", "lanes"),
    [
        ({1: 10.0, 4: 8.0, 8: 7.0, 16: 6.0}, 16),
        ({1: 10.0, 4: 5.0, 8: 4.0, 16: 7.0}, 8),
        ({1: 10.0, 4: 8.0, 8: 7.0, 16: 6.7}, 1),
        ({1: 10.0, 4: 18.0}, 1),
    ],
)
def test_auto_takes_the_quickest_if_it_gains_by_half(tmp_path, monkeypatch, seconds, lanes):
    told = json.dumps({"fields": ["model.dropout"], "seconds": seconds, "against": ""})
    monkeypatch.setattr(lane_width, "ask", lambda *_: told)
    found, why = chosen(tmp_path, "auto", strategy="none", overrides=ONE_SIZE)
    assert found == lanes and (f"{10.0 / seconds[lanes]:.1f} times as quick" in why) == (lanes > 1)


def test_what_a_step_takes_is_measured_on_its_own_and_by_lanes(tmp_path, monkeypatch):
    _, resolved = asked("auto", tmp_path, strategy="none", overrides=ONE_SIZE | {"train.num_epochs": 30})
    question: Any = {"spec": resolved.spec.to_json(), "home": str(tmp_path), "share": 20, "widths": [4, 8]}
    found = lane_probe.answer(**question)
    assert found["fields"] == ["model.dropout"] and [*found["seconds"]] == [1] and "on their own" in found["against"]
    monkeypatch.setattr(lane_probe, "WORTH", 0.0)
    monkeypatch.setattr(lane_probe, "SECONDS", 0.05)
    found = lane_probe.answer(**question)
    assert [*found["seconds"]] == [1, 4, 8] and min(found["seconds"].values()) > 0 and found["against"] == ""


def test_a_task_with_a_loop_of_its_own_speaks_against_lanes(tmp_path):
    _, resolved = asked("auto", tmp_path, reference=str(HARNESS / "tiny_study.py"))
    found = lane_probe.answer(resolved.spec.to_json(), str(tmp_path), 20, [4])
    assert found["against"] == "TinyTask has a fit() of its own"


@pytest.mark.usefixtures("process")
def test_a_study_of_several_kinds_is_the_study_without_lanes(tmp_path):
    """Its task tells, in a process, that its sizes are no fields of lanes; the number is the study's from then on."""
    digests = []
    for number, overrides in enumerate(([], ["-o", "train.lanes=8"])):
        home = Home(tmp_path / str(number))
        flags = ("--study", str(LANES), "--executor", "inline", "--seed", "3", "--trials", "4", *overrides)
        result = hpo("run", *flags, home=home)
        assert result.exit_code == 0, result.output
        told = "train.lanes=8: trials train one by one, since they differ in model.hidden_size" in result.stderr
        assert told is bool(overrides) and [*groups(home)] == [None]
        digests.append(known(home)[0])
        again = hpo("run", *flags, home=home)
        assert again.exit_code == 0, again.stderr
    assert digests[0] == digests[1]
