"""Writes what a process prints as log events, each one line of JSON on standard error.

Events pass through the standard logging module: what hpo prints through the logger `hpo.<command>`, those of libraries
through their own. Rotation is left to the host, which reads standard error.
"""

from __future__ import annotations

import datetime
import io
import json
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from trainer.redaction import redacted


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of ASCII JSON: time, level, logger, host, pid, message and, if any, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        event = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "host": socket.gethostname(),
            "pid": record.process,
            "message": redacted(record.getMessage()),
        }
        if record.exc_info:
            event["traceback"] = redacted(self.formatException(record.exc_info))
        return json.dumps(event)


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Does nothing: a log that cannot be written ends no study, and an error printed here would be logged again."""


class EventStream(io.TextIOBase):
    """A text stream in place of `results`, each of whose prints becomes an event of `logger`.

    A print ends with a line feed, so that a text of several lines stays one event. Each thread has its own.
    """

    def __init__(self, logger: logging.Logger, handler: logging.Handler, results: TextIO) -> None:
        self._logger, self._handler, self.results = logger, handler, results
        self._begun = threading.local()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.results.encoding

    @property
    def buffer(self) -> object:
        return self.results.buffer

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.results.fileno()

    def write(self, text: str, /) -> int:
        whole = getattr(self._begun, "text", "") + text
        self._begun.text = "" if whole.endswith("\n") else whole
        if whole.endswith("\n") and (message := whole.strip("\r\n")):
            self._logger.log(_level(message), "%s", message)
        return len(text)

    def failed(self, error: BaseException) -> None:
        """Logs an unexpected error as one event with its traceback."""
        self._logger.critical("%s: %s", type(error).__name__, error, exc_info=error)

    def line_of(self, text: str) -> str:
        """Returns the line of an event for a signal handler, which may have interrupted the handler of another one."""
        return self._handler.format(self._logger.makeRecord(self._logger.name, logging.WARNING, "", 0, text, (), None))


def _level(message: str) -> int:
    return logging.ERROR if message.startswith("error: ") else logging.INFO


@contextmanager
def json_lines(command: str) -> Iterator[None]:
    """Makes what is printed and logged within the block events on standard error; results stay on standard output."""
    handler, logger = _Handler(sys.stderr), logging.getLogger(f"hpo.{command}")
    handler.setFormatter(JsonFormatter())
    before, level = (sys.stdout, sys.stderr), logger.level
    logger.setLevel(logging.INFO)
    logging.root.addHandler(handler)
    logging.captureWarnings(True)
    sys.stdout, sys.stderr = (EventStream(logger, handler, stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        logging.captureWarnings(False)
        logging.root.removeHandler(handler)
        logger.setLevel(level)
