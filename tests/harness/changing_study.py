"""A training function that changes its process: each trial reports what it finds there, and leaves it another."""

import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings

import numpy as np

from hpo import Float, study

EPOCHS = 3


def state():
    """Returns what earlier trials may have changed, as a number that is 0 in a fresh process."""
    changed = [
        "CHANGED" in os.environ,
        os.path.basename(os.getcwd()).startswith("changed-"),
        np.geterr()["divide"] == "raise",
        signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL,
        sys.getrecursionlimit() == 2345,
        any(message and message.pattern == "changed" for _, message, *_ in warnings.filters),
        np.random.get_state()[1][0] == np.random.RandomState(7).get_state()[1][0],
    ]
    return sum(2**place for place, flag in enumerate(changed) if flag)


def change(number):
    os.environ["CHANGED"] = str(number)
    os.chdir(tempfile.mkdtemp(prefix="changed-"))
    np.seterr(divide="raise")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    sys.setrecursionlimit(2345)
    warnings.filterwarnings("ignore", "changed")
    np.random.seed(7)
    random.seed(number)


@study(
    space={"lr": Float(1e-3, 0.3, log=True)},
    minimize="loss",
    num_epochs=EPOCHS,
    strategy={"name": "asha", "min_epochs": 1, "eta": 2},
)
def changing(trial):
    before = state()
    change(trial.number)
    loss = 1.0
    if saved := trial.resume():
        loss = json.loads((saved / "loss.json").read_text())
    for epoch in range(trial.epoch + 1, EPOCHS + 1):
        time.sleep(0.1)
        loss = loss * (1 - trial.params.lr) + 0.1 * before
        file = trial.directory / "loss.json"
        file.write_text(json.dumps(loss))
        trial.save(file)
        if trial.report(epoch, {"loss": loss, "state": before}):
            return
