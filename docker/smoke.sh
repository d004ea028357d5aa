#!/bin/sh
# Runs a small study on the platform, kills its workers, stops and resumes its driver, and checks that nothing was lost.
# COMPOSE is what starts the services, by default `docker compose` with this directory's files.
set -eu
cd "$(dirname "$0")"
: "${COMPOSE:=docker compose}"
export HPO_STUDY=mlp HPO_TRIALS=6 # under a name of its own, beside a study of yours
export HPO_ARGS="--name smoke -o train.num_epochs=12 -o train.batch_size=2 --strategy none"

say() { echo "smoke: $*"; }
hpo() { $COMPOSE run --rm --no-deps -T driver "$@"; }
running() { # how many trials train
    hpo status --study smoke --json 2>/dev/null | tr -d ' \n' | sed -n 's/.*"running":\([0-9]*\).*/\1/p'
}
until_running() { # so many trials, or give up after ten minutes
    deadline=$(($(date +%s) + 600))
    until [ "$(running)" = "$1" ]; do
        [ "$(date +%s)" -lt "$deadline" ] || { say "$1 trials never ran at a time"; exit 1; }
        sleep 1
    done
    say "$1 trials are running"
}

say "starting the platform"
$COMPOSE up --detach
until_running 3
say "killing the workers (SIGKILL)"
$COMPOSE kill --signal SIGKILL worker
$COMPOSE up --detach worker
until_running 3
say "stopping the driver, which saves its trial"
$COMPOSE stop driver
hpo status --study smoke
say "starting it again, which resumes"
$COMPOSE up --detach driver worker
$COMPOSE wait driver
hpo status --study smoke
hpo best --study smoke
hpo verify --study smoke
say "nothing is lost"
