"""A search in tiers, by the commands of docs/guide/where-to-begin.md: the second study begins at the best trial."""

from __future__ import annotations

import re
import shlex
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import yaml
from driven import driven
from places import ROOT
from sqlalchemy import select
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.declaration.references import load
from hpo.driver.request import request_of
from hpo.driver.resolve import declare
from hpo.errors import UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.database.tables import asks, trials
from hpo.space.config import as_json, flatten
from hpo.storage.home import Home

pytestmark = pytest.mark.whole

CURVES = ROOT / "tests" / "harness" / "curves_study.py"
FIRST, SECOND = {"lr", "optimizer", "momentum"}, {"num_heads", "hidden_size"}


def commands() -> list[list[str]]:
    """Those of the guide's paragraph on tiers, without `hpo`."""
    text = (ROOT / "docs" / "guide" / "where-to-begin.md").read_text(encoding="utf-8")
    found = re.search(r"## Tiers.*?```\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return [shlex.split(line)[1:] for line in found[1].splitlines()]


def searched(home: Home, name: str) -> list[dict]:
    """The trials, each with its whole configuration."""
    with Ledger(home.storage).read() as connection:
        study = queries.study_row(connection, name).id
        query = select(asks.c.config).join(trials, trials.c.id == asks.c.trial_id).where(trials.c.study_id == study)
        configs = connection.execute(query.order_by(trials.c.number)).scalars().all()
        rows = queries.trial_rows(connection, study)
        return [{**asdict(row), "config": config} for row, config in zip(rows, configs, strict=True)]


@pytest.mark.usefixtures("process")
def test_the_second_tier_is_searched_around_the_best_of_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = CURVES.read_text().replace('"curves"', '"my-study"')
    text = text.replace("Choice([1, 2, 3, 4])", "Choice([1, 2, 3, 4], tier=2)")
    Path("my_study.py").write_text(text.replace('multiple_of="num_heads"', 'multiple_of="num_heads", tier=2'))
    home = Home(tmp_path / "home")
    lines = commands()
    assert [line[0] for line in lines] == ["run", "best", "run"]
    for line in lines:
        few = ["6" if word == "50" else word for word in line]
        given = [*few, "--home", str(home.root), *(["--executor", "inline"] if line[0] == "run" else [])]
        result = CliRunner().invoke(app, given)
        assert result.exit_code == 0, (line, result.output, result.stderr)
    one, two = searched(home, "my-study"), searched(home, "my-study-2")
    assert len(one) == len(two) == 6
    assert {path for row in one for path in row["params"]} <= FIRST
    assert all(row["config"]["num_heads"] == 4 and row["config"]["hidden_size"] == 32 for row in one), "as configured"

    complete = [row for row in one if row["state"] == "complete"]
    best = min(complete, key=lambda row: row["values"][0])
    assert len({row["params"]["lr"] for row in complete}) > 1, "there was something to choose from"
    assert yaml.safe_load(Path("tier1.yaml").read_text()) == best["params"]
    for row in two:
        assert {path: row["config"][path] for path in best["params"]} == best["params"]
        assert SECOND <= row["params"].keys() <= SECOND | (FIRST - best["params"].keys())
    assert len({(row["params"]["num_heads"], row["params"]["hidden_size"]) for row in two}) > 3


def test_a_higher_tier_begins_with_the_best_of_the_lower_one(home, capsys):
    """Under a name of its own, with the overrides of the lower one; unless the user says otherwise."""
    text = CURVES.read_text().replace("Choice([1, 2, 3, 4])", "Choice([1, 2, 3, 4], tier=2)")
    file = home.create().root / "curves.py"
    file.write_text(text.replace('multiple_of="num_heads"', 'multiple_of="num_heads", tier=2'))
    request = partial(request_of, home, reference=str(file), sampler="random", strategy="none", window=1)
    with closing(Ledger(home.storage)) as ledger:
        assert driven(ledger, request(tier=1), trials=4) == ("curves", "complete")
        assert driven(ledger, request(tier=2), trials=3) == ("curves-tier2", "complete")
        assert "this one is curves-tier2 (`hpo status --study curves-tier2`) and begins with" in capsys.readouterr().err
        one, two = searched(home, "curves"), searched(home, "curves-tier2")
        best = min(one, key=lambda row: row["values"][0])
        assert two[0]["config"] == best["config"] and two[0]["params"].keys() >= SECOND
        assert len({row["params"]["num_heads"] for row in two}) > 1
        assert driven(ledger, request(tier=2), trials=5) == ("curves-tier2", "complete"), "it goes on"
        assert searched(home, "curves-tier2")[:3] == two and capsys.readouterr().err == ""
        for name, change in (("other", {"name": "other"}), ("curves-tier2", {"enqueue": [{"lr": 0.25}]})):
            resolved = declare(request(tier=2, **change), None if name == "other" else ledger, workers=1)
            assert resolved.spec.name == name and [dict(one) for one in resolved.study.enqueue] == change.get(
                "enqueue", []
            )


def test_a_dimension_pinned_beyond_the_tier_keeps_its_value(tmp_path):
    """Both by the declaration, which enqueues its defaults, and by a file; any other field is refused."""
    ledger = Ledger(Home(tmp_path).create().storage)
    study = load("gpt")
    beyond = next(path for path in study.enqueue[0] if path not in study.upto(1).space.paths)
    pinned = 2 * int(dict(study.enqueue[0])[beyond])
    for enqueue in (None, [{beyond: pinned // 2}]):
        request = request_of(Home(tmp_path), "gpt", overrides={beyond: pinned}, tier=1, enqueue=enqueue)
        declared = declare(request, ledger, workers=1).study
        assert flatten(as_json(declared.config))[beyond] == pinned
        assert all(beyond not in entry for entry in declared.enqueue)
    with pytest.raises(UserError, match="is not a dimension of the space"):
        declare(request_of(Home(tmp_path), "gpt", tier=1, enqueue=[{"model.hiden": 1}]), ledger, workers=1)
    ledger.close()
