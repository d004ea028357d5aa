"""Trains models. Never imports hpo, studies, optuna, mlflow or ray."""

import os

# Without this the rounding of MKL's matrix products depends on their operands' addresses (on an AMD EPYC in most small
# shapes), so that the bits of a model that trains among others would depend on its row. MKL reads it at its first
# call; it costs no time there. Intel, "Developer Guide for oneMKL", Obtaining Numerically Reproducible Results.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
