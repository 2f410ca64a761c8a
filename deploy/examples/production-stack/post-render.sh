#!/bin/sh
# Reads what a chart renders and writes it with the sidecar added: helm's --post-renderer, or a stage in a pipe.
set -eu
cd "$(dirname "$0")"
cat >rendered.yaml
exec kubectl kustomize .
