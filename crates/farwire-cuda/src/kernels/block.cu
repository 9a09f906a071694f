// Blocks with a scale each, rounded to 8 or 4 bits: codecs/block.rs on the card.
//
// Set by the host: FORMAT (0 int8, 1 int4, 2 fp8), STOCHASTIC, ROTATE, BLOCK.
//
// `block_encode` and `block_add` give each warp a block, with the elements in registers:
//
//     element c + 4·lane + 128·j   c: 0 to 3, a 16-byte load;  j: 0 to BLOCK/128 − 1
//
// `…_any` give each thread block a block, kept in shared memory or, if that is too small, in
// `scratch`. They handle blocks of other sizes, and rotated blocks that are not full.

#define LEVELS (FORMAT == 1 && ROTATE && !STOCHASTIC)
#if FORMAT == 1
#define CODES(n) (((n) + 1) / 2)
#else
#define CODES(n) (n)
#endif
#define BLOCK_BYTES (4 + CODES(BLOCK))
#if FORMAT == 0
#define TOP 127.0f
#elif FORMAT == 1
#define TOP 7.0f
#else
#define TOP 448.0f
#endif

__device__ __forceinline__ u32 e4m3(float x, u32 dither) {
    x = fabsf(x);
    const u32 normal = ((bits_of(x) + dither) >> 20) - (120u << 3);
    const u32 fixed = (u32)(int)(fminf(x, 0.015625f) * 536870912.0f);
    const u32 small = (fixed + dither) >> 20;
    return min(x < 0.015625f ? small : normal, 0x7eu);
}

// The code of `value · inverse`: a byte, or for int4 a nibble.
__device__ __forceinline__ u32 quantise(float value, float inverse, u32 key, u32 index) {
#if FORMAT == 2
    const float x = fabsf(value * inverse);
#if STOCHASTIC
    const u32 dither = mix32(key, index) >> 12;
#else
    const u32 dither = 0x7ffffu + (x < 0.015625f || (bits_of(x) >> 20 & 1) == 1);
#endif
    return e4m3(x, dither) | bits_of(value) >> 31 << 7;
#elif LEVELS
    const float x = fabsf(value * inverse);
    const u32 level = (x > 0.2582f) + (x > 0.5224f) + (x > 0.7996f) + (x > 1.099f) +
                      (x > 1.437f) + (x > 1.844f) + (x > 2.401f);
    return level | bits_of(value) >> 31 << 3;
#else
#if STOCHASTIC
    const float noise = unit32(key, index) - 0.5f;
    const float x = fminf(fmaxf(value * inverse + noise, -127.0f), 127.0f);
#else
    const float x = value * inverse;
#endif
    const u32 code = bits_of(x + ROUND) & 0xff;
#if FORMAT == 0
    return code;
#else
    return (u32)(min(max((int)(i8)code, -7), 7) + 8) & 15;
#endif
#endif
}

#if LEVELS
__constant__ float level_values[8] = {0.1284f, 0.3881f, 0.6568f, 0.9424f,
                                      1.256f,  1.618f,  2.069f,  2.733f};
#endif

// A code as a multiple of the scale.
__device__ __forceinline__ float unit(u32 code) {
#if FORMAT == 0
    return (float)(int)(i8)code;
#elif FORMAT == 2
    const u32 m = code & 0x7f;
    const float value = m < 8 ? (float)(int)m * (1.0f / 512.0f)
                              : __uint_as_float((m << 20) + (120u << 23));
    return __uint_as_float(bits_of(value) | (code & 0x80) << 24);
#elif LEVELS
    return __uint_as_float(bits_of(level_values[code & 7]) | (code & 8) << 28);
#else
    return (float)((int)code - 8);
#endif
}

__device__ __forceinline__ bool is_code(u32 code) { return FORMAT != 2 || (code & 0x7f) != 0x7f; }

