"""Faults at random times, as many as fall: nothing is lost, doubled or left hanging, and every digest is equal.

    make chaos FAULTS=1000 SEED=monday JOURNAL=chaos.jsonl

Without a journal it runs EPISODES studies, and forgets them. With one it goes on after the journal's last line.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import s3_server
from chaos import HANGS, KINDS, Ended, Episode, Servers, Whole, drawn, fought, table, whole
from kill import end_all

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
def servers(postgres_server, tmp_path) -> Iterator[Servers]:
    with s3_server.serving(tmp_path) as endpoint:
        port = int(endpoint.rpartition(":")[2])
        [process] = [
            child
            for child in psutil.Process().children(recursive=True)
            if any(connection.laddr.port == port for connection in child.net_connections())
        ]
        yield Servers(postgres_server, (endpoint, process), tmp_path)


def test_every_pair_of_axes_comes_about_as_often_as_any_other():
    episodes, again = ([*itertools.islice(drawn("a"), FIRST)] for _ in range(2))
    assert episodes == again
    for kind in KINDS:
        for place in ("sqlite", "postgres", "home", "bucket"):
            count = sum(episode.kind == kind and place in (episode.ledger, episode.store) for episode in episodes)
            expected = FIRST / len(KINDS) / 2
            assert expected / 2 < count < expected * 2, (kind, place, count)


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

    fell = 0
    for episode in drawn(SEED):
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
