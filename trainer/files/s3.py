"""Stores objects in a bucket with the S3 API. Torch-free; boto3, the extra `s3`, is imported when a bucket is used.

Nothing there is overwritten: keys are used once, and the object that marks the others as complete is put last, and only
if it does not exist yet (`If-None-Match: *`). boto3 finds endpoint, addressing style, region and credentials
(AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the configuration file, the standard chain), and they are stored nowhere. Calls
without an answer, or answered with 429, 500, 502, 503 or 504, are repeated in its standard retry mode
(AWS_MAX_ATTEMPTS), and then for as long as this process waits for an outage (`files.outage`).
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from trainer.errors import CheckpointError, ConfigError
from trainer.files import outage
from trainer.redaction import redacted_url

_URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>[A-Za-z0-9!_.*'()/-]*))?")
_ABSENT = ("404", "NoSuchKey", "NotFound")
_CHANGED = ("412", "PreconditionFailed")
_CHUNK = 1 << 20  # bytes
CONNECT_SECONDS = 10
T = TypeVar("T")


class Unavailable(CheckpointError, OSError):
    """Raised when a request to the object store failed; the text is one sentence without credentials."""


class Away(Unavailable):
    """Raised when the object store did not answer for as long as this process waits; a later try may succeed."""

    exit_code = outage.EXIT_CODE


class Bucket:
    """The objects below `url`, s3://BUCKET or s3://BUCKET/PREFIX. Keys are relative to it.

    Every method raises Unavailable.
    """

    def __init__(self, url: str) -> None:
        self._bucket, self._prefix = parse(url)
        self.url = f"s3://{'/'.join(filter(None, (self._bucket, self._prefix)))}"

    def below(self, key: str) -> Bucket:
        return Bucket(f"{self.url}/{key}")

    def check(self) -> None:
        """Raises Unavailable unless the bucket exists and lists its objects."""
        self._asked(lambda client: client.list_objects_v2(Bucket=self._bucket, Prefix=self._key(""), MaxKeys=1))

    def upload(self, source: Path, key: str) -> None:
        """Uploads a file, in parts if it is large; a failed upload is aborted."""
        self._asked(lambda client: client.upload_file(str(source), self._bucket, self._key(key)))

    def put_new(self, key: str, data: bytes) -> None:
        """Puts an object under an unused key.

        An existing object with the same bytes counts as this one, put by a try whose answer was lost.
        """

        def put(client: Any) -> None:
            name, new = self._key(key), {"IfNoneMatch": "*"}
            try:
                _again(client, lambda: client.put_object(Bucket=self._bucket, Key=name, Body=data, **new))
            except client.exceptions.ClientError as error:
                if error.response["Error"]["Code"] != "PreconditionFailed" or self.get(key) != data:
                    raise

        self._asked(put)

    def get(self, key: str) -> bytes | None:
        """Returns an object's bytes, None if there is none."""

        def get(client: Any) -> bytes | None:
            with _absence(client):
                return _again(client, lambda: client.get_object(Bucket=self._bucket, Key=self._key(key))["Body"].read())
            return None

        return self._asked(get)

    def download(self, key: str, target: Path) -> bool:
        """Writes an object to a file; returns False, and writes no file, if there is none."""

        def download(client: Any) -> bool:
            with _absence(client):
                client.download_file(self._bucket, self._key(key), str(target))
                return True
            return False

        return self._asked(download)

    def keys(self, folder: str) -> list[str]:
        """Returns the keys of all objects below `folder`, relative to it."""
        return [name for name, _ in self._listed("list_objects_v2", folder, "Contents")]

    def objects(self, beginning: str) -> list[tuple[str, int, str]]:
        """Returns key, size and entity tag of each object whose key begins so, in the order of their keys."""
        prefix = self._key(beginning)

        def listed(client: Any) -> list[dict[str, Any]]:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
            return [row for page in pages for row in page.get("Contents") or ()]

        rows = sorted(self._asked(listed), key=lambda row: row["Key"])
        return [(beginning + row["Key"].removeprefix(prefix), row["Size"], row["ETag"].strip('"')) for row in rows]

    def copy(self, key: str, tag: str, file: BinaryIO) -> bool:
        """Writes an object to `file` from its start; returns False if the object is gone or has another tag."""

        def copy(client: Any) -> bool:
            with _absence(client, *_CHANGED):
                _again(client, lambda: self._copy(client, key, tag, file))
                return True
            return False

        return self._asked(copy)

    def _copy(self, client: Any, key: str, tag: str, file: BinaryIO) -> None:
        body = client.get_object(Bucket=self._bucket, Key=self._key(key), IfMatch=f'"{tag}"')["Body"]
        file.seek(0)
        with closing(body):
            for chunk in body.iter_chunks(_CHUNK):
                file.write(chunk)
        file.truncate()

    def entries(self, folder: str) -> set[str]:
        """Returns the names in `folder`, as in a directory, including partial uploads."""
        objects = self._listed("list_objects_v2", folder, "Contents", "CommonPrefixes", Delimiter="/")
        return {name.partition("/")[0] for name, _ in (*objects, *self.uploads(folder))}

    def uploads(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        """Returns the key and description of each unfinished multipart upload below `folder`."""
        return self._listed("list_multipart_uploads", folder, "Uploads")

    def remove(self, folder: str, first: str = "") -> None:
        """Removes all objects below `folder`, the one called `first` before the others; aborts unfinished uploads."""
        for key in sorted(self.keys(folder), key=lambda name: name != first):
            self.delete(f"{folder}/{key}")
        for name, upload in self.uploads(folder):
            which = {"Key": self._key(f"{folder}/{name}"), "UploadId": upload["UploadId"]}
            self._asked(lambda client, which=which: client.abort_multipart_upload(Bucket=self._bucket, **which))

    def delete(self, key: str) -> None:
        self._asked(lambda client: client.delete_object(Bucket=self._bucket, Key=self._key(key)))

    def _listed(self, call: str, folder: str, *what: str, **options: Any) -> list[tuple[str, dict[str, Any]]]:
        """Returns the entries of the kinds `what` below the folder, each with its key relative to the folder."""
        prefix = self._key(f"{folder}/")

        def listed(client: Any) -> list[dict[str, Any]]:
            pages = client.get_paginator(call).paginate(Bucket=self._bucket, Prefix=prefix, **options)
            return [row for page in pages for kind in what for row in page.get(kind) or ()]

        return [((row.get("Key") or row["Prefix"]).removeprefix(prefix), row) for row in self._asked(listed)]

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _asked(self, call: Callable[[Any], T]) -> T:
        """Returns the answer to `call` of a client, made again while the store is away and this process waits."""
        client = _client(os.getpid(), os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"))
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        outages = _outages(f"s3://{self._bucket}")
        while True:
            try:
                answer = call(client)
            except (BotoCoreError, ClientError, Boto3Error) as error:
                reason, away = _reason(error, _attempts(client))
                if not away or not outages.again(reason, outage.seconds()):
                    raise (Away if away else Unavailable)(f"{self.url} {reason}.") from error
            else:
                outages.over()
                return answer


@cache
def _outages(store: str) -> outage.Outage:
    return outage.Outage(store)


def parse(url: str) -> tuple[str, str]:
    """Returns bucket and prefix of s3://BUCKET/PREFIX. Raises ConfigError."""
    match = _URL.fullmatch(url.rstrip("/"))
    if match is None:
        raise ConfigError(
            f"{redacted_url(url)!r} is not a place for checkpoints: give s3://BUCKET/PREFIX, of plain letters and "
            "digits; endpoint and credentials come from AWS_ENDPOINT_URL and the standard chain of boto3."
        )
    return match["bucket"], (match["prefix"] or "").strip("/")


@cache
def _client(process: int, endpoint: str | None) -> Any:
    """Returns a client for this process, since connections do not survive a fork.

    `endpoint` is the one in the environment.
    """
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
        fix = _TRUST if "CA bundle" in str(error) else _FIX
        raise Unavailable(f"no client for s3:// can be made ({type(error).__name__}): {fix}.") from error


def _attempts(client: Any) -> int:
    """Returns how often a call is tried before it fails; the default is that of the standard mode."""
    return client.meta.config.retries.get("total_max_attempts", 3)


def _again(client: Any, call: Callable[[], T]) -> T:
    """Makes `call`, and repeats it in two cases in which boto3 does not.

    These are a conflict with another request for the key, and an answer cut off while it was read.
    """
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
_TRUST = (
    "name the file of the authority that has signed its certificate in AWS_CA_BUNDLE, and its host in AWS_ENDPOINT_URL "
    "as the certificate does"
)
# Errors of boto3 whose text is shown, since it cannot hold secrets.
_PLAIN = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")


# Failures to get an answer, by the names of botocore's errors.
_SILENT = {
    "EndpointConnectionError": "no connection to its endpoint can be made",
    "ConnectTimeoutError": f"no connection to its endpoint within {CONNECT_SECONDS} s",
    "ReadTimeoutError": "no answer in time",
    "ConnectionClosedError": "the connection broke",
    "SSLError": "the connection broke",
    "IncompleteReadError": "the answer broke off",
    "ResponseStreamingError": "the answer broke off",
}


def _reason(error: Any, attempts: int) -> tuple[str, bool]:
    """Returns the reason of an error of botocore or boto3, and whether a later try may succeed.

    The reason has no URL, which may be signed or hold a password.
    """
    from botocore import exceptions

    cause = error.__context__ if type(error).__name__ == "S3UploadFailedError" else error
    cause = getattr(cause, "last_exception", cause)  # the last error of a repeated download
    answer, tried = getattr(cause, "response", None) or {}, f"up to {attempts} times"
    code = answer.get("Error", {}).get("Code")
    if code == "NoSuchBucket" or (code == "404" and cause.operation_name == "HeadBucket"):
        return "cannot be used: the bucket does not exist at AWS_ENDPOINT_URL; create it, or give another name", False
    if code is not None:
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        later = code in _LATER or status == 429 or status >= 500
        fix = f"it was asked {tried} (AWS_MAX_ATTEMPTS), try again later" if later else _FIX
        return f"refuses {cause.operation_name} ({' '.join(map(str, filter(None, (code, status))))}): {fix}", later
    if isinstance(cause, exceptions.SSLError) and "EOF" not in (untrusted := _untrusted(cause)):
        return f"cannot be trusted ({untrusted}): {_TRUST}", False
    name = type(cause).__name__
    words = _SILENT.get(name) or (f"{name}: {cause}".rstrip(".") if name in _PLAIN else name)
    reason = f"cannot be reached ({words}): {_FIX}"
    away = isinstance(cause, exceptions.ConnectionError | exceptions.HTTPClientError | exceptions.IncompleteReadError)
    return f"{reason}; it was tried {tried} (AWS_MAX_ATTEMPTS)" if away else reason, away


def _untrusted(error: Any) -> str:
    """Returns why TLS has failed, without the URL and the place in OpenSSL that the error names."""
    words = str(error.kwargs.get("error", ""))
    bundle = "AWS_CA_BUNDLE: " if words.startswith(("[Errno", "[X509")) else ""  # the file itself cannot be read
    return bundle + re.sub(r"^\[[^]]*\] | \(_ssl\.c:\d+\)$", "", words).rstrip(".")


@contextmanager
def _absence(client: Any, *more: str) -> Iterator[None]:
    """Suppresses the error of an object that does not exist, and errors with the codes `more`."""
    try:
        yield
    except client.exceptions.ClientError as error:
        if error.response["Error"]["Code"] not in (*_ABSENT, *more):
            raise
