#!/bin/sh
# Prints the architectures of this machine's GPUs, as CMAKE_CUDA_ARCHITECTURES has them ("90-real"). Where there is
# none it says why on standard error, in a line that begins with "no GPU: ", and exits with 1.
set -u

none() {
  echo "no GPU: $1" >&2
  exit 1
}

command -v nvidia-smi > /dev/null || none "nvidia-smi was not found, so there is no NVIDIA driver here"
found=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>&1) || none "nvidia-smi says: $found"
list=$(echo "$found" | sort -u | sed -n 's/^\([0-9]*\)\.\([0-9]*\) *$/\1\2-real/p' | paste -s -d ';' -)
[ -n "$list" ] || none "nvidia-smi names no device: $found"
echo "$list"
