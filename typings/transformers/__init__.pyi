# transformers' own __init__ names every model there is: reading it takes pyright longer than all of this project.
from typing import Any

def __getattr__(name: str) -> Any: ...
