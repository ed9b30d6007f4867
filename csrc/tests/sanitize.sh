#!/usr/bin/env bash
# sanitize.sh [SECONDS [SEED [SANITIZERS...]]]
# Builds csrc/tests/stress.cpp and cuda_carrier.cpp under each sanitizer and runs them for SECONDS (20) and half of that;
# prints one line for each. SEED (1): of the schedules, prompts and models that stress draws. PPSD_KERNELS (all): as
# CMakeLists.txt says.
set -uo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:-20}
seed=${2:-1}
wanted=${*:3}
status=0
export TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}" UBSAN_OPTIONS="print_stacktrace=1 ${UBSAN_OPTIONS:-}"
for sanitizers in ${wanted:-thread address,undefined}; do
  folder=build/sanitize-${sanitizers/,/-}
  mkdir -p "$folder"
  if ! { echo 'int main() {}' | ${CXX:-c++} -fsanitize=$sanitizers -x c++ -o "$folder/probe" - && "$folder/probe"; } \
      >"$folder/log" 2>&1; then
    echo "$sanitizers: skipped, ${CXX:-c++} cannot build and run with -fsanitize=$sanitizers here"
    continue
  fi
  if ! { cmake -S . -B "$folder" -DPPSD_MODULE=OFF -DPPSD_TESTS=ON -DPPSD_SANITIZE=$sanitizers -DPPSD_KERNELS="${PPSD_KERNELS:-all}" \
           -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O1 &&
         cmake --build "$folder" --target stress cuda_carrier --parallel 2; } >"$folder/log" 2>&1; then
    echo "$sanitizers: does not build:"
    tail -n 20 "$folder/log"
    status=1
    continue
  fi
  for run in "stress $seconds $seed" "cuda_carrier $(((seconds + 1) / 2))"; do
    if timeout $((seconds * 4 + 90)) "$folder"/$run >"$folder/log" 2>&1; then
      echo "$sanitizers: $(tail -n 1 "$folder/log")"
    else
      echo "$sanitizers: FAILED: $run"
      head -n 60 "$folder/log"
      status=1
    fi
  done
done
exit $status
