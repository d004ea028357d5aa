"""Reads the configurations of launchers, DeepSpeed's JSON and Accelerate's YAML, as settings of `train`.

A key is read if its meaning is the same here, left out if it changes no result, and refused by its path otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import ValidationError

from hpo.door import option
from hpo.errors import UserError
from hpo.interchange.texts import loads
from hpo.space.config import flatten, load_yaml
from trainer.config import TrainConfig
from trainer.report import Json

Keys = dict[str, Json]  # path in the file -> value
Settings = dict[str, Json]  # path below `train` -> value
_Rule = Callable[[Json], Settings]
_NEVER = object()


@dataclass
class Converted:
    """The settings of `train` by path, and the keys of the file that change no result here."""

    settings: Settings = field(default_factory=dict[str, Json])
    left_out: list[str] = field(default_factory=list[str])

    def train(self) -> dict[str, Json]:
        """Returns the settings as the configuration of `train`: `{"batch_size": 64, "optim": {"lr": 0.1}}`."""
        whole: dict[str, Json] = {}
        sections: dict[str, dict[str, Json]] = {}  # no field here lies deeper than one section
        for path, value in self.settings.items():
            section, dot, name = path.partition(".")
            if dot:
                whole[section] = sections.setdefault(section, {})
                sections[section][name] = value
            else:
                whole[path] = value
        return whole


def read(file: str | Path, ranks: int | None = None) -> Converted:
    """Returns the settings in a file of DeepSpeed or Accelerate, whose kind its keys tell.

    `ranks` is the number of processes, where the file does not say it. Raises UserError for a file of neither, and for
    a key without an equivalent here.
    """
    values = _loaded(Path(file))
    if {"distributed_type", "compute_environment"} & values.keys():
        made = _accelerate(file, values, ranks)
    elif {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "optimizer"} & values.keys():
        made = _deepspeed(file, values, ranks)
    else:
        raise UserError(
            f"{file} is neither a configuration of DeepSpeed (zero_optimization, train_batch_size) nor of Accelerate "
            "(distributed_type): name one of these."
        )
    try:
        TrainConfig.model_validate(made.train())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("train", *first["loc"]))
        raise UserError(f"{file}: {where} cannot be set so: {first['msg'].removeprefix('Value error, ')}.") from error
    return made


def _loaded(path: Path) -> Keys:
    if path.suffix.lower() != ".json":
        return load_yaml(path)
    try:
        values = loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; name another file.") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: the file must hold an object of keys, not {type(values).__name__}.")
    return values


# --- Rules: a key's path -> the settings of its value


def _to(path: str) -> _Rule:
    return lambda value: {path: value}


def _choice(path: str, options: Mapping[object, Json], *, unset: object = _NEVER) -> _Rule:
    """Returns the rule of a key with few values, one of which may set nothing; it refuses any other value."""

    def rule(value: Json) -> Settings:
        plain = _plain(value)
        return {} if plain == unset else {path: options[plain]}

    return rule


def _only(*values: object) -> _Rule:
    """Returns the rule of a key that is read as saying nothing at these values, and refused at others."""
    return lambda value: {} if _plain(value) in values else _refuse(value)


def _refuse(value: object) -> Settings:
    raise LookupError(value)


def _factor(value: Json) -> float:
    if isinstance(value, int | float):
        return float(value)
    raise LookupError(value)


def _plain(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


_ZERO: Mapping[object, Json] = {0: "none", 1: "zero1", 2: "zero2", 3: "zero3"}
_NOTHING = (None, "none", "no", False, "false", 0)
_CLIP: _Rule = lambda value: {"clip.norm": value or None}  # noqa: E731

_DEEPSPEED: dict[str, _Rule] = {
    "gradient_clipping": _CLIP,
    "bf16.enabled": _choice("precision", {True: "bf16"}, unset=False),
    "fp16.enabled": _choice("precision", {True: "fp16"}, unset=False),
    "fp16.loss_scale": lambda value: {"loss_scale.dynamic": False, "loss_scale.init": value} if value else {},
    "fp16.initial_scale_power": lambda value: {"loss_scale.init": 2.0 ** _factor(value)},
    "fp16.loss_scale_window": _to("loss_scale.growth_interval"),
    "fp16.auto_cast": _only(*_NOTHING),
    "fp16.hysteresis": _only(1),  # here each overflow halves the scale
    "fp16.consecutive_hysteresis": _only(False),
    "fp16.min_loss_scale": _only(1),
    "zero_optimization.stage": _choice("parallel.shard", _ZERO),
    "amp.enabled": _only(False),
    "prescale_gradients": _only(False),
    "gradient_predivide_factor": _only(1, 1.0),
    "sparse_gradients": _only(False),
    "communication_data_type": _only(*_NOTHING),
}
# Sections that say nothing while they are not enabled.
_SECTIONS = ("bf16", "fp16", "amp", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comms_logger")
# These keys affect speed, memory or messages, but no result.
_OF_THE_MACHINE = (
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization.overlap_comm", "zero_optimization.contiguous_gradients", "zero_optimization.reduce_scatter",
    "zero_optimization.allgather_partitions", "zero_optimization.*bucket_size", "zero_optimization.stage3_*",
    "zero_optimization.sub_group_size", "zero_optimization.round_robin_gradients",
    "zero_optimization.offload_*.pin_memory", "zero_optimization.offload_*.fast_init",
    "optimizer.params.torch_adam", "optimizer.params.fused",
)  # fmt: skip
_OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "sgd": "sgd"}
# The defaults of torch's and DeepSpeed's classes where those of `train.optim` are others.
_UNSET = {"adam": {}, "adamw": {"weight_decay": 0.0}, "sgd": {"weight_decay": 0.0, "momentum": 0.0}}
_FIELDS = {"lr", "betas", "eps", "weight_decay", "momentum", "nesterov"}


def _deepspeed(file: str | Path, values: Mapping[str, Json], ranks: int | None) -> Converted:
    closed = [
        name for name in _SECTIONS if isinstance(section := values.get(name), Mapping) and not section.get("enabled")
    ]
    values = {name: value for name, value in values.items() if name not in closed}
    keys = flatten(values)
    made = Converted({"clip.norm": None} | _batches(file, keys, ranks) | _optimizer(file, keys))
    offload = _offload(
        file, {name: keys.pop(f"zero_optimization.offload_{name}.device", None) for name in ("param", "optimizer")}
    )
    if keys.get("fp16.enabled") and keys.get("bf16.enabled"):
        raise UserError(f"{file}: fp16 and bf16 are both enabled: leave one of them out.")
    _apply(file, made, keys, _DEEPSPEED, _OF_THE_MACHINE)
    made.settings |= offload
    made.settings.setdefault("precision", "fp32")
    return made


def _batches(file: str | Path, keys: Keys, ranks: int | None) -> Settings:
    """Takes the keys of the batch: a whole batch is that of a GPU times the accumulation times the GPUs."""
    whole, micro, steps = (
        _number(file, keys, name)
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if whole and micro and steps:
        known = whole / (micro * steps)
        if known != int(known) or ranks not in (None, int(known)):
            processes = "a whole number" if ranks is None else str(ranks)
            raise UserError(
                f"{file}: train_batch_size={whole} is not train_micro_batch_size_per_gpu={micro} times "
                f"gradient_accumulation_steps={steps} times {processes} of GPUs: correct one of them."
            )
        ranks = int(known)
    if whole is None and micro is not None:
        if ranks is None:
            raise UserError(
                f"{file}: train_batch_size is missing, and is train_micro_batch_size_per_gpu times the accumulation "
                f"times the GPUs: give their number by {option('ranks')}."
            )
        whole = micro * (steps or 1) * ranks
    if micro is None and whole is not None and steps and ranks:
        micro = whole // (steps * ranks)
    sizes = {"batch_size": whole, "micro_batch_size": micro, "parallel.data": ranks}
    return {path: value for path, value in sizes.items() if value is not None}


def _number(file: str | Path, keys: Keys, name: str) -> int | None:
    value = keys.pop(name, None)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise UserError(f"{file}: {name}={value!r} is not a whole number above 0{_AUTO if value == 'auto' else ''}.")


_AUTO = ": Hugging Face's Trainer fills in `auto`, so write what it trains with"


def _optimizer(file: str | Path, keys: Keys) -> Settings:
    kind = keys.pop("optimizer.type", None)
    if kind is None:
        return {}
    name = _OPTIMIZERS.get(str(kind).lower())
    if name is None:
        raise UserError(
            f"{file}: optimizer.type={kind!r} is read for Adam, AdamW and SGD alone: leave `optimizer` "
            "out, and set train.optim."
        )
    decoupled = keys.pop("optimizer.params.adam_w_mode", True)
    name = "adamw" if name == "adam" and decoupled else name
    params = {field: keys.pop(f"optimizer.params.{field}") for field in _FIELDS if f"optimizer.params.{field}" in keys}
    if "auto" in params.values():
        raise UserError(f"{file}: optimizer.params has `auto`{_AUTO}.")
    return {"optim.name": name} | {f"optim.{path}": value for path, value in (_UNSET[name] | params).items()}


def _offload(file: str | Path, devices: Mapping[str, object]) -> Settings:
    """Returns the setting of what is kept in host memory: here parameters and the optimizer's state together."""
    named = {name: _plain(device) for name, device in devices.items() if _plain(device) not in (None, "none")}
    if not named:
        return {}
    if named == {"param": "cpu", "optimizer": "cpu"}:
        return {"parallel.offload": True}
    shown = ", ".join(f"offload_{name}={device}" for name, device in named.items())
    raise UserError(
        f"{file}: {shown} is not to be had alone: train.parallel.offload keeps parameters, gradients and the "
        "optimizer's state in host memory, and nothing on NVMe: remove it, or offload both to cpu."
    )


