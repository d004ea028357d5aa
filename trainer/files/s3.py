"""A place in an object store that speaks S3. Torch-free; boto3, the extra `s3`, is imported when one is used.

Nothing there is written over: keys are used once, and what says that the others are whole is put last and only where
nothing is yet (`If-None-Match: *`). Endpoint, addressing style, region and credentials are boto3's to find
(AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the configuration file, the standard chain), and are kept nowhere. Calls that
were not answered, or with 429, 500, 502, 503 or 504, are made again in its standard retry mode (AWS_MAX_ATTEMPTS).
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from trainer.errors import CheckpointError, ConfigError
from trainer.redaction import redacted_url

_URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>[A-Za-z0-9!_.*'()/-]*))?")
_ABSENT = ("404", "NoSuchKey", "NotFound")
CONNECT_SECONDS = 10
T = TypeVar("T")


class Unavailable(CheckpointError, OSError):
    """The object store did not do what it was asked, in one sentence without credentials."""


class Bucket:
    """What lies below `url`, s3://BUCKET or s3://BUCKET/PREFIX. Keys are relative to it. Every method raises
    Unavailable."""

    def __init__(self, url: str) -> None:
        self._bucket, self._prefix = parse(url)
        self.url = f"s3://{'/'.join(filter(None, (self._bucket, self._prefix)))}"

    def below(self, key: str) -> Bucket:
        return Bucket(f"{self.url}/{key}")

    def check(self) -> None:
        """Raise Unavailable unless the bucket is there and lists its objects."""
        with self._asking() as client:
            client.list_objects_v2(Bucket=self._bucket, Prefix=self._key(""), MaxKeys=1)

    def upload(self, source: Path, key: str) -> None:
        """Put a file, in parts where it is large; what a failure leaves of it is aborted."""
        with self._asking() as client:
            client.upload_file(str(source), self._bucket, self._key(key))

    def put_new(self, key: str, data: bytes) -> None:
        """Put an object where there is none; one of just these bytes is this one, from a try whose answer was lost."""
        with self._asking() as client:
            name, new = self._key(key), {"IfNoneMatch": "*"}
            try:
                _again(client, lambda: client.put_object(Bucket=self._bucket, Key=name, Body=data, **new))
            except client.exceptions.ClientError as error:
                if error.response["Error"]["Code"] != "PreconditionFailed" or self.get(key) != data:
                    raise

    def get(self, key: str) -> bytes | None:
        """An object's bytes, None where there is none."""
        with self._asking() as client, _absence(client):
            return _again(client, lambda: client.get_object(Bucket=self._bucket, Key=self._key(key))["Body"].read())
        return None

    def download(self, key: str, target: Path) -> bool:
        """Write an object to a file; False, and no file, where there is none."""
        with self._asking() as client, _absence(client):
            client.download_file(self._bucket, self._key(key), str(target))
            return True
        return False

    def keys(self, folder: str) -> list[str]:
        """The keys of all objects below `folder`, relative to that."""
        return [name for name, _ in self._listed("list_objects_v2", folder, "Contents")]

    def entries(self, folder: str) -> set[str]:
        """The names in `folder`, as of a directory; also those of which only a part has been uploaded."""
        objects = self._listed("list_objects_v2", folder, "Contents", "CommonPrefixes", Delimiter="/")
        return {name.partition("/")[0] for name, _ in (*objects, *self.uploads(folder))}

    def uploads(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        """Key and description of each upload in parts below `folder` that was begun and not ended."""
        return self._listed("list_multipart_uploads", folder, "Uploads")

    def remove(self, folder: str, first: str = "") -> None:
        """Remove all below `folder`, the object called `first` before the others; abort uploads that are under way."""
        keys = sorted(self.keys(folder), key=lambda name: name != first)
        with self._asking() as client:
            for key in keys:
                client.delete_object(Bucket=self._bucket, Key=self._key(f"{folder}/{key}"))
            for name, upload in self.uploads(folder):
                key = self._key(f"{folder}/{name}")
                client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload["UploadId"])

    def delete(self, key: str) -> None:
        with self._asking() as client:
            client.delete_object(Bucket=self._bucket, Key=self._key(key))

    def _listed(self, call: str, folder: str, *what: str, **options: Any) -> list[tuple[str, dict[str, Any]]]:
        """Of all there is of `what` below the folder, the key relative to it, and what else is said."""
        prefix = self._key(f"{folder}/")
        with self._asking() as client:
            pages = client.get_paginator(call).paginate(Bucket=self._bucket, Prefix=prefix, **options)
            found = [one for page in pages for kind in what for one in page.get(kind) or ()]
        return [((one.get("Key") or one["Prefix"]).removeprefix(prefix), one) for one in found]

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        client = _client(os.getpid(), os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"))
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield client
        except (BotoCoreError, ClientError, Boto3Error) as error:
            raise Unavailable(f"{self.url} {_reason(error, _attempts(client))}.") from error


def parse(url: str) -> tuple[str, str]:
    """Bucket and prefix of s3://BUCKET/PREFIX. Raises ConfigError."""
    found = _URL.fullmatch(url.rstrip("/"))
    if found is None:
        raise ConfigError(
            f"{redacted_url(url)!r} is no place for checkpoints: give s3://BUCKET/PREFIX, of plain letters and digits; "
            "endpoint and credentials come from AWS_ENDPOINT_URL and the standard chain of boto3."
        )
    return found["bucket"], (found["prefix"] or "").strip("/")


@cache
def _client(process: int, endpoint: str | None) -> Any:
    """A client of this process's own: connections do not survive a fork. `endpoint` is what the environment says of
    it."""
    try:
        from boto3.session import Session
        from botocore.config import Config
    except ImportError as error:
        raise Unavailable("s3:// needs boto3: pip install 'hpo[s3]'.") from error
    from botocore.exceptions import BotoCoreError

    config = Config(retries={"mode": "standard"}, connect_timeout=CONNECT_SECONDS)
    try:
        return Session().client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        raise Unavailable(f"no client for s3:// can be made ({type(error).__name__}): {_FIX}.") from error


def _attempts(client: Any) -> int:
    """How often a call is made before it has failed; the default is that of the standard mode."""
    return client.meta.config.retries.get("total_max_attempts", 3)


def _again(client: Any, call: Callable[[], T]) -> T:
    """`call`, made again where boto3 does not do so itself: where another request for the key was under way, and where
    the answer broke off while it was read."""
    from botocore.exceptions import IncompleteReadError, ResponseStreamingError

    for attempt in range(1, _attempts(client)):
        try:
            return call()
        except client.exceptions.ClientError as error:
            if error.response["Error"]["Code"] != _CONFLICT:
                raise
        except (IncompleteReadError, ResponseStreamingError):
            pass
        time.sleep(random.uniform(0, 0.1 * 2**attempt))
    return call()


_CONFLICT = "ConditionalRequestConflict"
_LATER = (_CONFLICT, "RequestTimeout", "SlowDown")
_FIX = "check AWS_ENDPOINT_URL, the region and the credentials"
# What errors of boto3 say beside their name, where that cannot hold more than the user should see.
_PLAIN = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")


def _reason(error: Any, attempts: int) -> str:
    """What has gone wrong, by an error of botocore's or boto3's; no URL, which may be signed or hold a password."""
    from botocore import exceptions

    cause = error.__context__ if type(error).__name__ == "S3UploadFailedError" else error
    cause = getattr(cause, "last_exception", cause)  # of a download that broke off again and again
    answer, tried = getattr(cause, "response", None) or {}, f"up to {attempts} times"
    code = answer.get("Error", {}).get("Code")
    if code == "NoSuchBucket" or (code == "404" and cause.operation_name == "HeadBucket"):
        return "cannot be used: there is no bucket of that name where AWS_ENDPOINT_URL leads; make it, or name another"
    if code is not None:
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        later = code in _LATER or status == 429 or status >= 500
        fix = f"it was asked {tried} (AWS_MAX_ATTEMPTS), try again later" if later else _FIX
        return f"refuses {cause.operation_name} ({' '.join(map(str, filter(None, (code, status))))}): {fix}"
    name = type(cause).__name__
    said = f"cannot be reached ({f'{name}: {cause}'.rstrip('.') if name in _PLAIN else name}): {_FIX}"
    again = isinstance(cause, exceptions.ConnectionError | exceptions.HTTPClientError | exceptions.IncompleteReadError)
    return f"{said}; it was tried {tried} (AWS_MAX_ATTEMPTS)" if again else said


@contextmanager
def _absence(client: Any) -> Iterator[None]:
    """Pass over that an object is not there."""
    try:
        yield
    except client.exceptions.ClientError as error:
        if error.response["Error"]["Code"] not in _ABSENT:
            raise
