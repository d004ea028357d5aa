"""Studies each of whose trials changes one part of its process, and looks at the part that the one before it changed.

Trial k writes what it sees of part k - 1, and what it sees of part k once it has changed it, into files of `record`.
With `quiet` it changes nothing.
"""

from __future__ import annotations

import os

import torch

import hpo
from trainer.config import Frozen, TrainConfig
from trainer.data import TensorDataset
from trainer.task import Loss, Task

os.environ["KERAS_BACKEND"] = "torch"

# Name of an entry of the table -> statements that change it, and an expression that shows it.
CHANGES = {
    "the working directory": ("import os; os.chdir('/')", "__import__('os').getcwd()"),
    "the environment": ("import os; os.environ.clear()", "len(__import__('os').environ) > 5"),
    "the umask": (
        "import os; os.umask(0o123)",
        "__import__('re').search('Umask.*', open('/proc/self/status').read())[0]",
    ),
    "the CPU affinity": (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])",
        "len(__import__('os').sched_getaffinity(0))",
    ),
    "the priority of the process": ("import os; os.nice(1)", "__import__('os').nice(0)"),
    "resource limits": (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (512, r.getrlimit(r.RLIMIT_NOFILE)[1]))",
        "__import__('resource').getrlimit(7)[0]",
    ),
    "the locale": ("import locale; locale.setlocale(locale.LC_ALL, 'C.UTF-8')", "__import__('locale').setlocale(6)"),
    "timers": (
        "import signal; signal.setitimer(signal.ITIMER_VIRTUAL, 1000)",
        "__import__('signal').getitimer(1)[0] > 0",
    ),
    "signal handlers": (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "__import__('signal').getsignal(15) == 1",
    ),
    "blocked signals": (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])",
        "list(__import__('signal').pthread_sigmask(0, []))",
    ),
    "the recursion limit": ("import sys; sys.setrecursionlimit(1234)", "__import__('sys').getrecursionlimit()"),
    "the limit of an int's digits": (
        "import sys; sys.set_int_max_str_digits(0)",
        "__import__('sys').get_int_max_str_digits()",
    ),
    "the switch interval": ("import sys; sys.setswitchinterval(0.5)", "__import__('sys').getswitchinterval()"),
    "the module search path": ("import sys; sys.path.insert(0, '/nowhere')", "'/nowhere' in __import__('sys').path"),
    "the command line": ("import sys; sys.argv = ['other']", "__import__('sys').argv[1:2]"),
    "the standard streams": (
        "import io, sys; sys.stdout = io.StringIO()",
        "type(__import__('sys').stdout).__name__",
    ),
    "the interpreter's hooks": (
        "import sys; sys.excepthook = print",
        "__import__('sys').excepthook is print",
    ),
    "the hook of threads": (
        "import threading; threading.excepthook = print",
        "__import__('threading').excepthook is print",
    ),
    "builtins": (
        "import builtins; builtins.leaked = 1; builtins.ascii = repr",
        "('leaked' in dir(__builtins__), ascii is repr)",
    ),
    "the garbage collector": ("import gc; gc.disable()", "__import__('gc').isenabled()"),
    "the capture of warnings": (
        "import logging; logging.captureWarnings(True)",
        "__import__('logging')._warnings_showwarning is None",
    ),
    "loggers": (
        "import logging; logging.basicConfig(level=5, force=True); logging.getLogger('leaked').propagate = False",
        "(__import__('logging').root.level, __import__('logging').getLogger('leaked').propagate)",
    ),
    "settings of logging": (
        "import logging; logging.disable(logging.CRITICAL)",
        "__import__('logging').root.manager.disable",
    ),
    "warnings filters": (
        "import warnings; warnings.simplefilter('error')",
        "__import__('warnings').filters[0][0]",
    ),
    "the display of warnings": (
        "import warnings; warnings.showwarning = print",
        "__import__('warnings').showwarning is print",
    ),
    "the decimal context": ("import decimal; decimal.getcontext().prec = 5", "1 / __import__('decimal').Decimal(3)"),
    "Python's random numbers": ("import random; random.seed(5)", "__import__('random').random()"),
    "the temporary directory": ("import tempfile; tempfile.tempdir = '/'", "__import__('tempfile').tempdir == '/'"),
    "the timeout of sockets": (
        "import socket; socket.setdefaulttimeout(7)",
        "__import__('socket').getdefaulttimeout()",
    ),
    "how processes start": (
        "import multiprocessing; multiprocessing.set_start_method('spawn', force=True)",
        "__import__('multiprocessing').get_start_method(allow_none=True)",
    ),
    "modules of sys.modules": (
        "import sys, types; sys.modules['json'] = sys.modules['stub'] = types.ModuleType('other')",
        "(__import__('json').__name__, 'stub' in __import__('sys').modules)",
    ),
    "torch's default device": ("torch.set_default_device('meta')", "torch.empty(1).device"),
    "torch's default dtype": ("torch.set_default_dtype(torch.float64)", "torch.empty(1).dtype"),
    "torch's grad mode": ("torch.set_grad_enabled(False)", "torch.is_grad_enabled()"),
    "torch's inference mode": (
        "global _mode; _mode = torch.inference_mode(); _mode.__enter__()",
        "torch.is_inference_mode_enabled()",
    ),
    "torch's modes": (
        "from torch.overrides import BaseTorchFunctionMode; BaseTorchFunctionMode().__enter__()",
        "torch._C._len_torch_function_stack()",
    ),
    "torch's autocast": (
        "torch.set_autocast_enabled('cpu', True); torch.set_autocast_dtype('cpu', torch.float16)",
        "(torch.is_autocast_enabled('cpu'), torch.get_autocast_dtype('cpu'))",
    ),
    "torch's autocast cache": ("torch.set_autocast_cache_enabled(False)", "torch.is_autocast_cache_enabled()"),
    "torch's anomaly mode": ("torch.autograd.set_detect_anomaly(True)", "torch.is_anomaly_enabled()"),
    "torch's threads of backward passes": (
        "torch.autograd.set_multithreading_enabled(False)",
        "torch._C._is_multithreading_enabled()",
    ),
    "torch's deterministic mode": (
        "torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())",
        "torch.are_deterministic_algorithms_enabled()",
    ),
    "torch's filling of memory": (
        "d = torch.utils.deterministic; d.fill_uninitialized_memory = not d.fill_uninitialized_memory",
        "torch.utils.deterministic.fill_uninitialized_memory",
    ),
    "torch's matmul precision": (
        "torch.set_float32_matmul_precision('medium')",
        "torch.get_float32_matmul_precision()",
    ),
    "torch's cuBLAS flags": (
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False",
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    ),
    "torch's cuDNN flags": ("torch.backends.cudnn.enabled = False", "torch.backends.cudnn.enabled"),
    "torch's fp32 precision": (
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
        "torch.backends.mkldnn.matmul.fp32_precision == 'bf16'",
    ),
    "torch's attention kernels": (
        "torch.backends.cuda.enable_math_sdp(False)",
        "torch.backends.cuda.math_sdp_enabled()",
    ),
    "torch's oneDNN": ("torch.backends.mkldnn.set_flags(False)", "torch._C._get_mkldnn_enabled()"),
    "torch's NNPACK": ("torch.backends.nnpack.set_flags(False)", "torch._C._get_nnpack_enabled()"),
    "torch's opt_einsum": ("torch.backends.opt_einsum.enabled = False", "torch.backends.opt_einsum.enabled"),
    "torch's engine of quantization": (
        "torch.backends.quantized.engine = 'qnnpack'",
        "torch.backends.quantized.engine",
    ),
    "the flushing of denormal numbers": (
        "torch.set_flush_denormal(True)",
        "torch.tensor(1e-310, dtype=torch.double).item() * 0.5",
    ),
    "torch's threads": ("torch.set_num_threads(3)", "torch.get_num_threads()"),
    "torch's interop threads": ("torch.set_num_interop_threads(3)", "torch.get_num_interop_threads()"),
    "torch's warnings": ("torch.set_warn_always(True)", "torch.is_warn_always_enabled()"),
    "torch's hooks of all modules": (
        "torch.nn.modules.module.register_module_forward_hook(lambda *_: None)",
        "len(torch.nn.modules.module._global_forward_hooks)",
    ),
    "torch's print options": ("torch.set_printoptions(precision=2)", "torch.tensor(0.123456)"),
    "torch's sharing of memory": (
        "torch.multiprocessing.set_sharing_strategy('file_system')",
        "torch.multiprocessing.get_sharing_strategy()",
    ),
    "torch's process group": (
        "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)",
        "__import__('torch.distributed').distributed.is_initialized()",
    ),
    "options of torch's compiler": (
        "import torch._dynamo; torch._dynamo.config.recompile_limit = 2",
        "__import__('torch._dynamo')._dynamo.config.recompile_limit",
    ),
    "options of torch's inductor": (
        "import torch._inductor.config; torch._inductor.config.fallback_random = True",
        "__import__('torch._inductor.config')._inductor.config.fallback_random",
    ),
    "torch's compiled code": (
        "torch.compile(compiled, backend='eager')(torch.ones(2))",
        "getattr(torch._dynamo.convert_frame, 'FRAME_COUNTER', 0)",
    ),
    "torch's random numbers": ("torch.manual_seed(5)", "torch.rand(1).item()"),
    "numpy's error states": ("import numpy; numpy.seterr(all='raise')", "__import__('numpy').geterr()"),
    "numpy's error callback": ("import numpy; numpy.seterrcall(print)", "__import__('numpy').geterrcall() is print"),
    "numpy's buffer size": ("import numpy; numpy.setbufsize(4096)", "__import__('numpy').getbufsize()"),
    "numpy's print options": (
        "import numpy; numpy.set_printoptions(precision=2)",
        "__import__('numpy').array(0.123456)[None]",
    ),
    "numpy's random numbers": ("import numpy; numpy.random.seed(5)", "__import__('numpy').random.rand()"),
    "matplotlib's settings": (
        "import matplotlib; matplotlib.use('svg'); matplotlib.rcParams['lines.linewidth'] = 9",
        "(__import__('matplotlib').get_backend() == 'svg', __import__('matplotlib').rcParams['lines.linewidth'])",
    ),
    "matplotlib's figures": (
        "import matplotlib.pyplot as p; p.switch_backend('agg'); p.figure()",
        "__import__('matplotlib.pyplot').pyplot.get_fignums()",
    ),
    "pandas' options": (
        "import pandas; pandas.set_option('display.max_rows', 7)",
        "__import__('pandas').get_option('display.max_rows')",
    ),
    "scikit-learn's settings": (
        "import sklearn; sklearn.set_config(assume_finite=True)",
        "__import__('sklearn').get_config()['assume_finite']",
    ),
    "XGBoost's settings": (
        "import xgboost; xgboost.set_config(verbosity=3)",
        "__import__('xgboost').get_config()['verbosity']",
    ),
    "the threads of Arrow": ("import pyarrow; pyarrow.set_cpu_count(7)", "__import__('pyarrow').cpu_count() == 7"),
    "Keras' state": (
        "import keras; keras.layers.Dense(2); keras.config.set_dtype_policy('float64')",
        "(__import__('keras').layers.Dense(2).name, __import__('keras').config.dtype_policy().name)",
    ),
    "Keras' settings": ("import keras; keras.config.set_floatx('float64')", "__import__('keras').config.floatx()"),
}
UNDONE_BY_A_FRESH_WORKER = {
    "the priority of the process",
    "modules of sys.modules",
    "torch's inference mode",
    "torch's modes",
    "torch's interop threads",
}
NAMES = [*CHANGES]