// Scale and inverse, except for the Lloyd–Max levels.
__device__ __forceinline__ void scale_for(float largest, float* scale, float* inverse) {
    const bool sendable = is_sendable(largest);
    *scale = sendable ? largest / TOP : 0.0f;
    *inverse = sendable ? TOP / largest : 0.0f;
}

#if BLOCK >= 128 && BLOCK <= 1024
#define PER (BLOCK / 32)
#define WARPS 8

#if ROTATE
// The normalised Hadamard transform of the warp's block.
__device__ __forceinline__ void warp_turn(float x[PER]) {
    const u32 lane = threadIdx.x & 31;
#pragma unroll
    for (int half = 1; half < 4; half <<= 1) {
#pragma unroll
        for (int i = 0; i < PER; i++) {
            if ((i & half) == 0) {
                const float low = x[i], high = x[i | half];
                x[i] = low + high;
                x[i | half] = low - high;
            }
        }
    }
#pragma unroll
    for (int m = 1; m < 32; m <<= 1) {
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const float other = __shfl_xor_sync(FULL, x[i], m);
            // low + high, or low − high; −x + y is y − x to the bit.
            x[i] = other + __uint_as_float(bits_of(x[i]) ^ ((lane & m) ? 0x80000000u : 0u));
        }
    }
#pragma unroll
    for (int half = 4; half < PER; half <<= 1) {
#pragma unroll
        for (int i = 0; i < PER; i++) {
            if ((i & half) == 0) {
                const float low = x[i], high = x[i | half];
                x[i] = low + high;
                x[i | half] = low - high;
            }
        }
    }
    const float factor = 1.0f / sqrtf((float)BLOCK);
#pragma unroll
    for (int i = 0; i < PER; i++) x[i] = x[i] * factor;
}
#endif

extern "C" __global__ __launch_bounds__(32 * WARPS) void
block_encode(const __grid_constant__ Encode a) {
    const Shard& s = a.shards[blockIdx.y];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u64 b = (u64)blockIdx.x * WARPS + warp;
    if (b * BLOCK >= s.len) return;
    const u32 n = (u32)min(s.len - b * BLOCK, (u64)BLOCK);
#if ROTATE
    if (n < BLOCK) return; // block_encode_any
#endif
    const u64 at = s.start + b * BLOCK;
    const bool wide = is_wide(a.values, a.owed, a.left, at);
    float x[PER];
#pragma unroll
    for (int j = 0; j < PER / 4; j++) {
        const int e = 4 * lane + 128 * j;
        fuse4(a.values, a.owed, at + e, (int)n - e, wide, a.bad, &x[4 * j]);
    }
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) largest = max(largest, magnitude(x[i]));
    largest = warp_max(largest);

    const u32 start = (u32)(a.origin + at);
    float scale = 0.0f, inverse = 0.0f;
#if ROTATE
    u32 flips = 0;
    float y[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const u32 e = (i & 3) + 4 * lane + 128 * (i >> 2);
        const u32 sign = mix32(a.rotation_key, start + e) & ~MAGNITUDE;
        flips |= sign >> 31 << i;
        y[i] = __uint_as_float(bits_of(x[i]) ^ sign);
    }
    if (is_sendable(__uint_as_float(largest))) {
        warp_turn(y);
        u32 turned = 0;
#pragma unroll
        for (int i = 0; i < PER; i++) turned = max(turned, magnitude(y[i]));
        const float top = __uint_as_float(warp_max(turned));
#if LEVELS
        if (is_sendable(top)) {
            __shared__ float squares[WARPS][BLOCK];
            const float factor = 1.0f / top;
#pragma unroll
            for (int i = 0; i < PER; i++) {
                const u32 e = (i & 3) + 4 * lane + 128 * (i >> 2);
                squares[warp][e] = (y[i] * factor) * (y[i] * factor);
            }
            __syncwarp();
            float sum = 0.0f;
#pragma unroll 8
            for (int r = 0; r < BLOCK / 16; r++) sum = sum + squares[warp][(lane & 15) + 16 * r];
            sum = __shfl_sync(FULL, lanes_sum(sum), 0);
            scale = top * sqrtf(sum / (float)BLOCK);
            inverse = 1.0f / scale;
        }
#else
        scale_for(top, &scale, &inverse);
#endif
    } else {
#pragma unroll
        for (int i = 0; i < PER; i++) y[i] = 0.0f;
    }
