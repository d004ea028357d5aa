"""Names torch's operations on lists of tensors, which its own optimizers use and which it calls private."""

from __future__ import annotations

from trainer.compat.private import private

add = private("torch:_foreach_add", seen="2.13")
add_ = private("torch:_foreach_add_", seen="2.13")
addcmul_ = private("torch:_foreach_addcmul_", seen="2.13")
clamp_max_ = private("torch:_foreach_clamp_max_", seen="2.13")
clamp_min_ = private("torch:_foreach_clamp_min_", seen="2.13")
copy_ = private("torch:_foreach_copy_", seen="2.13")
div = private("torch:_foreach_div", seen="2.13")
div_ = private("torch:_foreach_div_", seen="2.13")
lerp = private("torch:_foreach_lerp", seen="2.13")
lerp_ = private("torch:_foreach_lerp_", seen="2.13")
mul = private("torch:_foreach_mul", seen="2.13")
mul_ = private("torch:_foreach_mul_", seen="2.13")
norm = private("torch:_foreach_norm", seen="2.13")
sign_ = private("torch:_foreach_sign_", seen="2.13")
sqrt = private("torch:_foreach_sqrt", seen="2.13")
sub = private("torch:_foreach_sub", seen="2.13")
sub_ = private("torch:_foreach_sub_", seen="2.13")