def compiled(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def turn(number: int, record: str, quiet: bool) -> None:
    if number > 0:
        _look("seen", number - 1, record)
    if number < len(NAMES) and not quiet:
        exec(CHANGES[NAMES[number]][0], globals())
        _look("changed", number, record)


def _look(what: str, number: int, record: str) -> None:
    with open(f"{record}/{what}-{number}", "w") as file:
        file.write(str(eval(CHANGES[NAMES[number]][1], globals())))


TURNS = [{"turn": number} for number in range(len(NAMES) + 1)]
SPACE = {"turn": hpo.Int(0, len(NAMES))}


@hpo.study(
    space=SPACE,
    minimize="loss",
    constants={"record": "", "quiet": False},
    enqueue=TURNS,
    strategy="none",
    sampler="random",
)
def functions(trial):
    turn(trial.params.turn, trial.params.record, trial.params.quiet)
    return 0.0


class Config(Frozen):
    turn: int = 0
    record: str = ""
    quiet: bool = False
    train: TrainConfig = TrainConfig(num_epochs=1, batch_size=8)


class Turn(Task):
    lane_fields = ("turn",)
    fold = -1

    def in_fold(self, fold: int, folds: int) -> Turn:
        task = Turn(self.config)
        task.fold = fold
        return task

    def model(self) -> torch.nn.Module:
        if self.fold == 1:  # of a trial whose first fold has changed a part
            _look("seen", self.config.turn, self.config.record)
        return torch.nn.Linear(2, 1)

    def train_set(self) -> TensorDataset:
        return TensorDataset(torch.ones(8, 2), torch.ones(8, 1))

    def loss(self, model, batch) -> Loss:
        x, y = batch
        return Loss(((model(x) - y) ** 2).sum(), len(x))

    def evaluate(self, model) -> dict[str, float]:
        if self.fold < 0:
            turn(self.config.turn, self.config.record, self.config.quiet)
        elif self.fold == 0 and self.config.turn < len(NAMES) and not self.config.quiet:
            exec(CHANGES[NAMES[self.config.turn]][0], globals())
        return {"loss": 0.0}


TASKS = hpo.Study(
    "tasks", Config(), Turn, SPACE, [hpo.Objective("loss")], enqueue=TURNS, strategy="none", sampler="random"
)
