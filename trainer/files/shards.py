"""Finds the files that a path names: a file, a directory, a pattern, or objects in a bucket. Torch-free.

    book.txt, file:///data/book.txt       a file
    texts/                                all files below a directory, or a split of Hugging Face's datasets (files.hub)
    shards/*.tar, shards/**/*.parquet     the files that a pattern matches
    s3://BUCKET/a.parquet                 an object
    s3://BUCKET/PREFIX                    all objects below a prefix, but for names that begin with . or _
    s3://BUCKET/PREFIX/*.parquet          the objects that a pattern matches; ** spans folders

Files stand in the order of their names.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PurePosixPath

from trainer.errors import ConfigError, DataError
from trainer.files import durable, fetched, hub, paths
from trainer.files.s3 import Bucket

_URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<key>[^?#@\x00-\x1f]*))?")
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Shard:
    """A file on this host, or an object in a bucket.

    `name` is its path or URL. `tag` identifies an object's content, and is empty for a file.
    """

    name: str
    size: int = 0
    tag: str = ""

    @property
    def is_local(self) -> bool:
        return not self.tag

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def digest(self) -> str:
        """Returns a digest of the content: a file's sha256, and an object's entity tag. Raises OSError."""
        if not self.is_local:
            return f"{self.tag}:{self.size}"
        status = Path(self.name).stat()
        return _sha256(self.name, status.st_size, status.st_mtime_ns)

    @contextmanager
    def opened(self, cache: fetched.Cache | None = None) -> Iterator[Path]:
        """Yields the file's path on this host: an object's copy in `cache`, which stays as long as the block.

        Errors of the data that the block raises name the object in place of its copy.
        """
        if self.is_local:
            yield Path(self.name)
            return
        with (cache or fetched.default()).opened(self.name, self.size, self.tag) as copy:
            try:
                yield copy
            except DataError as error:
                raise DataError(str(error).replace(str(copy), self.name)) from error


@lru_cache(maxsize=4096)
def _sha256(name: str, size: int, changed: int) -> str:
    """Returns the sha256 of a file, which is read again only if its size or time of change differs."""
    return durable.sha256(Path(name))


def listed(path: str, split: str = "") -> list[Shard]:
    """Returns the files that `path` names; of a directory of datasets those of `split`.

    A path that is neither there nor a pattern is returned as it is, for the reader to refuse. Raises DataError or
    ConfigError for a pattern that matches nothing, a directory without files and a split that is not there.
    """
    if path.startswith(paths.BUCKET):
        if split:
            raise ConfigError(f"{path} is in a bucket, where no split is read: name its files by a pattern.")
        return _objects(path)
    place = paths.local(path)
    if place.is_dir():
        is_dataset = bool(split) or hub.is_dataset(place)
        files = hub.files(place, split) if is_dataset else sorted(file for file in place.rglob("*") if file.is_file())
    elif split:
        raise ConfigError(f"{path} is not a directory of datasets, and split is {split!r}: leave the split out.")
    elif place.exists() or not _WILD.search(path):
        files = [place]
    else:
        matched = map(Path, glob.glob(str(place), recursive=True))
        files = sorted(file for file in matched if file.is_file())
    if not files:
        raise DataError(f"{path} names no file: give a file, a directory with files, or a pattern that matches some.")
    return [Shard(str(file), file.stat().st_size if file.exists() else 0) for file in files]


def _objects(url: str) -> list[Shard]:
    match = _URL.fullmatch(url)
    if match is None:
        raise ConfigError(
            f"{url!r} does not name a place in a bucket: give s3://BUCKET/KEY, a prefix or a pattern; endpoint and "
            "credentials come from AWS_ENDPOINT_URL and the standard chain of boto3."
        )
    bucket, key = match["bucket"], (match["key"] or "").strip("/")
    wild = _WILD.search(key)
    beginning = key[: wild.start()] if wild else key
    with fetched.as_data_error():
        objects = Bucket(f"{paths.BUCKET}{bucket}").objects(beginning)
    rows = [row for row in objects if not row[0].endswith("/")]
    if wild:
        rows = [row for row in rows if _matches(row[0], key)]
    elif key not in [row[0] for row in rows]:
        below = f"{key}/" if key else ""
        rows = [row for row in rows if row[0].startswith(below) and _is_shown(row[0].removeprefix(below))]
        _refuse_saved(url, {PurePosixPath(row[0]).name for row in rows})
    else:
        rows = [row for row in rows if row[0] == key]
    if not rows:
        raise DataError(
            f"{url} names no object: give an object, a prefix with objects, or a pattern that matches some."
        )
    return [Shard(f"{paths.BUCKET}{bucket}/{name}", size, tag) for name, size, tag in rows]


def _matches(key: str, pattern: str) -> bool:
    if "**" in pattern:
        return fnmatchcase(key, pattern)
    parts, patterns = key.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _is_shown(name: str) -> bool:
    return not any(part.startswith((".", "_")) for part in name.split("/"))


def _refuse_saved(url: str, names: set[str]) -> None:
    if names & {hub.SAVED, hub.SAVED_SPLITS}:
        raise DataError(
            f"{url} is a directory of Hugging Face's datasets in a bucket: name the files of a split, such as "
            f"{url.rstrip('/')}/*.arrow, or copy the directory to this host."
        )


def named(path: str) -> bool:
    """Returns True unless `path` is a file or a directory of this host: a pattern, or a place in a bucket."""
    return path.startswith(paths.BUCKET) or (bool(_WILD.search(path)) and not paths.local(path).exists())


def digest(path: str) -> str:
    """Returns a digest over the names and contents of all files that a pattern or a place in a bucket names."""
    contents = {shard.name: shard.digest() for shard in listed(path)}
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
