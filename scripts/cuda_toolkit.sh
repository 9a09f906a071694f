#!/usr/bin/env bash
# Puts together what `--features train-cuda` needs to build, from packages on PyPI: for a machine
# without the CUDA toolkit. (With the toolkit, and nvcc on the PATH, none of this is needed.)
#
#   scripts/cuda_toolkit.sh [DIR]          (default: target/cuda-toolkit)
#
# Then build with the commands that it prints. The packages are those of CUDA 13.0: code from a newer
# nvcc does not load on a driver for 13.0. They take about 2 GB, nearly all of it cuBLAS.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:-target/cuda-toolkit}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)

python3 -m venv "$dir/python"
"$dir/python/bin/python" -m pip install --quiet --disable-pip-version-check \
  "nvidia-cuda-nvcc==13.0.*" "nvidia-cuda-crt==13.0.*" "nvidia-nvvm==13.0.*" \
  "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cccl==13.0.*" "nvidia-cuda-nvrtc==13.0.*" \
  "nvidia-cublas==13.0.*" "nvidia-curand==10.4.0.*"
packages=$(echo "$dir"/python/lib/python3*/site-packages/nvidia/cu13)

# The packages have only libNAME.so.VERSION; linkers look for libNAME.so.
ln -sfn "$packages/bin" "$dir/bin"
ln -sfn "$packages/include" "$dir/include"
ln -sfn "$packages/nvvm" "$dir/nvvm"
mkdir -p "$dir/lib"
for library in "$packages"/lib/lib*.so.* "$packages"/lib/lib*.a; do
  name=$(basename "$library")
  ln -sf "$library" "$dir/lib/$name"
  ln -sf "$name" "$dir/lib/${name%%.so.*}.so"
done
rm -f "$dir"/lib/*.a.so
ln -sfn lib "$dir/lib64"
ln -sfn "$dir/lib" "$packages/lib64" # where nvcc looks

# The driver's library comes with the driver. For linking, the names of its functions are enough.
grep -ohE "\bcu[A-Z][A-Za-z0-9_]*" "$packages/include/cuda.h" | sort -u |
  sed 's/.*/void &(void) {}/' > "$dir/cuda_names.c"
"${CC:-cc}" -w -shared -fno-builtin -Wl,-soname,libcuda.so.1 -o "$dir/lib/libcuda.so" "$dir/cuda_names.c"

echo "To build farwire with it, for cards of compute capability 9.0 (H100, H200):"
echo "  export CUDA_HOME=$dir PATH=$dir/bin:\$PATH CUDA_COMPUTE_CAP=90"
echo "  cargo build --release -p farwire-cli --features train-cuda"
