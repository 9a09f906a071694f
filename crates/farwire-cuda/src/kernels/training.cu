// What training does to vectors, besides exchanging them: sums of gradients, squares, AdamW. Sums
// of squares are in f64, in an order that depends on the length alone: replicas get the same bits.

struct Add {
    float* sum;
    const float* gradient;
    u64* bad; // least 4 · index + kind of the elements of the sum that are not finite
    u64 len;
    u64 fresh; // whether to take `sum` to be zeros
};

extern "C" __global__ __launch_bounds__(256) void add_gradient(const Add a) {
    const u64 first = (u64)blockIdx.x * 4096 + threadIdx.x;
    u64 bad = ~0ull;
#pragma unroll
    for (int j = 15; j >= 0; j--) {
        const u64 at = first + 256 * j;
        if (at >= a.len) continue;
        const float x = (a.fresh ? 0.0f : a.sum[at]) + a.gradient[at];
        a.sum[at] = x;
        // Kinds: NaN, infinity, minus infinity.
        if (magnitude(x) >= INFINITE)
            bad = 4 * at + (magnitude(x) > INFINITE ? 0 : 1 + (bits_of(x) >> 31));
    }
    if (bad != ~0ull) atomicMin(a.bad, bad);
}

// One sum for each 4,096 elements.
extern "C" __global__ __launch_bounds__(256) void
sum_squares(double* out, const float* values, u64 len) {
    __shared__ double warps[8];
    const u64 first = (u64)blockIdx.x * 4096 + threadIdx.x;
    double sum = 0.0;
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const u64 at = first + 256 * j;
        const double x = at < len ? (double)values[at] : 0.0;
        sum += x * x;
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(FULL, sum, step);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < 8; warp++) sum += warps[warp];
        out[blockIdx.x] = sum;
    }
}

struct AdamW {
    float* weights;
    float* first;
    float* second;
    const float* gradient;
    u64 len;
    float scale, beta1, beta2, step, root, decay, epsilon;
    u32 unused;
};

extern "C" __global__ __launch_bounds__(256) void adamw(const AdamW a) {
    const u64 start = (u64)blockIdx.x * 4096 + threadIdx.x;
#pragma unroll 4
    for (int j = 0; j < 16; j++) {
        const u64 at = start + 256 * j;
        if (at >= a.len) return;
        const float g = a.gradient[at] * a.scale;
        const float first = a.beta1 * a.first[at] + (1.0f - a.beta1) * g;
        const float second = a.beta2 * a.second[at] + (1.0f - a.beta2) * g * g;
        a.first[at] = first;
        a.second[at] = second;
        const float moved = a.step * first / (sqrtf(second) / a.root + a.epsilon);
        a.weights[at] = a.weights[at] * a.decay - moved;
    }
}
