"""Faults at random times, as many as fall: nothing is lost, doubled or left hanging, and every digest is equal.

    make chaos FAULTS=1000 SEED=monday JOURNAL=chaos.jsonl

Without a journal it runs EPISODES studies, and forgets them. With one it goes on after the journal's last line.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

import apart
import mlflow_service
import psutil
import pytest
import s3_server
from chaos import HANGS, KINDS, Ended, Episode, Whole, drawn, fought, table, whole
from kill import end_all
from network import Network, missing
from servers import Servers

EPISODES = int(os.environ.get("EPISODES") or 9)
FAULTS = int(os.environ.get("FAULTS") or 0)
SEED = os.environ.get("SEED") or "chaos"
JOURNAL = os.environ.get("JOURNAL", "")
FIRST = 200  # episodes in which pairs are counted


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture
def servers(postgres_server, empty_mlflow, tmp_path) -> Iterator[Servers]:
    with ExitStack() as stack:
        network = None if missing() else stack.enter_context(closing(Network()))
        address = network.address if network else "127.0.0.1"
        endpoint = stack.enter_context(s3_server.serving(tmp_path, address=address))
        port = int(endpoint.rpartition(":")[2])
        [process] = [
            child
            for child in psutil.Process().children(recursive=True)
            if any(connection.laddr.port == port for connection in child.net_connections())
        ]

        @cache
        def mlflow() -> str:
            (root := tmp_path / "mlflow").mkdir()
            return stack.enter_context(mlflow_service.serving(root, empty_mlflow, address=address))

        yield Servers(postgres_server, (endpoint, process), mlflow, tmp_path, network)


def test_every_pair_of_axes_comes_about_as_often_as_any_other():
    episodes, again = ([*itertools.islice(drawn("a"), FIRST)] for _ in range(2))
    assert episodes == again
    for kind in KINDS:
        for place in ("sqlite", "postgres", "home", "bucket"):
            count = sum(episode.kind == kind and place in (episode.ledger, episode.store) for episode in episodes)
            expected = FIRST / len(KINDS) / 2
            assert expected / 2 < count < expected * 2, (kind, place, count)
    for fault in apart.FAULTS:
        of_it = [episode for episode in episodes if episode.network == fault]
        assert {episode.ledger for episode in of_it} == {"postgres"} and len({episode.kind for episode in of_it}) >= 5


def test_without_namespaces_episodes_have_one_host():
    with_hosts, without = ([*itertools.islice(drawn("a", hosts=hosts), FIRST)] for hosts in (True, False))
    assert [episode for episode in with_hosts if not episode.network] == [
        episode for episode, before in zip(without, with_hosts, strict=True) if not before.network
    ]
    assert not any(episode.network for episode in without)


@pytest.mark.slow
@pytest.mark.usefixtures("process")
@pytest.mark.timeout(max(EPISODES, FAULTS) * HANGS)
def test_random_faults_lose_nothing_and_double_nothing(tmp_path, servers):
    journal = Path(JOURNAL) if JOURNAL else tmp_path / "journal.jsonl"
    before = journal.read_text().splitlines() if journal.exists() else []
    uninterrupted: dict[str, Whole] = {}

    def of(episode: Episode) -> Ended:
        kind = KINDS[episode.kind]
        if episode.kind not in uninterrupted:
            uninterrupted[episode.kind] = whole(kind, tmp_path / f"whole-{episode.kind}")
        return fought(episode, servers, uninterrupted[episode.kind], tmp_path)

    if missing():
        print(f"No episode has several hosts, since {missing()}.")
    fell = 0
    for episode in drawn(SEED, hosts=not missing()):
        if episode.number < len(before):
            continue
        ended = of(episode)
        fell += sum(ended.fell.values())
        with journal.open("a") as file:
            file.write(ended.line())
        if fell >= FAULTS if FAULTS else episode.number + 1 - len(before) == EPISODES:
            break
    print(f"\nSEED={SEED}\n{table(journal)}")
    assert [broken for line in journal.read_text().splitlines() if (broken := json.loads(line)["broken"])] == []
