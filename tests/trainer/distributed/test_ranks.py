"""A trial of several ranks trains as one process would, resumes to the bit, and loses no rank unnoticed."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import rank_runs
import torch
from once import once
from rank_runs import SHORT
from safetensors.torch import load_file

from trainer.checkpoint import files
from trainer.checkpoint.manifest import Damaged
from trainer.checkpoint.store import load
from trainer.config import ParallelConfig, TrainConfig
from trainer.config.optim import OPTIMIZERS
from trainer.distributed.failures import RankFailed, RankLost
from trainer.distributed.launch import launch
from trainer.distributed.pipeline_stages import divide, stages_of
from trainer.distributed.tensor_parallel import _plan
from trainer.errors import ConfigError
from trainer.loop import fit

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("ranks")]

DDP = {"bucket_mb": 0.005}  # so small that there are several
KINDS: dict[int, dict[str, Any]] = {  # train.parallel by the number of ranks it takes
    2: {"ddp": {"data": 2}, "fp16": {"data": 2, "compression": "fp16"}, "buckets": {"data": 2, "bucket_mb": 0.001}}
    | {shard: {"data": 2, "shard": shard} for shard in ("zero1", "zero2", "zero3")}
    | {"offload": {"data": 2, "shard": "zero3", "offload": True}}
    | {"static": {"data": 2, "static_graph": True}, "unused": {"data": 2, "find_unused": True}}
    | {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}, "gpipe": {"pipeline": 2, "schedule": "gpipe"}},
    4: {"ddp": {"data": 4}, "zero3": {"data": 4, "shard": "zero3"}, "data tensor": {"data": 2, "tensor": 2}}
    | {f"{shard} tensor": {"data": 2, "shard": shard, "tensor": 2} for shard in ("zero2", "zero3")}
    | {"data pipeline": {"data": 2, "pipeline": 2}, "pipeline tensor": {"pipeline": 2, "tensor": 2}}
    | {f"{shard} pipeline": {"data": 2, "shard": shard, "pipeline": 2} for shard in ("zero2", "zero3")},
}
COMBINED = ("zero3 tensor", "data tensor", "data pipeline", "pipeline tensor", "zero2 pipeline", "zero3 pipeline")
SAMPLE = (  # of four ranks
    "rules zero3 tensor", "data pipeline", "pipeline tensor", "zero3 pipeline", "sm3 zero3 tensor", "muon zero3 tensor",
)  # fmt: skip
SWEPT = (  # of two ranks: dear, and proven by default of another kind as well
    "rules tensor", "rules zero3", "recomputed tensor", "recomputed zero3", "jumping zero3",
    "frozen tensor", "frozen zero3", "background tensor", "background pipeline", "background zero3", "nan zero3",
    "spoilt tensor", "from tensor", "resharded", "whole sequence", "cut sequence", "whole offload", "cut offload",
)  # fmt: skip
WAYS: dict[int, dict[str, Any]] = {  # in which all that can happen to a run is tried
    2: {"none": {"data": 2} | DDP, "zero1": {"data": 2, "shard": "zero1"}}
    | {name: KINDS[2][name] for name in ("zero3", "tensor", "pipeline")},
    4: {"none": {"data": 4} | DDP, "zero1": {"data": 4, "shard": "zero1"}}
    | {name: KINDS[4][name] for name in ("zero3", *COMBINED)},
}
TWO_PASSES = {  # train.optim of those that look at a window more than once
    "sam": {"name": "sgd", "lr": 0.1, "wrap": "sam", "sam": {"rho": 0.2}},
    "sophia": {"name": "sophia", "lr": 1e-3, "update_every": 2},
}
OF_EIGENVECTORS = {name: {"name": name, "max_dim": 6} for name in ("soap", "shampoo")}
ON_A_MESH = ("sm3", "muon")
RULES = {  # what is done to gradients besides
    "clip": {"norm": 0.5, "per_parameter": 0.3, "adaptive": 0.05},
    "gradients": {"centralize": True, "normalize": "parameter"},
}
KEPT: dict[str, dict[str, Any]] = {  # what keeps a state of its own beside the optimizer's
    "loss_scale": {"precision": "fp16", "loss_scale": {"init": 2.0**22, "growth_interval": 5}},
    "ema": {"average": {"name": "ema", "decay": 0.9}},
    "swa": {"average": {"name": "swa", "start": 0.5}},
    "schedule_free": {"optim": {"name": "schedule_free"}},
    "lookahead": {"optim": {"wrap": "lookahead", "lookahead": {"k": 3}}},
    "ranger": {"optim": {"name": "ranger"}},
}
PENALTY = {"gradients": {"penalty": 1.0}}
PENALISED = ("ddp", "zero1")
RECOMPUTED = {"activations": {"checkpoint": "full", "offload": "disk"}}
RECOMPUTED_BY = ("ddp", "zero3", "tensor", "pipeline")
SHARDED = [name for name, known in OPTIMIZERS.items() if known.sharded]
TAKEN = ("zero3", "tensor", "pipeline")  # where a rank holds a part
NAMED = ("zero1", *TAKEN)  # which start from one process's checkpoint
JUMPS = ("none", "zero3", "pipeline")
FINITE = ("none", "zero1", "zero3", "pipeline")
RESUMED = {"task": "Wide", "micro_batch_size": 3, "num_epochs": 2, "checkpoint": {"every_steps": 5}}
BACKGROUND = {"checkpoint": {"every_steps": 1, "asynchronous": True}}
JUMPING = {
    "task": "Jumping",
    "checkpoint": {"every_steps": 2},
    "rollback": {"enabled": True, "threshold": 20.0, "min_history": 8, "cooldown": 4},
}


INTERLEAVED = {"pipeline": 2, "schedule": "interleaved"}
SPOILT = SHORT | {"task": "SpoiltWithin", "guard": {"max_consecutive": 2}}
SPOILT_BY: dict[str, Any] = {"tensor": KINDS[2]["tensor"], "interleaved": INTERLEAVED}
GATHERED = KINDS[2]["zero3"] | {"gather": "bf16"}
OTHERS: dict[int, dict[str, Any]] = {  # of other tasks: a run, and the oracle it is held against
    2: {
        "sequence": ({"task": "Block", "parallel": {"tensor": 2}}, "Block"),
        "interleaved": ({"task": "Deep", "parallel": INTERLEAVED}, "Deep"),
        "out of step": ({"task": "Deep", "batch_size": 10, "parallel": INTERLEAVED}, "Tens"),  # of 5 micro-batches
    },
    4: {
        f"sequence {shard}": ({"task": "Block", "parallel": {"data": 2, "tensor": 2, "shard": shard}}, "Block")
        for shard in ("none", "zero3")
    }
    | {"data interleaved": ({"task": "Deep", "parallel": INTERLEAVED | {"data": 2}}, "Deep")}
    | {"zero3 interleaved": ({"task": "Deep", "parallel": INTERLEAVED | {"data": 2, "shard": "zero3"}}, "Deep")}
    | {"sequence pipeline": ({"task": "Stack", "parallel": {"pipeline": 2, "tensor": 2}}, "Stack")},
}
POWERSGD = {"data": 2, "compression": "powersgd"}
CUT: dict[str, Any] = {  # and resumed, besides all ways
    "sequence": {"task": "Dropping", "parallel": {"tensor": 2}},
    "interleaved": {"parallel": INTERLEAVED},
    "offload": {"parallel": KINDS[2]["offload"]},
    "powersgd": {"parallel": POWERSGD},
    "powersgd zero1": {"parallel": POWERSGD | {"shard": "zero1"}},
    "bf16": {"parallel": {"data": 2} | DDP, "precision": "bf16"},
    "counters zero1": {"parallel": {"data": 2, "shard": "zero1"}, "optim": {"name": "own_optimizers:Groups"}},
    "counters pipeline": {"parallel": {"pipeline": 2}, "optim": {"name": "own_optimizers:Groups"}},
}
BEHIND = WAYS[2] | {"powersgd zero1": CUT["powersgd zero1"]["parallel"]}  # train.parallel of saves in the background
REDUCED = ("ddp", "zero1", "zero2", "zero3")
RULED = [(2, "zero3"), (2, "tensor"), (2, "pipeline"), (4, "zero3 tensor")]
SLOW = {2: (), 4: (pytest.mark.slow,)}  # what four ranks do is, but for the sample
RANKS = [pytest.param(ranks, marks=SLOW[ranks]) for ranks in KINDS]
OF_ALL_KINDS = [
    pytest.param(ranks, kind, marks=() if kind in SAMPLE else SLOW[ranks]) for ranks in KINDS for kind in KINDS[ranks]
]
OF_ALL_WAYS = [pytest.param(ranks, way, marks=SLOW[ranks]) for ranks in WAYS for way in WAYS[ranks]]


def of_run(name: str) -> Any:
    """The marks of a case that needs the run `name` of two ranks."""
    return (pytest.mark.slow,) if name in SWEPT else ()


def swept(prefix: str, ways: Any) -> list[Any]:
    """The ways as cases, of which those are slow whose runs, named `prefix` and the way, are."""
    return [pytest.param(way, marks=of_run(f"{prefix} {way}")) for way in ways]


@pytest.fixture(scope="session")
def solo(tmp_path_factory):
    """The oracle: one process."""

    @cache
    def of(name: str, short: bool = False) -> dict[str, Any]:
        runs = {"Jumping": JUMPING, "rules": RULES, "penalty": PENALTY, "Tens": {"task": "Deep", "batch_size": 10}}
        config = runs.get(name, {"task": name})
        return rank_runs.run(str(tmp_path_factory.mktemp(name)), **(SHORT if short else {}), **config)

    return of


def jobs_of(ranks: int) -> dict[str, Any]:
    """Runs by name."""
    runs = {name: SHORT | {"parallel": kind} for name, kind in KINDS[ranks].items()}
    runs |= {name: SHORT | run for name, (run, _) in OTHERS[ranks].items()}
    for way, kind in WAYS[ranks].items():
        runs |= {f"whole {way}": RESUMED | {"parallel": kind}}
        runs |= {f"cut {way}": RESUMED | {"parallel": kind, "cut": 6}}
        runs |= {f"stopped {way}": {"parallel": kind, "stop": 2}}
    runs |= {f"rules {way}": SHORT | RULES | {"parallel": KINDS[ranks][way]} for count, way in RULED if count == ranks}
    if ranks == 4:
        way = SHORT | {"parallel": KINDS[4]["zero3 tensor"]}
        runs |= {f"{name} zero3 tensor": way | {"optim": {"name": name}} for name in ON_A_MESH}
    if ranks == 2:
        ddp, zero3 = WAYS[2]["none"], KINDS[2]["zero3"]
        doubled = SHORT | {"task": "Double", "parallel": ddp}
        runs |= {name: doubled | {"optim": optim} for name, optim in OF_EIGENVECTORS.items()}
        runs |= {
            f"background {way}": RESUMED | BACKGROUND | {"parallel": kind, "cut": 6} for way, kind in BEHIND.items()
        }
        runs |= {name: SHORT | {"parallel": ddp, "optim": optim} for name, optim in TWO_PASSES.items()}
        runs |= {name: {"parallel": ddp} | run for name, run in KEPT.items()}
        runs |= {f"recomputed {way}": SHORT | RECOMPUTED | {"parallel": KINDS[2][way]} for way in RECOMPUTED_BY}
        runs |= {f"penalty {way}": SHORT | PENALTY | {"parallel": KINDS[2][way]} for way in PENALISED}
        runs |= {f"whole {name}": RESUMED | run for name, run in CUT.items()}
        runs |= {f"cut {name}": RESUMED | run | {"cut": 6} for name, run in CUT.items()}
        runs |= {"mixed": {"task": "Mixed", "parallel": {"tensor": 2}}}
        runs |= {"powersgd": SHORT | {"parallel": POWERSGD}, "stopped powersgd": {"parallel": POWERSGD, "stop": 2}}
        runs |= {"workers": RESUMED | {"parallel": ddp, "num_workers": 1}}
        runs |= {f"nan {way}": {"task": "Bad", "parallel": WAYS[2][way]} for way in FINITE}
        runs |= {"untrained": SHORT | {"task": "BadFromTheStart", "parallel": ddp}}
        runs |= {f"spoilt {way}": SPOILT | {"parallel": kind} for way, kind in SPOILT_BY.items()}
        runs |= {f"jumping {way}": JUMPING | {"parallel": WAYS[2][way]} for way in JUMPS}
        frozen = {"task": "Adapted", "num_epochs": 2, "cut": 6}
        runs |= {f"frozen {way}": frozen | {"parallel": WAYS[2][way]} for way in ("none", *TAKEN)}
        runs |= {"one jumps": JUMPING | {"task": "OneJumps", "parallel": ddp}}
        normed = SHORT | {"task": "Normed", "precision": "bf16", "parallel": zero3}
        runs |= {"in bf16": normed, "in bf16 gathered": normed | {"task": "Gathered", "parallel": GATHERED}}
        stayed = RESUMED | {"parallel": ddp, "num_epochs": 3}
        left = stayed | {"directory": "left"}
        runs |= {"refused": {"parallel": ddp, "memory_limit": "1KiB"}}
        runs |= {"fits": SHORT | {"parallel": zero3, "micro_batch_size": "auto", "memory_limit": "15KiB"}}
        runs |= {"stayed": stayed, "left": left | {"fate": "SIGTERM"}, "went on": left}
    return runs


def parts_of(ranks: int) -> dict[str, dict[str, Any]]:
    """The runs of one launch each: those that are run by default, and those that only the full sweep has."""
    runs = jobs_of(ranks)
    default = [name for name in runs if (name in SAMPLE if ranks == 4 else name not in SWEPT)]
    rest = [name for name in runs if name not in default]
    if ranks == 2:  # what they are held against is in the launch
        rest += [f"whole {way}" for way in TAKEN] + ["tensor", "zero3"]
    return {"default": {name: runs[name] for name in default}, "slow": {name: runs[name] for name in rest}}


def job_of(ranks: int, part: str, directory: Path) -> dict[str, Any]:
    job: dict[str, Any] = {"directory": str(directory), "runs": parts_of(ranks)[part]}
    if ranks == 2:
        job["alone"] = rank_runs.run(str(directory / "resharded"), stop=2)
        [newest] = Path(directory, "resharded").glob("step-00000008.*")
        named, flawed = (str(shutil.copytree(newest, directory / name)) for name in ("named", "flawed"))
        Path(flawed, "optimizer.safetensors").write_bytes(b"")
        runs = {f"from {way}": {"parallel": WAYS[2][way], "resume_from": named} for way in NAMED}
        runs["resharded"] = {"parallel": KINDS[2]["zero3"]}
        runs["from flawed"] = runs["resharded"] | {"resume_from": flawed}
        job["runs"] |= {name: run for name, run in runs.items() if (name in SWEPT) == (part == "slow")}
    if (ranks, part) == (2, "default"):
        job |= {"sharded": ["adamw", "muon", "sm3"], "low_rank": True}
        job["reductions"] = {"directory": str(directory), "ways": {name: KINDS[2][name] for name in REDUCED}}
    return job


@pytest.fixture(scope="session")
def ran(tmp_path_factory):
    """The launch of 2 or of 4 ranks that has the run `name`: its job, and by rank what came of each run, by name."""

    @cache
    def part_of(ranks: int, part: str) -> Any:
        def make(directory: Path) -> Any:
            job = job_of(ranks, part, directory)
            return job, launched("runs", job, ranks)

        return once(tmp_path_factory, f"{part}-{ranks}-ranks", make)

    def of(ranks: int, name: str) -> Any:
        usual = "slow" if name in SWEPT else "default"
        [part, *_] = [part for part, runs in parts_of(ranks).items() if name in runs] or [usual]
        return part_of(ranks, part)

    return of


def launched(entry: str, job: dict[str, Any], ranks: int, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
    parallel = ParallelConfig(data=ranks, timeout=timeout)
    return launch(f"rank_runs:{entry}", job, parallel, device="cpu", **kwargs)


def assert_equal(result: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    torch.testing.assert_close(rank_runs.losses_of(result), rank_runs.losses_of(expected), rtol=tolerance, atol=0)
    assert result["weights"].keys() == expected["weights"].keys()
    for name, values in expected["weights"].items():
        reference = torch.tensor(values)
        error = (torch.tensor(result["weights"][name]) - reference).norm() / reference.norm()
        assert error <= tolerance, (name, error)


@pytest.mark.parametrize(("ranks", "kind"), OF_ALL_KINDS)
def test_every_kind_computes_what_one_process_does(ranks, kind, ran, solo):
    """8 windows with clipping and accumulation, every fourth with fewer samples than ranks."""
    _, results = ran(ranks, kind)
    result = results[0][kind]
    assert len(result["losses"]) == 8
    assert_equal(result, solo("Smooth", short=True), 1e-2 if kind == "fp16" else 1e-6)
    assert all(other[kind]["losses"] == result["losses"] for other in results), "all ranks decide by the same numbers"


@pytest.mark.parametrize(
    ("ranks", "kind"), [pytest.param(ranks, kind, marks=SLOW[ranks]) for ranks in OTHERS for kind in OTHERS[ranks]]
)
def test_sequence_parts_and_several_stages_compute_as_one_process(ranks, kind, ran, solo):
    assert_equal(ran(ranks, kind)[1][0][kind], solo(OTHERS[ranks][kind][1], short=True), 1e-6)


@pytest.mark.slow
def test_all_kinds_at_once_on_eight_ranks(tmp_path, solo):
    cube = {"pipeline": 2, "data": 2, "tensor": 2}
    runs = {"Smooth": SHORT | {"parallel": cube | {"shard": "zero3"}}, "Stack": SHORT | {"task": "Stack"}}
    runs["Stack"]["parallel"] = cube | {"shard": "zero2"}
    for result in launched("runs", {"directory": str(tmp_path), "runs": runs}, 8)[:1]:
        for name in runs:
            assert_equal(result[name], solo(name, short=True), 1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # inductor's own
def test_compiled_replicas_compute_what_one_process_does_and_resume(tmp_path):
    run = {"task": "Large", "compile": True, "num_epochs": 2, "micro_batch_size": 3, "checkpoint": {"every_steps": 5}}
    ways = {"ddp": {"data": 2, "bucket_mb": 1.0}, "zero1": {"data": 2, "bucket_mb": 1.0, "shard": "zero1"}}
    runs = {name: run | {"parallel": kind} for name, kind in ways.items()}
    runs["cut"] = runs["ddp"] | {"cut": 6}
    result = launched("runs", {"directory": str(tmp_path), "runs": runs}, 2)[0]
    expected = rank_runs.run(str(tmp_path / "alone"), **run)
    for way in ways:
        assert_equal(result[way], expected, 1e-6)
    assert result["cut"]["losses"] == [*result["ddp"]["losses"][:6], *result["ddp"]["losses"][5:]]
    assert result["cut"]["weights"] == result["ddp"]["weights"]


def test_parts_of_the_sequence_and_whole_ones_are_not_added(ran):
    for result in ran(2, "mixed")[1]:
        assert result["mixed"].startswith("parallel_plan leaves an operation with one tensor that is divided along the")
        assert "'scatter' the module after which" in result["mixed"]


@pytest.mark.parametrize(
    ("ranks", "way"),
    [pytest.param(ranks, way, marks=of_run(f"rules {way}")) for ranks, way in RULED],
)
def test_rules_for_single_parameters_see_all_of_their_parts(ranks, way, ran, solo):
    result = ran(ranks, f"rules {way}")[1][0][f"rules {way}"]
    assert_equal(result, solo("rules", short=True), 1e-6)


def test_replicas_report_the_share_of_time_that_gradients_are_waited_for(ran):
    results = ran(2, "ddp")[1][0]
    for way in ("ddp", "zero1"):
        assert len(shares := results[way]["communication"]) == 2 and all(0 <= share < 1 for share in shares)
        assert any(share > 0 for share in shares)
    assert results["zero3"]["communication"] == []


@pytest.mark.parametrize("way", swept("recomputed", RECOMPUTED_BY))
def test_activations_are_recomputed_on_any_kind_of_ranks(way, ran, solo):
    """What they are not kept for is the same to the bit."""
    results = ran(2, f"recomputed {way}")[1][0]
    assert_equal(results[f"recomputed {way}"], results[way], 0.0)


@pytest.mark.parametrize("way", PENALISED)
def test_a_penalty_on_gradients_goes_over_all_replicas(way, ran, solo):
    result = ran(2, f"penalty {way}")[1][0][f"penalty {way}"]
    assert_equal(result, solo("penalty", short=True), 1e-6)


@pytest.mark.parametrize("name", TWO_PASSES)
def test_an_optimizer_of_two_passes_sees_all_ranks_gradients_in_both(name, ran, tmp_path):
    expected = rank_runs.run(str(tmp_path), **SHORT, optim=TWO_PASSES[name])
    assert_equal(ran(2, name)[1][0][name], expected, 1e-5)


@pytest.mark.parametrize("name", KEPT)
def test_state_beside_the_optimizer_is_on_ranks_as_in_one_process(name, ran, tmp_path):
    """fp16's loss scale moves with the same overflows; averages and Lookahead's slow weights are the same."""
    job, results = ran(2, name)
    tolerance = 1e-2 if name == "loss_scale" else 1e-6
    assert_equal(results[0][name], rank_runs.run(str(tmp_path), **KEPT[name]), tolerance)
    ours, theirs = (load(max(Path(at).glob("step-*"))) for at in (f"{job['directory']}/{name}", tmp_path))
    item = {"ema": "average", "swa": "average", "schedule_free": "average", "ranger": "lookahead"}.get(name, name)
    assert ours[item]
    torch.testing.assert_close(ours[item], theirs[item], rtol=tolerance, atol=1e-6)
    if name == "loss_scale":
        assert ours[item] == theirs[item] and ours[item]["factor"] < 2.0**22


@pytest.mark.parametrize("name", OF_EIGENVECTORS)
def test_eigenvector_optimizers_on_ranks_compute_as_one_process(name, ran, tmp_path):
    """In float64 and for sides no longer than a gradient's rank: else rounding chooses among eigenvectors."""
    expected = rank_runs.run(str(tmp_path), **SHORT, task="Double", optim=OF_EIGENVECTORS[name])
    result = ran(2, name)[1][0][name]
    assert len(result["losses"]) == 8
    assert_equal(result, expected, 1e-6)


