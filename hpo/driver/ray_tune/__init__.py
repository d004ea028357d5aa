"""A study whose trials Ray Tune decides about, recorded like any other."""

from hpo.driver.ray_tune.recorder import Recorder as Recorder
from hpo.driver.ray_tune.space import param_space as param_space
from hpo.driver.ray_tune.trainable import as_trainable as as_trainable
