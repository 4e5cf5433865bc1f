#!/usr/bin/env bash
# Builds and runs the fuzz targets: `make fuzz`, or tests/fuzz/run.sh [TARGET…].
#
#   FUZZ_SECONDS=60   for each target (20)
#   FUZZ_NEW=corpus   keep new inputs in tests/fuzz/corpus (minimised) instead of throwing them away
#   CI=true           a missing clang fails
#
# A finding is written to build/fuzz/<target>-crash-…, and that target's program run on the file shows it again.
set -euo pipefail
cd "$(dirname "$0")/../.."
seconds=${FUZZ_SECONDS:-20}
out=build/fuzz
compiler=""
mkdir -p "$out"
echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' >"$out/probe.cc"
for candidate in ${FUZZ_CXX:-clang++ $(echo clang++-{20..14})}; do
  if command -v "$candidate" >/dev/null &&
    "$candidate" -fsanitize=fuzzer,address,undefined "$out/probe.cc" -o "$out/probe" 2>/dev/null; then
    compiler=$candidate
    break
  fi
done
if [ -z "$compiler" ]; then
  echo "*** THE FUZZ TARGETS DID NOT RUN: no clang with libFuzzer was found."
  echo "*** Install it (Debian: clang libclang-rt-dev, Fedora: clang compiler-rt) and run make fuzz again."
  [ "${CI:-}" != true ] || exit 1
  exit 0
fi
flags=(-std=c++20 -O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all -Wall -Wextra -Wno-unused-parameter
  -Werror -DPYCOMM_HAS_SODIUM=1 -Icsrc -Itests/fuzz)
objects=()
for source in csrc/base/*.cc csrc/transport/*.cc csrc/transport/tcp/*.cc; do
  object=$out/$(echo "${source%.cc}" | tr / _).o
  objects+=("$object")
  # The whole folder is small: what is newer than its object, or where any header is, is compiled again.
  if [ ! -e "$object" ] || [ -n "$(find "$source" csrc/base csrc/transport -name '*.h' -newer "$object" -o \
    -path "$source" -newer "$object")" ]; then
    "$compiler" "${flags[@]}" -fsanitize=fuzzer-no-link,address,undefined -c "$source" -o "$object"
  fi
done
targets=("$@")
[ ${#targets[@]} -gt 0 ] || for source in tests/fuzz/fuzz_*.cc; do
  name=${source##*/fuzz_}
  targets+=("${name%.cc}")
done
for target in "${targets[@]}"; do
  program=$out/fuzz_$target
  "$compiler" "${flags[@]}" -fsanitize=fuzzer,address,undefined "tests/fuzz/fuzz_$target.cc" "${objects[@]}" \
    -o "$program" -lsodium
  found=$out/found_$target
  mkdir -p "$found"
  echo "--- $target: $seconds s"
  if ! "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -max_len=4096 -print_final_stats=1 \
    -print_funcs=0 -artifact_prefix="$out/$target-" "$found" "tests/fuzz/corpus/$target" >"$out/$target.log" 2>&1; then
    grep -v '^#' "$out/$target.log"
    echo "*** $target: A FINDING, see above; run $program on the file named there to see it again"
    exit 1
  fi
  grep -E '^#.*(INITED|DONE)|^stat::(number|average|peak)' "$out/$target.log"
  [ "${FUZZ_NEW:-}" != corpus ] || "$program" -merge=1 -use_counters=0 "tests/fuzz/corpus/$target" "$found" 2>/dev/null
done
