"""Pure training. Never imports hpo, studies, optuna, mlflow or ray."""

import os

# Without this MKL's matrix products round by where their operands begin in memory (on an AMD EPYC in most small
# shapes), so that a lane's bits would depend on its row. MKL reads it at its first call; there it costs no time.
# Intel, "Developer Guide for oneMKL", Obtaining Numerically Reproducible Results.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
