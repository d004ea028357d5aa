"""The model's import, which takes seconds, begins while the first trials train and not when it is asked."""

from __future__ import annotations

import json
import subprocess
import sys

TOLD = """
import json, sys, threading
from hpo import Float, Objective
from hpo.search.promotion.freeze_thaw import FreezeThawSampler
from hpo.search.samplers.base import TrialRecord
from hpo.space.space import Space

sampler = FreezeThawSampler(Space({"lr": Float(0.0, 1.0)}), [Objective("loss")], 0)
asked = [sampler.ask(number) for number in range(3)]
before = "torch" in sys.modules
sampler.tell(TrialRecord(0, "complete", asked[0].coordinates, (0.5,), [(1, 0.5)]))
"""
JOINED = """
threads = [one for one in threading.enumerate() if one is not threading.main_thread()]
for one in threads:
    one.join()
sampler.tell(TrialRecord(1, "complete", asked[1].coordinates, (0.4,), [(1, 0.4)]))
print(json.dumps([before, len(threads), "hpo.search.promotion.curve_model" in sys.modules, threading.active_count()]))
"""


def test_it_begins_at_the_first_trial_that_is_told(process):
    ran = subprocess.run([sys.executable, "-c", TOLD + JOINED], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [False, 1, True, 1]


def test_a_process_that_ends_meanwhile_ends_without_a_word(process):
    """As that of a run whose first trials have all failed."""
    ran = subprocess.run([sys.executable, "-c", TOLD], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")
