#!/bin/sh
# Builds both Dockerfiles, unchanged, where no registry can be reached: as root, by buildah, on Debian's python3.11.
# pip is set by the environment (PIP_INDEX_URL, PIP_CERT ...); PIP_FIND_LINKS may name one directory of wheels.
set -eu
cd "$(dirname "$0")/.."
for tool in buildah mmdebstrap; do
    command -v "$tool" >/dev/null || { echo "$0: $tool is missing: apt-get install buildah mmdebstrap" >&2; exit 1; }
done
export BUILDAH_ISOLATION="${BUILDAH_ISOLATION:-chroot}"
base=localhost/hpo-base:bookworm
authorities=/etc/ssl/certs/ca-certificates.crt
wheels=${PIP_FIND_LINKS:-}
[ -d "$wheels" ] || wheels=
container=
work=$(mktemp -d)
trap 'rm -rf "$work"; [ -z "$container" ] || buildah rm "$container" >/dev/null' EXIT
trap 'exit 130' INT TERM

mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3.11-venv \
    --customize-hook='ln -s /usr/bin/python3.11 "$1/usr/local/bin/python"; : >"$1/etc/pip.conf"' \
    bookworm "$work/base.tar"
container=$(buildah from scratch)
buildah add --quiet "$container" "$work/base.tar" /
buildah commit --quiet "$container" "$base"
rm "$work/base.tar"

# Mounted, since --env would write the settings into the images; on paths that the base has, so no mount leaves a trace.
{
    printf '[global]\ncert = %s\n' "$authorities"
    env | sed -n '/^PIP_CERT=/d; '"${wheels:+s,^PIP_FIND_LINKS=.*,find-links = /mnt,p; }"'s/^PIP_//p'
} >"$work/pip.conf"
build() {
    buildah build --pull=never --network host --from "$base" --volume "$work/pip.conf:/etc/pip.conf:ro" \
        ${PIP_CERT:+--volume "$PIP_CERT:$authorities:ro"} ${wheels:+--volume "$wheels:/mnt:ro"} "$@" .
}
build --file docker/Dockerfile --tag hpo:cpu --build-arg REVISION="$(git rev-parse HEAD || echo unknown)"
build --file docker/mlflow.Dockerfile --tag "hpo-mlflow:$(sed -n 's/^ARG VERSION=//p' docker/mlflow.Dockerfile)"
buildah images
