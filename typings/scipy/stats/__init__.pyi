# scipy has no types of its own. This is what is used of it.
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

class WilcoxonResult:
    statistic: float
    pvalue: float

def wilcoxon(
    x: Sequence[float],
    *,
    alternative: Literal["two-sided", "greater", "less"] = "two-sided",
    zero_method: Literal["wilcox", "pratt", "zsplit"] = "wilcox",
) -> WilcoxonResult: ...
def rankdata(a: ArrayLike, *, axis: int | None = None, nan_policy: str = "propagate") -> NDArray[np.float64]: ...
def __getattr__(name: str) -> Any: ...
