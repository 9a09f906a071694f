#!/usr/bin/env bash
# Builds the GPU tests and benchmarks here, for a machine that has a GPU and no cargo.
#
#   scripts/gpu.sh [DIR]          (default: target/gpu)
#
# Writes the stripped programs and `run.sh` to DIR. Copy DIR to the machine with the GPU and start
# `run.sh` there. It needs only the NVIDIA driver and NVRTC (from the CUDA toolkit, or from the
# package nvidia-cuda-nvrtc on PyPI). With compute-sanitizer installed, `run.sh sanitize` looks for
# stray, racing and uninitialised accesses. `run.sh bench` measures an all-reduce between two ranks
# on the card, and Gloo's if torch is installed.
#
# If nvcc is on the PATH (see cuda_toolkit.sh), it also builds the programs that train on the card,
# in DIR-train, for `run.sh train`: that needs cuBLAS and cuRAND, from the CUDA toolkit or torch.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:-target/gpu}
mkdir -p "$dir"

# The path of a program that cargo built, from the JSON message for that target.
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
(cd "$dir" && strip parity memory all_reduce training codec_cuda farwire)
cp scripts/gpu_peers.py "$dir"
if command -v nvcc > /dev/null; then
  # A folder of its own: builds with other features in between would compile candle's kernels again.
  export CARGO_TARGET_DIR=${TRAIN_TARGET_DIR:-${CARGO_TARGET_DIR:-target}/train-cuda}
  mkdir -p "$dir-train"
  cp "$(built farwire --release --package farwire-cli --features train-cuda --bin farwire)" \
    "$dir-train/farwire"
  cp "$(built cuda --release --package farwire-candle --features cuda --test cuda)" \
    "$dir-train/candle"
  (cd "$dir-train" && strip farwire candle)
  cp scripts/gpu_train.py "$dir-train"
fi

