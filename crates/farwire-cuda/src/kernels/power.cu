// PowerSGD: codecs/powersgd.rs on the card. Every sum is in the CPU's order, so the factors match
// the CPU's to the bit.
//
// `power_p` computes the matrix M (gradient plus residual) and P = M·Q: a thread block takes a few
// rows, and each of its half warps a segment of their columns at a time. `power_bands` computes
// Q = Mᵀ·P̂ for each band of rows, one thread per column, and `power_q` adds the bands up.
// `power_end` computes the result P̂·Qᵀ, and leaves in M what was not sent.
//
// Every thread reads all it needs next before it writes: a write ends the reading ahead.
//
// Set by the host: RANK, the number of columns of P and Q; SEGMENT and BAND; TOGETHER, the number
// of rows that share what is read of Q.

struct Power {
    const void* values;
    const float* owed; // null: nothing is owed
    float* matrix;
    u64* bad; // lowest index of an element that is not finite
    float* p; // row by row
    float* q; // column by column
    float* bands; // Q of each band of rows
    const float* own; // this rank's Q
    float* out;
    u64 len;
    u64 rows;
    u64 columns;
};

// Elements of a row that are read at once.
#define AHEAD 4
#define GROUPS 16

// Reads the next elements of some rows and adds their share of P. WHOLE says that all of these
// elements exist.
template <bool WHOLE>
__device__ __forceinline__ void power_share(const Power& a, u64 top, u64 column, u64 end,
                                            float sums[TOGETHER][RANK]) {
    const Value* values = (const Value*)a.values;
    float x[TOGETHER][AHEAD], owed[TOGETHER][AHEAD], q[AHEAD][RANK];
    u32 worst = 0;
#define THERE(r, i) (WHOLE || (column + 16 * (i) < end && AT(r, i) < a.len))
#define AT(r, i) ((top + (r)) * a.columns + column + 16 * (i))
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
#pragma unroll
        for (int r = 0; r < TOGETHER; r++) x[r][i] = THERE(r, i) ? widen(values[AT(r, i)]) : 0.0f;
    }
    if (a.owed) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
#pragma unroll
            for (int r = 0; r < TOGETHER; r++) owed[r][i] = THERE(r, i) ? a.owed[AT(r, i)] : 0.0f;
        }
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        const bool in_row = WHOLE || column + 16 * i < end;
#pragma unroll
        for (int k = 0; k < RANK; k++) q[i][k] = in_row ? a.q[k * a.columns + column + 16 * i] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
#pragma unroll
        for (int r = 0; r < TOGETHER; r++) {
            if (a.owed) x[r][i] = x[r][i] + owed[r][i];
            if (THERE(r, i)) a.matrix[AT(r, i)] = x[r][i];
            worst = max(worst, magnitude(x[r][i]));
            // Beyond the row this adds zeros, which changes no sum.
#pragma unroll
            for (int k = 0; k < RANK; k++) sums[r][k] = sums[r][k] + x[r][i] * q[i][k];
        }
    }
    if (worst >= INFINITE) {
        for (int i = 0; i < AHEAD; i++) {
            for (int r = 0; r < TOGETHER; r++) {
                if (magnitude(x[r][i]) >= INFINITE) atomicMin(a.bad, AT(r, i));
            }
        }
    }
#undef THERE
#undef AT
}

extern "C" __global__ __launch_bounds__(256, RANK <= 8 ? 2 : 1) void power_p(const __grid_constant__ Power a) {
    __shared__ float parts[GROUPS][TOGETHER * RANK];
    const u32 group = threadIdx.x / 16, lane = threadIdx.x & 15;
    const u64 top = (u64)blockIdx.x * TOGETHER;
    const bool whole_rows = (top + TOGETHER) * a.columns <= a.len;
    float total = 0.0f; // one element of P, in the first threads
    for (u64 left = 0; left < a.columns; left += GROUPS * SEGMENT) {
        const u64 first = left + group * SEGMENT, end = min(first + SEGMENT, a.columns);
        float sums[TOGETHER][RANK];
#pragma unroll
        for (int r = 0; r < TOGETHER; r++) {
#pragma unroll
            for (int k = 0; k < RANK; k++) sums[r][k] = 0.0f;
        }
        for (u64 column = first + lane; column < end; column += 16 * AHEAD) {
            if (whole_rows && column + 16 * (AHEAD - 1) < end) {
                power_share<true>(a, top, column, end, sums);
            } else {
                power_share<false>(a, top, column, end, sums);
            }
        }
#pragma unroll
        for (int r = 0; r < TOGETHER; r++) {
#pragma unroll
            for (int k = 0; k < RANK; k++) {
                for (int half = 8; half > 0; half >>= 1) {
                    sums[r][k] = sums[r][k] + __shfl_down_sync(FULL, sums[r][k], half, 16);
                }
                if (lane == 0) parts[group][r * RANK + k] = sums[r][k];
            }
        }
        __syncthreads();
        if (threadIdx.x < TOGETHER * RANK) {
#pragma unroll
            for (int g = 0; g < GROUPS; g++) total = total + parts[g][threadIdx.x];
        }
        __syncthreads();
    }
    const u64 at = top * RANK + threadIdx.x;
    if (threadIdx.x < TOGETHER * RANK && at < a.rows * RANK) a.p[at] = total;
}

// Rows that are read at once.
#define ROWS 16

// Multiplies a column's elements in one band by P. WHOLE says that all rows of the band exist.
template <bool WHOLE>
__device__ __forceinline__ void power_band(const float* x, u64 stride, u64 rows, const float* p,
                                           float sums[RANK]) {
    for (int row = 0; row < BAND && (WHOLE || row < rows); row += ROWS) {
        float read[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) read[i] = WHOLE || row + i < rows ? x[(row + i) * stride] : 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
#pragma unroll
            for (int k = 0; k < RANK; k++) sums[k] = sums[k] + read[i] * p[(row + i) * RANK + k];
        }
    }
}

