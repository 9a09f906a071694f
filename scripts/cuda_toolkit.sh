#!/usr/bin/env bash
# Puts together what `--features train-cuda` needs to build, from packages of PyPI: for a machine
# without the CUDA toolkit. (With the toolkit, and nvcc on the PATH, nothing of this is needed.)
#
#   scripts/cuda_toolkit.sh [DIR]          (default: target/cuda-toolkit)
#
# Then build as the last lines say. CUDA 13.0: what a newer nvcc makes does not load on a driver
# of 13.0. Takes about 2 GB, nearly all of it cuBLAS.
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

# The packages have libNAME.so.VERSION alone; linkers look for libNAME.so.
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

# The driver's library comes with the driver. To link, its functions' names will do.
grep -ohE "\bcu[A-Z][A-Za-z0-9_]*" "$packages/include/cuda.h" | sort -u |
  sed 's/.*/void &(void) {}/' > "$dir/cuda_names.c"
"${CC:-cc}" -w -shared -fno-builtin -Wl,-soname,libcuda.so.1 -o "$dir/lib/libcuda.so" "$dir/cuda_names.c"

echo "To build farwire with it, for cards of compute capability 9.0 (H100, H200):"
echo "  export CUDA_HOME=$dir PATH=$dir/bin:\$PATH CUDA_COMPUTE_CAP=90"
echo "  cargo build --release -p farwire-cli --features train-cuda"
