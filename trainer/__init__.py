"""Pure training. Never imports hpo, studies, optuna, mlflow or ray."""
