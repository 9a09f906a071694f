// Code shared by all kernels. Every other file in this folder is compiled after this one.
//
// The CPU codec is the reference: each formula here is one of its loops, with the same order of
// operations. No multiply-add is contracted (--fmad=false), divisions and square roots are IEEE,
// denormals are kept. So the bits are the same.
//
// Set by the host: VALUE (0 f32, 1 f16, 2 bf16), the type of the gradient.

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef VALUE
#define VALUE 0
#endif

#define MAGNITUDE 0x7fffffffu
#define INFINITE 0x7f800000u
#define FULL 0xffffffffu
#define TWO_100 1267650600228229401496703205376.0f
// Adding and then subtracting 1.5·2²³ rounds to the nearest integer, ties to even.
#define ROUND 12582912.0f
#define MAX_SHARDS 64

// The elements that become one message.
struct Shard {
    u64 start; // first element, counted from the first of the job
    u64 len;
    u64 out; // where its message starts; a multiple of 16
    u64 drawn; // for random-k, its first stratum
};

struct Encode {
    const void* values;
    const float* owed; // null: nothing is owed
    float* left; // null: the residual is not wanted
    u8* out;
    u64* bad; // lowest index of an element that is not finite
    u64 origin; // index of the job's first element in the whole vector
    u32 rounding_key;
    u32 rotation_key;
    float* scratch;
    Shard shards[MAX_SHARDS];
};

struct Decode {
    const u8* bytes;
    float* acc;
    u32* bad; // set to 1 if no encoder would write this message
    u64 len;
    u64 origin;
    u32 rotation_key;
    u32 fresh; // whether to take `acc` to be zeros
    float* scratch;
};

#if VALUE == 0
typedef float Value;
__device__ __forceinline__ float widen(Value v) { return v; }
#else
typedef u16 Value;
__device__ __forceinline__ float widen(Value v) {
#if VALUE == 1
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
#else
    return __uint_as_float((u32)v << 16);
#endif
}
#endif

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ u32 magnitude(float x) { return bits_of(x) & MAGNITUDE; }

// Whether element `at` of each of these is aligned for an access to four elements.
__device__ __forceinline__ bool is_wide(const void* values, const float* owed, const float* left,
                                        u64 at) {
    const size_t v = (size_t)((const Value*)values + at) & (4 * sizeof(Value) - 1);
    const size_t o = owed ? (size_t)(owed + at) & 15 : 0;
    const size_t l = left ? (size_t)(left + at) & 15 : 0;
    return (v | o | l) == 0;
}

__device__ __forceinline__ void load4(const float* from, bool wide, float x[4]) {
    if (wide) {
        const float4 v = __ldcs((const float4*)from);
        x[0] = v.x; x[1] = v.y; x[2] = v.z; x[3] = v.w;
    } else {
        for (int c = 0; c < 4; c++) x[c] = from[c];
    }
}

#if VALUE != 0
__device__ __forceinline__ void load4(const u16* from, bool wide, float x[4]) {
    if (wide) {
        const uint2 v = __ldcs((const uint2*)from);
        x[0] = widen((u16)v.x); x[1] = widen((u16)(v.x >> 16));
        x[2] = widen((u16)v.y); x[3] = widen((u16)(v.y >> 16));
    } else {
        for (int c = 0; c < 4; c++) x[c] = widen(from[c]);
    }
}
#endif

__device__ __forceinline__ void store4(float* to, bool wide, const float x[4]) {
    if (wide) {
        __stcs((float4*)to, make_float4(x[0], x[1], x[2], x[3]));
    } else {
        for (int c = 0; c < 4; c++) to[c] = x[c];
    }
}

// Gradient plus residual of one element.
__device__ __forceinline__ float fuse1(const void* values, const float* owed, u64 at) {
    const float v = widen(((const Value*)values)[at]);
    return owed ? v + owed[at] : v;
}

// The same for elements at..at+n; if n is below four, zeros for the rest. Reports what is not
// finite.
__device__ __forceinline__ void fuse4(const void* values, const float* owed, u64 at, int n,
                                      bool wide, u64* bad, float x[4]) {
    if (n >= 4) {
        load4((const Value*)values + at, wide, x);
        if (owed) {
            float o[4];
            load4(owed + at, wide, o);
            for (int c = 0; c < 4; c++) x[c] = x[c] + o[c];
        }
    } else {
        for (int c = 0; c < 4; c++) x[c] = c < n ? fuse1(values, owed, at + c) : 0.0f;
    }
    const u32 worst = max(max(magnitude(x[0]), magnitude(x[1])),
                          max(magnitude(x[2]), magnitude(x[3])));
    if (worst >= INFINITE) {
        for (int c = 3; c >= 0; c--) {
            if (magnitude(x[c]) >= INFINITE) atomicMin(bad, at + c);
        }
    }
}

__device__ __forceinline__ u32 warp_max(u32 x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(FULL, x);
#else
    for (int d = 16; d > 0; d >>= 1) x = max(x, __shfl_xor_sync(FULL, x, d));
    return x;
#endif
}

__device__ __forceinline__ u32 warp_sum(u32 x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(FULL, x);
#else
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(FULL, x, d);
    return x;
#endif
}

__device__ __forceinline__ u32 warp_inclusive(u32 x) {
    const u32 lane = threadIdx.x & 31;
    for (int d = 1; d < 32; d <<= 1) {
        const u32 y = __shfl_up_sync(FULL, x, d);
        if (lane >= d) x += y;
    }
    return x;
}

// The largest x of all threads in the block, in every thread. All threads must call this.
__device__ __forceinline__ u32 block_max(u32 x) {
    __shared__ u32 warps[32];
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, count = (blockDim.x + 31) >> 5;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) warps[warp] = x;
    __syncthreads();
    x = 0;
    for (u32 i = 0; i < count; i++) x = max(x, warps[i]);
    return x;
}

// Adds up lanes 0 to 15 of the warp, halves first; the sum is in lane 0.
__device__ __forceinline__ float lanes_sum(float lane) {
    for (int half = 8; half > 0; half >>= 1) {
        lane = lane + __shfl_down_sync(FULL, lane, half);
    }
    return lane;
}

__device__ __forceinline__ bool is_sendable(float largest) {
    return largest >= 1.0f / TWO_100 && largest <= TWO_100;
}

__device__ __forceinline__ bool is_scale(float scale) {
    return scale >= 0.0f && scale <= TWO_100;
}

__device__ __forceinline__ u32 mix32(u32 key, u32 index) {
    u32 x = index * 0x9e3779b9u ^ key;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

__device__ __forceinline__ float unit32(u32 key, u32 index) {
    return (float)(int)(mix32(key, index) >> 9) * (1.0f / 8388608.0f);
}

__device__ __forceinline__ u64 mix64(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

__device__ __forceinline__ u16 to_bf16(float x) {
    const u32 m = magnitude(x);
    const u32 rounded = (m + 0x7fff + (m >> 16 & 1)) >> 16;
    return (u16)(min(rounded, 0x7f7fu) | bits_of(x) >> 31 << 15);
}

__device__ __forceinline__ float from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

// A float from bytes that start anywhere.
__device__ __forceinline__ float float_at(const u8* bytes) {
    return __uint_as_float((u32)bytes[0] | (u32)bytes[1] << 8 | (u32)bytes[2] << 16 |
                           (u32)bytes[3] << 24);
}
