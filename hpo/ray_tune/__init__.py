"""Runs studies whose trials Ray Tune chooses and stops, and records them like any other study."""

from hpo.errors import UserError

try:
    from hpo.ray_tune.recorder import Recorder as Recorder
    from hpo.ray_tune.space import param_space as param_space
    from hpo.ray_tune.trainable import as_trainable as as_trainable
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise UserError("Ray Tune needs Ray: pip install 'hpo[ray]'.") from error
