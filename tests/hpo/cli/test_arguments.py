"""Messages as Python says them: options are arguments, and commands that Python has are calls."""

from __future__ import annotations

import inspect

import pytest

import hpo
from hpo.cli.arguments import in_python
from hpo.errors import DriftError, HpoError, UserError

OPTIONS = inspect.signature(hpo.run).parameters
SAID = {
    "study 'x' is new: say how far, by --trials, --epochs or --time.": (
        "study 'x' is new: say how far, by trials=, epochs= or time=."
    ),
    "--order ordered: leave it away, and give --workers 1 --window 1.": (
        "order='ordered': leave it away, and give workers=1 window=1."
    ),
    "--executor ray-tune: there Ray Tune decides, by --scheduler and --trials.": (
        "executor='ray-tune': there Ray Tune decides, by scheduler= and trials=."
    ),
    "--warm-start source: its trials are others.": "warm_start='source': its trials are others.",
    "--time '2x' is no length of time, --time 1h30m is one": "time='2x' is no length of time, time='1h30m' is one",
    "--enqueue /x/y.yaml holds no value": "enqueue='/x/y.yaml' holds no value",
    "give --storage postgresql://... and a --home that all see, set it by -o.": (
        "give storage='postgresql://...' and a home= that all see, set it by overrides=."
    ),
    "continue with --allow-drift, in a study of another --name.": (
        "continue with allow_drift=True, in a study of another name=."
    ),
    "`hpo run --study a.py:f --name NAME -o lr=0.5 -o kind=a` begins it": (
        "`hpo.run('a.py:f', name='NAME', overrides={'lr': 0.5, 'kind': 'a'})` begins it"
    ),
    "`hpo resume --study s --trials 4 --allow-drift --home /h` goes on": (
        "`hpo.resume('s', trials=4, allow_drift=True, home='/h')` goes on"
    ),
    "`hpo show 3 --study s` says why, `--strategy none`": "`hpo show 3 --study s` says why, `strategy='none'`",
    "--metric 'a' is none; a path like /a/--trials stays": "--metric 'a' is none; a path like /a/--trials stays",
}


@pytest.mark.parametrize(("flags", "arguments"), SAID.items())
def test_a_message_names_the_arguments_of_the_function(flags, arguments):
    assert in_python(flags, OPTIONS) == arguments


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"sampler": "tpo", "trials": 1}, UserError, r"^sampler='tpo'"),
        ({"trials": 1, "window": 1, "strategy": "pbt"}, UserError, r"^window=1: under pbt a generation begins"),
        ({"trials": 1, "executor": "inline", "workers": 2}, UserError, r"^workers=2: .*; use executor='local'\.$"),
        ({"trials": 1, "time": "soon"}, UserError, r"^time='soon' is not a length of time"),
        ({"trials": 1, "warm_start": "none"}, UserError, r"name the home of that one by home=\.$"),
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
    fix = rf"continue with allow_drift=True, start another study by `hpo\.run\('{file}:train', name='NAME'\)`"
    for run in (lambda: hpo.run(str(file), trials=2, **given), lambda: hpo.resume("train", trials=2, **given)):
        with pytest.raises(DriftError, match=fix):
            run()
    with pytest.raises(HpoError, match=r"`hpo\.resume\('failing', trials=2, home='.*'\)` goes on"):
        hpo.run(str(file), trials=1, name="failing", **given)
