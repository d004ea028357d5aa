"""A training script: weights, momentum and random numbers in a directory, a file handed over."""

import argparse
import json
import os
import random
import time

from hpo.client import trial

STEPS = 5


def log(step):
    if path := os.environ.get("TINY_LOG"):
        with open(path, "a") as file:
            file.write(f"{step}\n")


parser = argparse.ArgumentParser()
for name in ("lr", "momentum", "pause"):
    parser.add_argument(f"--{name}", type=float)
parser.add_argument("--epochs", type=int)
args = parser.parse_args()

rng = random.Random(trial.seed)
x = [[rng.gauss(0, 1) for _ in range(3)] for _ in range(40)]
y = [a - 2 * b + 0.5 * c for a, b, c in x]
weights, velocity = [0.0] * 3, [0.0] * 3
if saved := trial.resume():
    kept = json.loads((saved / "state" / "weights.json").read_text())
    weights, velocity = kept["weights"], kept["velocity"]
    version, internal, gauss = json.loads((saved / "rng.json").read_text())
    rng.setstate((version, tuple(internal), gauss))
for epoch in range(trial.epoch + 1, args.epochs + 1):
    for step in range(STEPS):
        log(step)
        time.sleep(args.pause)
        row = rng.randrange(len(x))
        error = sum(w * v for w, v in zip(weights, x[row], strict=True)) - y[row]
        velocity = [args.momentum * v + error * value for v, value in zip(velocity, x[row], strict=True)]
        weights = [w - args.lr * v for w, v in zip(weights, velocity, strict=True)]
    kept = trial.directory / "kept"
    (kept / "state").mkdir(parents=True, exist_ok=True)
    (kept / "state" / "weights.json").write_text(json.dumps({"weights": weights, "velocity": velocity}))
    (kept / "rng.json").write_text(json.dumps(rng.getstate()))
    trial.save(kept)
    errors = [sum(w * v for w, v in zip(weights, row, strict=True)) - one for row, one in zip(x, y, strict=True)]
    if trial.report(epoch, {"val/loss": sum(one * one for one in errors) / len(errors)}):
        break
