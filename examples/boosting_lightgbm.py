"""LightGBM, ten rounds an epoch: `hpo run --study examples/boosting_lightgbm.py --trials 20`."""

import lightgbm as lgb
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

import hpo

ROUNDS = 10  # of an epoch


@hpo.study(
    space={
        "learning_rate": hpo.Float(1e-2, 0.5, log=True),
        "num_leaves": hpo.Int(4, 64, log=True),
        "min_data_in_leaf": hpo.Int(5, 60),
        "lambda_l2": hpo.Float(1e-3, 10.0, log=True),
    },
    minimize="val/log_loss",
    num_epochs=9,
)
def boosting(trial):
    x, y = load_breast_cancer(return_X_y=True)
    x, x_val, y, y_val = train_test_split(x, y, test_size=0.3, random_state=0, stratify=y)
    params = {**trial.params, "objective": "binary", "seed": trial.seed, "num_threads": 1, "verbose": -1}
    saved = trial.resume()
    model = lgb.Booster(model_file=saved / "model.txt") if saved else None
    for epoch in range(trial.epoch + 1, trial.num_epochs + 1):
        model = lgb.train(params, lgb.Dataset(x, y), num_boost_round=ROUNDS, init_model=model)
        model.save_model(trial.directory / "model.txt")
        trial.save(trial.directory / "model.txt")
        if trial.report(epoch, {"val/log_loss": log_loss(y_val, model.predict(x_val))}):
            return


if __name__ == "__main__":
    print(hpo.run(boosting, trials=20).best)
