"""Where a search begins: enqueued configurations, another study's trials, tiers; and what a resume makes of it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from driven import driven

from hpo.enqueue import read
from hpo.errors import DriftError, SpaceError, UserError
from hpo.home import Home
from hpo.ledger import Ledger, reads
from hpo.run import Request, declare
from hpo.search.samplers import MODELS, SAMPLERS

STUDY = str(Path(__file__).parents[1] / "harness" / "curves_study.py")
GOOD = {"lr": 0.01, "optimizer": "adamw", "num_heads": 4, "hidden_size": 64}


def drive(home, trials, **flags):
    """Run a study without its mirror: (params by number, digest)."""
    with closing(Ledger(home.create().storage)) as ledger:
        request = Request(home, **{"reference": STUDY, "window": 4} | flags)
        name, state = driven(ledger, request, trials=trials)
        assert state == "complete"
        with ledger.read() as connection:
            row = reads.study_row(connection, name)
            return [trial["params"] for trial in reads.trial_rows(connection, row["id"])], reads.digest(connection, row)


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name != "gp"])
def test_enqueued_configurations_come_first_and_a_resume_goes_on_behind_them(tmp_path, sampler):
    queue = [GOOD, {"lr": 0.1, "optimizer": "sgd", "momentum": 0.5}]
    flags = {"sampler": sampler, "enqueue": queue}
    whole, digest = drive(Home(tmp_path / "whole"), 12, **flags)
    assert whole[0] == GOOD and queue[1].items() <= whole[1].items() and whole[1].keys() > queue[1].keys()
    assert len({str(params) for params in whole}) == 12
    for trials in (1, 2, 7):
        drive(Home(tmp_path / "parts"), trials, **flags)
    parts, same = drive(Home(tmp_path / "parts"), 12)  # what was enqueued is of the study now
    assert (parts, same) == (whole, digest)
    if sampler in ("grid", "qmc"):
        rest, _ = drive(Home(tmp_path / "without"), 10, sampler=sampler)
        assert whole[2:] == rest, "the sequence begins behind them"


def test_other_enqueued_configurations_are_drift(tmp_path):
    drive(Home(tmp_path), 1, enqueue=[GOOD])
    with pytest.raises(DriftError, match="the enqueued configurations changed"):
        drive(Home(tmp_path), 2, enqueue=[GOOD | {"lr": 0.02}])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"lrr": 0.1}, "enqueue[0]: 'lrr' is no dimension of the space; did you mean 'lr'"),
        ({"lr": 7.0}, "enqueue[0]: lr=7.0 is not among"),
        ({"optimizer": "sdg"}, "did you mean 'sgd'"),
        ({"momentum": 0.5}, "enqueue[0] has momentum, which depends on optimizer: give that too"),
        ({"optimizer": "adamw", "momentum": 0.5}, "momentum is not active there: it needs optimizer='sgd'"),
        ({"hidden_size": 63, "num_heads": 4}, "hidden_size=63 is not among"),
        ({"train": {"num_epochs": 3}}, "train.num_epochs=3, which is not searched and is 9 here: set it by -o"),
    ],
)
def test_what_does_not_fit_the_space_is_refused_before_anything_is_written(tmp_path, entry, words):
    with pytest.raises(SpaceError) as caught:
        declare(Request(Home(tmp_path / "home"), reference=STUDY, enqueue=[entry]), None, workers=1)
    assert words in str(caught.value) and not (tmp_path / "home").exists()


def test_a_file_is_read_and_what_is_pinned_keeps_its_value(tmp_path):
    (tmp_path / "good.yaml").write_text("lr: 0.01\noptimizer: sgd\nmomentum: 0.5\ntrain:\n  num_epochs: 9\n")
    [entry] = read([tmp_path / "good.yaml"])
    request = Request(Home(tmp_path), reference=STUDY, enqueue=[entry], overrides={"optimizer": "adamw"})
    study, spec = declare(request, None, workers=1)
    assert spec.enqueue == [{"lr": 0.01}] and study.enqueue == ({"lr": 0.01},)


def test_a_warm_start_is_part_of_the_study_and_a_resume_makes_the_same_of_it(tmp_path):
    def begin(where):
        home = Home(tmp_path / where)
        drive(home, 12, name="source", sampler="random", strategy="none")
        return home

    flags = {"name": "warm", "sampler": "tpe"}
    home = begin("whole")
    whole, digest = drive(home, 14, warm_start="source", **flags)
    cold, _ = drive(home, 14, name="cold", sampler="tpe")
    assert whole[0] != cold[0], "the model is used from the first trial on"
    home = begin("parts")
    drive(home, 5, warm_start="source", **flags)
    drive(home, 20, name="source")  # which goes on, and changes nothing
    assert drive(home, 14, **flags) == (whole, digest)
    drive(home, 20, name="other", sampler="random", seed=5)
    with pytest.raises(DriftError, match="trials of the warm start changed"):
        drive(home, 15, warm_start="other", **flags)


@pytest.mark.parametrize("sampler", [name for name in MODELS if name != "gp"])
def test_every_model_takes_a_warm_start(tmp_path, sampler):
    home = Home(tmp_path)
    drive(home, 12, name="source", sampler="random", strategy="none")
    warm, _ = drive(home, 6, name="warm", sampler=sampler, warm_start="source")
    cold, _ = drive(home, 6, name="cold", sampler=sampler)
    assert (warm == cold) == sampler.startswith("nsga"), "a first generation of fifty is random either way"


def test_a_warm_start_that_cannot_be_is_refused_in_one_sentence(tmp_path):
    home = Home(tmp_path)
    drive(home, 3, name="source", sampler="random")
    ledger = Ledger(home.storage)

    def refused(old="", new="", **flags):
        file = tmp_path / "other.py"
        file.write_text(Path(STUDY).read_text().replace(old, new))
        with pytest.raises(UserError) as caught:
            declare(Request(home, **{"reference": str(file), "name": "new", "warm_start": "source"} | flags), ledger, 1)
        return str(caught.value)

    assert "no study 'sorce'" in refused(warm_start="sorce")
    assert "sampler 'random' has no model" in refused(sampler="random")
    assert "none fits the space" in refused("Float(1e-4, 1.0", "Float(1e-9, 1e-8")
    assert "judged by minimize val/loss" in refused('"val/loss", "minimize"', '"val/loss", "maximize"')
    with pytest.raises(UserError, match="this home holds no study yet"):
        declare(Request(home, reference=STUDY, name="new", warm_start="source"), None, workers=1)
    ledger.close()


def test_a_tier_is_kept_by_a_resume(tmp_path):
    text = Path(STUDY).read_text().replace("Choice([1, 2, 3, 4])", "Choice([1, 2, 3, 4], tier=2)")
    file = tmp_path / "tiered.py"
    file.write_text(text.replace('multiple_of="num_heads"', 'multiple_of="num_heads", tier=2'))
    home = Home(tmp_path / "home")
    first, _ = drive(home, 4, reference=str(file), tier=1)
    assert {path for params in first for path in params} == {"lr", "optimizer", "momentum"}
    again, _ = drive(home, 8, reference=str(file))
    assert again[:4] == first and {path for params in again for path in params} == {"lr", "optimizer", "momentum"}
    with pytest.raises(DriftError, match="dimension num_heads is new"):
        drive(home, 9, reference=str(file), tier=2)
