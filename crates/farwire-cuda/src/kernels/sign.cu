// One bit per element, times the mean magnitude of its block of 4,096: codecs/sign.rs on the card.
//
// A block is 256 threads' work, 16 elements each: element c + 4·thread + 1024·j.

#define BLOCK 4096
#define THREADS 256
#define BLOCK_BYTES (4 + BLOCK / 8)

extern "C" __global__ __launch_bounds__(THREADS) void
sign_encode(const __grid_constant__ Encode a) {
    __shared__ float magnitudes[BLOCK];
    __shared__ float mean;
    const Shard& s = a.shards[blockIdx.y];
    const u64 b = blockIdx.x;
    if (b * BLOCK >= s.len) return;
    const u32 n = (u32)min(s.len - b * BLOCK, (u64)BLOCK);
    const u64 at = s.start + b * BLOCK;
    const bool wide = is_wide(a.values, a.owed, a.left, at);
    float x[16];
    u32 largest = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int e = 4 * threadIdx.x + 1024 * j;
        fuse4(a.values, a.owed, at + e, (int)n - e, wide, a.bad, &x[4 * j]);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int e = 4 * threadIdx.x + 1024 * j;
        const float4 m = make_float4(fabsf(x[4 * j]), fabsf(x[4 * j + 1]), fabsf(x[4 * j + 2]),
                                     fabsf(x[4 * j + 3]));
        *(float4*)&magnitudes[e] = m;
#pragma unroll
        for (int c = 0; c < 4; c++) largest = max(largest, magnitude(x[4 * j + c]));
    }
    largest = block_max(largest);
    if (threadIdx.x < 32) {
        // Sixteen lanes, each in order: the sum has the bits of the CPU's. A block that is not full
        // is padded with zeros, and adding zero changes nothing.
        float sum = 0.0f;
#pragma unroll 16
        for (int i = threadIdx.x & 15; i < BLOCK; i += 16) sum = sum + magnitudes[i];
        sum = lanes_sum(sum);
        if (threadIdx.x == 0) mean = is_sendable(__uint_as_float(largest)) ? sum / (float)n : 0.0f;
    }
    __syncthreads();
    const float scale = mean;
    u8* out = a.out + s.out + b * BLOCK_BYTES;
    if (threadIdx.x == 0) *(float*)out = scale;
    out += 4;
    const u32 lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const u32 e = 4 * threadIdx.x + 1024 * j;
        u32 signs = 0;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const u32 negative = e + c < n ? bits_of(x[4 * j + c]) >> 31 : 0;
            signs |= negative << c;
            x[4 * j + c] = x[4 * j + c] + __uint_as_float(bits_of(-scale) ^ negative << 31);
        }
        // The nibbles of eight neighbours make a word.
        signs |= __shfl_down_sync(FULL, signs, 1) << 4;
        signs |= __shfl_down_sync(FULL, signs, 2) << 8;
        signs |= __shfl_down_sync(FULL, signs, 4) << 16;
        if ((lane & 7) == 0 && e < n) {
            if (e + 32 <= n) {
                *(u32*)(out + e / 8) = signs;
            } else {
                for (u32 k = 0; e + 8 * k < n; k++) out[e / 8 + k] = (u8)(signs >> (8 * k));
            }
        }
        if (a.left && e < n) {
            if (e + 4 <= n) {
                store4(a.left + at + e, wide, &x[4 * j]);
            } else {
#pragma unroll
                for (int c = 0; c < 4; c++) if (e + c < n) a.left[at + e + c] = x[4 * j + c];
            }
        }
    }
}

extern "C" __global__ __launch_bounds__(THREADS) void sign_add(const __grid_constant__ Decode a) {
    const u64 b = blockIdx.x;
    const u32 n = (u32)min(a.len - b * BLOCK, (u64)BLOCK);
    const u64 at = b * BLOCK;
    const u8* in = a.bytes + b * BLOCK_BYTES;
    const float scale = *(const float*)in;
    if (!is_scale(scale)) *a.bad = 1;
    in += 4;
    const bool wide = ((size_t)(a.acc + at) & 15) == 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const u32 e = 4 * threadIdx.x + 1024 * j;
        if (e >= n) continue;
        const u32 signs = in[e / 8] >> (e & 4);
        float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (e + 4 <= n) {
            if (!a.fresh) load4(a.acc + at + e, wide, x);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                x[c] = x[c] + __uint_as_float(bits_of(scale) ^ (signs >> c & 1) << 31);
            }
            store4(a.acc + at + e, wide, x);
        } else {
            for (u32 c = 0; c < 4 && e + c < n; c++) {
                const float acc = a.fresh ? 0.0f : a.acc[at + e + c];
                a.acc[at + e + c] = acc + __uint_as_float(bits_of(scale) ^ (signs >> c & 1) << 31);
            }
        }
    }
}
