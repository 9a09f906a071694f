#!/usr/bin/env bash
# Looks for reads and writes outside of allocated or mapped memory, and for decisions on memory that
# was never written, in the code with `unsafe`: shared memory and the codecs' kernels.
#
#   scripts/valgrind.sh
#
# Takes some minutes. Valgrind does not support AVX-512, so of the kernels it checks only the
# portable and AVX2 forms. The model checker's tests are left out: they switch stacks, which valgrind
# reports as errors.
set -uo pipefail
cd "$(dirname "$0")/.."

if ! command -v valgrind > /dev/null; then
  echo "skipped: valgrind is not installed"
  exit 0
fi

triple=$(rustc -vV | sed -n 's/^host: //p')
runner="CARGO_TARGET_$(tr a-z- A-Z_ <<< "$triple")_RUNNER"
export "$runner=valgrind --tool=memcheck --quiet --error-exitcode=99 --fair-sched=yes"
# Enough cases to reach every branch; the suite itself runs more.
export PROPTEST_CASES=8 FARWIRE_MUTATIONS=200

failed=0
check() {
  local what=$1 log
  shift
  log=$(mktemp)
  if timeout 1200 cargo test --quiet "$@" -- --test-threads=1 "${tests[@]}" > "$log" 2>&1; then
    echo "clean   $what: $(sed -n 's/^test result: ok\. \([0-9]* passed\).*/\1/p' "$log" | tail -1)"
  else
    echo "FAILED  $what"
    grep -E '^==[0-9]+==|panicked|^error' "$log" | head -60
    failed=1
  fi
  rm -f "$log"
}

tests=(shm:: past_caches --skip shm::model)
check "slots, rings, bells and streaming copies" -p farwire --lib
tests=(long_vectors_cross_many_slots segments_of_any_size_work)
check "collectives between threads" -p farwire --test in_process
tests=(simd:: index:: topk::)
check "kernels" -p farwire-codec --lib
tests=(hostile:: conservation::fewer_elements_than_ranks)
check "decoders, on mutated messages" -p farwire-codec --test codecs
exit $failed
