"""How many trials of a study that begins train as lanes: as asked where they are alike, by measurement for auto."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lane_studies import LANES, groups, variant
from places import HARNESS
from rounds import rounds
from study_runs import begin, hpo, known

from hpo.child_process import NoAnswer
from hpo.driver import lane_width
from hpo.driver.lane_width import decided
from hpo.driver.request import RunRequest, request_of
from hpo.driver.resolve import declare
from hpo.storage.home import Home
from hpo.workers import lane_probe
from hpo.workers.attempt import task_of
from hpo.workers.executors.placement import Placement
from hpo.workers.executors.resources import Resources
from hpo.workers.prepared import Prepared
from trainer.lanes import probe

LOCAL = Placement("local", 2)
ONE_SIZE = {"model.hidden_size": 8}
TOLD = {"fields": ["model.dropout"], "seconds": {}, "alone": 100.0, "busy": "", "full": "", "against": ""}  # seconds


def answers(**told: Any) -> Callable[[str, str, float | None], str]:
    """What a process would say of a study's task."""
    return lambda *_: json.dumps(TOLD | told)


def asks_nobody(*_: Any) -> str:
    pytest.fail("it asks the task")


def asked(lanes: Any, home: Path, **flags: Any) -> tuple[RunRequest, Any]:
    reference, overrides = flags.pop("reference", str(LANES)), flags.pop("overrides", {})
    request = request_of(Home(home), reference=reference, overrides={"train.lanes": lanes, **overrides}, **flags)
    return request, declare(request, None, workers=2)


def chosen(home: Path, lanes: Any, **flags: Any) -> tuple[int, str]:
    request, resolved = asked(lanes, home, **flags)
    after, why = decided(request, resolved, None, LOCAL)
    assert (after == request) == (not why)
    return after.study.overrides["train.lanes"], why


