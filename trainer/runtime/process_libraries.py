"""Lists the parts of a process's state that belong to libraries, with functions to read and restore each."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from copy import copy
from operator import attrgetter
from typing import Any

from trainer.compat.modes import without_modes
from trainer.runtime.process_entries import Entry, attributes, pair

_CONTAINERS = (list, set, dict)

# Torch


def _read_device(torch: Any) -> Any:
    """Returns the default device that was set; None if none was, which makes calls of torch cheapest."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return context and context.device


def _read_generator(torch: Any) -> bytes:
    """Returns the state of the CPU's generator, also while torch traces a model, when it takes no real tensors."""
    generator = torch.default_generator
    with without_modes(torch):
        return generator.get_state().numpy().tobytes()


def _read_autocast(torch: Any) -> dict[str, Any]:
    kinds = ("cpu", "cuda")
    return {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}


def _write_autocast(torch: Any, before: Mapping[str, Any]) -> None:
    for kind, (enabled, dtype) in before.items():
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


_FP32 = [
    ("generic", "all"),
    *((owner, part) for owner in ("cuda", "mkldnn") for part in ("all", "matmul", "conv", "rnn")),
]


def _write_fp32(C: Any, before: Mapping[tuple[str, str], str]) -> None:
    for setting, value in before.items():
        if C._get_fp32_precision_getter(*setting) != value:
            C._set_fp32_precision_setter(*setting, value)


_HOOKS = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_buffer_registration_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
)


def _read_hooks(module: Any) -> dict[str, dict[Any, Any]]:
    return {name: dict(getattr(module, name, {})) for name in _HOOKS}


def _write_hooks(module: Any, before: Mapping[str, Mapping[Any, Any]]) -> None:
    for name, hooks in before.items():
        if getattr(module, name, {}) != hooks:
            getattr(module, name).clear()
            getattr(module, name).update(hooks)


def _read_gpu(cuda: Any) -> int:
    return cuda.current_device() if cuda.is_initialized() else 0


def _write_gpu(cuda: Any, before: int) -> None:
    if cuda.is_initialized():
        cuda.set_device(before)


def _has_group(distributed: Any) -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _leave_group(distributed: Any, before: bool) -> None:
    if not before:
        distributed.destroy_process_group()


def _write_compiled(frames: Any, before: int) -> None:
    sys.modules["torch._dynamo"].reset()
    frames.FRAME_COUNTER = before


def _overrides(config: Any) -> dict[str, Any]:
    """Returns the override of each option; in newer releases of torch, that of the current context."""
    values: list[Any] = [*map(attrgetter("user_override"), config._config.values())]
    if values and isinstance(values[0], ContextVar):
        values = [*map(ContextVar.get, values)]  # several hundred, in half the time of a loop
    return dict(zip(config._config, values, strict=True))


def _read_options(config: Any) -> dict[str, Any]:
    """Returns the options that were set.

    Where the default of an option is a list, a set or a dict, torch overrides it with a copy as soon as it is read. An
    override that equals such a default is therefore no setting.
    """
    unset, options = _unset(), config._config
    return {
        name: _kept(value)
        for name, value in _overrides(config).items()
        if value is not unset and not (isinstance(value, _CONTAINERS) and value == options[name].default)
    }


def _write_options(config: Any, before: Mapping[str, Any]) -> None:
    unset, now = _unset(), _read_options(config)
    for name in {**now, **before}:
        if (value := before.get(name, unset)) != now.get(name, unset):
            option = config._config[name]
            # torch then computes the hash of all options anew, by which it finds compiled code
            setattr(config, name, option.default if value is unset else _kept(value))
            if value is unset and isinstance(option.user_override, ContextVar):
                option.user_override.set(unset)
            elif value is unset:
                option.user_override = unset


def _kept(value: Any) -> Any:
    return copy(value) if isinstance(value, _CONTAINERS) else value  # not reached by changes of the original in place


def _unset() -> object:
    """Returns what stands in place of an override that was not set."""
    return sys.modules["torch.utils._config_module"]._UNSET_SENTINEL


_SDP = ("flash", "mem_efficient", "math", "cudnn")


def _read_sdp(cuda: Any) -> dict[str, bool]:
    return {kind: getattr(cuda, f"{kind}_sdp_enabled")() for kind in _SDP}


