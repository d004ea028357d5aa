"""A study whose trials Ray Tune decides about, recorded like any other."""

from hpo.errors import UserError

try:
    from hpo.driver.ray_tune.recorder import Recorder as Recorder
    from hpo.driver.ray_tune.space import param_space as param_space
    from hpo.driver.ray_tune.trainable import as_trainable as as_trainable
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise UserError("Ray Tune needs Ray: pip install 'hpo[ray]'.") from error