@pytest.mark.parametrize("name", ON_A_MESH)
def test_optimizers_of_whole_matrices_see_them_on_a_mesh(name, ran, tmp_path):
    """Each rank holds some rows of some columns."""
    result = ran(4, f"{name} zero3 tensor")[1][0][f"{name} zero3 tensor"]
    assert_equal(result, rank_runs.run(str(tmp_path), **SHORT, optim={"name": name}), 1e-6)


def test_powersgd_sends_a_gradient_at_its_rank_and_the_rest_later(ran):
    """It is exact for one of its rank; nothing is lost, whatever the windows' counts; a NaN is kept nowhere."""
    for result in ran(2, "low_rank")[1]:
        found = result["low_rank"]
        assert found["exact"] < 1e-5
        assert found["rank"] == 2
        assert found["lost"] < 1e-5 < 0.1 < found["left_out"]
        assert found["bad"]


def test_powersgd_follows_one_process_and_leaves_what_that_can_read(ran, solo, tmp_path):
    job, results = ran(2, "powersgd")
    losses, expected = (rank_runs.losses_of(result) for result in (results[0]["powersgd"], solo("Smooth", short=True)))
    torch.testing.assert_close(losses, expected, rtol=1e-2, atol=0)
    assert not torch.allclose(losses, expected, rtol=1e-5), "it is in use"
    left = shutil.copytree(f"{job['directory']}/stopped powersgd", tmp_path / "left")
    assert len(rank_runs.run(str(left))["losses"]) == 12


