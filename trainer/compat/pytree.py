"""Names torch's functions on nested containers."""

from __future__ import annotations

from trainer.compat.private import private

tree_flatten = private("torch.utils._pytree:tree_flatten", seen="2.13")
tree_leaves = private("torch.utils._pytree:tree_leaves", seen="2.13")
tree_map = private("torch.utils._pytree:tree_map", seen="2.13")
tree_map_only = private("torch.utils._pytree:tree_map_only", seen="2.13")
tree_unflatten = private("torch.utils._pytree:tree_unflatten", seen="2.13")
