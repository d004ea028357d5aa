"""`hpo serve --metrics`: figures of all studies as Prometheus reads them, for whoever brings the token."""

from __future__ import annotations

import stat
from collections.abc import Iterator

import pytest
from crafted import open_crafted, put_trial
from prometheus_client.parser import text_string_to_metric_families
from served import get, port_of, served
from sqlalchemy import event, insert, update

from hpo.analysis.serve.metrics import HomeMetrics
from hpo.ledger import Ledger
from hpo.ledger.database import tables
from hpo.ledger.views import metrics as metric_queries
from hpo.ledger.views import mirror as mirror_queries
from hpo.space.trial_state import STATES
from hpo.storage import metrics_text
from hpo.storage.home import Home


def parsed(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Returns the name of each sample -> its values by the values of its labels."""
    families = text_string_to_metric_families(text)
    values: dict[str, dict[tuple[str, ...], float]] = {}
    for sample in (sample for family in families for sample in family.samples):
        assert sample.labels.keys() <= {"study", "state"}, "a label by trial would make a time series for each"
        labels = tuple(sample.labels[label] for label in ("study", "state") if label in sample.labels)
        values.setdefault(sample.name, {})[labels] = sample.value
    return values


@pytest.fixture
def ledger(tmp_path) -> Iterator[Ledger]:
    """A study with trials of three states, and another one without trials."""
    ledger = open_crafted(tmp_path / "ledger.db", names=("crafted", "other"))
    put_trial(ledger, 0, "complete", (0.5, 0.6), fence=1, revision=5)
    put_trial(ledger, 1, "running", (0.5,), fence=1, revision=3)
    put_trial(ledger, 2, "waiting")
    yield ledger
    ledger.close()


class Watch:
    """Two clocks, the wall's and the monotonic one, that a test moves."""

    def __init__(self, ledger: Ledger) -> None:
        self.seconds = 0.0
        self.measure = HomeMetrics(ledger, wall=lambda: self.seconds, monotonic=lambda: 1000 + self.seconds)

    def read(self) -> dict[str, dict[tuple[str, ...], float]]:
        return parsed(metrics_text.text_of(self.measure).decode())


def test_trials_epochs_and_transactions_are_the_ledgers(ledger):
    values = Watch(ledger).read()
    states = {("crafted", "complete"): 1.0, ("crafted", "running"): 1.0, ("crafted", "waiting"): 1.0}
    every = {(study, state): 0.0 for study in ("crafted", "other") for state in STATES}
    assert values["hpo_trials"] == every | states
    assert values["hpo_epochs_total"] == {("crafted",): 3.0, ("other",): 0.0}
    assert values["hpo_trial_transactions_total"] == {("crafted",): 8.0, ("other",): 0.0}
    assert (
        values["hpo_study_state"]["other", "interrupted"] == 1.0 and values["hpo_study_state"]["other", "running"] == 0
    )


def test_the_age_of_a_report_is_that_of_the_most_silent_trial(ledger):
    put_trial(ledger, 3, "running", fence=1)
    with ledger.write() as connection:
        connection.execute(update(tables.reports).where(tables.reports.c.trial_id == 2).values(at=40.0))
        connection.execute(update(tables.attempts).where(tables.attempts.c.trial_id == 4).values(started_at=30.0))
    watch = Watch(ledger)
    watch.seconds = 50.0
    assert watch.read()["hpo_report_age_seconds"] == {("crafted",): 20.0}  # trial 3 has not reported since its start


def test_a_lease_ages_until_its_counter_moves(ledger):
    with ledger.write() as connection:
        lease = {"name": "driver:1", "owner": "p", "fence": 1, "renewals": 7, "host": "box", "pid": 1}
        connection.execute(insert(tables.leases).values(**lease, pid_started="x", since=0.0))
    watch, ages = Watch(ledger), []
    for seconds, driver, trial in ((0, 7, 0), (10, 7, 0), (20, 8, 0), (25, 8, 1)):
        with ledger.write() as connection:
            connection.execute(update(tables.leases).values(renewals=driver))
            connection.execute(update(tables.attempts).values(renewals=trial))
        watch.seconds = float(seconds)
        values = watch.read()
        ages.append(
            (values["hpo_driver_lease_age_seconds"]["crafted",], values["hpo_trial_lease_age_seconds"]["crafted",])
        )
    assert ages == [(0, 0), (10, 10), (0, 20), (5, 0)]
    assert "hpo_mirror_lease_age_seconds" not in values, "nobody mirrors"
    assert watch.read()["hpo_study_state"]["crafted", "running"] == 1.0, "its driver is on another host"


def test_the_lag_is_that_of_the_tracker_furthest_behind(ledger):
    with ledger.write() as connection:
        assert metric_queries.behind(connection) == {}
        mirror_queries.move(connection, "near", 1, [(mirror_queries.STUDY, "s", 0), (0, "a", 5), (1, "b", 3)])
        mirror_queries.move(connection, "far", 1, [(mirror_queries.STUDY, "s", 0), (0, "a", 4)])
        mirror_queries.move(connection, "far", 2, [(mirror_queries.STUDY, "s", 0)])
        assert [mirror_queries.behind(connection, name, 1) for name in ("near", "far")] == [0, 4]
    assert Watch(ledger).read()["hpo_mirror_behind_transactions"] == {("crafted",): 4.0, ("other",): 0.0}


def test_a_mirror_that_has_never_reached_its_tracker_lacks_everything(ledger):
    assert "hpo_mirror_behind_transactions" not in Watch(ledger).read(), "nothing mirrors these studies"
    with ledger.write() as connection:
        lease = {"name": "mirror:1", "owner": "p", "fence": 1, "renewals": 7, "host": "box", "pid": 1}
        connection.execute(insert(tables.leases).values(**lease, pid_started="x", since=0.0))
    assert Watch(ledger).read()["hpo_mirror_behind_transactions"] == {("crafted",): 8.0}


def test_bytes_are_those_of_kept_checkpoints(ledger):
    row = {"trial_id": 1, "epoch": 1, "sha256": "", "metrics": {}, "fence": 1, "revision": 1, "at": 0.0}
    with ledger.write() as connection:
        for step, state in enumerate(("kept", "deleted", "kept", "damaged")):
            values = row | {"step": step, "path": f"step-{step}", "size": 10**step, "state": state}
            connection.execute(insert(tables.checkpoints).values(values))
    assert Watch(ledger).read()["hpo_checkpoint_bytes"] == {("crafted",): 101.0, ("other",): 0.0}


def test_a_scrape_is_six_queries_for_any_number_of_studies(tmp_path):
    ledger = open_crafted(tmp_path / "many.db", names=tuple(f"study-{i}" for i in range(20)))
    statements: list[str] = []
    event.listen(ledger.engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    assert len(Watch(ledger).read()["hpo_checkpoint_bytes"]) == 20
    assert len([text for text in statements if text.startswith("SELECT")]) == 6
    ledger.close()


def test_metrics_have_a_token_that_opens_nothing_else(ledger, tmp_path):
    home = Home.at(tmp_path)
    with served(home, metrics=True) as server:
        port, path = port_of(server), home.root / "metrics.token"
        token = path.read_text()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(bytes.fromhex(token)) == 32
        for brought in ("", "Bearer ", "Bearer x", f"Basic {token}", f"Bearer {(home.root / 'ui.token').read_text()}"):
            status, _, text = get(port, "/metrics", Authorization=brought)
            assert status == 401 and "crafted" not in text
        status, headers, text = get(port, "/metrics", Authorization=f"Bearer {token}")
        assert status == 200 and headers["content-type"] == metrics_text.CONTENT and parsed(text)["hpo_trials"]
        assert get(port, "/", Authorization=f"Bearer {token}")[0] == 401, "the pages have another token"
        assert get(port, "/metrics", Authorization=f"Bearer {token}", Host="evil.test")[0] == 403
        assert get(port, "/metrics", Authorization=f"Bearer {token}", method="POST")[0] == 405


def test_metrics_may_be_below_a_path_and_are_not_served_unasked(ledger, tmp_path):
    home = Home.at(tmp_path)
    bearer = {"Authorization": f"Bearer {metrics_text.token_of(home)}"}
    with served(home, metrics=True, prefix="/hpo") as server:
        assert {get(port_of(server), path, **bearer)[0] for path in ("/metrics", "/hpo/metrics")} == {200}
    with served(home) as server:
        assert get(port_of(server), "/metrics", **bearer)[0] == 401
        assert get(port_of(server), "/metrics", home)[0] == 404
