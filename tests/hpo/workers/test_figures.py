"""`hpo worker --metrics`: what a worker spends its time on, how long its reports take, and who may read it."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
from contextlib import closing

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hpo.errors import StorageError, UserError
from hpo.storage import metrics_text
from hpo.storage.home import Home
from hpo.storage.metrics_text import exposed, text_of, token_of
from hpo.workers.figures import Figures


def values(text: bytes) -> dict[tuple[str, ...], float]:
    samples = [sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_time_is_counted_by_what_the_worker_does():
    now = 100.0
    figures = Figures(lambda: now)
    for state, seconds in (
        ("no_study", 1.0),
        ("no_trial", 2.0),
        ("training", 4.0),
        ("no_trial", 8.0),
        ("training", 16.0),
    ):
        figures.enter(state)
        now += seconds
    with figures.waiting_at_a_rung():
        now += 32.0
    now += 64.0
    counted = values(text_of(figures.families))
    assert {state: counted["hpo_worker_seconds_total", state] for state in ("no_study", "no_trial", "at_rung")} == {
        "no_study": 1.0,
        "no_trial": 10.0,
        "at_rung": 32.0,
    }
    assert counted["hpo_worker_seconds_total", "training"] == 84.0, "the time since the last change counts"
    assert counted["hpo_worker_trials_total",] == 2.0


def test_reports_are_counted_by_the_time_in_which_they_commit():
    now = 0.0
    figures = Figures(lambda: now)
    for seconds, reports in ((0.004, 1), (0.3, 2), (60.0, 1)):
        with figures.reporting(reports):
            now += seconds
    with pytest.raises(ValueError), figures.reporting(1):
        raise ValueError  # a report that has not been committed
    counted = values(text_of(figures.families))
    bounds = {name[1]: value for name, value in counted.items() if name[0] == "hpo_worker_report_seconds_bucket"}
    assert (bounds["0.005"], bounds["0.25"], bounds["0.5"], bounds["10.0"], bounds["+Inf"]) == (1, 1, 3, 3, 4)
    assert counted["hpo_worker_report_seconds_count",] == 4
    assert counted["hpo_worker_report_seconds_sum",] == pytest.approx(60.604)


def test_a_port_of_a_worker_answers_for_the_token(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = Home.at(tmp_path)

    def ask(path: str, **headers: str) -> tuple[int, bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    with exposed(str(port), home, Figures().families):
        bearer = {"Authorization": f"Bearer {(tmp_path / 'metrics.token').read_text()}"}
        status, text = ask("/metrics", **bearer)
        assert status == 200 and values(text)["hpo_worker_trials_total",] == 0.0
        assert ask("/metrics")[0] == 401 and ask("/", **bearer)[0] == 404
        with pytest.raises(UserError, match=rf"--metrics {port}: it cannot be used \(.*\); give another\."):
            exposed(str(port), home, Figures().families).__enter__()
    with pytest.raises(ConnectionRefusedError):
        ask("/metrics")


def test_a_token_that_everybody_would_know_is_refused(tmp_path):
    (tmp_path / "metrics.token").write_text("\n")
    with pytest.raises(StorageError, match="is empty: delete it"):
        token_of(Home.at(tmp_path))
    (tmp_path / "metrics.token").write_text("of-a-team\n")
    assert token_of(Home.at(tmp_path)) == "of-a-team"
    assert metrics_text.answer_with(list, "of-a-team", "Bearer of-a-team").status == 200


def test_without_the_extra_a_sentence_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"prometheus_client: pip install 'hpo\[metrics\]'\."):
        exposed("0", Home.at(tmp_path), list)
    assert not [*tmp_path.iterdir()]


def test_workers_and_status_import_no_prometheus_client():
    code = (
        "import sys, hpo.workers.worker, hpo.cli.main, hpo.analysis.results.status; "
        "assert 'prometheus_client' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
