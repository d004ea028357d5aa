"""Checks a home with its rights, ledger, leases and tracker."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

from hpo.doctor.finding import Finding
from hpo.door import option
from hpo.errors import HpoError, NoLedger
from hpo.ledger import Ledger, leases, queries
from hpo.ledger.database import damage
from hpo.ledger.database.store import backend
from hpo.ledger.process_id import is_dead
from hpo.ledger.views import verify as verify_queries
from hpo.storage.home import Home
from hpo.text import command, counted, tally
from hpo.tracking.mlflow.client import silence
from hpo.tracking.mlflow.damage import damage_of
from hpo.tracking.uri import check_uri, of_rows, tracker_name
from trainer.redaction import redacted_url

SECONDS = 3.0  # for a server to answer


def rights(at: Home) -> Iterator[Finding]:
    """Yields who may read and write the home."""
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
    foreign = [entry.name for entry in at.root.iterdir() if not os.access(entry, os.R_OK | os.W_OK)]
    if foreign:
        fix = f"chown -R {os.geteuid()} {at.root}, or run as the user who owns it."
        yield Finding("home", "fails", f"in it are not yours to write: {', '.join(sorted(foreign))}", fix)


def ledger(at: Home, storage: str | None) -> Iterator[Finding]:
    """Yields whether the ledger answers, with its schema, integrity and leases."""
    url = storage or at.storage
    try:
        if away := _away(url):
            fix = f"start the server, or correct {option('storage')}; the host must let port and address through."
            yield Finding("ledger", "fails", f"{redacted_url(url)} does not answer ({away})", fix)
            return
        opened = Ledger(url, create=False)
    except NoLedger:
        if with_checkpoints := at.with_checkpoints():
            fix = f"restore the ledger from a backup, or choose another {option('home')}."
            yield Finding(
                "ledger", "fails", f"{redacted_url(url)} holds no ledger, and {with_checkpoints} has checkpoints", fix
            )
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
        fix = f"restore the file from a backup, or choose another {option('home')}."
        yield Finding("ledger", "fails", f"it is damaged: {broken[0]}", fix)
    leases_held = opened.look(leases.holders)
    dead = sorted(name for name, row in leases_held.items() if is_dead(row.host, row.pid, row.pid_started))
    alive = [f"{name} by {row.host}:{row.pid}" for name, row in leases_held.items() if name not in dead]
    if alive:
        yield Finding("ledger", "ok", f"at work: {', '.join(sorted(alive))}")
    if dead:
        text = f"{counted(len(dead), 'lease')} of processes that are dead: {', '.join(dead)}"
        yield Finding("ledger", "note", text, f"`{command('resume')}` takes the study over from them.")


def tracker(at: Home, storage: str | None, given: str | None) -> Iterator[Finding]:
    """Yields for each tracker of the studies whether it can be used and answers."""
    uris = [given] if given else [at.tracking_uri]
    if not given:
        try:
            with closing(Ledger(storage or at.storage, create=False)) as opened, opened.read() as connection:
                rows = [queries.study_row(connection, name) for name in queries.study_names(connection)]
                uris = list(dict.fromkeys(of_rows([row], at) for row in rows)) or uris
        except HpoError:  # the check of the ledger reports it
            pass
    for uri in uris:
        if uri == at.tracking_uri and not at.root.is_dir():
            continue  # the first run creates it with the home
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
    """Returns why a database server does not answer; empty if it does or none is needed.

    The database's own driver would try for minutes.
    """
    parts = urlsplit(url)
    if backend(url) == "sqlite" or not parts.hostname:
        return ""
    try:
        socket.create_connection((parts.hostname, parts.port or 5432), SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
