"""scikit-learn, an epoch at a time: `hpo run --study examples/digits_sklearn.py --trials 20`."""

import joblib
import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import train_test_split

import hpo


@hpo.study(
    space={
        "alpha": hpo.Float(1e-6, 1e-1, log=True),
        "eta0": hpo.Float(1e-4, 1.0, log=True),
        "loss": hpo.Choice(["hinge", "log_loss", "modified_huber"]),
    },
    maximize="val/accuracy",
    num_epochs=9,
)
def digits(trial):
    x, y = load_digits(return_X_y=True)
    x, x_val, y, y_val = train_test_split(x / 16, y, test_size=0.3, random_state=0, stratify=y)
    model = SGDClassifier(
        loss=trial.params.loss, alpha=trial.params.alpha, eta0=trial.params.eta0, learning_rate="constant"
    )
    if saved := trial.resume():
        model = joblib.load(saved / "model.joblib")
    for epoch in range(trial.epoch + 1, trial.num_epochs + 1):
        order = np.random.default_rng([trial.seed, epoch]).permutation(len(x))
        model.set_params(random_state=epoch)
        model.partial_fit(x[order], y[order], classes=range(10))
        joblib.dump(model, trial.directory / "model.joblib")
        trial.save(trial.directory / "model.joblib")
        if trial.report(epoch, {"val/accuracy": model.score(x_val, y_val), "train/accuracy": model.score(x, y)}):
            return


if __name__ == "__main__":
    found = hpo.run(digits, trials=20)
    print(found.trials()[["number", "state", "value", "params.alpha", "params.eta0", "params.loss"]])