#else
    scale_for(__uint_as_float(largest), &scale, &inverse);
    float* y = x;
#endif

    u8* out = a.out + s.out + b * BLOCK_BYTES;
    if (lane == 0) *(float*)out = scale;
    out += 4;
#pragma unroll
    for (int j = 0; j < PER / 4; j++) {
        const u32 e = 4 * lane + 128 * j;
        u32 codes[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int i = 4 * j + c;
            codes[c] = quantise(y[i], inverse, a.rounding_key, start + e + c);
#if ROTATE
            y[i] = unit(codes[c]);
#else
            x[i] = x[i] - unit(codes[c]) * scale;
#endif
        }
#if FORMAT == 1
        if (e + 4 <= n) {
            *(u16*)(out + e / 2) = (u16)(codes[0] | codes[1] << 4 | codes[2] << 8 | codes[3] << 12);
        } else {
            if (e < n) out[e / 2] = (u8)(codes[0] | (e + 1 < n ? codes[1] << 4 : 0));
            if (e + 2 < n) out[e / 2 + 1] = (u8)codes[2];
        }
#else
        if (e + 4 <= n) {
            *(u32*)(out + e) = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24;
        } else {
#pragma unroll
            for (int c = 0; c < 4; c++) if (e + c < n) out[e + c] = (u8)codes[c];
        }
#endif
    }
#if ROTATE
    warp_turn(y);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const float u = __uint_as_float(bits_of(y[i]) ^ (flips >> i << 31));
        x[i] = x[i] - u * scale;
    }
#endif
    if (a.left) {
#pragma unroll
        for (int j = 0; j < PER / 4; j++) {
            const u32 e = 4 * lane + 128 * j;
            if (e + 4 <= n) {
                store4(a.left + at + e, wide, &x[4 * j]);
            } else {
#pragma unroll
                for (int c = 0; c < 4; c++) if (e + c < n) a.left[at + e + c] = x[4 * j + c];
            }
        }
    }
}

extern "C" __global__ __launch_bounds__(32 * WARPS) void
block_add(const __grid_constant__ Decode a) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u64 b = (u64)blockIdx.x * WARPS + warp;
    if (b * BLOCK >= a.len) return;
    const u32 n = (u32)min(a.len - b * BLOCK, (u64)BLOCK);
#if ROTATE
    if (n < BLOCK) return; // block_add_any
#endif
    const u64 at = b * BLOCK;
    const u8* in = a.bytes + b * BLOCK_BYTES;
    const float scale = *(const float*)in;
    bool good = is_scale(scale);
    in += 4;
    const bool wide = ((size_t)(a.acc + at) & 15) == 0;
    float x[PER], y[PER];
#pragma unroll
    for (int j = 0; j < PER / 4; j++) {
        const u32 e = 4 * lane + 128 * j;
        u32 codes = 0;
#if FORMAT == 1
        if (e + 4 <= n) {
            codes = *(const u16*)(in + e / 2);
        } else {
            if (e < n) codes = in[e / 2];
            if (e + 2 < n) codes |= (u32)in[e / 2 + 1] << 8;
        }
#pragma unroll
        for (int c = 0; c < 4; c++) y[4 * j + c] = unit(codes >> (4 * c) & 15);
#else
        if (e + 4 <= n) {
            codes = *(const u32*)(in + e);
        } else {
#pragma unroll
            for (int c = 0; c < 4; c++) if (e + c < n) codes |= (u32)in[e + c] << (8 * c);
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const u32 code = codes >> (8 * c) & 0xff;
            good = good && is_code(code);
            y[4 * j + c] = unit(code);
        }
#endif
        if (a.fresh) {
#pragma unroll
            for (int c = 0; c < 4; c++) x[4 * j + c] = 0.0f;
        } else if (e + 4 <= n) {
            load4(a.acc + at + e, wide, &x[4 * j]);
        } else {
#pragma unroll
            for (int c = 0; c < 4; c++) x[4 * j + c] = e + c < n ? a.acc[at + e + c] : 0.0f;
        }
    }
    if (!good) *a.bad = 1;
