"""A home and what it is tied to: rights, ledger, leases, tracker."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

from hpo.doctor.finding import Finding
from hpo.errors import HpoError, NoLedger
from hpo.ledger import Ledger, damage, leases, queries, verify_queries
from hpo.ledger.process_id import is_dead
from hpo.ledger.store import backend
from hpo.storage.home import Home
from hpo.text import command, counted, tally
from hpo.tracking.damage import damage_of
from hpo.tracking.mlflow import silence
from hpo.tracking.uri import check_uri, of_rows, tracker_name
from trainer.redaction import redacted_url

SECONDS = 3.0  # that a server may take to answer


def rights(at: Home) -> Iterator[Finding]:
    """Who may write and read it."""
    if not at.root.is_dir():
        yield Finding("home", "ok", f"{at.root} is not there yet: `hpo run` makes it")
        return
    mode = stat.S_IMODE(at.root.stat().st_mode)
    text = f"{at.root}, mode {mode:o}"
    try:
        at.create()
    except HpoError as error:
        yield Finding("home", "fails", str(error))
        return
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        fix = f"chmod o-w {at.root}: a trial's code is read from files that others could replace."
        yield Finding("home", "note", f"{text}: anybody may write there", fix)
    else:
        yield Finding("home", "ok", text)
    foreign = [one.name for one in at.root.iterdir() if not os.access(one, os.R_OK | os.W_OK)]
    if foreign:
        fix = f"chown -R {os.geteuid()} {at.root}, or run as the user who owns it."
        yield Finding("home", "fails", f"in it are not yours to write: {', '.join(sorted(foreign))}", fix)


def ledger(at: Home, storage: str | None) -> Iterator[Finding]:
    """That it answers, its schema, its integrity, its leases."""
    url = storage or at.storage
    try:
        if away := _away(url):
            fix = "start the server, or correct --storage; the host must let port and address through."
            yield Finding("ledger", "fails", f"{redacted_url(url)} does not answer ({away})", fix)
            return
        opened = Ledger(url, create=False)
    except NoLedger:
        if there := at.with_checkpoints():
            fix = "restore the ledger from a backup, or choose another --home."
            yield Finding("ledger", "fails", f"{redacted_url(url)} holds no ledger, and {there} has checkpoints", fix)
            return
        yield Finding("ledger", "ok", f"{redacted_url(url)} holds no ledger yet: `hpo run` makes it")
        return
    except HpoError as error:
        yield Finding("ledger", "fails", str(error))
        return
    with closing(opened):
        try:
            yield from _contents(opened)
        except HpoError as error:
            yield Finding("ledger", "fails", str(error))


def _contents(opened: Ledger) -> Iterator[Finding]:
    names = opened.look(queries.study_names)
    yield Finding("ledger", "ok", f"{opened.shown}, of this release, with {tally({'studies': len(names)})}")
    broken = opened.look(verify_queries.integrity_check) if opened.is_sqlite else []
    broken += [fault] if not broken and (fault := opened.look(damage.first)) else []
    if broken:
        fix = "restore the file from a backup, or choose another --home."
        yield Finding("ledger", "fails", f"it is damaged: {broken[0]}", fix)
    held = opened.look(leases.holders)
    dead = sorted(name for name, row in held.items() if is_dead(row["host"], row["pid"], row["pid_started"]))
    alive = [f"{name} by {row['host']}:{row['pid']}" for name, row in held.items() if name not in dead]
    if alive:
        yield Finding("ledger", "ok", f"at work: {', '.join(sorted(alive))}")
    if dead:
        text = f"{counted(len(dead), 'lease')} of processes that are dead: {', '.join(dead)}"
        yield Finding("ledger", "note", text, f"`{command('resume')}` takes the study over from them.")


def tracker(at: Home, storage: str | None, given: str | None) -> Iterator[Finding]:
    """That each place where studies are tracked can be used, and answers."""
    uris = [given] if given else [at.tracking_uri]
    if not given:
        try:
            with closing(Ledger(storage or at.storage, create=False)) as opened, opened.read() as connection:
                rows = [queries.study_row(connection, name) for name in queries.study_names(connection)]
                uris = list(dict.fromkeys(of_rows([row], at) for row in rows)) or uris
        except HpoError:  # which the ledger's own check says
            pass
    for uri in uris:
        if uri == at.tracking_uri and not at.root.is_dir():
            continue  # it comes with the home
        try:
            check_uri(uri)
        except HpoError as error:
            yield Finding("tracking", "fails", str(error))
            continue
        if wrong := silence(uri, SECONDS) or damage_of(uri):
            yield Finding("tracking", "fails", wrong)
        else:
            yield Finding("tracking", "ok", tracker_name(uri))


def _away(url: str) -> str:
    """Why a database server does not answer, empty where one does, or where none is needed: its driver would try for
    minutes."""
    parts = urlsplit(url)
    if backend(url) == "sqlite" or not parts.hostname:
        return ""
    try:
        socket.create_connection((parts.hostname, parts.port or 5432), SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
