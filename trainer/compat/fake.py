"""Names torch's fake tensors, which have only shapes, with their errors and their dispatch."""

from __future__ import annotations

from typing import Any

from trainer.compat.private import private

DataDependentOutputException: Any = private("torch._subclasses.fake_tensor:DataDependentOutputException", seen="2.13")
DynamicOutputShapeException: Any = private("torch._subclasses.fake_tensor:DynamicOutputShapeException", seen="2.13")
FakeTensorMode: Any = private("torch._subclasses.fake_tensor:FakeTensorMode", seen="2.13")
UnsupportedOperatorException: Any = private("torch._subclasses.fake_tensor:UnsupportedOperatorException", seen="2.13")
unset_fake_temporarily: Any = private("torch._subclasses.fake_tensor:unset_fake_temporarily", seen="2.13")
TorchDispatchMode: Any = private("torch.utils._python_dispatch:TorchDispatchMode", seen="2.13")
select_conv_backend = private("torch._C:_select_conv_backend", seen="2.13")
LOCAL_SCALAR = private("torch:ops.aten._local_scalar_dense", seen="2.13").default  # the operator of `item()`
