#!/bin/sh
# Makes the secrets that are not there yet, in DIRECTORY (by default ./secrets): make_secrets.sh [DIRECTORY].
# The directory is its owner's alone. The files in it are readable, because a container reads them as another user.
set -eu
cd "$(dirname "$0")"
directory=${1:-secrets}
mkdir -p "$directory"
chmod 700 "$directory"

chmod a+r databases.sql make_buckets.py # which containers read, too

random() { od -An -N"$1" -tx1 /dev/urandom | tr -d ' \n'; }
put() { # NAME VALUE
    [ -e "$directory/$1" ] && return
    printf '%s\n' "$2" >"$directory/$1"
    chmod 444 "$directory/$1"
    echo "made $directory/$1"
}

server=postgres:5432
put postgres_password "$(random 24)" # of the superuser, whom no service knows but PostgreSQL itself
put hpo_database_password "$(random 24)"
put mlflow_database_password "$(random 24)"
put hpo_storage "postgresql+psycopg://hpo:$(cat "$directory/hpo_database_password")@$server/hpo"
mlflow=postgresql+psycopg://mlflow:$(cat "$directory/mlflow_database_password")
put mlflow_store "$mlflow@$server/mlflow"
put mlflow_users "$mlflow@$server/mlflow_users"
put mlflow_password "$(random 24)"
put mlflow_session_key "$(random 32)"
put s3_access_key "$(random 10)"
put s3_secret_key "$(random 24)"
put s3_credentials "[default]
aws_access_key_id = $(cat "$directory/s3_access_key")
aws_secret_access_key = $(cat "$directory/s3_secret_key")"
put ray_token "$(random 32)"
