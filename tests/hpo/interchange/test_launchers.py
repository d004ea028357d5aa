"""Settings of DeepSpeed and Accelerate mean the same here, or are refused by key.

The oracle is DeepSpeed's "DeepSpeed Configuration JSON" and Accelerate's "Launching your scripts": batches multiply, no
clipping without `gradient_clipping`, Adam is AdamW unless `adam_w_mode` says otherwise, no decay unless it is set.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from study_runs import refused
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.errors import UserError
from hpo.interchange.launchers import read
from trainer.config import TrainConfig

# As Hugging Face's documentation of DeepSpeed has it for ZeRO 3, with numbers in place of `auto`.
ZERO3 = {
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": 1000,
        "stage3_prefetch_bucket_size": 1000,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 2000,
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "wall_clock_breakdown": False,
}
FSDP = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
use_cpu: false
"""


THREE = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}


def deepspeed(directory: Path, **values: object) -> Path:
    file = directory / "ds.json"
    file.write_text(json.dumps(values))
    return file


def trained(file: Path, ranks: int | None = None) -> TrainConfig:
    return TrainConfig.model_validate(read(file, ranks).train())


def test_zero_3_with_everything_on_the_cpu(tmp_path):
    found = read(deepspeed(tmp_path, **ZERO3))
    assert found.train() == {
        "clip": {"norm": 0.5},
        "batch_size": 64,
        "micro_batch_size": 2,
        "parallel": {"data": 8, "shard": "zero3", "offload": True},  # 64 = 2 x 4 x 8
        "optim": {"name": "adamw", "lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 0.0},
        "precision": "bf16",
    }
    assert set(found.left_out) == {
        "steps_per_print", "wall_clock_breakdown", "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_param.pin_memory", "zero_optimization.overlap_comm",
        "zero_optimization.contiguous_gradients", "zero_optimization.sub_group_size",
        "zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    }  # fmt: skip


def test_what_is_not_set_has_deepspeeds_default_and_not_ours(tmp_path):
    config = trained(deepspeed(tmp_path, train_batch_size=32, optimizer={"type": "Adam", "params": {}}))
    assert (config.clip.norm, config.precision, config.parallel.shard) == (None, "fp32", "none")
    assert config.optim.name == "adamw" and config.optim.hyperparameters["weight_decay"] == 0.0
    plain = {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}
    assert trained(deepspeed(tmp_path, train_batch_size=32, optimizer=plain)).optim.name == "adam"
    sgd = trained(deepspeed(tmp_path, train_batch_size=32, optimizer={"type": "SGD", "params": {"lr": 0.1}})).optim
    assert sgd.hyperparameters == {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}


def test_the_loss_scale_of_fp16(tmp_path):
    dynamic = {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 1}
    config = trained(deepspeed(tmp_path, train_batch_size=8, fp16=dynamic))
    scale = config.loss_scale
    assert (config.precision, scale.init, scale.dynamic, scale.growth_interval) == ("fp16", 4096.0, True, 500)
    fixed = trained(deepspeed(tmp_path, train_batch_size=8, fp16={"enabled": True, "loss_scale": 128})).loss_scale
    assert (fixed.init, fixed.dynamic) == (128.0, False)


@pytest.mark.parametrize(
    ("batch", "ranks", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 4, (24, 2, 4)),
        ({"train_micro_batch_size_per_gpu": 2}, 4, (8, 2, 4)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, 4, (24, 2, 4)),
        (
            {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
            None,
            (24, 2, 4),
        ),
        ({"train_batch_size": 24}, None, (24, None, 1)),
    ],
)
def test_batches_multiply(tmp_path, batch, ranks, expected):
    config = trained(deepspeed(tmp_path, **batch), ranks)
    assert (config.batch_size, config.micro_batch_size, config.parallel.data) == expected


def test_accelerate_with_fsdp_and_with_a_file_of_deepspeed(tmp_path):
    file = tmp_path / "accelerate.yaml"
    file.write_text(FSDP)
    assert read(file).train() == {"parallel": {"data": 4, "shard": "zero2"}, "precision": "bf16"}
    deepspeed(tmp_path, **ZERO3)
    inner = {"deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}}
    file.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "num_processes": 8, **inner}))
    assert read(file).train() == read(tmp_path / "ds.json").train()
    assert read(file).left_out[-1] == "deepspeed_config.zero3_init_flag"
    file.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 0}}))
    assert read(file).train() == {"clip": {"norm": None}, "parallel": {"shard": "none"}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler.type has no equivalent here"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4 has no equivalent here"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "offload_param=nvme is not to be had",
        ),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type='OneBitAdam' is read for Adam, AdamW and SGD alone"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params has `auto`"),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "optimizer.params.amsgrad has no equivalent"),
        ({"train_batch_size": "auto"}, "train_batch_size='auto' is not a whole number above 0: Hugging Face's Trainer"),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}, "train_batch_size=32 is not"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
        ({"fp16": {"enabled": True, "hysteresis": 2}}, "fp16.hysteresis=2 has no equivalent here"),
        ({"communication_data_type": "fp16"}, "communication_data_type='fp16' has no equivalent"),
        ({"zero_optimization": {"stage": 1}}, "shard=zero1 divides among replicas and data is 1"),
    ],
)
def test_what_means_something_else_is_refused_by_its_key(tmp_path, changes, said):
    file = deepspeed(tmp_path, **{"train_batch_size": 32} | changes)
    with pytest.raises(UserError) as error:
        read(file)
    assert said in str(error.value) and str(file) in str(error.value)


def test_the_command_writes_a_file_for_run(tmp_path):
    file, to = deepspeed(tmp_path, **ZERO3), tmp_path / "train.yaml"
    said = CliRunner().invoke(app, ["import-config", str(file), "--to", str(to)])
    assert said.exit_code == 0 and f"wrote {to}: `hpo run --study NAME --config {to}` uses it." in said.stdout
    assert yaml.safe_load(to.read_text()) == {"train": read(file).train()}
    printed = CliRunner().invoke(app, ["import-config", str(file)])
    assert yaml.safe_load(printed.stdout) == {"train": read(file).train()}
    as_json = json.loads(CliRunner().invoke(app, ["import-config", str(file), "--json"]).stdout)
    assert as_json["config"] == {"train": read(file).train()} and as_json["file"] is None
    assert "exists already" in refused(CliRunner().invoke(app, ["import-config", str(file), "--to", str(to)]), 2)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.json", None, "cannot be read"),
        ("cut.json", "{", "is not JSON"),
        ("deep.json", '{"a":' * 100_000, "is not JSON: it has more than"),
        ("list.json", "[]", "must hold an object of keys, not list"),
        ("other.yaml", "a: 1", "is neither a configuration of DeepSpeed"),
        ("tpu.yaml", "distributed_type: XLA", "distributed_type='XLA' has no equivalent here"),
        ("hosts.yaml", "distributed_type: MULTI_GPU\nnum_machines: 2", "num_machines=2 has no equivalent here"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_sentence(tmp_path, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert said in refused(CliRunner().invoke(app, ["import-config", str(tmp_path / name)]), 2)
