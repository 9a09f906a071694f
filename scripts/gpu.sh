#!/usr/bin/env bash
# Builds the GPU tests and benchmarks here, for a machine that has a GPU and no cargo.
#
#   scripts/gpu.sh [DIR]          (default: target/gpu)
#
# Leaves in DIR the programs, stripped, and `run.sh`. Copy DIR to the machine with the GPU and start
# `run.sh` there. That needs the NVIDIA driver and NVRTC (of the CUDA toolkit, or of the package
# nvidia-cuda-nvrtc from PyPI), and nothing else; where compute-sanitizer is installed,
# `run.sh sanitize` has it look for stray, racing and uninitialised accesses. `run.sh bench` measures
# an all-reduce between two ranks on the card, and Gloo's if torch is there.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:-target/gpu}
mkdir -p "$dir"

# The name of what cargo built: the path in the JSON message of that target.
built() {
  local name=$1
  shift
  cargo build --message-format=json "$@" | sed -n "s/.*\"name\":\"$name\".*\"executable\":\"\([^\"]*\)\".*/\1/p" | tail -1
}
for name in parity memory all_reduce training; do
  cp "$(built "$name" --package farwire-cuda --test "$name")" "$dir/$name"
done
cp "$(built codec_cuda --release --package farwire-cuda --example codec_cuda)" "$dir/codec_cuda"
cp "$(built farwire --release --package farwire-cli --features cuda --bin farwire)" "$dir/farwire"
strip "$dir"/{parity,memory,all_reduce,training,codec_cuda,farwire}
cp scripts/gpu_peers.py "$dir"

cat > "$dir/run.sh" <<'RUN'
#!/usr/bin/env bash
# The GPU tests, then the codecs' table of docs/gpu.md. `run.sh sanitize`: the tests under
# compute-sanitizer. `run.sh bench`: all-reduces.
set -euo pipefail
cd "$(dirname "$0")"
export FARWIRE_REQUIRE_GPU=1
if ! ldconfig -p | grep -q libnvrtc; then
  for lib in /usr/local/cuda/lib64 /usr/local/cuda-*/lib64 /usr/local/cuda-*/targets/*/lib; do
    if compgen -G "$lib/libnvrtc.so*" > /dev/null; then
      export LD_LIBRARY_PATH=$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
      break
    fi
  done
fi
if [ "${1:-}" = sanitize ]; then
  # Every test but those of memory over many steps, with one input for each codec and type, under
  # each of three tools: a process for each tool, test and kind of codec, as many at once as there
  # are cores. What takes the card's memory, or looks at it, comes after the others, alone. Runs whose
  # logs are there, and clean, are not made again.
  logs=sanitized
  mkdir -p "$logs"
  clean="ERROR SUMMARY: 0 errors\|RACECHECK SUMMARY: 0 hazards"
  alone='out_of_memory|crosses_the_bus'
  once="$alone|wrong_guess|without_kernels|comes_after|dense|killed|owed_moves"
  jobs() {
    for tool in memcheck racecheck initcheck; do
      for program in parity training all_reduce; do
        # Two of them do without the card.
        for test in $("./$program" --list | sed -n 's/: test$//p' | grep -Ev "thousand_steps|has_messages|not_there"); do
          local codecs="none bf16 f16 topk randk int8 int4 fp8 sign powersgd"
          if [ "$program" = training ] || [[ $test =~ $once ]]; then codecs=.; fi
          for codec in $codecs; do echo "$tool $program $test $codec"; done
        done
      done
    done
  }
  one() {
    local tool=$1 program=$2 test=$3 codec=$4 log
    log=$logs/$tool-$program-$test-${codec/./all}
    if grep -qs "$clean" "$log"; then return; fi
    if [ "$codec" != . ]; then export FARWIRE_CUDA_CODECS=$codec; fi
    FARWIRE_CUDA_CASES=1 timeout "${LIMIT:-300}" compute-sanitizer --tool "$tool" --report-api-errors no \
      --error-exitcode 9 "./$program" --test-threads 1 --exact "$test" > "$log" 2>&1 && return
    case $? in
      124) echo "not finished: $*" ;;
      *) echo "FAILED: $*, see $log" ;;
    esac
  }
  export -f one
  export logs clean
  # Kernels are compiled once, not by every process.
  FARWIRE_CUDA_CASES=1 ./parity --test-threads 1 > /dev/null 2>&1 || true
  {
    jobs | grep -Ev "$alone" | shuf --random-source=<(yes) | xargs -P "$(nproc)" -L 1 bash -c 'one "$@"' _
    jobs | grep -E "$alone" | xargs -P 1 -L 1 bash -c 'one "$@"' _
  } | tee "$logs.txt"
  echo "$(jobs | wc -l) runs, $(wc -l < "$logs.txt") with a complaint;" \
    "$(grep -l "$clean" "$logs"/* | wc -l) clean"
  if [ -s "$logs.txt" ]; then exit 1; else exit 0; fi
fi
if [ "${1:-}" = bench ]; then
  for codec in topk:64/4096 int8; do
    ./farwire bench all_reduce --device cuda --ranks 2 --link shm --size 256MiB --iters 20 --codec "$codec"
  done
  ./farwire bench all_reduce --device cuda --ranks 2 --link shm --size 256MiB --iters 20
  if python3 -c 'import torch'; then
    python3 gpu_peers.py --size 256
  fi
  exit
fi
./parity
./memory
./training
./all_reduce
./codec_cuda
RUN
chmod +x "$dir/run.sh"
echo "$dir: copy it to a machine with a GPU, and start run.sh there"