cat > "$dir/run.sh" <<'RUN'
#!/usr/bin/env bash
# The GPU tests, then the codecs' table of docs/gpu.md. `run.sh sanitize`: the tests under
# compute-sanitizer. `run.sh bench`: all-reduces. `run.sh train`: training.
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
  # Runs every test except those of memory over many steps and of killed ranks, with the smallest
  # inputs that take kernels through all their paths, under each of three tools. Each tool, test and
  # group of codecs has a process of its own; JOBS run at once, by default one per core. Those that
  # take longest come first, or last if TIME is limited, so that more of them are made. The test
  # that takes all of the card's memory comes after the others, alone. LIMIT is the most seconds for
  # one run, TIME for all runs together (0: no limit). Runs that have a clean log are not repeated.
  for bin in /usr/local/cuda/bin /usr/local/cuda-*/bin /usr/local/cuda*/compute-sanitizer; do
    if [ -x "$bin/compute-sanitizer" ]; then PATH=$PATH:$bin; fi
  done
  if ! command -v compute-sanitizer; then
    echo "compute-sanitizer is not on the PATH"
    exit 2
  fi
  logs=sanitized
  mkdir -p "$logs"
  : > "$logs.txt"
  # Prefixes of codec names, in groups. Most codecs are variants of top-k.
  large="topk:2,topk:3,topk:4,topk:5,topk:6,topk:7,topk:8,topk:9"
  top="topk:0.0 topk:0.1,topk:0.2,topk:0.3,topk:0.4,topk:0.5,topk:0.6,topk:0.7,topk:0.8,topk:0.9"
  top="$top,topk:count,topk:1 $large"
  order=--reverse
  if [ "${TIME:-0}" -gt 0 ]; then order=--stable; fi
  jobs() {
    local tool program test codecs codec weight
    for program in parity training all_reduce; do
      for test in $("./$program" --list | sed -n 's/: test$//p'); do
        case $program.$test in
          *thousand_steps | *killed*) continue ;; # too long; and a killed process does not report
          *has_messages* | *not_there*) continue ;; # these do not use the card
          *wrong_guess*) codecs="topk:0.01 topk:0.001 topk:0.02 topk:count topk:6" ;;
          *processes*) codecs="topk int8,int4,fp8 none,bf16,f16,randk,sign,powersgd" ;;
          training.* | *without_kernels* | *comes_after* | *dense* | *owed_moves* | *out_of_memory*)
            codecs=. ;;
          parity.bytes* | parity.damaged* | parity.what_is_not* | parity.a_card_and*)
            codecs="$top int8,fp8 int4 none,bf16,f16,randk,sign" ;;
          parity.*) codecs="topk int8,fp8 int4 none,bf16,f16,randk,sign" ;;
          *every_codec) codecs="$top int8,fp8 int4 none,bf16,f16,randk sign,powersgd" ;;
          *)
            codecs="topk:0,topk:1,topk:c $large int8,int4,fp8 none,bf16,f16,randk sign,powersgd" ;;
        esac
        for tool in racecheck memcheck initcheck; do
          for codec in $codecs; do
            weight=0
            case $test in *processes* | *owed_moves*) weight=$((weight + 4)) ;; esac
            case $test in
              *every_codec* | *long* | *crosses* | *dense_vectors*) weight=$((weight + 2)) ;;
            esac
            case $codec in topk* | *int4*) weight=$((weight + 2)) ;; esac
            case $tool in racecheck) weight=$((weight + 2)) ;; esac
            echo "$weight $tool $program $test $codec"
          done
        done
      done
    done | sort -s -n "$order" -k 1,1 | cut -d ' ' -f 2-
  }
  one() {
    local tool=$1 program=$2 test=$3 codec=$4 log start status limit=${LIMIT:-200}
    if [ "$codec" = . ]; then log=all; else log=${codec//[:,]/_}; fi
    log=$logs/$tool-$program-$test-$log
    if grep -qs "^run.sh: clean" "$log"; then return; fi
    start=$(date +%s)
    if [ "$until" -gt 0 ] && [ $((until - start)) -lt "$limit" ]; then limit=$((until - start)); fi
    if [ "$limit" -lt 3 ]; then
      echo "not made: $*"
      return
    fi
    if [ "$codec" != . ]; then export FARWIRE_CUDA_CODECS=$codec; fi
    status=0
    FARWIRE_CUDA_CASES=1 timeout -k 5 "$limit" compute-sanitizer --tool "$tool" \
      --target-processes all --report-api-errors no --error-exitcode 9 \
      "./$program" --test-threads 1 --exact "$test" > "$log" 2>&1 || status=$?
    echo "$(($(date +%s) - start)) s: $*" >> "$logs.times"
    if [ $status = 124 ] || [ $status = 137 ]; then
      echo "not finished in $limit s: $*"
    elif [ $status = 0 ] && grep -q "SUMMARY: 0 " "$log" && ! grep -q "SUMMARY: [1-9]" "$log"; then
      echo "run.sh: clean" >> "$log"
    else
      echo "FAILED ($status): $*, see $log"
      grep -m 12 "^=========\|panicked" "$log" | sed 's/^/  /' || true
    fi
  }
  run() { xargs -r -P "$1" -L 1 bash -c 'one "$@"' _ | tee -a "$logs.txt"; }
  began=$(date +%s)
  until=0
  if [ "${TIME:-0}" -gt 0 ]; then until=$((began + TIME)); fi
  export -f one
  export logs until
  # Compiles the kernels once here, instead of in every process.
  for codec in $top int8,fp8 int4 none,bf16,f16,randk,sign,powersgd; do
    for program in parity all_reduce; do
      FARWIRE_CUDA_CODECS=$codec FARWIRE_CUDA_CASES=1 \
        "./$program" --test-threads 1 bytes_residuals every_codec short_floats > /dev/null 2>&1 &
    done
  done
  FARWIRE_CUDA_CASES=1 ./training > /dev/null 2>&1 &
  wait
  echo "$(jobs | wc -l) runs; kernels were compiled in $(($(date +%s) - began)) s"
  rm -f "$logs.times"
  # An eighth of the time is kept for the test that runs alone.
  if [ $until -gt 0 ]; then until=$((began + TIME - TIME / 8)); fi
  jobs | grep -v out_of_memory | run "${JOBS:-$(nproc)}"
  if [ $until -gt 0 ]; then until=$((began + TIME)); fi
  jobs | grep out_of_memory | run 1
  echo "those that took longest:"
  sort -n -r "$logs.times" | sed -n 1,12p
  clean=$(grep -l "^run.sh: clean" "$logs"/* | wc -l)
  echo "$(jobs | wc -l) runs, $clean clean, $(grep -c "^FAILED" "$logs.txt" || true) failed," \
    "$(grep -c "^not" "$logs.txt" || true) not made or not finished, in $(($(date +%s) - began)) s"
  grep "^FAILED\|^not" "$logs.txt" && exit 1
  exit 0
fi
if [ "${1:-}" = bench ]; then
  bench() { ./farwire bench all_reduce --ranks 2 --link shm --size 256MiB --iters 20 "$@"; }
  for round in 1 2; do
    for codec in topk:64/4096 int8 powersgd:4; do bench --device cuda --codec "$codec"; done
    bench --device cuda
    if python3 -c 'import torch' 2> /dev/null; then python3 gpu_peers.py --size 256; fi
  done
  echo "in host memory, without the card:"
  bench
  exit
fi
if [ "${1:-}" = train ]; then
  # Finds torch's cuBLAS and cuRAND, in case the toolkit's are not installed.
  torch=$(python3 -c 'import torch, os; print(os.path.dirname(torch.__file__))' 2> /dev/null || true)
  for lib in "$torch"/../nvidia/*/lib /usr/local/cuda/lib64 /usr/local/cuda-*/lib64; do
    if [ -d "$lib" ]; then LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$lib; fi
  done
  export LD_LIBRARY_PATH
  ldd farwire | grep "not found" || true
  if [ -z "${2:-}" ] && [ -x candle ]; then ./candle; fi
  python3 gpu_train.py ./farwire ${2:+"$2"}
  exit
fi
failed=
for program in parity memory training all_reduce; do
  began=$SECONDS
  "./$program" || failed="$failed $program"
  echo "$program took $((SECONDS - began)) s"
done
./codec_cuda || failed="$failed codec_cuda"
if [ -n "$failed" ]; then
  echo "FAILED:$failed"
  exit 1
fi
RUN
chmod +x "$dir/run.sh"
if [ -d "$dir-train" ]; then cp "$dir/run.sh" "$dir-train"; fi
echo "$dir: copy it to a machine with a GPU, and start run.sh there"