#if ROTATE
    warp_turn(y);
    const u32 start = (u32)(a.origin + at);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const u32 e = (i & 3) + 4 * lane + 128 * (i >> 2);
        y[i] = __uint_as_float(bits_of(y[i]) ^ (mix32(a.rotation_key, start + e) & ~MAGNITUDE));
    }
#endif
#pragma unroll
    for (int i = 0; i < PER; i++) x[i] = x[i] + y[i] * scale;
#pragma unroll
    for (int j = 0; j < PER / 4; j++) {
        const u32 e = 4 * lane + 128 * j;
        if (e + 4 <= n) {
            store4(a.acc + at + e, wide, &x[4 * j]);
        } else {
#pragma unroll
            for (int c = 0; c < 4; c++) if (e + c < n) a.acc[at + e + c] = x[4 * j + c];
        }
    }
}
#endif // warps

// This thread block's block in shared memory, or in `scratch`, which has BLOCK floats for each
// thread block.
__device__ __forceinline__ float* workspace(float* scratch) {
    extern __shared__ float shared[];
    if (!scratch) return shared;
    return scratch + ((u64)blockIdx.y * gridDim.x + blockIdx.x) * BLOCK;
}

// The normalised Hadamard transforms over the powers of two that add up to `n`, largest first.
__device__ void turn_any(float* work, u32 n) {
    __syncthreads();
    for (u32 from = 0; from < n;) {
        const u32 len = 1u << (31 - __clz(n - from));
        float* piece = work + from;
        for (u32 half = 1; half < len; half <<= 1) {
            for (u32 k = threadIdx.x; k < len / 2; k += blockDim.x) {
                const u32 i = (k & ~(half - 1)) << 1 | (k & (half - 1));
                const float low = piece[i], high = piece[i + half];
                piece[i] = low + high;
                piece[i + half] = low - high;
            }
            __syncthreads();
        }
        const float factor = 1.0f / sqrtf((float)len);
        for (u32 i = threadIdx.x; i < len; i += blockDim.x) piece[i] = piece[i] * factor;
        from += len;
    }
    __syncthreads();
}

// Which block of a shard this thread block handles: the one with its number, or with `only_tails`
// the last one, if that is not full.
__device__ __forceinline__ bool block_of(u64 len, u32 only_tails, u64* b, u32* n) {
    *b = only_tails ? len / BLOCK : blockIdx.x;
    if (*b * BLOCK >= len) return false;
    *n = (u32)min(len - *b * BLOCK, (u64)BLOCK);
    return true;
}

extern "C" __global__ void block_encode_any(const __grid_constant__ Encode a, u32 only_tails) {
    const Shard& s = a.shards[blockIdx.y];
    u64 b;
    u32 n;
    if (!block_of(s.len, only_tails, &b, &n)) return;
    const u64 at = s.start + b * BLOCK;
    const u32 start = (u32)(a.origin + at);
    u32 largest = 0;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        const u32 m = magnitude(fuse1(a.values, a.owed, at + i));
        if (m >= INFINITE) atomicMin(a.bad, at + i);
        largest = max(largest, m);
    }
    largest = block_max(largest);
    float scale = 0.0f, inverse = 0.0f;
