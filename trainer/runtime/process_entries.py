"""Lists the parts of a process's state of Python and the system, with functions to read and restore each."""

from __future__ import annotations

import locale  # this and the next are imported for their entries: native code changes what they read
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A part of the process's state.

    `read` is called with the loaded `module` and returns a value that later changes do not affect; `write` restores
    such a value.
    """

    name: str  # for use in a sentence
    module: str  # if not loaded, there is nothing to restore
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object] | None  # None: it can only be compared
    numeric: bool = False  # it affects computed numbers
    compiled: bool = False  # restoring it discards compiled code
    drawn: bool = False  # other threads draw from it


def pair(name: str, module: str, get: str, put: str, *arguments: Any, numeric: bool = False) -> Entry:
    """Returns an entry of a function that returns a value and a function that takes it, dotted names in `module`."""

    def read(owner: Any) -> Any:
        return attrgetter(get)(owner)(*arguments)

    def write(owner: Any, before: Any) -> None:
        attrgetter(put)(owner)(*arguments, before)

    return Entry(name, module, read, write, numeric)


def attributes(name: str, module: str, *paths: str, numeric: bool = False) -> Entry:
    """Returns an entry of plain attributes, dotted names in `module`; one that cannot be read is left alone."""

    def read(owner: Any) -> dict[str, Any]:
        return {path: value for path in paths if (value := _value(owner, path)) is not _UNREADABLE}

    def write(owner: Any, before: Mapping[str, Any]) -> None:
        for path, value in before.items():
            holder, _, last = path.rpartition(".")
            if _value(owner, path) != value:
                setattr(attrgetter(holder)(owner) if holder else owner, last, value)

    return Entry(name, module, read, write, numeric)


_UNREADABLE = object()


def _value(owner: Any, path: str) -> Any:
    try:
        return attrgetter(path)(owner)
    except (AttributeError, RuntimeError):  # torch refuses to return a setting that was made in two ways
        return _UNREADABLE


def _in_place(name: str, module: str, attribute: str) -> Entry:
    def write(owner: Any, before: Sequence[Any]) -> None:
        getattr(owner, attribute)[:] = before

    return Entry(name, module, lambda owner: tuple(getattr(owner, attribute)), write)


def _write_environ(os: Any, before: Mapping[str, str]) -> None:
    zone = os.environ.get("TZ")
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})
    if before.get("TZ") != zone and "time" in sys.modules:
        sys.modules["time"].tzset()


def _read_umask(_: Any) -> int:
    """Returns the mask from the kernel: os.umask reads it only by changing it, which other threads would see."""
    with open("/proc/self/status", "rb") as status:
        return int(status.read().partition(b"Umask:")[2].split(None, 1)[0], 8)


_SIGNALS = [number for number in range(1, 32) if number not in (signal.SIGKILL, signal.SIGSTOP)]
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


def _read_handlers(signal: Any) -> dict[int, Any]:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("only the main thread sets handlers")
    get = getattr(signal.getsignal, "__wrapped__", signal.getsignal)  # avoids making an enum of each handler
    return {number: get(number) for number in _SIGNALS}


def _write_handlers(signal: Any, before: Mapping[int, Any]) -> None:
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _write_timers(signal: Any, before: Sequence[bool]) -> None:
    for timer, runs in zip(_TIMERS, before, strict=True):
        if not runs:
            signal.setitimer(timer, 0.0)


_LIMITS = [
    kind
    for name in ("NOFILE", "AS", "CPU", "DATA", "STACK", "FSIZE", "CORE", "NPROC", "MEMLOCK")
    if (kind := getattr(resource, f"RLIMIT_{name}", None)) is not None
]


def _write_limits(resource: Any, before: Mapping[int, tuple[int, int]]) -> None:
    for kind, limits in before.items():
        if resource.getrlimit(kind) != limits:
            resource.setrlimit(kind, limits)


_DEFAULT_LOGGER = (0, False, True, ())


def _logger(logger: Any) -> tuple[Any, ...]:
    return logger.level, logger.disabled, logger.propagate, tuple(logger.handlers)


def _read_loggers(logging: Any) -> dict[str, tuple[Any, ...]]:
    """Reads the loggers that have been set up; the name of the root is empty."""
    known = [("", logging.root), *logging.root.manager.loggerDict.items()]
    states = {name: _logger(logger) for name, logger in known if hasattr(logger, "handlers")}
    return {name: state for name, state in states.items() if state != _DEFAULT_LOGGER}


def _write_loggers(logging: Any, before: Mapping[str, tuple[Any, ...]]) -> None:
    for name in before.keys() | _read_loggers(logging).keys():
        logger, state = logging.getLogger(name), before.get(name, _DEFAULT_LOGGER)
        if _logger(logger) != state:
            logger.setLevel(state[0])
            logger.disabled, logger.propagate, logger.handlers[:] = *state[1:3], state[3]


def _write_filters(warnings: Any, before: Sequence[Any]) -> None:
    warnings.resetwarnings()  # has every warning looked up again
    warnings.filters[:] = before


def _read_builtins(builtins: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(builtins).items() if name != "_"}  # a prompt sets it


def _write_builtins(builtins: Any, before: Mapping[str, Any]) -> None:
    for name in _read_builtins(builtins).keys() - before.keys():
        delattr(builtins, name)
    vars(builtins).update(before)


def _read_collector(gc: Any) -> tuple[Any, ...]:
    return gc.isenabled(), gc.get_threshold(), gc.get_debug()


def _write_collector(gc: Any, before: tuple[Any, ...]) -> None:
    enabled, threshold, debug = before
    (gc.enable if enabled else gc.disable)()
    gc.set_threshold(*threshold)
    gc.set_debug(debug)


def _read_decimal(decimal: Any) -> tuple[Any, ...]:
    c = decimal.getcontext()
    signals = (tuple(name for name, on in of.items() if on) for of in (c.flags, c.traps))
    return c.prec, c.rounding, c.Emin, c.Emax, c.capitals, c.clamp, *signals


def _write_decimal(decimal: Any, before: tuple[Any, ...]) -> None:
    decimal.setcontext(decimal.Context(*before[:6], list(before[6]), list(before[7])))


class Modules:
    """The loaded modules.

    They equal those `before` if all of these still exist and no code has added others without a spec, such as stubs;
    imported modules have a spec.
    """

    def __init__(self, modules: Iterable[ModuleType | None]) -> None:
        self._modules = tuple(modules)

    def __eq__(self, before: object) -> bool:
        if not isinstance(before, Modules):
            return False
        count = len(before._modules)  # a new module goes to the end, and a replaced one keeps its position
        if self._modules[:count] != before._modules and not before.ids() <= self.ids():
            return False
        return len(self._modules) == count or not any(map(_is_stub, self.since(before)))

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def ids(self) -> set[int]:
        return {*map(id, self._modules)}

    def since(self, before: Modules) -> list[ModuleType | None]:
        """Returns the modules that were not there before."""
        known = before.ids()
        return [module for module in self._modules if id(module) not in known]

    def after_import(self, old: Modules, new: Modules) -> Modules:
        """Returns these and the modules that an import has added to `old`, which then are `new`."""
        return Modules([*self._modules, *Modules(new.since(old)).since(self)])


def _is_stub(module: ModuleType | None) -> bool:
    return getattr(module, "__spec__", None) is None


def _remove_stubs(sys: Any, before: Modules) -> None:
    known = before.ids()
    for name in [name for name, module in sys.modules.items() if id(module) not in known and _is_stub(module)]:
        del sys.modules[name]


PYTHON = (
    pair("the working directory", "os", "getcwd", "chdir"),
    Entry("the environment", "os", lambda os: dict(os.environ), _write_environ),
    Entry("the umask", "os", _read_umask, lambda os, mask: os.umask(mask)),
    pair("the CPU affinity", "os", "sched_getaffinity", "sched_setaffinity", 0),
    pair("the priority of the process", "os", "getpriority", "setpriority", os.PRIO_PROCESS, 0),
    Entry("resource limits", "resource", lambda of: {kind: of.getrlimit(kind) for kind in _LIMITS}, _write_limits),
    pair("the locale", "locale", "setlocale", "setlocale", locale.LC_ALL),
    Entry("timers", "signal", lambda of: tuple(of.getitimer(timer)[0] > 0 for timer in _TIMERS), _write_timers),
    Entry("signal handlers", "signal", _read_handlers, _write_handlers),
    Entry(
        "blocked signals",
        "signal",
        lambda signal: frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        lambda signal, mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
    ),
    pair("the recursion limit", "sys", "getrecursionlimit", "setrecursionlimit"),
    pair("the limit of an int's digits", "sys", "get_int_max_str_digits", "set_int_max_str_digits"),
    pair("the switch interval", "sys", "getswitchinterval", "setswitchinterval"),
    _in_place("the module search path", "sys", "path"),
    _in_place("the command line", "sys", "argv"),
    attributes("the standard streams", "sys", "stdin", "stdout", "stderr"),
    attributes("the interpreter's hooks", "sys", "excepthook", "unraisablehook", "displayhook", "breakpointhook"),
    attributes("the hook of threads", "threading", "excepthook"),
    Entry("builtins", "builtins", _read_builtins, _write_builtins),
    Entry("the garbage collector", "gc", _read_collector, _write_collector),
    Entry(
        "the capture of warnings",
        "logging",
        lambda logging: logging._warnings_showwarning is not None,
        lambda logging, captured: logging.captureWarnings(captured),
    ),
    Entry("loggers", "logging", _read_loggers, _write_loggers),
    attributes("settings of logging", "logging", "raiseExceptions", "root.manager.disable"),
    Entry("warnings filters", "warnings", lambda warnings: tuple(warnings.filters), _write_filters),
    attributes("the display of warnings", "warnings", "showwarning", "formatwarning"),
    Entry("the decimal context", "decimal", _read_decimal, _write_decimal),
    Entry(
        "Python's random numbers",
        "random",
        lambda random: random.getstate(),
        lambda random, state: random.setstate(state),
        drawn=True,
    ),
    attributes("the temporary directory", "tempfile", "tempdir"),
    pair("the timeout of sockets", "socket", "getdefaulttimeout", "setdefaulttimeout"),
    Entry(
        "how processes start",
        "multiprocessing",
        lambda multiprocessing: multiprocessing.get_start_method(allow_none=True),
        lambda multiprocessing, method: multiprocessing.set_start_method(method, force=True),
    ),
    Entry("modules of sys.modules", "sys", lambda sys: Modules(sys.modules.values()), _remove_stubs),
)
