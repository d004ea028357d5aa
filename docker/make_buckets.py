"""Makes the buckets that are named, unless they are there: `python make_buckets.py NAME ...`."""

from __future__ import annotations

import os
import sys

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from hpo.cli.secret_files import read_into
from hpo.errors import UserError


def main(names: list[str]) -> None:
    try:
        read_into(os.environ)
    except UserError as error:
        sys.exit(f"buckets: {error}")
    where = os.environ.get("AWS_ENDPOINT_URL", "Amazon S3")
    client = boto3.client("s3")
    for name in names:
        try:
            made = name not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]
            if made:
                client.create_bucket(Bucket=name)
        except (BotoCoreError, ClientError) as error:
            sys.exit(f"buckets: {where} did not make {name} ({error}): check S3_ENDPOINT and the keys in secrets/.")
        print(f"bucket {name} is {'made' if made else 'there'}.")


if __name__ == "__main__":
    main(sys.argv[1:])
