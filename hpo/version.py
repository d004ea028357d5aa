"""Holds the version of this release; nothing else states it."""

VERSION = "0.2.0"
