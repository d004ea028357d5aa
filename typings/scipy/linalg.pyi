# scipy has no types of its own. This is what is used of it.
import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.float64]

def cho_factor(a: _Array, lower: bool = False) -> tuple[_Array, bool]: ...
def cho_solve(c_and_lower: tuple[_Array, bool], b: _Array) -> _Array: ...
