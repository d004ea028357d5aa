"""A study whose trials Ray Tune decides about, recorded like any other."""

from hpo.driver.ray_tune.recorder import Recorder
from hpo.driver.ray_tune.space import param_space
from hpo.driver.ray_tune.trainable import as_trainable

__all__ = ["Recorder", "as_trainable", "param_space"]
