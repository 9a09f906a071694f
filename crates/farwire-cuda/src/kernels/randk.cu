// The same random elements on every rank: codecs/randk.rs on the card.
//
// Set by the host: BF16, whether values are rounded to bf16.

#define THREADS 256
#define ROUNDS 4
#define TILE (4 * THREADS * ROUNDS)

// A vector cut into strata, one element drawn from each. Both numbers are below 2³².
struct Strata {
    u64 elements;
    u64 count;
    u64 key;
};

// The element drawn from stratum j, and how many elements it is drawn from.
__device__ __forceinline__ u64 drawn(const Strata& s, u64 j, u64* of) {
    const u64 start = j * s.elements / s.count;
    *of = (j + 1) * s.elements / s.count - start;
    const u64 random = mix64(s.key + (j + 1) * 0x9e3779b97f4a7c15ull);
    return start + __umul64hi(random, *of);
}

// left = values + owed.
extern "C" __global__ __launch_bounds__(THREADS) void
fuse(const __grid_constant__ Encode a, u64 len) {
    const bool wide = is_wide(a.values, a.owed, a.left, 0);
    float x[ROUNDS][4];
#pragma unroll
    for (int j = 0; j < ROUNDS; j++) {
        const u64 at = (u64)blockIdx.x * TILE + 4 * (threadIdx.x + THREADS * j);
        if (at < len) {
            fuse4(a.values, a.owed, at, (int)min(len - at, (u64)4), wide, a.bad, x[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < ROUNDS; j++) {
        const u64 at = (u64)blockIdx.x * TILE + 4 * (threadIdx.x + THREADS * j);
        if (at + 4 <= len) {
            store4(a.left + at, wide, x[j]);
        } else {
#pragma unroll
            for (int c = 0; c < 4; c++) if (at + c < len) a.left[at + c] = x[j][c];
        }
    }
}

// Encodes the drawn elements of each shard: shards[].len of them.
extern "C" __global__ __launch_bounds__(THREADS) void randk_encode(const __grid_constant__ Encode a,
                                                                   const Strata strata, u32 boost) {
    const Shard& s = a.shards[blockIdx.y];
    const u64 k = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (k >= s.len) return;
    u64 of;
    const u64 at = drawn(strata, s.drawn + k, &of) - a.origin;
    const float value = a.left[at];
    const float sent = boost ? value * (float)of : value;
#if BF16
    const u16 code = to_bf16(sent);
    *(u16*)(a.out + s.out + 2 * k) = code;
    a.left[at] = value - from_bf16(code);
#else
    *(float*)(a.out + s.out + 4 * k) = sent;
    a.left[at] = value - sent;
#endif
}

// Adds the values for strata first..first+a.len.
extern "C" __global__ __launch_bounds__(THREADS) void randk_add(const __grid_constant__ Decode a,
                                                                const Strata strata, u64 first) {
    const u64 k = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (k >= a.len) return;
    u64 of;
    const u64 at = drawn(strata, first + k, &of) - a.origin;
#if BF16
    const float value = from_bf16(*(const u16*)(a.bytes + 2 * k));
#else
    const float value = *(const float*)(a.bytes + 4 * k);
#endif
    if (magnitude(value) >= INFINITE) *a.bad = 1;
    a.acc[at] = a.acc[at] + value;
}