@pytest.mark.usefixtures("process")
def test_a_search_over_shapes_trains_one_by_one(tmp_path):
    """The quickstart's space: 8 lanes would hold 8 models of 50 kinds."""
    lanes, why = chosen(tmp_path, 8, reference="mlp")
    assert lanes == 1
    assert why == (
        "train.lanes=8: trials train one by one, since they differ in train.optim.name, train.batch_size, "
        "model.hidden_size, model.num_layers, in which lanes of one model may not: set them by -o to have them fused, "
        "or name in lane_fields what is a dropout rate or a number that loss calculates with"
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
    request, resolved = asked(lanes, tmp_path, order=order, overrides=ONE_SIZE if kinds == 1 else {})
    study = lane_width._Asking(resolved, request, LOCAL, None)
    assert (study._scattered(lanes, ("model.dropout",)) == "") is fused


def test_on_a_gpu_is_said_what_lanes_cannot_promise_there(tmp_path, monkeypatch):
    monkeypatch.setattr(lane_width, "ask", answers())

    def told(lanes: int, **overrides: Any) -> str:
        request, resolved = asked(lanes, tmp_path, strategy="none", overrides={**ONE_SIZE, **overrides})
        after, words = decided(request, resolved, None, LOCAL)
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
        found, _ = decided(request, resolved, begun.spec, LOCAL)
        assert found.study.overrides["train.lanes"] == after, (before, now)


def test_what_was_refused_where_a_study_began_is_not_asked_again(tmp_path, monkeypatch):
    """A measurement may say otherwise the next time, and the same command would be another study. Who means it may."""
    _, begun = asked(1, tmp_path, strategy="none", overrides=ONE_SIZE)
    monkeypatch.setattr(lane_width, "ask", asks_nobody)
    request, resolved = asked(8, tmp_path, strategy="none", overrides=ONE_SIZE)
    found, words = decided(request, resolved, begun.spec, LOCAL)
    assert found.study.overrides["train.lanes"] == 1
    assert words == "train.lanes=8: trials train one by one, as the study began"
    monkeypatch.setattr(lane_width, "ask", answers(seconds={1: 1.0, 8: 0.5}))
    allowed = replace(request, study=replace(request.study, allow_drift=True))
    assert decided(allowed, resolved, begun.spec, LOCAL)[0].study.overrides["train.lanes"] == 8


@pytest.mark.usefixtures("process")
def test_under_a_preset_that_is_given_again_a_study_keeps_its_number(tmp_path):
    """A preset takes the place of all overrides, also of the number that the study has found."""
    presets = 'presets={"long": {"train.num_epochs": 6}, "fused": {"train.lanes": 8}},'
    file = variant(tmp_path, '    sampler="tpe",\n', f'    sampler="tpe",\n    {presets}\n')
    for preset, found in (("long", 16), ("fused", 8), ("fused", 1)):
        overrides = {"preset": preset, **ONE_SIZE}
        _, begun = asked(found, tmp_path, reference=file, strategy="none", overrides=overrides)
        request = request_of(Home(tmp_path), reference=file, overrides=overrides)
        kept, _ = decided(request, declare(request, None, workers=2), begun.spec, LOCAL)
        assert declare(kept, None, workers=2).spec.overrides == begun.spec.overrides, preset
    home = Home(tmp_path / "home")
    begin(home, reference=file, overrides={"preset": "long", "train.lanes": 4, **ONE_SIZE})
    flags = ("--trials", "1", "--executor", "inline", "-o", "preset=long", "-o", "model.hidden_size=8")
    ran = hpo("run", "--study", file, *flags, home=home)
    assert ran.exit_code == 0 and "train.lanes=4, with which this study began" in ran.output, ran.stderr


@rounds(
    ("flags", "placement", "words"),
    [
        ({}, LOCAL, "where trials train to their ends, and strategy asha may stop them: for --strategy none"),
        ({"strategy": "none"}, Placement("ray-tune", 2), "workers of ray-tune are not measured from here"),
        ({"strategy": "none", "trials": 6}, LOCAL, "fewer than 4 trials for each worker"),
        ({"strategy": "none", "window": 6}, LOCAL, "fewer than 4 trials for each worker"),
        ({"strategy": "none", "overrides": {"train.compile": True}}, LOCAL, "cannot do with compile=true"),
        ({"strategy": "none", "reference": "mlp"}, LOCAL, "they differ in train.optim.name, train.batch_size"),
    ],
)
def test_auto_is_one_by_one_where_lanes_cannot_pay_and_says_why(tmp_path, monkeypatch, flags, placement, words):
    """Before anything is measured: of several kinds the task is only asked what may differ."""

    def ask(module: str, question: str, within: float | None) -> str:
        assert json.loads(question)["widths"] == []
        return answers()(module, question, within)

    monkeypatch.setattr(lane_width, "ask", ask if "reference" in flags else asks_nobody)
    request, resolved = asked("auto", tmp_path, **flags)
    found, why = decided(request, resolved, None, placement)
    assert found.study.overrides["train.lanes"] == 1 and words in why, why


@rounds(
    ("seconds", "lanes"),
    [
        ({1: 10.0, 4: 8.0, 8: 7.0, 16: 6.0}, 16),
        ({1: 10.0, 4: 5.0, 8: 4.0, 16: 7.0}, 8),
        ({1: 10.0, 4: 8.0, 8: 7.0, 16: 6.7}, 1),
        ({1: 10.0, 4: 18.0}, 1),
        ({1: 10.0}, 1),  # no memory for more
    ],
)
def test_auto_takes_the_quickest_if_it_gains_by_half(tmp_path, monkeypatch, seconds, lanes):
    monkeypatch.setattr(lane_width, "ask", answers(seconds=seconds))
    found, why = chosen(tmp_path, "auto", strategy="none", overrides=ONE_SIZE)
    assert found == lanes and (f"{10.0 / seconds[lanes]:.1f} times as quick" in why) == (lanes > 1)


def test_of_two_kinds_half_of_the_lanes_train_together(tmp_path, monkeypatch):
    for half, lanes in ((6.0, 16), (8.0, 1)):
        monkeypatch.setattr(lane_width, "ask", answers(seconds={1: 10.0, 8: half, 16: 2.0}))
        found, why = chosen(tmp_path, "auto", strategy="none")
        assert found == lanes and f"{10.0 / half:.1f}" in why, why


@rounds(
    ("told", "words"),
    [
        ({"alone": 59.0}, "a worker's trials take 59 s on their own, less than 60 s"),
        ({"busy": "a batch takes 2 s"}, "since a batch takes 2 s"),
        ({"against": "it has a fit() of its own"}, "since it has a fit() of its own"),
        ({"fields": []}, "they differ in model.dropout"),
        ({"full": "4 lanes take 9 GB", "seconds": {1: 9.0}}, "since 4 lanes take 9 GB"),
    ],
)
def test_auto_is_one_by_one_for_what_the_task_says(tmp_path, monkeypatch, told, words):
    monkeypatch.setattr(lane_width, "ask", answers(**{"seconds": {1: 9.0, 8: 1.0}} | told))
    lanes, why = chosen(tmp_path, "auto", strategy="none", overrides=ONE_SIZE)
    assert lanes == 1 and words in why


def by_default(home: Path, placement: Placement = LOCAL, **flags: Any) -> tuple[int, str]:
    """What a study gets where nobody speaks of lanes."""
    flags = {"trials": 400, "strategy": "none", "overrides": ONE_SIZE} | flags
    request = request_of(Home(home), **{"reference": str(LANES)} | flags)
    after, told = decided(request, declare(request, None, workers=2), None, placement)
    if "train.lanes" not in after.study.overrides:
        assert after == request
    return after.study.overrides.get("train.lanes", 1), told


@rounds(
    ("trials", "sampler", "window", "lanes"),
    [
        (400, "auto", None, 16),
        (128, "auto", None, 8),  # a sampler with a memory proposes in four rounds at least
        (63, "tpe", None, 1),
        (64, "tpe", None, 4),
        (63, "random", None, 16),
        (400, "random", 16, 8),
        (7, "random", None, 1),
    ],
)
def test_by_default_lanes_are_measured_where_a_sampler_keeps_its_memory(
    tmp_path, monkeypatch, trials, sampler, window, lanes
):
    def ask(module: str, question: str, within: float | None) -> str:
        widths = json.loads(question)["widths"]
        assert within is not None and widths[-1] == lanes
        return answers(seconds={k: 10.0 / k for k in (1, *widths)})(module, question, within)

    monkeypatch.setattr(lane_width, "ask", ask)
    found, told = by_default(tmp_path, trials=trials, sampler=sampler, window=window)
    assert found == lanes
    assert told == (
        f"train.lanes=auto, the default: {lanes} lanes, in which a step is {lanes:.1f} times as quick as on its own"
        if lanes > 1
        else ""
    )


@rounds(
    ("flags", "placement"),
    [
        ({"strategy": "asha"}, LOCAL),
        ({"strategy": "asha", "order": "async"}, LOCAL),
        ({"overrides": {}}, LOCAL),  # several kinds of trials: as the study says, its sizes are no fields of lanes
        ({"overrides": ONE_SIZE | {"train.compile": True}}, LOCAL),
        ({"overrides": ONE_SIZE | {"train.lanes": 1}}, LOCAL),
        ({"trials": None, "seconds": 600.0}, LOCAL),  # how many rounds of proposals these are is not known
        ({"seconds": 30.0}, LOCAL),
        ({}, Placement("inline", 1)),
        ({}, Placement("ray", 2)),
        ({"reference": str(HARNESS / "function_study.py"), "overrides": {}}, LOCAL),
    ],
)
def test_by_default_trials_are_on_their_own_where_lanes_may_not_pay(tmp_path, monkeypatch, flags, placement):
    """Without a word, and the study is as it would be without lanes."""
    monkeypatch.setattr(lane_width, "ask", answers() if flags.get("overrides") == {} else asks_nobody)
    assert by_default(tmp_path, placement, **flags) == (1, "")


def test_by_default_it_is_said_why_what_was_measured_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(lane_width, "ask", answers(seconds={1: 10.0, 16: 9.0}))
    lanes, told = by_default(tmp_path)
    assert lanes == 1 and told == (
        "train.lanes=auto, the default: trials train one by one, since at best a step of 16 lanes is 1.11 times as "
        "quick, and 1.5 is asked for"
    )


def test_a_study_that_declares_one_lane_has_one(tmp_path, monkeypatch):
    monkeypatch.setattr(lane_width, "ask", answers(seconds={1: 10.0, 16: 1.0}))
    declared = variant(tmp_path, "num_epochs=4,", "num_epochs=4, lanes=1,")
    assert by_default(tmp_path, reference=declared) == (1, "")
    assert by_default(tmp_path)[0] == 16


def test_what_could_not_be_measured_by_default_is_said(tmp_path, monkeypatch):
    """And nothing is left of what the process has written that did not answer in time."""
    written = []

    def ask(_: str, question: str, __: float | None) -> str:
        written.append(Path(json.loads(question)["scratch"], "checkpoint"))
        written[0].touch()
        raise NoAnswer("it took more than 15 s")

    monkeypatch.setattr(lane_width, "ask", ask)
    assert by_default(tmp_path) == (
        1,
        "train.lanes: trials train one by one, since lanes could not be measured (it took more than 15 s)",
    )
    assert not written[0].parent.exists()


@rounds(
    ("flags", "told", "words"),
    [
        ({}, {"seconds": {1: 1.0, 8: 0.9}}, ""),
        ({}, {"seconds": {1: 1.0, 8: 1.05}}, ""),  # which is within what a measurement is off
        ({}, {"seconds": {1: 1.0, 8: 1.3}}, "since a step of 8 takes 1.30 times as long as theirs"),
        ({}, {"seconds": {1: 1.0}, "alone": 9.0}, ""),  # too short to be measured
        ({}, {"busy": "a batch takes 2 s", "seconds": {1: 2.0}}, "since a batch takes 2 s"),
        ({}, {"against": "it has a fit() of its own"}, ""),  # which the trials say themselves
        ({"window": 6}, {}, "since of a window of 6 trials fewer than 4 are left to each worker: give --window 32"),
        ({"strategy": "asha"}, {}, "strategy asha may stop them: give --strategy none to have them fused"),
        ({"strategy": "asha", "order": "async"}, {}, "strategy asha may stop them"),
        ({"strategy": "asha", "window": 16}, {}, "strategy asha may stop them"),
        ({"strategy": "pbt"}, {}, "strategy pbt may stop them"),
    ],
)
def test_lanes_by_hand_are_none_where_they_would_take_longer(tmp_path, monkeypatch, flags, told, words):
    monkeypatch.setattr(lane_width, "ask", answers(**told))
    lanes, why = chosen(tmp_path, 8, **{"strategy": "none", "overrides": ONE_SIZE} | flags)
    assert lanes == (1 if words else 8) and words in why


def test_lanes_of_a_cluster_are_held_to_what_this_host_measures(tmp_path, monkeypatch):
    """Where its workers have GPUs, which this host has not, the number is as asked for."""
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    told = {"seconds": {1: 1.0, 8: 1.3}}

    def found(placement: Placement, **flags: Any) -> tuple[int, str]:
        questions: list[dict[str, Any]] = []

        def ask(_: str, question: str, __: float | None) -> str:
            questions.append(json.loads(question))
            return json.dumps(TOLD | (told if questions[0]["widths"] else {}))

        monkeypatch.setattr(lane_width, "ask", ask)
        request, resolved = asked(8, tmp_path, **{"strategy": "none", "overrides": ONE_SIZE} | flags)
        after, words = decided(request, resolved, None, placement)
        assert all(one["workers"] == 1 for one in questions)  # what memory this host has is not theirs
        return after.study.overrides["train.lanes"], words

    lanes, words = found(Placement("ray", 2))
    assert lanes == 1 and "a step of 8 takes 1.30 times as long as theirs" in words
    lanes, words = found(Placement("ray", 2), strategy="asha")
    assert lanes == 1 and "strategy asha may stop them" in words
    for flags in ({}, {"strategy": "asha"}):
        assert found(Placement("ray", 2, Resources(gpus=1)), **flags) == (8, f"train.lanes=8: {lane_width.ON_GPUS}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert found(Placement("ray", 2)) == (8, "")  # here it would be measured on a GPU


def test_what_a_step_takes_is_measured_on_its_own_and_by_lanes(tmp_path, monkeypatch):
    _, resolved = asked("auto", tmp_path, strategy="none", overrides=ONE_SIZE | {"train.num_epochs": 30})
    question: Any = {
        "spec": resolved.spec.to_json(),
        "home": str(tmp_path),
        "workers": 2,
        "share": 20,
        "widths": [4, 8],
    }
    found = lane_probe.answer(**question, worth=60.0)
    assert found["fields"] == ["model.dropout"] and [*found["seconds"]] == [1] and 0 < found["alone"] < 60
    monkeypatch.setattr(lane_probe, "SECONDS", 0.05)
    found = lane_probe.answer(**question, worth=0.0)
    assert {1, 8} <= found["seconds"].keys() <= {1, 4, 8} and min(found["seconds"].values()) > 0
    assert found["busy"] == found["against"] == ""
    monkeypatch.setattr(lane_probe._Taken, "most", 10**6)  # bytes
    monkeypatch.setattr(lane_probe, "memory_left", lambda: 30 * 10**6)
    assert [*lane_probe.answer(**question, worth=0.0)["seconds"]][1:] == [4]  # of two workers, in half of the memory
    monkeypatch.setattr(lane_probe, "memory_left", lambda: 15 * 10**6)
    found = lane_probe.answer(**question, worth=0.0)
    assert [*found["seconds"]] == [1] and re.match(r"4 lanes take .* in each worker, of 15.00 MB free", found["full"])
    monkeypatch.setattr(lane_probe, "LARGE", 0.0)
    found = lane_probe.answer(**question, worth=0.0)
    assert [*found["seconds"]] == [1] and "all of it computing" in found["busy"]


def test_what_is_not_worth_while_is_measured_for_a_glance(tmp_path, monkeypatch):
    """A fifth of the time, by a clock on which each step takes a millisecond."""
    endless = {"train.num_epochs": 10**6, "train.early_stopping.patience": 10**6}
    _, resolved = asked("auto", tmp_path, strategy="none", overrides=ONE_SIZE | endless)
    config: Any = resolved.study.config
    for worth, steps in ((math.inf, 100), (0.0, 500)):
        computed, passed = (itertools.count(0.0, 0.001) for _ in range(2))
        clock = SimpleNamespace(process_time=computed.__next__, perf_counter=passed.__next__)
        monkeypatch.setattr(probe, "time", clock)
        step, total = probe.solo(lambda: task_of(resolved.study, Home(tmp_path), config), config.train, 0.5, worth)
        assert step == pytest.approx(0.001) and total > 10**6
        assert next(computed) == pytest.approx(0.001 * (steps + probe.WARM), abs=0.01)


def test_trials_of_too_many_kinds_are_not_measured(tmp_path):
    _, resolved = asked("auto", tmp_path, strategy="none")
    found = lane_probe.answer(resolved.spec.to_json(), str(tmp_path), 2, 20, [4], 0.0)
    assert (found["fields"], found["seconds"], found["against"]) == (["model.dropout"], {}, "")


@rounds(
    ("fields", "words"),
    [
        (
            '("model.dropuot",)',
            "lane_fields of LanesTask: unknown path 'model.dropuot': .*did you mean 'model.dropout'",
        ),
        ('("model.dropout")', r"lane_fields of LanesTask is a text: give a tuple, \('model.dropout',\)\."),
    ],
)
def test_fields_of_lanes_that_are_none_speak_against_lanes(tmp_path, fields, words):
    """And do so in the trials where the number is one by hand."""
    (tmp_path / "of").mkdir()
    file = variant(tmp_path / "of", 'lane_fields = ("model.dropout",)', f"lane_fields = {fields}")
    _, resolved = asked("auto", tmp_path, strategy="none", reference=file)
    found = lane_probe.answer(resolved.spec.to_json(), str(tmp_path), 2, 20, [4], 0.0)
    assert re.match(words, found["against"])


def test_a_task_with_a_loop_of_its_own_speaks_against_lanes(tmp_path):
    _, resolved = asked("auto", tmp_path, reference=str(HARNESS / "tiny_study.py"))
    found = lane_probe.answer(resolved.spec.to_json(), str(tmp_path), 2, 20, [4], 60.0)
    assert found["against"] == "TinyTask has a fit() of its own"


@pytest.mark.usefixtures("process")
def test_what_is_chosen_by_default_is_recorded_and_kept(tmp_path, monkeypatch):
    """Its digest is that of the number given by hand; a resume asks nobody; and one lane leaves no trace."""
    flags = ("run", "--study", str(LANES), "--seed", "3", "--strategy", "none", "--sampler", "random")
    flags += ("-o", "model.hidden_size=8", "--workers", "1")
    digests = {}
    for name, seconds in (("fused", {1: 10.0, 4: 1.0}), ("alone", {1: 10.0, 4: 9.0})):
        home = Home(tmp_path / name)
        monkeypatch.setattr(Prepared, "ask", lambda *_, told=seconds: answers(seconds=told)(*_))
        begun = hpo(*flags, "--trials", "5", home=home)
        assert begun.exit_code == 0, begun.stderr
        assert ("train.lanes=auto, the default: 4 lanes" in begun.stderr) is (name == "fused")
        assert "kept from before" not in begun.stderr
        monkeypatch.setattr(Prepared, "ask", asks_nobody)
        resumed = hpo(*flags, "--trials", "7", home=home)
        assert resumed.exit_code == 0, resumed.stderr
        digests[name] = known(home)[0]
        assert (None in groups(home)) is (name == "alone")
    for name, lanes in (("fused", "4"), ("alone", "1")):
        home = Home(tmp_path / f"{name} by hand")
        monkeypatch.setattr(Prepared, "ask", answers(seconds={}))
        result = hpo(*flags, "--trials", "7", "-o", f"train.lanes={lanes}", home=home)
        assert result.exit_code == 0, result.stderr
        assert known(home)[0] == digests[name]
    assert digests["fused"] != digests["alone"]


@pytest.mark.usefixtures("process")
def test_a_study_of_several_kinds_is_the_study_without_lanes(tmp_path):
    """Its task tells, in a process, that its sizes are no fields of lanes; the number is the study's from then on."""
    digests = []
    asked_for = ("--study", str(LANES), "--executor", "inline", "--seed", "3", "--trials", "4", "--strategy", "none")
    for number, overrides in enumerate(([], ["-o", "train.lanes=4"])):
        home = Home(tmp_path / str(number))
        flags = (*asked_for, *overrides)
        result = hpo("run", *flags, home=home)
        assert result.exit_code == 0, result.output
        told = "train.lanes=4: trials train one by one, since they differ in model.hidden_size" in result.stderr
        assert told is bool(overrides) and [*groups(home)] == [None]
        digests.append(known(home)[0])
        again = hpo("run", *flags, home=home)
        assert again.exit_code == 0, again.stderr
    assert digests[0] == digests[1]
