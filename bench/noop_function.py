"""The study of `bench/noop.py` as a function: the same reports and, with `saves`, as many bytes in each checkpoint."""

import hpo
from bench.noop import REPORTS, STATE, metrics


@hpo.study(
    space={"x": hpo.Float(0.0, 1.0), "y": hpo.Float(1e-3, 1.0, log=True)},
    minimize="val/loss",
    constants={"saves": False},
    sampler="random",
    strategy="none",
)
def noop_function(trial):
    trial.resume()
    for epoch in range(trial.epoch + 1, REPORTS + 1):
        if trial.params.saves:
            state = trial.directory / "state.bin"
            state.write_bytes(bytes(STATE))
            trial.save(state)
            state.unlink()
        if trial.report(epoch, metrics(trial.params.x, trial.params.y, epoch)):
            return
