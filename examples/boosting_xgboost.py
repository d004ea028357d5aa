"""XGBoost, ten rounds an epoch, by its callback: `hpo run --study examples/boosting_xgboost.py --trials 20`."""

import xgboost as xgb
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

import hpo
from hpo.integrations.xgboost import TrialCallback


@hpo.study(
    space={
        "learning_rate": hpo.Float(1e-2, 0.5, log=True),
        "max_depth": hpo.Int(2, 8),
        "min_child_weight": hpo.Float(0.5, 20.0, log=True),
        "subsample": hpo.Float(0.5, 1.0),
        "reg_lambda": hpo.Float(1e-3, 10.0, log=True),
    },
    minimize="val/logloss",
    num_epochs=9,
)
def boosting(trial):
    x, y = load_breast_cancer(return_X_y=True)
    x, x_val, y, y_val = train_test_split(x, y, test_size=0.3, random_state=0, stratify=y)
    params = {**trial.params, "objective": "binary:logistic", "nthread": 1}
    callback = TrialCallback(trial, every=10)
    xgb.train(
        params,
        xgb.DMatrix(x, y),
        callback.rounds_left(90),
        evals=[(xgb.DMatrix(x_val, y_val), "val")],
        xgb_model=callback.resume_path,
        callbacks=[callback],
        verbose_eval=False,
    )


if __name__ == "__main__":
    print(hpo.run(boosting, trials=20).best)
