"""`hpo` and `python -m hpo`. Handlers of Ctrl-C, SIGTERM and SIGHUP are installed before anything else is loaded: a
signal that arrives before the command has begun ends it with one word."""

import os
import signal
import sys

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEFAULTS = (signal.default_int_handler, signal.SIG_DFL)


def _leave(number: int, _: object) -> None:
    sys.stderr.flush()
    os.write(2, b"interrupted.\n")
    os._exit(128 + number)


def main() -> None:
    heard = [number for number in _ENDING if signal.getsignal(number) in _DEFAULTS]  # not where a shell ignores it
    for number in heard:
        signal.signal(number, _leave)
    from hpo.cli.main import main as commands

    try:
        commands()
    except SystemExit as end:
        for number in heard:
            signal.signal(number, signal.SIG_IGN)  # how it has ended is known: nothing changes that any more
        if end.code == 128 + signal.SIGINT:  # CPython 3.11 ends by the signal where an eval() was interrupted
            os._exit(128 + signal.SIGINT)
        raise


if __name__ == "__main__":
    main()
