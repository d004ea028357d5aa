# scipy has no types of its own. This is what is used of it.
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.float64]

class OptimizeResult:
    x: _Array
    fun: float

def minimize(
    fun: Callable[[_Array], float], x0: _Array, *, method: str, bounds: Sequence[tuple[float, float]]
) -> OptimizeResult: ...
