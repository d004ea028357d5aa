"""`hpo sync` towards a server that is away."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial

import pytest
from crafted import open_crafted, put_trial
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.tracking import mirror_process


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
def test_a_sync_to_where_nothing_listens_says_so_once(home, monkeypatch, flags):
    """In the words of `hpo run`; as JSON, standard output has that line alone."""
    home.create()
    with closing(open_crafted(home.root / "ledger.db")) as ledger:
        put_trial(ledger, 0, "complete", (0.5,))
    monkeypatch.setattr(mirror_process, "drain", partial(mirror_process.drain, seconds=0.1))  # it tries for so long
    words = ("sync", "--home", str(home.root), "--tracking-uri", "http://127.0.0.1:9", *flags)
    told = CliRunner().invoke(app, words)
    away = "MLflow at http://127.0.0.1:9 does not answer now (Connection refused)"
    assert told.exit_code == 1
    if flags:
        assert json.loads(told.stdout)[0]["why"] == away and told.stdout.count("\n") == 1
    else:
        [line] = told.output.splitlines()
        assert line.startswith("crafted: MLflow at http://127.0.0.1:9 is behind by ") and f" ({away}): run `" in line
        assert "Max retries" not in line