_ACCELERATE: dict[str, _Rule] = {
    "compute_environment": _only("local_machine"),
    "distributed_type": _only("no", "multi_gpu", "multi_cpu", "fsdp", "deepspeed"),
    "num_machines": _only(1),
    "mixed_precision": _choice(
        "precision", {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8", False: "fp32"}
    ),
    "gradient_accumulation_steps": _only(1),
    "use_cpu": _choice("device", {True: "cpu"}, unset=False),
    "downcast_bf16": _only(*_NOTHING),
    "fsdp_config.fsdp_sharding_strategy": _choice(
        "parallel.shard",
        {"full_shard": "zero3", "shard_grad_op": "zero2", "no_shard": "none", 1: "zero3", 2: "zero2", 3: "none"},
    ),
    "fsdp_config.fsdp_reshard_after_forward": _choice(
        "parallel.shard",
        {True: "zero3", False: "zero2", "full_shard": "zero3", "shard_grad_op": "zero2", "no_shard": "none"},
    ),
    "fsdp_config.fsdp_offload_params": _choice("parallel.offload", {True: True}, unset=False),
    "fsdp_config.fsdp_activation_checkpointing": _choice("activations.checkpoint", {True: "full"}, unset=False),
    "deepspeed_config.zero_stage": _choice("parallel.shard", _ZERO),
    "deepspeed_config.gradient_clipping": _CLIP,
    "deepspeed_config.gradient_accumulation_steps": _only(1),
    "dynamo_config.dynamo_backend": _choice("compile", {"inductor": True, "no": False, False: False}),
    "dynamo_config.dynamo_mode": _choice("compile", {"default": True, "reduce-overhead": "graphs"}),
}
_OF_THE_LAUNCHER = (
    "debug", "machine_rank", "main_process_ip", "main_process_port", "main_training_function", "rdzv_backend",
    "same_network", "gpu_ids", "enable_cpu_affinity", "tpu_*", "fsdp_config.fsdp_version",
    "fsdp_config.fsdp_auto_wrap_policy", "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
    "fsdp_config.fsdp_min_num_params", "fsdp_config.fsdp_backward_prefetch*", "fsdp_config.fsdp_forward_prefetch",
    "fsdp_config.fsdp_use_orig_params", "fsdp_config.fsdp_cpu_ram_efficient_loading",
    "fsdp_config.fsdp_sync_module_states", "fsdp_config.fsdp_state_dict_type", "deepspeed_config.zero3_*",
    "deepspeed_config.deepspeed_multinode_launcher", "dynamo_config.dynamo_use_*",
)  # fmt: skip


def _accelerate(file: str | Path, values: Mapping[str, Json], ranks: int | None) -> Converted:
    keys = flatten(values)
    processes = _number(file, keys, "num_processes") or ranks
    inner = keys.pop("deepspeed_config.deepspeed_config_file", None)
    if inner is not None:
        made = read(Path(file).parent / str(inner), processes)
    else:
        made = Converted({"parallel.data": processes} if processes else {})
        if _plain(keys.get("distributed_type")) == "deepspeed":
            made.settings["clip.norm"] = None  # DeepSpeed clips nothing unless it is told to
        devices = {name: keys.pop(f"deepspeed_config.offload_{name}_device", None) for name in ("param", "optimizer")}
        made.settings |= _offload(file, devices)
    _apply(file, made, keys, _ACCELERATE, _OF_THE_LAUNCHER)
    return made


def _apply(
    file: str | Path, made: Converted, keys: Mapping[str, Json], rules: Mapping[str, _Rule], inert: tuple[str, ...]
) -> None:
    """Adds the settings of all keys. Raises UserError for a key without a rule, or a value that its rule refuses."""
    for path, value in keys.items():
        if value == {}:
            continue
        if path in rules:
            try:
                made.settings |= rules[path](value)
            except (LookupError, TypeError) as error:
                raise UserError(f"{file}: {path}={value!r} has no equivalent here: {_HELP}.") from error
        elif any(fnmatchcase(path, pattern) for pattern in inert):
            made.left_out.append(path)
        else:
            raise UserError(f"{file}: {path} has no equivalent here: {_HELP}.")


_HELP = "remove it, and see docs/guide/coming-from.md for what there is"
