# The package has types and does not say so (py.typed). This is what is used of it.
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.float64]

class CMA:
    def __init__(
        self,
        mean: _Array,
        sigma: float,
        bounds: _Array | None = None,
        n_max_resampling: int = 100,
        seed: int | None = None,
        population_size: int | None = None,
        cov: _Array | None = None,
    ) -> None: ...
    @property
    def generation(self) -> int: ...
    def reseed_rng(self, seed: int) -> None: ...
    def ask(self) -> _Array: ...
    def tell(self, solutions: Sequence[tuple[_Array, float]]) -> None: ...

def get_warm_start_mgd(source_solutions: Sequence[tuple[_Array, float]]) -> tuple[_Array, float, _Array]: ...
