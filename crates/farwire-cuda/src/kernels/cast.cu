// Each element by itself: codecs/cast.rs and codecs/identity.rs on the card.
//
// Set by the host: FORMAT (0 f32, 1 f16, 2 bf16), the type that elements are sent as.

#define THREADS 256
#define ROUNDS 4
#define TILE (4 * THREADS * ROUNDS)

#if FORMAT == 0
typedef u32 Code;
#else
typedef u16 Code;
#endif

__device__ __forceinline__ Code code_of(float x) {
#if FORMAT == 0
    return bits_of(x);
#elif FORMAT == 1
    x = x < -65504.0f ? -65504.0f : x;
    x = x > 65504.0f ? 65504.0f : x;
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
#else
    return to_bf16(x);
#endif
}

__device__ __forceinline__ float value_of(Code code) {
#if FORMAT == 0
    return __uint_as_float(code);
#elif FORMAT == 1
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(code));
    return x;
#else
    return from_bf16(code);
#endif
}

// The residual of an element. Where nothing is rounded it is +0, whatever the element's sign.
__device__ __forceinline__ float left_of(float x, Code code) {
#if FORMAT == 0
    return 0.0f;
#else
    return x - value_of(code);
#endif
}

__device__ __forceinline__ void store_codes(u8* to, const Code c[4]) {
#if FORMAT == 0
    *(uint4*)to = make_uint4(c[0], c[1], c[2], c[3]);
#else
    *(uint2*)to = make_uint2((u32)c[0] | (u32)c[1] << 16, (u32)c[2] | (u32)c[3] << 16);
#endif
}

__device__ __forceinline__ void load_codes(const u8* from, Code c[4]) {
#if FORMAT == 0
    const uint4 v = *(const uint4*)from;
    c[0] = v.x; c[1] = v.y; c[2] = v.z; c[3] = v.w;
#else
    const uint2 v = *(const uint2*)from;
    c[0] = (u16)v.x; c[1] = (u16)(v.x >> 16); c[2] = (u16)v.y; c[3] = (u16)(v.y >> 16);
#endif
}

extern "C" __global__ __launch_bounds__(THREADS) void
cast_encode(const __grid_constant__ Encode a) {
    const Shard& s = a.shards[blockIdx.y];
    const u64 first = (u64)blockIdx.x * TILE;
    if (first >= s.len) return;
    const bool wide = is_wide(a.values, a.owed, a.left, s.start);
#pragma unroll
    for (int j = 0; j < ROUNDS; j++) {
        const u64 e = first + 4 * (threadIdx.x + THREADS * j);
        if (e >= s.len) continue;
        const u64 at = s.start + e;
        const int n = (int)min(s.len - e, (u64)4);
        float x[4];
        fuse4(a.values, a.owed, at, n, wide, a.bad, x);
        Code codes[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            codes[c] = code_of(x[c]);
            x[c] = left_of(x[c], codes[c]);
        }
        u8* out = a.out + s.out + e * sizeof(Code);
        if (n == 4) {
            store_codes(out, codes);
            if (a.left) store4(a.left + at, wide, x);
        } else {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                if (c < n) {
                    ((Code*)out)[c] = codes[c];
                    if (a.left) a.left[at + c] = x[c];
                }
            }
        }
    }
}

extern "C" __global__ __launch_bounds__(THREADS) void cast_add(const __grid_constant__ Decode a) {
    const u64 first = (u64)blockIdx.x * TILE;
    const bool wide = ((size_t)a.acc & 15) == 0;
    bool good = true;
#pragma unroll
    for (int j = 0; j < ROUNDS; j++) {
        const u64 e = first + 4 * (threadIdx.x + THREADS * j);
        if (e >= a.len) continue;
        const int n = (int)min(a.len - e, (u64)4);
        const u8* in = a.bytes + e * sizeof(Code);
        float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        Code codes[4] = {0, 0, 0, 0};
        if (n == 4) {
            load_codes(in, codes);
            if (!a.fresh) load4(a.acc + e, wide, x);
        } else {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                if (c < n) {
                    codes[c] = ((const Code*)in)[c];
                    if (!a.fresh) x[c] = a.acc[e + c];
                }
            }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float value = value_of(codes[c]);
            good = good && magnitude(value) < INFINITE;
            x[c] = x[c] + value;
        }
        if (n == 4) {
            store4(a.acc + e, wide, x);
        } else {
#pragma unroll
            for (int c = 0; c < 4; c++) if (c < n) a.acc[e + c] = x[c];
        }
    }
    if (!good) *a.bad = 1;
}