def _write_sdp(cuda: Any, before: Mapping[str, bool]) -> None:
    for kind, enabled in before.items():
        getattr(cuda, f"enable_{kind}_sdp")(enabled)


TORCH = (
    Entry(
        "torch's default device", "torch", _read_device, lambda torch, device: torch.set_default_device(device), True
    ),
    pair("torch's default dtype", "torch", "get_default_dtype", "set_default_dtype", numeric=True),
    Entry("torch's default tensor type", "torch._C", lambda C: str(C._get_default_device()), None, True),
    pair("torch's grad mode", "torch._C", "is_grad_enabled", "_set_grad_enabled", numeric=True),
    Entry("torch's inference mode", "torch", lambda torch: torch.is_inference_mode_enabled(), None, True),
    Entry(
        "torch's modes",
        "torch._C",
        lambda C: (C._len_torch_function_stack(), C._len_torch_dispatch_stack()),
        None,
        True,
    ),
    Entry("torch's autocast", "torch", _read_autocast, _write_autocast, True),
    pair("torch's autocast cache", "torch", "is_autocast_cache_enabled", "set_autocast_cache_enabled"),
    Entry(
        "torch's anomaly mode",
        "torch",
        lambda torch: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda torch, before: torch.set_anomaly_enabled(*before),
        True,
    ),
    pair("torch's threads of backward passes", "torch._C", "_is_multithreading_enabled", "_set_multithreading_enabled"),
    pair(
        "torch's deterministic mode",
        "torch",
        "get_deterministic_debug_mode",
        "set_deterministic_debug_mode",
        numeric=True,
    ),
    attributes("torch's filling of memory", "torch.utils.deterministic", "fill_uninitialized_memory", numeric=True),
    pair(
        "torch's matmul precision",
        "torch",
        "get_float32_matmul_precision",
        "set_float32_matmul_precision",
        numeric=True,
    ),
    attributes(
        "torch's cuBLAS flags",
        "torch.backends.cuda",
        *(f"matmul.allow_{setting}" for setting in ("tf32", "fp16_accumulation")),
        *(f"matmul.allow_{setting}_reduced_precision_reduction" for setting in ("fp16", "bf16")),
        numeric=True,
    ),
    attributes(
        "torch's cuDNN flags",
        "torch.backends.cudnn",
        *("enabled", "benchmark", "benchmark_limit", "deterministic", "allow_tf32"),
        numeric=True,
    ),
    Entry(
        "torch's fp32 precision",
        "torch._C",
        lambda C: {at: C._get_fp32_precision_getter(*at) for at in _FP32},
        _write_fp32,
        True,
    ),
    Entry("torch's attention kernels", "torch.backends.cuda", _read_sdp, _write_sdp, True),
    pair("torch's oneDNN", "torch._C", "_get_mkldnn_enabled", "_set_mkldnn_enabled", numeric=True),
    pair("torch's NNPACK", "torch._C", "_get_nnpack_enabled", "_set_nnpack_enabled", numeric=True),
    attributes("torch's opt_einsum", "torch.backends.opt_einsum", "enabled", "strategy", numeric=True),
    attributes("torch's engine of quantization", "torch.backends.quantized", "engine", numeric=True),
    Entry(
        "the flushing of denormal numbers",
        "torch",
        lambda _: sys.float_info.min / 2.0 == 0.0,
        lambda torch, flushed: torch.set_flush_denormal(flushed),
        True,
    ),
    pair("torch's threads", "torch", "get_num_threads", "set_num_threads", numeric=True),
    pair("torch's interop threads", "torch", "get_num_interop_threads", "set_num_interop_threads", numeric=True),
    pair("torch's warnings", "torch", "is_warn_always_enabled", "set_warn_always"),
    Entry("torch's hooks of all modules", "torch.nn.modules.module", _read_hooks, _write_hooks, True),
    Entry(
        "torch's print options",
        "torch._tensor_str",
        lambda module: dict(vars(module.PRINT_OPTS)),
        lambda module, before: vars(module.PRINT_OPTS).update(before),
    ),
    pair("torch's sharing of memory", "torch.multiprocessing", "get_sharing_strategy", "set_sharing_strategy"),
    Entry("torch's GPU", "torch.cuda", _read_gpu, _write_gpu, True),
    Entry("torch's process group", "torch.distributed", _has_group, _leave_group),
    Entry("options of torch's compiler", "torch._dynamo.config", _read_options, _write_options, True),
    Entry("options of torch's inductor", "torch._inductor.config", _read_options, _write_options, True),
    Entry(
        "torch's compiled code",
        "torch._dynamo.convert_frame",
        lambda frames: frames.FRAME_COUNTER,
        _write_compiled,
        compiled=True,
    ),
    Entry(
        "torch's random numbers",
        "torch",
        _read_generator,
        lambda torch, state: torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
        drawn=True,
    ),
)

