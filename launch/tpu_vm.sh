#!/usr/bin/env bash
# Train on a Cloud TPU VM or pod slice, from a machine with gcloud:
#
#   launch/tpu_vm.sh setup NAME ZONE                             copy this folder to every worker and install it
#   launch/tpu_vm.sh train NAME ZONE CONFIG [--key=value ...]    the same command on every worker
#
# JAX finds the workers through the metadata of the TPU. run.root must be a place that all workers share, such as
# a mounted bucket or a network volume. SIGTERM makes the run save and leave with code 75: run `train` again.
set -euo pipefail

usage() {
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

[[ $# -ge 3 ]] || usage
verb=$1 name=$2 zone=$3
shift 3

everywhere() {
    gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"
}

case $verb in
    setup)
        archive=$(mktemp)
        trap 'rm -f "$archive"' EXIT
        git -C "$(dirname "$0")/.." archive --format=tar.gz --output="$archive" HEAD
        gcloud compute tpus tpu-vm scp "$archive" "$name:moejax.tar.gz" --zone="$zone" --worker=all
        everywhere 'mkdir -p moejax && tar -xzf moejax.tar.gz -C moejax && cd moejax &&
            python3 -m venv .venv && .venv/bin/pip install --quiet --editable ".[tpu]"'
        ;;
    train)
        [[ $# -ge 1 ]] || usage
        everywhere "cd moejax && exec .venv/bin/moejax train $(printf '%q ' "$@")"
        ;;
    *)
        usage
        ;;
esac
