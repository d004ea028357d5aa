"""Where a search begins: enqueued configurations and tiers; and what a resume makes of it. Earlier studies are in
test_learn.py."""

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

from hpo.declaration.enqueue import read
from hpo.driver.request import request_of
from hpo.driver.resolve import declare
from hpo.errors import DriftError, SpaceError, UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.database.tables import asks
from hpo.search.samplers.registry import SAMPLERS
from hpo.storage.home import Home

pytestmark = pytest.mark.whole

STUDY = str(HARNESS / "curves_study.py")
GOOD = {"lr": 0.01, "optimizer": "adamw", "num_heads": 4, "hidden_size": 64}


def drive(home, trials, **flags):
    """Run a study without its mirror: (params by number, digest)."""
    with closing(Ledger(home.create().storage)) as ledger:
        request = request_of(home, **{"reference": STUDY, "window": 4} | flags)
        name, state = driven(ledger, request, trials=trials)
        assert state == "complete"
        with ledger.read() as connection:
            row = queries.study_row(connection, name)
            return [trial.params for trial in queries.trial_rows(connection, row.id)], queries.digest(connection, row)


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
        ({"lrr": 0.1}, "enqueue[0]: 'lrr' is not a dimension of the space; did you mean 'lr'"),
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
        declare(request_of(Home(tmp_path / "home"), reference=STUDY, enqueue=[entry]), None, workers=1)
    assert words in str(caught.value) and not (tmp_path / "home").exists()


def test_a_file_is_read_and_what_is_pinned_keeps_its_value(tmp_path):
    (tmp_path / "good.yaml").write_text("lr: 0.01\noptimizer: sgd\nmomentum: 0.5\ntrain:\n  num_epochs: 9\n")
    [entry] = read([tmp_path / "good.yaml"])
    request = request_of(Home(tmp_path), reference=STUDY, enqueue=[entry], overrides={"optimizer": "adamw"})
    resolved = declare(request, None, workers=1)
    assert resolved.spec.enqueue == [{"lr": 0.01}] and resolved.study.enqueue == ({"lr": 0.01},)


def test_a_file_without_a_value_is_refused(tmp_path):
    (tmp_path / "empty.yaml").write_text("# to be filled\n")
    with pytest.raises(UserError, match=r"--enqueue .*empty.yaml holds no value: write one a line"):
        read([tmp_path / "empty.yaml"])


def test_a_tier_is_kept_by_a_resume(tmp_path):
    text = Path(STUDY).read_text().replace("Choice([1, 2, 3, 4])", "Choice([1, 2, 3, 4], tier=2)")
    file = tmp_path / "tiered.py"
    file.write_text(text.replace('multiple_of="num_heads"', 'multiple_of="num_heads", tier=2'))
    home = Home(tmp_path / "home")
    first, _ = drive(home, 4, reference=str(file), tier=1)
    assert {path for params in first for path in params} == {"lr", "optimizer", "momentum"}
    again, _ = drive(home, 8, reference=str(file))
    assert again[:4] == first and {path for params in again for path in params} == {"lr", "optimizer", "momentum"}
