"""Waits for a storage: how long, what is said, and how a request to leave shortens them."""

from __future__ import annotations

import time

import pytest

from trainer.files import outage
from trainer.files.outage import Outage

ADDRESS = "the ledger postgresql://hpo:geheim@host/db"


@pytest.fixture(autouse=True)
def told_at_once(monkeypatch):
    monkeypatch.setattr(outage, "_TOLD_AFTER", 0.0)


def test_an_outage_is_told_once_with_the_time_left_and_so_is_its_end(capsys):
    storage = Outage(ADDRESS)
    storage.over()
    for _ in range(2):
        assert [storage.again("does not answer", 60.0) for _ in range(3)] == [True] * 3
        storage.over()
    said = capsys.readouterr().err.splitlines()
    begins = "the ledger postgresql://hpo:***@host/db"
    waits, again = f"{begins} does not answer; this process waits for it, up to 60 s more.", f"{begins} answers again, "
    assert [said[0], said[2]] == [waits] * 2 and all(line.startswith(again) for line in said[1::2]) and len(said) == 4


def test_the_wait_counts_from_the_first_failure_of_any_thread(capsys):
    storage, begun = Outage("it"), time.monotonic()
    while storage.again("is away", 0.3):
        pass
    assert 0.3 <= time.monotonic() - begun < 3.0
    assert not storage.again("is away", 0.3), "a second caller does not begin to wait anew"
    storage.over()
    assert storage.again("is away", 0.3)


def test_nobody_waits_unless_asked(capsys):
    assert not outage.is_set() and (outage.seconds(), outage.seconds(60.0)) == (0.0, 60.0)
    assert not Outage("it").again("is away", outage.seconds())
    with outage.waiting(5.0):
        assert outage.is_set() and outage.seconds(60.0) == 5.0
    assert not outage.is_set() and capsys.readouterr().err == ""


def test_a_worker_waits_like_its_driver_and_writes_what_it_alone_meets(tmp_path, monkeypatch, capsys):
    with outage.waiting(7.0):
        given = outage.environ(tmp_path / "notices")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert outage.seconds(60.0) == 7.0
    for alone in (False, True):
        storage = Outage("alone" if alone else "for all")
        assert storage.again("is away", outage.seconds(), alone=alone)
        storage.over()
    lines = (tmp_path / "notices").read_text().splitlines()
    assert [line.partition(" is ")[0].partition(" answers")[0] for line in lines] == ["alone", "alone"]
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_who_is_asked_to_leave_waits_no_longer_than_for_a_hiccup(monkeypatch):
    monkeypatch.setattr(outage, "_LEAVING", 0.2)
    with outage.waiting(60.0):
        outage.leave_soon()
        begun = time.monotonic()
        storage = Outage("it")
        while storage.again("is away", outage.seconds()):
            pass
        assert 0.2 <= time.monotonic() - begun < 3.0