extern "C" __global__ __launch_bounds__(256) void power_bands(const __grid_constant__ Power a) {
    __shared__ __align__(16) float p[BAND * RANK];
    const u64 column = (u64)blockIdx.x * 256 + threadIdx.x;
    // A column has one element in each row, except perhaps in the last.
    const u64 rows = column < min(a.len, a.columns) ? (a.len - column + a.columns - 1) / a.columns : 0;
    for (u64 band = blockIdx.y; band * BAND < a.rows; band += gridDim.y) {
        const u64 top = band * BAND;
        __syncthreads();
        for (u32 i = threadIdx.x; i < BAND * RANK; i += 256) {
            p[i] = top * RANK + i < a.rows * RANK ? a.p[top * RANK + i] : 0.0f;
        }
        __syncthreads();
        const float* x = a.matrix + top * a.columns + column;
        float sums[RANK];
#pragma unroll
        for (int k = 0; k < RANK; k++) sums[k] = 0.0f;
        if (top + BAND <= rows) {
            power_band<true>(x, a.columns, BAND, p, sums);
        } else {
            power_band<false>(x, a.columns, rows > top ? rows - top : 0, p, sums);
        }
        if (column < a.columns) {
#pragma unroll
            for (int k = 0; k < RANK; k++) {
                a.bands[(band * RANK + k) * a.columns + column] = sums[k];
            }
        }
    }
}

extern "C" __global__ __launch_bounds__(128) void power_q(const __grid_constant__ Power a) {
    const u64 at = (u64)blockIdx.x * 128 + threadIdx.x, elements = a.columns * RANK;
    if (at >= elements) return;
    const u64 bands = (a.rows + BAND - 1) / BAND;
    float sum = 0.0f;
#pragma unroll 16
    for (u64 band = 0; band < bands; band++) sum = sum + a.bands[band * elements + at];
    a.q[at] = sum;
}

// Rows that a thread block takes, and how many of them are read at once.
#define STRIPE 16
#define AT_ONCE (RANK <= 8 ? 8 : 4)

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
        for (int top = 0; top < STRIPE; top += AT_ONCE) {
            const u64 row = stripe * STRIPE + top;
            float left[AT_ONCE], result[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const u64 at = (row + i) * a.columns + column;
                left[i] = at < a.len ? a.matrix[at] : 0.0f;
                result[i] = 0.0f;
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
                for (int k = 0; k < RANK; k++) {
                    const float p = row + i < a.rows ? a.p[(row + i) * RANK + k] : 0.0f;
                    result[i] = result[i] + sum[k] * p;
                    left[i] = left[i] - own[k] * p;
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const u64 at = (row + i) * a.columns + column;
                if (at >= a.len) break;
                a.out[at] = result[i];
                a.matrix[at] = left[i];
            }
        }
    }
}

#if RANK <= 8
#define STRIPE_WIDE 32
#define AT_ONCE_WIDE 4

// The same for rows that start at multiples of 16 bytes: four columns to a thread, which share what
// is read of P. Twelve bytes per element cross the memory bus, as in `r += g`.
extern "C" __global__ __launch_bounds__(128, RANK <= 4 ? 5 : 3) void
power_end_wide(const __grid_constant__ Power a) {
    const u64 column = 4 * ((u64)blockIdx.x * 128 + threadIdx.x);
    if (column >= a.columns) return;
    float sum[RANK][4], own[RANK][4];
#pragma unroll
    for (int k = 0; k < RANK; k++) {
        const float4 s = *(const float4*)(a.q + k * a.columns + column);
        const float4 o = *(const float4*)(a.own + k * a.columns + column);
        sum[k][0] = s.x; sum[k][1] = s.y; sum[k][2] = s.z; sum[k][3] = s.w;
        own[k][0] = o.x; own[k][1] = o.y; own[k][2] = o.z; own[k][3] = o.w;
    }
    for (u64 stripe = blockIdx.y; stripe * STRIPE_WIDE < a.rows; stripe += gridDim.y) {
        for (int top = 0; top < STRIPE_WIDE; top += AT_ONCE_WIDE) {
            const u64 row = stripe * STRIPE_WIDE + top;
            float left[AT_ONCE_WIDE][4], result[AT_ONCE_WIDE][4];
#pragma unroll
            for (int i = 0; i < AT_ONCE_WIDE; i++) {
                const u64 at = (row + i) * a.columns + column;
                if (at + 4 <= a.len) {
                    load4(a.matrix + at, true, left[i]);
                } else {
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        left[i][c] = at + c < a.len ? a.matrix[at + c] : 0.0f;
                    }
                }
#pragma unroll
                for (int c = 0; c < 4; c++) result[i][c] = 0.0f;
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE_WIDE; i++) {
#pragma unroll
                for (int k = 0; k < RANK; k++) {
                    const float p = row + i < a.rows ? a.p[(row + i) * RANK + k] : 0.0f;
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        result[i][c] = result[i][c] + sum[k][c] * p;
                        left[i][c] = left[i][c] - own[k][c] * p;
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE_WIDE; i++) {
                const u64 at = (row + i) * a.columns + column;
                if (at + 4 <= a.len) {
                    store4(a.out + at, true, result[i]);
                    store4(a.matrix + at, true, left[i]);
                } else {
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        if (at + c < a.len) {
                            a.out[at + c] = result[i][c];
                            a.matrix[at + c] = left[i][c];
                        }
                    }
                }
            }
        }
    }
}
#endif
