"""The dashboard of Grafana draws every metric that is exported, and names no other."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from crafted import open_crafted, put_trial
from places import ROOT
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import insert

from hpo.analysis.serve.metrics import ROLES, HomeMetrics
from hpo.ledger.database import tables
from hpo.storage.metrics_text import text_of
from hpo.workers import figures

DASHBOARD = ROOT / "deploy" / "grafana" / "hpo.json"
_NAME = re.compile(r"\bhpo_\w+")


class Gpu:
    """Stands for torch on a GPU: 3 of 8 bytes are in use."""

    class cuda:
        is_initialized = staticmethod(lambda: True)
        mem_get_info = staticmethod(lambda: (5, 8))


@pytest.fixture
def exported(tmp_path, monkeypatch) -> dict[str, set[str]]:
    """Returns the names of all samples that are exported -> the names of their labels."""
    ledger = open_crafted(tmp_path / "ledger.db")
    put_trial(ledger, 0, "running", (0.5,), fence=1)
    with ledger.write() as connection:
        for role in ROLES:
            lease = {"name": f"{role}:1", "owner": "p", "fence": 1, "renewals": 7, "host": "box", "pid": 1}
            connection.execute(insert(tables.leases).values(**lease, pid_started="x", since=0.0))
    monkeypatch.setitem(sys.modules, "torch", Gpu)
    texts = text_of(HomeMetrics(ledger)) + text_of(figures.Figures().families)
    ledger.close()
    families = text_string_to_metric_families(texts.decode())
    return {sample.name: {*sample.labels} for family in families for sample in family.samples}


def queries() -> Iterator[str]:
    def inside(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from (node[key] for key in ("expr", "query") if isinstance(node.get(key), str))
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from inside(child)

    yield from inside(json.loads(DASHBOARD.read_text()))


def test_every_query_names_exported_metrics_and_all_are_drawn(exported):
    named = {name for query in queries() for name in _NAME.findall(query)}
    assert named <= exported.keys()
    assert exported.keys() - named == {"hpo_worker_report_seconds_sum"}, "the histogram draws quantiles and the count"


def test_queries_group_and_filter_by_labels_that_the_metrics_have(exported):
    for query in queries():
        labels = {label for part in re.findall(r"by \(([^)]*)\)", query) for label in part.split(", ")}
        labels |= {*re.findall(r"[{,]\s*(\w+)\s*=", query)}
        for name in _NAME.findall(query):
            assert labels <= exported[name], query


def test_the_memory_of_a_gpu_is_what_all_its_processes_use(exported, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", Gpu)
    values = {family.name: next(iter(family.samples)).value for family in figures.Figures().families()[3:]}
    assert values == {"hpo_worker_gpu_memory_bytes": 3, "hpo_worker_gpu_memory_limit_bytes": 8}


def test_panels_have_titles_places_and_numbers_of_their_own():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(panels) == len(places) == len({panel["id"] for panel in panels}) == len({p["title"] for p in panels})
