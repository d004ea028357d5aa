"""`hpo` and `python -m hpo`. Ctrl-C is met before anything else is loaded: it ends what has not begun with one word."""

import os
import signal
import sys

_CODE = 128 + signal.SIGINT


def _leave(*_: object) -> None:
    sys.stderr.flush()
    os.write(2, b"interrupted.\n")
    os._exit(_CODE)


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, _leave)
    from hpo.cli.main import main as commands

    try:
        commands()
    except SystemExit as end:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # how it has ended is known: Ctrl-C changes that no more
        if end.code == _CODE:  # CPython 3.11 ends by the signal where an eval() was interrupted, caught or not
            os._exit(_CODE)
        raise


if __name__ == "__main__":
    main()
