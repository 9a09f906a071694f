// The end of an all-reduce: the decoded sum, divided and rounded to the gradient's type, replaces
// the gradient. As on the CPU, overflow gives an infinity.

__device__ __forceinline__ Value narrow(float x) {
#if VALUE == 0
    return x;
#elif VALUE == 1
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
#else
    const u32 m = magnitude(x);
    return (u16)((m + 0x7fff + (m >> 16 & 1)) >> 16 | bits_of(x) >> 31 << 15);
#endif
}

extern "C" __global__ __launch_bounds__(256) void
finish(Value* out, const float* in, u64 len, float divisor) {
    const u64 first = (u64)blockIdx.x * 4096 + threadIdx.x;
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const u64 at = first + 256 * j;
        if (at < len) out[at] = narrow(in[at] / divisor);
    }
}
