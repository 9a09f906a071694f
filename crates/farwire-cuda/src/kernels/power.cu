// PowerSGD: codecs/powersgd.rs on the card. Every sum goes in the CPU's order, so the factors are
// the CPU's, to the bit.
//
// `power_p` makes the matrix M (gradient plus residual) and P = M·Q, half a warp to a row. `power_q`
// makes Q = Mᵀ·P̂, a thread to a column: rows are added one after another. `power_end` makes the
// result P̂·Qᵀ, and leaves in M what was not sent.
//
// Set by the host: RANK, the columns of P and Q.

struct Power {
    const void* values;
    const float* owed; // null: nothing is owed
    float* matrix;
    u64* bad; // least index of an element that is not finite
    float* p; // row by row
    float* q; // column by column
    const float* own; // this rank's Q
    float* out;
    u64 len;
    u64 rows;
    u64 columns;
};

extern "C" __global__ __launch_bounds__(256) void power_p(const __grid_constant__ Power a) {
    const u64 row = ((u64)blockIdx.x * 256 + threadIdx.x) / 16;
    const u32 lane = threadIdx.x & 15;
    const u64 first = row * a.columns, end = min(first + a.columns, a.len);
    float sums[RANK];
#pragma unroll
    for (int k = 0; k < RANK; k++) sums[k] = 0.0f;
    if (row < a.rows) {
#pragma unroll 4
        for (u64 at = first + lane; at < end; at += 16) {
            const float x = fuse1(a.values, a.owed, at);
            if (magnitude(x) >= INFINITE) atomicMin(a.bad, at);
            a.matrix[at] = x;
#pragma unroll
            for (int k = 0; k < RANK; k++) {
                sums[k] = sums[k] + x * a.q[k * a.columns + (at - first)];
            }
        }
    }
#pragma unroll
    for (int k = 0; k < RANK; k++) {
        for (int half = 8; half > 0; half >>= 1) {
            sums[k] = sums[k] + __shfl_down_sync(FULL, sums[k], half, 16);
        }
        if (lane == 0 && row < a.rows) a.p[row * RANK + k] = sums[k];
    }
}

#define ROWS 32

extern "C" __global__ __launch_bounds__(64) void power_q(const __grid_constant__ Power a) {
    const u64 column = (u64)blockIdx.x * 64 + threadIdx.x;
    if (column >= a.columns) return;
    float sums[RANK];
#pragma unroll
    for (int k = 0; k < RANK; k++) sums[k] = 0.0f;
    const u64 rows = column < a.len ? (a.len - column + a.columns - 1) / a.columns : 0;
    u64 row = 0;
    for (; row + ROWS <= rows; row += ROWS) {
        float x[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) x[i] = a.matrix[(row + i) * a.columns + column];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
#pragma unroll
            for (int k = 0; k < RANK; k++) {
                sums[k] = sums[k] + x[i] * a.p[(row + i) * RANK + k];
            }
        }
    }
    for (; row < rows; row++) {
        const float x = a.matrix[row * a.columns + column];
#pragma unroll
        for (int k = 0; k < RANK; k++) sums[k] = sums[k] + x * a.p[row * RANK + k];
    }
#pragma unroll
    for (int k = 0; k < RANK; k++) a.q[k * a.columns + column] = sums[k];
}

#define STRIPE 16

extern "C" __global__ __launch_bounds__(256) void power_end(const __grid_constant__ Power a) {
    const u64 column = (u64)blockIdx.x * 256 + threadIdx.x;
    if (column >= a.columns) return;
    float sum[RANK], own[RANK];
#pragma unroll
    for (int k = 0; k < RANK; k++) {
        sum[k] = a.q[k * a.columns + column];
        own[k] = a.own[k * a.columns + column];
    }
    for (u64 stripe = blockIdx.y; stripe * STRIPE < a.rows; stripe += gridDim.y) {
#pragma unroll 4
        for (int i = 0; i < STRIPE; i++) {
            const u64 row = stripe * STRIPE + i, at = row * a.columns + column;
            if (row >= a.rows || at >= a.len) break;
            float result = 0.0f, left = a.matrix[at];
#pragma unroll
            for (int k = 0; k < RANK; k++) {
                const float p = a.p[row * RANK + k];
                result = result + sum[k] * p;
                left = left - own[k] * p;
            }
            a.out[at] = result;
            a.matrix[at] = left;
        }
    }
}
