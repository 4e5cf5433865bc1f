#!/usr/bin/env bash
# Builds and runs the fuzz targets, two side by side: `make fuzz`, or tests/fuzz/run.sh [TARGET…].
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

# Everything below bind/, without CUDA. -ffp-contract=off as in the real build: results are defined bit for bit.
flags="-std=c++20 -O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all -Wall -Wextra -Wno-unused-parameter
  -Wno-psabi -Wno-bitwise-conditional-parentheses -Werror -ffp-contract=off -fno-math-errno -pthread -DPYCOMM_HAS_SODIUM=1 -DPYCOMM_BASELINE_ONLY
  -Icsrc -Itests/fuzz"
[ $# -gt 0 ] || set -- $(printf '%s\n' tests/fuzz/fuzz_*.cc | sed 's,.*/fuzz_\(.*\)\.cc,\1,')
{
  echo "FLAGS := $(echo $flags)"
  echo "programs: $(printf " $out/fuzz_%s" "$@")"
  objects=""
  for source in csrc/{base,transport,transport/tcp,schedule,kernels,engine}/*.cc tests/fuzz/fuzz_*.cc; do
    object=$out/$(echo "${source%.cc}" | tr / _).o
    # The same is parsed on every instruction set; and the kernels' thousand bodies are there to be executed.
    options='$(FLAGS) -fsanitize=fuzzer-no-link,address,undefined'
    case $source in
      */isa_avx*) continue ;;
      */isa_baseline.cc) options='$(FLAGS) -O0 -g0 -fsanitize=address' ;;
    esac
    printf '%s: %s\n\t@%s %s -MMD -MP -c $< -o $@\n-include %s\n' \
      "$object" "$source" "$compiler" "$options" "${object%.o}.d"
    case $source in csrc/*) objects+=" $object" ;; esac
  done
  echo "$out/core.a:$objects"
  printf '\t@rm -f $@ && ar rcs $@ $^\n'
  for target in "$@"; do
    printf '%s: %s %s\n\t@%s -fsanitize=fuzzer,address,undefined -pthread $^ -lsodium -o $@\n' \
      "$out/fuzz_$target" "$out/tests_fuzz_fuzz_$target.o" "$out/core.a" "$compiler"
  done
} >"$out/Makefile"
make -j"${FUZZ_JOBS:-2}" --no-print-directory -f "$out/Makefile" programs

run() {  # run TARGET: for `seconds`, over its kept inputs first
  local target=$1 program=$out/fuzz_$1 found=$out/found_$1
  mkdir -p "$found" "tests/fuzz/corpus/$target"
  if ! "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -max_len=4096 -print_final_stats=1 \
    -print_funcs=0 -artifact_prefix="$out/$target-" "$found" "tests/fuzz/corpus/$target" >"$out/$target.log" 2>&1; then
    grep -v '^#' "$out/$target.log"
    echo "*** $target: A FINDING, see above; run $program on the file named there to see it again"
    return 1
  fi
  echo "--- $target: $seconds s"
  grep -E '^#.*(INITED|DONE)|^stat::(number|average|peak)' "$out/$target.log"
  [ "${FUZZ_NEW:-}" != corpus ] || "$program" -merge=1 -use_counters=0 "tests/fuzz/corpus/$target" "$found" 2>/dev/null
}

failed=0
while [ $# -gt 0 ]; do
  run "$1" &
  first=$!
  second=""
  if [ $# -gt 1 ]; then
    run "$2" &
    second=$!
    shift
  fi
  shift
  wait "$first" || failed=1
  [ -z "$second" ] || wait "$second" || failed=1
done
exit $failed
