"""Runs MLflow's server behind the gate, as one process.

    python -m hpo.tracking.ui.gated_server --home DIR --host HOST --port PORT

with the store in MLFLOW_BACKEND_STORE_URI.

`mlflow server` accepts no application in front of its own unless that is installed as a plugin. This module does what
`mlflow server` does with one uvicorn worker and without job execution (mlflow/server/__init__.py, `_run_server`, of
MLflow 3.17).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from hpo.storage.home import Home
from hpo.tracking.mlflow.store import location
from hpo.tracking.ui.gate import Gate, token_of

# Settings that MLflow's pages (3.17) keep in a browser; by default they open among tools for language models, with an
# assistant.
_SETTINGS = {
    "mlflow.workflowType_v1": '"machine_learning"',
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM. `hpo.tracking.ui.supervise` ends it with its parent."""
    parser = argparse.ArgumentParser(prog="python -m hpo.tracking.ui.gated_server")
    parser.add_argument("--home", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(argv)
    home, store = Home.at(options.home), os.environ["MLFLOW_BACKEND_STORE_URI"]
    names = dict.fromkeys((options.host, "localhost"))
    os.environ |= {
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(f"{name}:{options.port}" for name in names),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": ",".join(origins := [f"http://{name}:{options.port}" for name in names]),
    }
    from mlflow.server import constants

    root = "mlflow-artifacts:/"
    os.environ |= {
        constants.BACKEND_STORE_URI_ENV_VAR: store,
        constants.REGISTRY_STORE_URI_ENV_VAR: store,
        constants.ARTIFACT_ROOT_ENV_VAR: root,
        constants.ARTIFACTS_DESTINATION_ENV_VAR: location(home.artifacts),
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
    }
    import uvicorn
    from mlflow.server.fastapi_app import app
    from mlflow.server.handlers import initialize_backend_stores

    initialize_backend_stores(store, store, root)
    gate = Gate(app, token_of(home), origins, f"hpo-{options.port}", settings=_SETTINGS)
    # Without an access log, which would hold the token.
    uvicorn.run(gate, host=options.host, port=options.port, access_log=False, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
