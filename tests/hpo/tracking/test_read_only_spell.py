"""MLflow's database on a file system that takes no changes for a while, as after a fault of a disk or of a mount."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.whole

STUDY = """
import time
from hpo import Float, Objective, Study
from trainer.config import Frozen, TrainConfig
from trainer.report import Outcome

class Config(Frozen):
    x: float = 0.0
    train: TrainConfig = TrainConfig()

class Loop:
    def __init__(self, config): self.x = config.x
    def fit(self, reporter, checkpoints):
        for epoch in (1, 2):
            time.sleep(1.0)
            reporter.report(epoch, {"val/loss": self.x}, epoch=epoch)
        return Outcome("complete", 2, 2)

STUDY = Study("spell", Config(), Loop, {"x": Float(0.0, 1.0)}, [Objective("val/loss")], sampler="random")
"""
# Run in a namespace of its own; what it starts begins warm. The spell begins while nothing has the database open, as no
# mount becomes read-only under a writer.
SPELL = """
import sqlite3, subprocess, sys, time

tests, place = sys.argv[1:]
sys.path.insert(0, tests)
import warm

warm.install()
if subprocess.run(["mount", "-t", "tmpfs", "none", f"{place}/store"]).returncode:
    sys.exit(77)
hpo, home = [sys.executable, "-m", "hpo"], ["--home", f"{place}/home"]
to = ["--tracking-uri", f"sqlite:///{place}/store/mlflow.db"]
run = [*hpo, "run", "--study", f"{place}/spell.py", "--workers", "1", *home, *to]
subprocess.run([*run, "--trials", "1"], check=True)
subprocess.run(["mount", "-o", "remount,ro", "none", f"{place}/store"], check=True)
going = subprocess.Popen([*run, "--trials", "6"])
ledger = sqlite3.connect(f"file:{place}/home/ledger.db?mode=ro", uri=True)
while ledger.execute("SELECT count(*) FROM trials WHERE ended_at IS NOT NULL").fetchone()[0] < 3:
    assert going.poll() is None, "training does not wait for a tracker"
    time.sleep(0.1)
subprocess.run(["mount", "-o", "remount,rw", "none", f"{place}/store"], check=True)
print("run", going.wait())
print("leases", ledger.execute("SELECT name FROM leases WHERE owner IS NOT NULL").fetchall())
print("verify", subprocess.run([*hpo, "verify", *home, *to]).returncode, flush=True)
"""


@pytest.mark.usefixtures("process")
def test_a_mirror_outlives_a_store_that_took_no_changes(tmp_path):
    (tmp_path / "spell.py").write_text(STUDY)
    (tmp_path / "store").mkdir()
    program = [sys.executable, "-c", SPELL, str(ROOT / "tests" / "helpers"), str(tmp_path)]
    ran = subprocess.run(["unshare", "-Urm", *program], capture_output=True, text=True, timeout=280)
    if ran.returncode in (1, 77) and not Path(tmp_path, "home").exists():
        pytest.skip(f"runs as root, or with the right to mount in a namespace of its own: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert {"run 0", "leases []", "verify 0"} <= set(lines), ran.stdout + ran.stderr
    assert any(line.startswith("0 differences") for line in lines), ran.stdout
