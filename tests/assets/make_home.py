"""Writes the home that tests/golden/test_recorded_home.py opens, and what its commands say of it.

    python tests/assets/make_home.py

It leaves home-<version>.tar.xz and home-<version>.json beside this file. Run it for a new release, name the new home in
tests/golden/home_asset.py, and keep the old one while its version must still open.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "golden"))

import golden_record  # noqa: E402
import home_asset  # noqa: E402

SMALL = ("--study", "mlp", "--executor", "inline", "-o", "model.hidden_size=16", "-o", "train.checkpoint.keep_last=1")
WHOLE = (*SMALL, "--name", home_asset.COMPLETE, "--sampler", "random", "--trials", "3", "-o", "train.num_epochs=2")
BROKEN = (*SMALL, "--name", home_asset.INTERRUPTED, "--sampler", "tpe", "--strategy", "none")
BROKEN += ("--trials", "3", "-o", "train.num_epochs=6", "-o", "train.checkpoint.every_steps=10")
STOP_AT = 12  # reports: in the middle of the second trial, and of an epoch


def hpo(home: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hpo", *arguments, "--home", str(home)]
    return subprocess.Popen(
        command, env=golden_record.pinned_environment() | environment, stdout=subprocess.PIPE, text=True
    )


def said(home: Path, *arguments: str) -> str:
    """Returns the output of a command that succeeds."""
    process = hpo(home, *arguments)
    output, _ = process.communicate()
    assert process.returncode == 0, f"hpo {' '.join(arguments)} exits {process.returncode}: {output}"
    return output


def interrupt(home: Path) -> None:
    """Runs the second study until it halts itself in the middle of a trial, and sends it what Ctrl-C sends."""
    halt = {"HPO_TESTING": "1", "HPO_FAILPOINTS": f"worker.after_report_commit=stop@{STOP_AT}"}
    process = hpo(home, "run", *BROKEN, **halt)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate()
    assert process.returncode == 130, output


def facts(home: Path, name: str) -> dict[str, Any]:
    """Returns what the commands say of a study, as JSON."""
    return {command: json.loads(said(home, command, "--study", name, "--json")) for command in ("status", "compare")}


def settle(home: Path) -> None:
    """Moves what write-ahead logs hold into the databases, and removes what processes printed."""
    for name in ("ledger.db", "mlflow.db"):
        with closing(sqlite3.connect(home / name, isolation_level=None)) as connection:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.rmtree(home / "logs")


def place(home: Path) -> dict[str, Any]:
    """Returns where the interrupted trial stands."""
    trial = json.loads(said(home, "show", "1", "--study", home_asset.INTERRUPTED, "--json"))
    per_epoch = next(step // epoch for step, epoch, _ in trial["curves"]["val/loss"])
    assert trial["state"] == "waiting" and trial["step"] % per_epoch, "it does not wait in the middle of an epoch"
    return {key: trial[key] for key in ("number", "epoch", "step", "params")}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="hpo-asset-") as directory:
        home, twin = Path(directory, home_asset.NAME), Path(directory, "twin")
        said(home, "run", *WHOLE)
        interrupt(home)
        said(twin, "run", *BROKEN)
        told = {name: facts(home, name) for name in (home_asset.COMPLETE, home_asset.INTERRUPTED)}
        told |= {"interrupted trial": place(home), "uninterrupted": facts(twin, home_asset.INTERRUPTED)}
        said(home, "verify")
        settle(home)
        with tarfile.open(HERE / f"{home_asset.NAME}.tar.xz", "w:xz", preset=9) as archive:
            archive.add(home, home_asset.NAME, filter=nameless)
    (HERE / f"{home_asset.NAME}.json").write_text(json.dumps(told, indent=1).replace(str(home), "HOME") + "\n")


def nameless(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()
