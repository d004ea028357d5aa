"""Messages as Python says them: options are arguments, and commands that Python has are calls."""

from __future__ import annotations

import inspect

import pytest

import hpo
from hpo import door
from hpo.errors import DriftError, HpoError, UserError

ARGUMENTS = inspect.signature(hpo.run).parameters
SPELLED = [
    (("trials",), "--trials", "trials="),
    (("trials", 0), "--trials 0", "trials=0"),
    (("trials", "0"), "--trials 0", "trials=0"),
    (("order", "ordered"), "--order ordered", "order='ordered'"),
    (("time", "'2x'"), "--time '2x'", "time='2x'"),
    (("allow_drift",), "--allow-drift", "allow_drift=True"),
    (("overrides",), "-o", "overrides="),
    (("overrides", "lr=0.5"), "-o lr=0.5", "overrides={'lr': 0.5}"),
    (("trackers", "wandb:DIR"), "--tracker wandb:DIR", "trackers='wandb:DIR'"),
    (("metric", "'a'"), "--metric 'a'", "--metric 'a'"),
]
STEPS = [
    (
        "run --study a.py:f --name NAME -o lr=0.5 -o kind=a",
        "hpo.run('a.py:f', name='NAME', overrides={'lr': 0.5, 'kind': 'a'})",
    ),
    ("resume --study s --trials 4 --allow-drift --home /h", "hpo.resume('s', trials=4, allow_drift=True, home='/h')"),
    ("show 3 --study s", "hpo show 3 --study s"),
    ("resume --study s --json", "hpo resume --study s --json"),
]


@pytest.mark.parametrize(("asked", "typed", "argument"), SPELLED)
def test_an_option_is_spelled_as_the_caller_gives_it(asked, typed, argument):
    assert door.option(*asked) == typed
    with door.of_python(ARGUMENTS):
        assert door.option(*asked) == argument
    assert door.option(*asked) == typed


@pytest.mark.parametrize(("words", "call"), STEPS)
def test_a_step_is_a_command_or_the_call_that_does_the_same(words, call):
    assert door.step(words) == f"hpo {words}"
    with door.of_python(ARGUMENTS):
        assert door.step(words) == call


def test_an_error_has_its_option_and_says_it_by_either_door():
    error = UserError(field="window", value=0, why="no trial would be open", fix="give 1 or more")
    assert (error.field, error.value) == ("window", 0)
    assert str(error) == "--window 0: no trial would be open; give 1 or more."
    with door.of_python(ARGUMENTS):
        assert str(UserError(field="window", value=0, fix="give 1 or more")) == "window=0: give 1 or more."


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"sampler": "tpo", "trials": 1}, UserError, r"^sampler='tpo'"),
        ({"trials": 1, "window": 1, "strategy": "pbt"}, UserError, r"^window=1: under pbt a generation begins"),
        ({"trials": 1, "executor": "inline", "workers": 2}, UserError, r"^workers=2: .*; use executor='local'\.$"),
        ({"trials": 1, "time": "soon"}, UserError, r"^time='soon' is not a length of time"),
        ({"trials": 1, "warm_start": "sorce"}, UserError, r"name the home of that one by home=\.$"),
        ({"trials": 1, "executor": "local", "cpus_per_worker": 0}, UserError, r"^cpus_per_worker=0: give 1 or more"),
    ],
)
def test_what_hpo_run_refuses_is_said_in_its_own_words(tmp_path, given, error, said):
    with pytest.raises(error, match=said):
        hpo.run("mlp", home=tmp_path / "home", progress=False, **given)
    assert not (tmp_path / "home").exists()


def test_drift_and_a_stopped_study_are_said_in_python_too(process, tmp_path):
    """What is refused, and why a study had to stop, which a command would print."""
    file, home = tmp_path / "train.py", tmp_path / "home"
    text = (
        "import hpo\n\n\n@hpo.study(space={'x': hpo.Float(0.0, 1.0)}, minimize='loss')\n"
        "def train(trial):\n    return trial.params.x\n"
    )
    file.write_text(text)
    given = {"home": home, "executor": "inline", "progress": False}
    hpo.run(str(file), trials=1, **given)
    file.write_text(text.replace("trial.params.x", "1 / 0"))
    fix = rf"continue with allow_drift=True, start another study with `hpo\.run\('{file}:train', name='NAME'\)`"
    for run in (lambda: hpo.run(str(file), trials=2, **given), lambda: hpo.resume("train", trials=2, **given)):
        with pytest.raises(DriftError, match=fix):
            run()
    with pytest.raises(HpoError, match=r"`hpo\.resume\('failing', trials=2, home='.*'\)` goes on"):
        hpo.run(str(file), trials=1, name="failing", **given)