#if ROTATE
    float* work = workspace(a.scratch);
    const bool sendable = is_sendable(__uint_as_float(largest));
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        const u32 sign = mix32(a.rotation_key, start + i) & ~MAGNITUDE;
        const float x = fuse1(a.values, a.owed, at + i);
        work[i] = sendable ? __uint_as_float(bits_of(x) ^ sign) : 0.0f;
    }
    if (sendable) {
        turn_any(work, n);
        u32 turned = 0;
        for (u32 i = threadIdx.x; i < n; i += blockDim.x) turned = max(turned, magnitude(work[i]));
        const float top = __uint_as_float(block_max(turned));
#if LEVELS
        if (is_sendable(top)) {
            __shared__ float total;
            if (threadIdx.x < 32) {
                const float factor = 1.0f / top;
                float sum = 0.0f;
                for (u32 i = threadIdx.x & 15; i < n; i += 16) {
                    sum = sum + (work[i] * factor) * (work[i] * factor);
                }
                sum = lanes_sum(sum);
                if (threadIdx.x == 0) total = sum;
            }
            __syncthreads();
            scale = top * sqrtf(total / (float)n);
            inverse = 1.0f / scale;
        }
#else
        scale_for(top, &scale, &inverse);
#endif
    } else {
        __syncthreads(); // an element is quantised by another thread than the one that zeroed it
    }
#else
    scale_for(__uint_as_float(largest), &scale, &inverse);
#endif
    u8* out = a.out + s.out + b * BLOCK_BYTES;
    if (threadIdx.x == 0) *(float*)out = scale;
    out += 4;
    // Two elements to a thread: the two nibbles of a byte.
    for (u32 i = 2 * threadIdx.x; i < n; i += 2 * blockDim.x) {
        u32 codes[2] = {0, 0};
        for (u32 c = 0; c < 2 && i + c < n; c++) {
            const float x = fuse1(a.values, a.owed, at + i + c);
#if ROTATE
            codes[c] = quantise(work[i + c], inverse, a.rounding_key, start + i + c);
            work[i + c] = unit(codes[c]);
#else
            codes[c] = quantise(x, inverse, a.rounding_key, start + i + c);
            if (a.left) a.left[at + i + c] = x - unit(codes[c]) * scale;
#endif
        }
#if FORMAT == 1
        out[i / 2] = (u8)(codes[0] | codes[1] << 4);
#else
        out[i] = (u8)codes[0];
        if (i + 1 < n) out[i + 1] = (u8)codes[1];
#endif
    }
#if ROTATE
    if (!a.left) return;
    turn_any(work, n);
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        const u32 sign = mix32(a.rotation_key, start + i) & ~MAGNITUDE;
        const float x = fuse1(a.values, a.owed, at + i);
        a.left[at + i] = x - __uint_as_float(bits_of(work[i]) ^ sign) * scale;
    }
#endif
}

extern "C" __global__ void block_add_any(const __grid_constant__ Decode a, u32 only_tails) {
    u64 b;
    u32 n;
    if (!block_of(a.len, only_tails, &b, &n)) return;
    const u64 at = b * BLOCK;
    const u8* in = a.bytes + b * BLOCK_BYTES;
    const float scale = *(const float*)in;
    bool good = is_scale(scale);
    in += 4;
#if ROTATE
    float* work = workspace(a.scratch);
#endif
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
#if FORMAT == 1
        const u32 code = in[i / 2] >> (4 * (i & 1)) & 15;
#else
        const u32 code = in[i];
        good = good && is_code(code);
#endif
#if ROTATE
        work[i] = unit(code);
#else
        const float acc = a.fresh ? 0.0f : a.acc[at + i];
        a.acc[at + i] = acc + unit(code) * scale;
#endif
    }
    if (!good) *a.bad = 1;
#if ROTATE
    turn_any(work, n);
    const u32 start = (u32)(a.origin + at);
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        const u32 sign = mix32(a.rotation_key, start + i) & ~MAGNITUDE;
        const float acc = a.fresh ? 0.0f : a.acc[at + i];
        a.acc[at + i] = acc + __uint_as_float(bits_of(work[i]) ^ sign) * scale;
    }
#endif
}