# Others


def _read_numpy_random(random: Any) -> tuple[Any, ...]:
    name, keys, *rest = random.get_state()
    return name, keys.tobytes(), *rest


def _write_numpy_random(random: Any, before: Sequence[Any]) -> None:
    name, keys, *rest = before
    random.set_state((name, sys.modules["numpy"].frombuffer(keys, dtype="uint32"), *rest))


def _read_rc(matplotlib: Any) -> dict[str, Any]:
    """Returns the parameters as they are stored: asking for the backend would choose one."""
    return dict(dict.items(matplotlib.rcParams))


def _write_rc(matplotlib: Any, before: Mapping[str, Any]) -> None:
    rc: Any = matplotlib.rcParams
    if dict.__getitem__(rc, "backend") != before["backend"] and "matplotlib.pyplot" in sys.modules:
        pyplot: Any = sys.modules["matplotlib.pyplot"]
        pyplot._backend_mod = None  # the next figure loads the backend that is set
    dict.update(rc, before)


def _write_figures(pyplot: Any, before: Sequence[int]) -> None:
    for number in {*pyplot.get_fignums()} - {*before}:
        pyplot.close(number)


def _read_pandas(config: Any) -> dict[str, Any]:
    return dict(_options(config._global_config))


def _options(tree: Mapping[str, Any], prefix: str = "") -> Any:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _options(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _write_pandas(config: Any, before: Mapping[str, Any]) -> None:
    now = _read_pandas(config)
    for name, value in before.items():
        if now[name] != value:
            config.set_option(name, value)


def _read_keras(module: Any) -> dict[str, Any]:
    state = vars(module.GLOBAL_STATE_TRACKER)
    return {name: value.copy() if isinstance(value, dict) else value for name, value in state.items()}


def _write_keras(module: Any, before: Mapping[str, Any]) -> None:
    vars(module.GLOBAL_STATE_TRACKER).clear()
    vars(module.GLOBAL_STATE_TRACKER).update(
        {name: value.copy() if isinstance(value, dict) else value for name, value in before.items()}
    )


OTHERS = (
    Entry("numpy's error states", "numpy", lambda np: np.geterr(), lambda np, before: np.seterr(**before), True),
    pair("numpy's error callback", "numpy", "geterrcall", "seterrcall"),
    pair("numpy's buffer size", "numpy", "getbufsize", "setbufsize"),
    Entry(
        "numpy's print options",
        "numpy",
        lambda np: np.get_printoptions(),
        lambda np, before: np.set_printoptions(**before),
    ),
    Entry("numpy's random numbers", "numpy.random", _read_numpy_random, _write_numpy_random, drawn=True),
    Entry("matplotlib's settings", "matplotlib", _read_rc, _write_rc),
    Entry("matplotlib's figures", "matplotlib.pyplot", lambda pyplot: tuple(pyplot.get_fignums()), _write_figures),
    Entry("pandas' options", "pandas._config.config", _read_pandas, _write_pandas),
    Entry("scikit-learn's settings", "sklearn", lambda of: of.get_config(), lambda of, before: of.set_config(**before)),
    Entry("XGBoost's settings", "xgboost", lambda of: of.get_config(), lambda of, before: of.set_config(**before)),
    pair("the threads of Arrow", "pyarrow", "cpu_count", "set_cpu_count"),
    Entry("Keras' state", "keras.src.backend.common.global_state", _read_keras, _write_keras),
    attributes(
        "Keras' settings",
        "keras.src.backend.config",
        *("_FLOATX", "_EPSILON", "_IMAGE_DATA_FORMAT"),
        numeric=True,
    ),
)

LIBRARIES = (*TORCH, *OTHERS)
