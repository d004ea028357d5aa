"""Where a search begins: enqueued configurations, another study's trials, tiers; and what a resume makes of it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from driven import driven
from places import HARNESS
from rounds import rounds
from sqlalchemy import select

from hpo import Objective
from hpo.declaration.enqueue import read
from hpo.driver.request import RunRequest
from hpo.driver.resolve import declare
from hpo.driver.warm_start import records
from hpo.errors import DriftError, SpaceError, UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.history import Curves
from hpo.ledger.tables import asks
from hpo.search.samplers.registry import MODELS, SAMPLERS
from hpo.storage.home import Home

pytestmark = pytest.mark.whole

STUDY, POPULATION = str(HARNESS / "curves_study.py"), HARNESS / "population_study.py"
GOOD = {"lr": 0.01, "optimizer": "adamw", "num_heads": 4, "hidden_size": 64}


def drive(home, trials, **flags):
    """Run a study without its mirror: (params by number, digest)."""
    with closing(Ledger(home.create().storage)) as ledger:
        request = RunRequest(home, **{"reference": STUDY, "window": 4} | flags)
        name, state = driven(ledger, request, trials=trials)
        assert state == "complete"
        with ledger.read() as connection:
            row = queries.study_row(connection, name)
            return [trial["params"] for trial in queries.trial_rows(connection, row["id"])], queries.digest(
                connection, row
            )


def sampled(names: Iterable[str], *by_default: str) -> list[Any]:
    """These samplers but for the Gaussian process; what a sampler by itself makes of a beginning is in
    tests/contract/test_samplers.py and test_warm_start.py."""
    slow = {name for name in names if name not in by_default}
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names if name != "gp"]


@pytest.mark.parametrize("sampler", sampled(SAMPLERS, "tpe", "qmc", "cmaes"))
def test_enqueued_configurations_come_first_and_a_resume_follows_them(tmp_path, sampler):
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


@pytest.mark.parametrize("sampler", ["random", "qmc", "grid"])
def test_what_an_entry_leaves_open_is_drawn_once(tmp_path, sampler):
    """Each ask has a seed of its own, also of a sampler without a memory and of one whose sequence is shifted."""
    home = Home(tmp_path)
    whole, _ = drive(home, 8, sampler=sampler, enqueue=[{"optimizer": "adamw"}, {}])
    with closing(Ledger(home.storage)) as ledger, ledger.read() as connection:
        seeds = connection.execute(select(asks.c.seed)).scalars().all()
    assert len(set(seeds)) == len({str(params) for params in whole}) == 8
    if sampler == "random":
        assert len({params["lr"] for params in whole}) == 8, "no draw is used twice"


def test_other_enqueued_configurations_are_drift(tmp_path):
    drive(Home(tmp_path), 1, enqueue=[GOOD])
    with pytest.raises(DriftError, match="the enqueued configurations changed"):
        drive(Home(tmp_path), 2, enqueue=[GOOD | {"lr": 0.02}])


@rounds(
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
def test_what_does_not_fit_the_space_is_refused_at_once(tmp_path, entry, words):
    with pytest.raises(SpaceError) as caught:
        declare(RunRequest(Home(tmp_path / "home"), reference=STUDY, enqueue=[entry]), None, workers=1)
    assert words in str(caught.value) and not (tmp_path / "home").exists()


def test_a_file_is_read_and_what_is_pinned_keeps_its_value(tmp_path):
    (tmp_path / "good.yaml").write_text("lr: 0.01\noptimizer: sgd\nmomentum: 0.5\ntrain:\n  num_epochs: 9\n")
    [entry] = read([tmp_path / "good.yaml"])
    request = RunRequest(Home(tmp_path), reference=STUDY, enqueue=[entry], overrides={"optimizer": "adamw"})
    resolved = declare(request, None, workers=1)
    assert resolved.spec.enqueue == [{"lr": 0.01}] and resolved.study.enqueue == ({"lr": 0.01},)


def test_a_file_without_a_value_is_refused(tmp_path):
    (tmp_path / "empty.yaml").write_text("# to be filled\n")
    with pytest.raises(UserError, match=r"--enqueue .*empty.yaml holds no value: write one a line"):
        read([tmp_path / "empty.yaml"])


def test_a_warm_start_is_part_of_the_study_for_a_resume(tmp_path):
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


@pytest.mark.parametrize("sampler", sampled(MODELS, "tpe", "nsga2"))
def test_every_model_takes_a_warm_start(tmp_path, sampler):
    home = Home(tmp_path)
    drive(home, 12, name="source", sampler="random", strategy="none")
    warm, _ = drive(home, 6, name="warm", sampler=sampler, warm_start="source")
    cold, _ = drive(home, 6, name="cold", sampler=sampler)
    assert (warm == cold) == sampler.startswith("nsga"), "a first generation of fifty is random either way"


TWO = 'Objective("val/loss", "minimize")], constraints=[Constraint("val/heads", upper=2)'


def declared(path, old="", new=""):
    """A copy of the study, whose trials also say in their first epoch how many heads they have."""
    text = Path(STUDY).read_text().replace("import Choice,", "import Choice, Constraint,")
    heads = '{"val/loss": loss} | ({"val/heads": c.num_heads} if epoch == 1 else {})'
    path.write_text(text.replace('{"val/loss": loss, "time/epoch": 1.0}', heads).replace(old, new))
    return str(path)


def test_warm_start_trials_are_held_against_this_studys_constraints(tmp_path, capsys):
    home = Home(tmp_path / "home")
    source = declared(tmp_path / "source.py")
    params, _ = drive(home, 12, reference=source, name="source", sampler="random", strategy="none")
    bounded = declared(tmp_path / "bounded.py", 'Objective("val/loss", "minimize")', TWO)
    with closing(Ledger(home.storage)) as ledger:
        request = RunRequest(home, reference=bounded, name="new", warm_start="source", sampler="tpe")
        resolved = declare(request, ledger, workers=1)
    told = records(resolved.spec.earlier, len(resolved.study.constraints))
    heads = [one["num_heads"] for one in params if one["lr"] <= 0.7]
    said = f"warm start: {len(heads)} of {len(heads)} complete trials of study source"
    assert said in capsys.readouterr().err
    assert [one.violations for one in told] == [(pytest.approx((n - 2) / 2),) for n in heads]
    assert [one.state for one in told] == ["infeasible" if n > 2 else "complete" for n in heads]


def test_a_warm_start_takes_the_curves_of_stopped_trials_too(tmp_path, capsys):
    home = Home(tmp_path / "home")
    drive(home, 14, name="source", sampler="random", strategy="asha")
    with closing(Ledger(home.storage)) as ledger:
        with ledger.read() as connection:
            source = queries.study_row(connection, "source")
            rows = queries.trial_rows(connection, source["id"])
            curves = Curves(source["id"], [Objective("val/loss")])
            known = {row["number"]: curves.of(connection, row["id"]) for row in rows}
        request = RunRequest(home, reference=STUDY, name="new", warm_start="source", sampler="freeze-thaw")
        resolved = declare(request, ledger, workers=1)
    states = [row["state"] for row in rows]
    assert states.count("pruned") > 0 and [one["state"] for one in resolved.spec.earlier] == states
    told = records(resolved.spec.earlier, len(resolved.study.constraints))
    assert [list(one.curve) for one in told] == [list(known[row["number"]]) for row in rows]
    said = f"warm start: {states.count('complete')} of {states.count('complete')} complete trials of study source"
    assert f"{said}, and {states.count('pruned')} pruned ones" in capsys.readouterr().err
    drive(home, 4, name="new", warm_start="source", sampler="freeze-thaw")
    assert "warm start" in capsys.readouterr().err
    drive(home, 6, name="new")


def test_trials_of_a_warm_start_have_the_value_that_this_study_selects(tmp_path):
    home, rising = Home(tmp_path / "home"), ("c.num_heads / epoch", "(epoch - 4) ** 2")
    drive(
        home, 6, reference=declared(tmp_path / "source.py", *rising), name="source", sampler="random", strategy="none"
    )
    best = declared(tmp_path / "best.py", '"minimize")', '"minimize", "best")')
    with closing(Ledger(home.storage)) as ledger:
        with ledger.read() as connection:
            rows = queries.trial_rows(connection, queries.study_row(connection, "source")["id"])
        request = RunRequest(home, reference=best, name="new", warm_start="source", sampler="tpe")
        spec = declare(request, ledger, workers=1).spec
    last = [row["values"][0] for row in rows if row["state"] == "complete"]
    assert [one["values"][0] for one in spec.earlier] == pytest.approx([value - 25.0 for value in last]), "of epoch 4"


def test_a_warm_start_leaves_out_whose_parameters_changed_in_training(tmp_path, capsys):
    home, flags = Home(tmp_path / "home"), {"reference": str(POPULATION), "window": None, "overrides": {"pause": 0.0}}
    drive(home, 12, name="bred", **flags)
    with closing(Ledger(home.storage)) as ledger:
        with ledger.read() as connection:
            rows = queries.trial_rows(connection, queries.study_row(connection, "bred")["id"])
        request = RunRequest(home, name="new", warm_start="bred", sampler="tpe", strategy="none", **flags)
        spec = declare(request, ledger, workers=1).spec
    of = {row["number"]: row for row in rows}
    complete = [row for row in rows if row["state"] == "complete"]
    whole = []
    for row in complete:
        line = [row]
        while line[-1]["parent"] is not None:
            line.append(of[line[-1]["parent"]])
        whole += [row] if all(one["params"] == row["params"] for one in line) else []
    assert 0 < len(whole) < len(complete)
    taken = [one["values"] for one in spec.earlier if one["state"] == "complete"]
    assert taken == [row["values"] for row in whole]
    parents = {row["parent"] for row in rows}
    ended = [row["values"] for row in rows if row["state"] == "pruned" and row["number"] not in parents]
    assert all(one["values"] in ended for one in spec.earlier if one["state"] == "pruned")
    assert f"warm start: {len(whole)} of {len(complete)} complete trials of study bred" in capsys.readouterr().err


def test_a_warm_start_that_cannot_be_is_refused_in_one_sentence(tmp_path):
    home = Home(tmp_path)
    drive(home, 3, name="source", sampler="random")
    ledger = Ledger(home.storage)

    def refused(old="", new="", **flags):
        file = tmp_path / "other.py"
        file.write_text(Path(STUDY).read_text().replace(old, new))
        with pytest.raises(UserError) as caught:
            declare(
                RunRequest(home, **{"reference": str(file), "name": "new", "warm_start": "source"} | flags), ledger, 1
            )
        return str(caught.value)

    assert "no study 'sorce'" in refused(warm_start="sorce")
    assert "sampler 'random' has no model" in refused(sampler="random")
    bounded = refused('"minimize")]', '"minimize")], constraints=[__import__("hpo").Constraint("val/size", upper=1)]')
    assert "none fits the space of this study and has reported all of val/loss, val/size" in bounded
    assert "none fits the space" in refused("Float(1e-4, 1.0", "Float(1e-9, 1e-8")
    assert "judged by minimize val/loss" in refused('"val/loss", "minimize"', '"val/loss", "maximize"')
    with pytest.raises(UserError, match="this home holds no study yet"):
        declare(RunRequest(home, reference=STUDY, name="new", warm_start="source"), None, workers=1)
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