@pytest.mark.parametrize("way", REDUCED)
def test_gradients_are_reduced_once_a_window_of_any_micro_batches(way, ran):
    one, six = ran(2, "reductions")[1][0]["reductions"][way]
    assert one == six > 4, "windows of an epoch"


@pytest.mark.parametrize("sample", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_optimizers_of_sharded_parameters_step_and_resume_as_on_whole(sample, ran, tmp_path):
    job = {"directory": str(tmp_path), "runs": {}, "sharded": SHARDED}
    job, results = ran(2, "sharded") if sample else (job, launched("runs", job, 2))
    assert list(results[0]["sharded"]) == job["sharded"]
    for name, result in results[0]["sharded"].items():
        assert result["error"] < 1e-4 * result["moved"], name


@pytest.mark.parametrize(
    ("ranks", "way"), [*OF_ALL_WAYS, *(pytest.param(2, way, marks=of_run(f"cut {way}")) for way in CUT)]
)
def test_resumed_inside_an_epoch_it_ends_bit_equal(ranks, way, ran):
    """With batch norm, dropout and several buckets, whose layout would otherwise differ after the cut."""
    whole, cut = (ran(ranks, f"cut {way}")[1][0][f"{name} {way}"] for name in ("whole", "cut"))
    assert cut["losses"] == [*whole["losses"][:6], *whole["losses"][5:]]
    assert cut["weights"] == whole["weights"]


@pytest.mark.parametrize("way", swept("background", BEHIND))
def test_saves_in_the_background_change_nothing_on_any_rank(way, ran):
    """After the cut it goes on from the save before, or from an older one if its end was not heard of."""
    whole, cut = (ran(2, f"background {way}")[1][0][f"{name} {way}"] for name in ("whole", "background"))
    again = cut["losses"][6:]
    assert cut["losses"][:6] == whole["losses"][:6]
    assert again == whole["losses"][-len(again) :]
    assert cut["weights"] == whole["weights"]


@pytest.mark.parametrize("way", swept("background", BEHIND))
def test_each_rank_makes_beforehand_the_memory_to_copy_what_it_saves(way, ran):
    job, results = ran(2, f"background {way}")
    newest = max(Path(job["directory"], f"background {way}").glob("step-*"))
    written = {path.name: tensors_in(path) for path in newest.glob("*.safetensors")}
    reserved = [one[f"background {way}"]["reserved"] for one in results]
    assert reserved[0].keys().isdisjoint(reserved[1])
    assert reserved[0] | reserved[1] == written


@pytest.mark.parametrize("ranks", RANKS)
def test_under_zero1_a_rank_saves_only_its_share_of_optimizer_state(ranks, ran):
    [newest] = Path(ran(ranks, "stopped zero1")[0]["directory"], "stopped zero1").glob("step-00000008.*")
    shares = {path.name: load_file(path) for path in newest.glob("optimizer*")}
    others = {f"optimizer-{i:05d}-of-{ranks:05d}.safetensors" for i in range(2, ranks + 1)}
    assert shares.keys() == {"optimizer.safetensors"} | others
    whole = rank_runs.Smooth(None).model().state_dict()
    found = sorted(key for share in shares.values() for key in share)
    assert found == sorted(f"state/{name}/{key}" for name in whole for key in ("step", "exp_avg", "exp_avg_sq"))
    weights = {path.name: load_file(path) for path in newest.glob("model*")}
    assert [*weights] == ["model.safetensors"] and weights["model.safetensors"].keys() == whole.keys()


def test_replicas_save_what_each_of_them_has_left_out(ran):
    newest = max(Path(ran(2, "whole powersgd")[0]["directory"], "whole powersgd").glob("step-*"))
    first, second = (load_file(newest / f"compression{rank}.safetensors") for rank in ("", "-00002-of-00002"))
    left_out = {key for key in first if key.startswith("left_out/")}
    assert left_out == second.keys() == {f"left_out/{name}.weight" for name in ("0", "4", "6", "8")}
    assert all(share[key].shape[0] == 1 for share in (first, second) for key in left_out)
    kept = files.read(newest, None)[0]["compression"]["left_out"]
    for key in left_out:
        assert kept[key.removeprefix("left_out/")].equal(torch.cat([first[key], second[key]]))


@pytest.mark.parametrize(
    ("ranks", "way", "savers"),
    [
        (2, "zero3", 2),
        (2, "tensor", 2),
        pytest.param(4, "zero3 tensor", 4, marks=SLOW[4]),
        pytest.param(4, "data tensor", 2, marks=SLOW[4]),  # the second replica has nothing that the first has not
        pytest.param(4, "zero3 pipeline", 4, marks=SLOW[4]),
        pytest.param(4, "pipeline tensor", 4, marks=SLOW[4]),
    ],
)
def test_each_rank_saves_its_parts_and_damage_is_found(ranks, way, savers, ran, tmp_path):
    [newest] = Path(ran(ranks, f"stopped {way}")[0]["directory"], f"stopped {way}").glob("step-00000008.*")
    last = f"of-{ranks:05d}.safetensors"
    names = {f"{item}-{i:05d}-{last}" for item in ("model", "optimizer") for i in range(1, savers + 1)}
    weights, manifest = files.read_model(newest)
    assert {path.name for path in newest.glob("*.safetensors")} == set(manifest["files"]) == names
    whole = rank_runs.Smooth(None).model().state_dict()
    assert {name: value.shape for name, value in weights.items()} == {n: v.shape for n, v in whole.items()}
    stored = sum(part.nbytes for path in newest.glob("model-*") for part in load_file(path).values())
    assert stored == sum(value.nbytes for value in whole.values()), "nothing is stored twice"
    damaged = shutil.copytree(newest, tmp_path / "damaged")
    (damaged / f"optimizer-00001-{last}").unlink()
    assert files.read_model(damaged)[0].keys() == weights.keys(), "the weights are there"
    (damaged / f"model-00002-{last}").write_bytes(b"")
    with pytest.raises(Damaged, match=r"model-00002-of-0000\d\.safetensors has 0 bytes"):
        files.read_model(damaged)


def test_loader_workers_change_nothing_on_any_rank(ran):
    for result in ran(2, "workers")[1]:
        assert [result["workers"][name] for name in ("losses", "weights")] == [
            result["whole none"][name] for name in ("losses", "weights")
        ]


@pytest.mark.parametrize(("ranks", "way"), OF_ALL_WAYS)
def test_it_goes_on_with_another_number_of_ranks(ranks, way, ran, solo, tmp_path):
    """From the checkpoint that the ranks left at a stop at epoch 2 of 5, by one process."""
    name = f"stopped {way}"
    job, results = ran(ranks, name)
    alone = rank_runs.run(str(shutil.copytree(f"{job['directory']}/{name}", tmp_path / name)))
    assert len(alone["losses"]) == 12
    assert_equal(alone | {"losses": results[0][name]["losses"] + alone["losses"]}, solo("Smooth"), 1e-6)
    [(_, fields)] = [event for event in alone["events"] if event[0] == "ranks_changed"]
    before = {name: value for name, value in WAYS[ranks][way].items() if name not in DDP}
    assert fields == {"step": 8, "before": before, "now": {}}


@pytest.mark.slow
def test_parts_of_a_checkpoint_that_one_process_left(ran, solo):
    job, results = ran(2, "resharded")
    alone, result = job["alone"], results[0]["resharded"]
    assert_equal(result | {"losses": alone["losses"] + result["losses"]}, solo("Smooth"), 1e-6)


@pytest.mark.parametrize("way", swept("frozen", ["none", *TAKEN]))
def test_each_rank_stores_what_is_frozen_once(way, ran, solo):
    """After a cut as well, and trains the rest as one process does."""
    job, results = ran(2, f"frozen {way}")
    checkpoints = sorted(Path(job["directory"], f"frozen {way}").glob("step-*"))
    names = {path.name for path in checkpoints[0].glob("model-frozen*")}
    assert len(names) == (2 if way in ("zero3", "tensor") else 1) and len(checkpoints) == 2
    assert all(checkpoints[0].joinpath(name).samefile(checkpoints[1] / name) for name in names)
    expected = solo("Adapted", short=True)
    assert_equal(results[0][f"frozen {way}"] | {"losses": expected["losses"]}, expected, 1e-6)


def stored(checkpoint: Path) -> int:
    """Bytes of all tensors."""
    return sum(tensors_in(path) for path in checkpoint.glob("*.safetensors"))


def tensors_in(path: Path) -> int:
    return sum(part.nbytes for part in load_file(path).values())


@pytest.mark.parametrize(
    ("run", "way"),
    [
        pytest.param(run, way, marks=of_run(run))
        for way in TAKEN
        for run in (f"cut {way}", f"from {way}", *(("resharded",) if way == "zero3" else ()))
    ],
)
def test_a_rank_reads_of_a_checkpoint_what_it_holds(run, way, ran):
    """Scalars, such as the optimizer's counts, and what is not divided are read by all."""
    job, results = ran(2, run)
    read = [one[run]["read"] for one in results]
    total = stored(next(Path(job["directory"], run).glob("step-*")))
    assert total <= sum(read) < 1.1 * total if way != "tensor" else total < sum(read) < 1.6 * total
    assert max(read) < (0.7 if way != "tensor" else 0.8) * total


@pytest.mark.parametrize("way", swept("from", NAMED))
def test_ranks_start_from_a_checkpoint_that_a_user_names(way, ran, solo):
    job, results = ran(2, f"from {way}")
    alone, result = job["alone"], results[0][f"from {way}"]
    assert_equal(result | {"losses": alone["losses"] + result["losses"]}, solo("Smooth"), 1e-6)


def test_a_named_checkpoint_that_is_damaged_is_one_error_of_all_ranks(ran):
    told = [one["from flawed"] for one in ran(2, "from flawed")[1]]
    assert told[0] == told[1] and "optimizer.safetensors has 0 bytes" in told[0]
    assert told[0].startswith("train.resume_from: checkpoint ")


@pytest.mark.parametrize("ranks", RANKS)
def test_a_verdict_reaches_all_ranks_at_its_step(ranks, ran):
    for result in ran(ranks, "stopped none")[1]:
        for way in WAYS[ranks]:
            outcome = result[f"stopped {way}"]["outcome"]
            assert (outcome["kind"], outcome["step"]) == ("pruned", 8)


@pytest.mark.parametrize("way", swept("nan", FINITE))
def test_what_is_not_finite_on_one_rank_is_skipped_by_all(way, ran):
    """Rank 1's share of every window has a NaN from window 4 on; ten in a row end the fit."""
    for result in ran(2, f"nan {way}")[1]:
        outcome = result[f"nan {way}"]["outcome"]
        assert (outcome["kind"], outcome["step"]) == ("nonfinite", 13)
        assert "10 steps in a row" in outcome["error"]
        assert outcome["error"].endswith("the model's outputs are finite (on rank 1).")


def test_ranks_that_trained_no_step_end_as_infeasible(ran):
    """Eight steps, fewer than the guard's ten in a row."""
    for result in ran(2, "untrained")[1]:
        outcome = result["untrained"]["outcome"]
        assert outcome["kind"] == "nonfinite" and outcome["error"].startswith("none of the 8 steps was trained on")


@pytest.mark.parametrize("way", swept("spoilt", SPOILT_BY))
def test_what_a_rank_spoils_before_another_has_it_is_named(way, ran):
    """Its own output, though by then the other one's, later in the pass, is not finite either."""
    outcome = ran(2, f"spoilt {way}")[1][0][f"spoilt {way}"]["outcome"]
    assert outcome["kind"] == "nonfinite"
    sentence = "the output of module 3.1 is the first that is not finite (on rank 1)."
    assert outcome["error"].endswith(sentence), outcome["error"]


@pytest.mark.parametrize("way", swept("jumping", JUMPS))
def test_a_loss_that_jumps_is_reported_by_all_ranks_as_by_one(way, ran, solo):
    [[name, text]] = solo("Jumping")["artifacts"]
    results = ran(2, f"jumping {way}")[1]
    expected, (result, *others) = json.loads(text), [one[f"jumping {way}"] for one in results]
    assert all(other["artifacts"] == [] for other in others), "rank 0 speaks for all"
    [[found, text]] = result["artifacts"]
    report = json.loads(text)
    assert (found, expected["step"]) == (name, 10)
    for key in ("step", "epoch", "window", "samples", "action"):
        assert report[key] == expected[key], key
    for key in ("loss", "grad_norm", "recent_losses"):
        assert report[key] == pytest.approx(expected[key], rel=1e-4), key
    shares = [{one["module"]: one["share"] for one in of["largest_gradients"]} for of in (report, expected)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-4)


@pytest.mark.parametrize("way", [None, *swept("jumping", JUMPS)])
def test_a_loss_that_jumps_on_one_rank_rolls_all_of_them_back(way, ran, solo):
    run = f"jumping {way}" if way else "one jumps"
    expected, (result, other) = solo("Jumping"), (one[run] for one in ran(2, run)[1])
    for events in (result["events"], expected["events"]):
        [fields] = [fields for kind, fields in events if kind == "loss_jumped"]
        assert fields["step"] == 10
        assert "back to step 10" in fields["action"]
    assert result["losses"] == other["losses"], "all ranks decide by the same numbers"
    assert_equal(result, expected, 1e-6)


def strike(fate: str, directory: Path, timeout: float = 120.0) -> list[Any]:
    run = RESUMED | {"parallel": WAYS[2]["none"], "fate": fate}
    return launched("runs", {"directory": str(directory), "runs": {"struck": run}}, 2, timeout)


def assert_nothing_left() -> None:
    left = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert not [p for p in left if "trainer.distributed.rank" in p.cmdline()]


def test_a_killed_rank_is_named_and_the_rest_ended(tmp_path):
    with pytest.raises(RankLost, match=r"^rank 1 \(pid \d+\) was killed by SIGKILL\.$"):
        strike("SIGKILL", tmp_path)
    assert_nothing_left()


def test_a_stopped_rank_is_named_within_the_timeout(tmp_path):
    timeout = 8.0
    with pytest.raises(RankLost, match=r"^rank 1 \(pid \d+\) has been stopped for \d+ s \(SIGSTOP\)\.$") as caught:
        strike("SIGSTOP", tmp_path, timeout)
    assert timeout <= seconds_of(caught) < 1.5 * timeout
    assert_nothing_left()


def test_a_rank_that_hangs_is_named_within_the_timeout(tmp_path):
    """The other one waits for it in a collective, and has shown one sign of life more."""
    timeout = 8.0
    with pytest.raises(
        RankLost, match=r"^rank 1 \(pid \d+\) showed no progress for \d+ s, train\.parallel\.t"
    ) as caught:
        strike("hang", tmp_path, timeout)
    assert timeout <= seconds_of(caught) < 1.5 * timeout
    assert_nothing_left()


def seconds_of(caught: pytest.ExceptionInfo[RankLost]) -> int:
    """How long the rank has shown no progress, as its sentence says."""
    [seconds] = re.findall(r" for (\d+) s", str(caught.value))
    return int(seconds)


def test_counters_that_differ_from_rank_to_rank_are_refused(tmp_path):
    local = {"parallel": {"data": 2, "shard": "zero1"}, "optim": {"name": "own_optimizers:Local"}}
    job = {"directory": str(tmp_path), "runs": {"local": SHORT | local}}
    for result in launched("runs", job, 2):
        assert "Local keeps numbers of several parameters that differ from rank to rank" in result["local"]


def test_an_error_on_one_rank_ends_all_with_its_traceback(tmp_path):
    with pytest.raises(RankFailed, match=r"^rank 1: ValueError: a bug of the user's$") as caught:
        strike("error", tmp_path)
    assert 'raise ValueError("a bug of the user' in caught.value.report["traceback"]
    assert_nothing_left()


def test_asked_to_leave_all_ranks_do_so_at_one_step_and_go_on_bit_equal(ran):
    """Rank 1 got SIGTERM in the sixth window."""
    results = ran(2, "left")[1]
    ended = [(one["left"]["outcome"]["kind"], one["left"]["outcome"]["step"]) for one in results]
    assert ended[0][0] == "preempted"
    assert ended[0] == ended[1]
    assert 6 <= ended[0][1] <= 8
    left, went_on, whole = (results[0][name] for name in ("left", "went on", "stayed"))
    assert left["losses"] + went_on["losses"] == whole["losses"]
    assert went_on["weights"] == whole["weights"]


@pytest.mark.parametrize(
    ("way", "task"),
    [
        ("none", "Tight"),
        ("pipeline", "TightOnTheWayBack"),  # where torch wraps the error in one of its own
        pytest.param("zero3", "Tight", marks=pytest.mark.slow),
        pytest.param("zero3", "TightOnTheWayBack", marks=pytest.mark.slow),
        pytest.param("pipeline", "Tight", marks=pytest.mark.slow),
    ],
)
def test_out_of_memory_on_one_rank_halves_the_micro_batch_of_all(way, task, tmp_path, solo):
    """In the sixth window rank 1 has room for one sample: from the checkpoint of step 4 on, all take one at a time."""
    run = {"task": task, "num_epochs": 2, "parallel": WAYS[2][way]}
    job = {"directory": str(tmp_path), "runs": {"tight": run}}
    expected, results = solo("Smooth", short=True), launched("runs", job, 2)
    result, other = (one["tight"] for one in results)
    assert ["out_of_memory", {"step": 4, "micro_batch_size": 1}] in result["events"]
    assert result["losses"] == other["losses"]
    assert_equal(result, expected | {"losses": expected["losses"][4:]}, 1e-6)
    assert_nothing_left()


def test_parameters_gathered_in_bf16_are_what_autocast_makes_of_them(ran):
    results = ran(2, "in bf16")[1][0]
    assert results["in bf16 gathered"]["losses"] == results["in bf16"]["losses"]
    assert results["in bf16 gathered"]["weights"] == results["in bf16"]["weights"]


def test_ranks_are_refused_what_does_not_fit_before_the_first_step(ran):
    for result in ran(2, "refused")[1]:
        outcome = result["refused"]["outcome"]
        assert (outcome["kind"], outcome["step"]) == ("out_of_memory", 0)
        assert "a micro-batch of 2 needs on the largest of 2 ranks" in outcome["error"]


def test_ranks_choose_the_micro_batch_that_fits(ran, solo):
    results = [result["fits"] for result in ran(2, "fits")[1]]
    [fields] = [fields for kind, fields in results[0]["events"] if kind == "memory_estimate"]
    assert fields["micro_batch_size"] == 6 and fields["peak"] < fields["limit"] == 15 * 1024, "a rank's share"
    assert_equal(results[0], solo("Smooth", short=True), 1e-6)
    assert results[0]["losses"] == results[1]["losses"]


def test_out_of_memory_in_the_first_pass_of_all_is_no_other(tmp_path, solo):
    """Which under DDP is one for nothing, before the first window."""
    run = {"task": "TightFromTheStart", "num_epochs": 2, "parallel": WAYS[2]["none"]}
    job = {"directory": str(tmp_path), "runs": {"tight": run}}
    result = launched("runs", job, 2)[0]["tight"]
    assert ["out_of_memory", {"step": 0, "micro_batch_size": 1}] in result["events"]
    assert_equal(result, solo("Smooth", short=True), 1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"batch_size": 1, "parallel": {"data": 2}}, "give every rank at least one sample"),
        ({"parallel": {"shard": "zero1"}}, "data is 1: set data to 2"),
        ({"parallel": {"data": 2, "compression": "powersgd"}, "optim": {"wrap": "sam"}}, "SAM takes two"),
        ({"parallel": {"data": 2, "shard": "zero3"}, "compile": True}, "compile is for one process and for replicas"),
        ({"parallel": {"data": 2, "bucket_mb": 0.5}, "compile": True}, "set bucket_mb to 1 or more"),
        ({"parallel": {"data": 2, "static_graph": True}, "compile": True}, "static_graph and find_unused out"),
        ({"parallel": {"context": 2}}, "torch's context parallelism does not run on a CPU"),
        ({"parallel": {"data": 2, "offload": True}}, "shard is none: set shard to zero2 or zero3"),
        ({"parallel": {"pipeline": 2, "stages_per_rank": 3}}, "read only by schedule=interleaved, and it is 1f1b"),
        ({"parallel": {"data": 2, "shard": "zero1", "tensor": 2}}, "use shard=zero2 or zero3"),
        ({"parallel": {"data": 2, "shard": "zero1", "pipeline": 2}}, "use shard=zero2 or zero3"),
        ({"parallel": {"data": 2, "schedule": "gpipe"}}, "read only by a pipeline"),
        ({"parallel": {"pipeline": 2}, "memory_limit": "1GiB"}, "there is none of a pipeline's stages"),
        ({"parallel": {"pipeline": 2}}, "set micro_batch_size to 16 or less"),
        (
            {"parallel": {"pipeline": 2}, "micro_batch_size": 4, "precision": "fp16"},
            "precision=fp16 needs the whole model",
        ),
        ({"parallel": {"tensor": 2}, "average": {"name": "ema"}}, "average.name=ema needs whole"),
        (
            {"parallel": {"pipeline": 2}, "micro_batch_size": 4, "optim": {"name": "ranger"}},
            "optim.name=ranger needs the whole model",
        ),
        (
            {"parallel": {"pipeline": 2}, "micro_batch_size": 4, "optim": {"wrap": "lookahead"}},
            "optim.wrap=lookahead needs the whole model",
        ),
        ({"parallel": {"data": 2, "gather": "bf16"}}, "shard is none: set shard to zero3"),
        ({"parallel": {"data": 2, "shard": "zero2", "gather": "bf16"}}, "shard is zero2: set shard to zero3"),
        ({"parallel": {"data": 2, "shard": "zero3", "gather": "bf16"}}, "precision is auto: set it to bf16"),
        ({"parallel": {"data": 2, "shard": "zero3", "bucket_mb": 1.0}}, "bucket_mb belong to replicas of whole models"),
        ({"parallel": {"data": 2, "shard": "zero2"}, "gradients": {"noise": 0.1}}, "gradients.noise=0.1 needs whole"),
        (
            {"parallel": {"data": 2}, "gradients": {"noise_scale": True}, "micro_batch_size": 4},
            "measured by one process",
        ),
        ({"parallel": {"data": 2, "static_graph": True, "find_unused": True}}, "exclude each other"),
        ({"parallel": {"nproc": 3, "tensor": 2}}, "nproc=3 is not a multiple of tensor=2 times pipeline=1"),
        ({"parallel": {"nproc": 4, "data": 3}}, "nproc=4 asks for data=4, and data is 3: leave one of them out"),
        ({"parallel": {"nproc": 0}}, "parallel.nproc\n.*greater than or equal to 1"),
    ],
)
def test_what_cannot_be_is_refused_by_the_configuration(config, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.model_validate(config)


def test_a_number_of_ranks_is_a_number_of_replicas():
    asked = TrainConfig.model_validate({"parallel": {"nproc": 4, "tensor": 2}})
    assert asked == TrainConfig.model_validate({"parallel": {"data": 2, "tensor": 2}}) and asked.parallel.ranks == 4


def test_ranks_that_nobody_started_are_refused(tmp_path):
    config = TrainConfig.model_validate({"parallel": {"data": 2}})
    with pytest.raises(ConfigError, match=r"asks for 2 ranks and this process is alone"):
        fit(rank_runs.Smooth(None), config, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({}, "has no parallel_plan"),
        ({"0": "diagonal"}, "give a pattern of module names"),
        ({"9": "colwise"}, "give a pattern of module names"),
        ({"1": "rowwise"}, "names '1' rowwise, which is no nn.Linear and no nn.Embedding: leave it out of the plan"),
        ({"0": "sequence"}, "names '0' sequence, which is no nn.LayerNorm and no nn.RMSNorm and no nn.Dropout"),
        ({"4": "colwise"}, r"\(3, 12\) does not come out even"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(plan, message):
    task = rank_runs.Smooth(None)
    task.parallel_plan = lambda model: plan  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=message):
        _plan(task.model(), task, 2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda model: [], "has no pipeline_plan"),
        (lambda model: model[:3], "leaves out the parameter '4.weight'"),
        (lambda model: [model], "has 1 parts that are trained"),
        (lambda model: [model[:3], model[2:]], "'2.weight' is a parameter of two stages"),
    ],
)
def test_a_pipeline_that_cannot_be_followed_is_refused(plan, message):
    task = rank_runs.Smooth(None)
    task.pipeline_plan = plan  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=message):
        stages_of(task.model(), task, 2)


@pytest.mark.parametrize(
    ("sizes", "stages", "starts"),
    [((4, 1, 1, 1, 1), 2, [0, 1]), ((1, 1, 1, 1), 2, [0, 2]), ((5, 1, 1, 5), 3, [0, 1, 3]), ((1, 1), 2, [0, 1])],
)
def test_stages_are_of_like_size(sizes, stages, starts):
    assert [run.start for run in divide([[torch.empty(size)] for size in sizes], stages)] == starts
