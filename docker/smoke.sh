#!/bin/sh
# Runs a small study on the platform, kills its workers, stops and resumes its driver, and checks that nothing was lost.
# COMPOSE is what starts the services, by default `docker compose` with this directory's files.
set -eu
cd "$(dirname "$0")"
: "${COMPOSE:=docker compose}"
export HPO_STUDY=mlp HPO_TRIALS=8 # under a name of its own, beside a study of yours
export HPO_ARGS="--name smoke -o train.num_epochs=5 -o train.batch_size=2 --strategy none"

say() { echo "smoke: $*"; }
hpo() { $COMPOSE run --rm --no-deps -T driver "$@"; }
count() { # a number of `hpo status`, by its key
    hpo status --study smoke --json 2>/dev/null | tr -d ' \n' | sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p"
}
until_trained() { # so many epochs, and two trials are running, one of them a worker's; gives up after ten minutes
    deadline=$(($(date +%s) + 600))
    until [ "$(count running)" -ge 2 ] 2>/dev/null && [ "$(count epochs_trained)" -ge "$1" ]; do
        [ "$(date +%s)" -lt "$deadline" ] || { say "two trials never ran at $1 epochs"; exit 1; }
        sleep 1
    done
    say "$(count running) trials are running, $(count epochs_trained) epochs are trained"
}

say "starting the platform"
$COMPOSE up --detach
until_trained 2
say "killing the workers (SIGKILL)"
$COMPOSE kill --signal SIGKILL worker
$COMPOSE up --detach worker
until_trained 5
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
