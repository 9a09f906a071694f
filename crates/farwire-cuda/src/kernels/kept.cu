// Kept elements on the wire: index.rs and kept.rs on the card.
//
// A block of 256 takes as many bytes as its gaps need, and messages contain no offsets. Encoding:
// `bounds` finds each shard's part of the list; `measure` computes the length of every block;
// `offsets` adds the lengths up; `write_blocks` writes the blocks. Decoding: the host has walked
// over the blocks and says where each starts; `gap_sums` computes how far each block reaches,
// `gap_scan` adds that up, and `add_blocks` adds the values.
//
// Each warp handles a block, with eight neighbouring elements to a lane.
//
// Set by the host: VALUES (0 f32, 1 bf16, 2 int8).

#define KEPT 256
#define MAX_LOW 23
#define RUN 0xffu
#define WARPS 4
// Room for the indices: the best coding of 256 gaps takes at most 6,883 bits and a byte.
#define INDEX_BYTES 868
#define VALUE_BYTES 1028
#define WORDS ((INDEX_BYTES + VALUE_BYTES + 7) / 4)

struct Coding {
    const u32* indices;
    const float* picked;
    float* left; // for int8, whose rounding the selection did not know; null: not wanted
    u8* out;
    const u64* ends; // where each shard ends, counted from the first element of the job
    u32* first; // shards + 1: the position in the list of each shard's first element
    u32* first_block; // shards + 1
    u64* block_at; // bytes in each block; later, in all blocks before it
    struct Block* blocks; // for decoding a message on the card that made it
    u64* messages; // shards + 1: where each message starts, one byte past the end of the one
                   // before; then shards + 1: the number of each message's first block
    const u64* total; // elements in the list
    u32 shards;
};

// Where a block starts in its message, the position of the last 1 bit in its unary part, and its
// number of elements.
struct Block {
    u64 at;
    u32 last;
    u32 count;
};

// How a block of gaps is coded.
struct Shape {
    u32 low; // or RUN
    u32 low_bytes;
    u32 unary_bytes;
};

__device__ __forceinline__ u32 value_bytes(u32 count) {
#if VALUES == 0
    return 4 * count;
#elif VALUES == 1
    return 2 * count;
#else
    return count + 4;
#endif
}

// The gaps of list[from..from+count]. `next` is the first element it could contain.
__device__ __forceinline__ void load_gaps(const u32* list, u64 from, u32 count, u64 next,
                                          u32 gaps[8]) {
    const u32 lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const u32 i = 8 * lane + k;
        u32 gap = 0;
        if (i < count) {
            const u64 due = i == 0 ? next : (u64)list[from + i - 1] + 1;
            gap = (u32)(list[from + i] - due);
        }
        gaps[k] = gap;
    }
}

__device__ __forceinline__ u32 high_sum(const u32 gaps[8], u32 low) {
    u32 sum = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) sum += gaps[k] >> low;
    return warp_sum(sum);
}

__device__ __forceinline__ Shape shape_of(const u32 gaps[8], u32 count, u64 passed) {
    if (passed == 0) return Shape{RUN, 0, 0};
    const u64 mean = max(passed * 45426 / 65536 / count, (u64)1);
    const u32 guess = min((u32)(63 - __clzll(mean)), (u32)MAX_LOW);
    const u32 lows[4] = {0, guess > 0 ? guess - 1 : 0, guess, min(guess + 1, (u32)MAX_LOW)};
    u32 best = 0, best_high = 0;
    u64 least = ~0ull;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const u32 high = high_sum(gaps, lows[k]);
        const u64 bits = high + (u64)(lows[k] + 1) * count;
        if (bits < least) {
            least = bits;
            best = lows[k];
            best_high = high;
        }
    }
    return Shape{best, (count * best + 7) / 8, (best_high + count + 7) / 8};
}

// The shard that has block b.
__device__ __forceinline__ u32 shard_of(const Coding& a, u32 b) {
    u32 low = 0, high = a.shards;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (a.first_block[middle] <= b) low = middle; else high = middle;
    }
    return low;
}

// Block b: its part of the list, and the first element it could hold.
__device__ __forceinline__ u32 block_of(const Coding& a, u32 b, u32 shard, u64* from, u64* next) {
    const u64 start = shard == 0 ? 0 : a.ends[shard - 1];
    *from = a.first[shard] + (u64)(b - a.first_block[shard]) * KEPT;
    *next = *from == a.first[shard] ? start : (u64)a.indices[*from - 1] + 1;
    return (u32)min(a.first[shard + 1] - *from, (u64)KEPT);
}

// 32 shards at a time, one warp for each. The warps' results go through shared memory, and one
// warp writes them out: nothing here reads what this launch has written.
extern "C" __global__ __launch_bounds__(1024) void bounds(const __grid_constant__ Coding a) {
    __shared__ u32 found[32];
    const u64 total = *a.total;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    u32 listed = 0, blocks = 0; // in the shards that are done
    if (threadIdx.x == 0) {
        a.first[0] = 0;
        a.first_block[0] = 0;
    }
    for (u32 from = 0; from < a.shards; from += 32) {
        const u32 s = from + warp;
        if (s < a.shards) {
            // Probes 32 places at a time. The last shard ends with the list.
            u64 low = s + 1 == a.shards ? total : 0, high = total;
            while (low < high) {
                const u64 step = (high - low + 31) / 32, at = low + step * lane + step - 1;
                const u32 less = __ballot_sync(FULL, at < high && a.indices[at] < a.ends[s]);
                // Indices ascend, so the lanes that say yes are the first ones.
                const u64 passed = low + step * __popc(less);
                high = min(high, passed + step - 1);
                low = passed;
            }
            if (lane == 0) found[warp] = (u32)low;
        }
        __syncthreads();
        if (warp == 0) {
            const bool mine = from + lane < a.shards;
            const u32 end = mine ? found[lane] : 0, last = __shfl_up_sync(FULL, end, 1);
            const u32 count = mine ? end - (lane == 0 ? listed : last) : 0;
            const u32 sum = blocks + warp_inclusive((count + KEPT - 1) / KEPT);
            if (mine) {
                a.first[from + lane + 1] = end;
                a.first_block[from + lane + 1] = sum;
            }
            listed = __shfl_sync(FULL, end, 31);
            blocks = __shfl_sync(FULL, sum, 31);
        }
        __syncthreads();
    }
}

extern "C" __global__ __launch_bounds__(32 * WARPS) void measure(const __grid_constant__ Coding a) {
    const u32 b = blockIdx.x * WARPS + threadIdx.x / 32;
    if (b >= a.first_block[a.shards]) return;
    u64 from, next;
    const u32 count = block_of(a, b, shard_of(a, b), &from, &next);
    u32 gaps[8];
    load_gaps(a.indices, from, count, next, gaps);
    const Shape shape = shape_of(gaps, count, a.indices[from + count - 1] - next + 1 - count);
    if ((threadIdx.x & 31) == 0) {
        a.block_at[b] = 1 + shape.low_bytes + shape.unary_bytes + value_bytes(count);
    }
}

// Sum of x over the threads before this one in a block of 1,024; the sum over all in *total.
__device__ __forceinline__ u64 block_before64(u64 x, u64* warps, u64* total) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u64 inclusive = x;
    for (int d = 1; d < 32; d <<= 1) {
        const u64 y = __shfl_up_sync(FULL, inclusive, d);
        if (lane >= d) inclusive += y;
    }
    __syncthreads();
    if (lane == 31) warps[warp] = inclusive;
    __syncthreads();
    u64 before = 0, all = 0;
    for (u32 i = 0; i < 32; i++) {
        before += i < warp ? warps[i] : 0;
        all += warps[i];
    }
    *total = all;
    return before + inclusive - x;
}

extern "C" __global__ __launch_bounds__(1024) void offsets(const __grid_constant__ Coding a) {
    __shared__ u64 warps[32];
    const u32 blocks = a.first_block[a.shards];
    u64 done = 0;
    for (u32 first = 0; first < blocks; first += 4 * 1024) {
        const u32 b = first + 4 * threadIdx.x;
        u64 mine[4], sum = 0, total;
        for (int i = 0; i < 4; i++) {
            mine[i] = b + i < blocks ? a.block_at[b + i] : 0;
            sum += mine[i];
        }
        u64 at = done + block_before64(sum, warps, &total);
        for (int i = 0; i < 4; i++) {
            if (b + i < blocks) a.block_at[b + i] = at;
            at += mine[i];
        }
        done += total;
    }
    __syncthreads();
    for (u32 s = threadIdx.x; s <= a.shards; s += blockDim.x) {
        const u32 b = a.first_block[s];
        const u64 message = (b < blocks ? a.block_at[b] : done) + 5 * (u64)s;
        a.messages[s] = message;
        a.messages[a.shards + 1 + s] = b;
        if (s < a.shards) {
            const u32 count = a.first[s + 1] - a.first[s];
            for (int i = 0; i < 4; i++) a.out[message + i] = (u8)(count >> (8 * i));
        }
    }
}

extern "C" __global__ __launch_bounds__(32 * WARPS) void
write_blocks(const __grid_constant__ Coding a) {
    __shared__ u32 buffers[WARPS][WORDS];
    const u32 b = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (b >= a.first_block[a.shards]) return;
    u32* words = buffers[threadIdx.x / 32];
    u8* bytes = (u8*)words;
    const u32 shard = shard_of(a, b);
    u64 from, next;
    const u32 count = block_of(a, b, shard, &from, &next);
    u32 gaps[8];
    load_gaps(a.indices, from, count, next, gaps);
    const Shape shape = shape_of(gaps, count, a.indices[from + count - 1] - next + 1 - count);
    const u32 index_bytes = 1 + shape.low_bytes + shape.unary_bytes;
    for (u32 i = lane; i < (index_bytes + 3) / 4; i += 32) words[i] = 0;
    __syncwarp();
    const u64 at = a.block_at[b] - a.block_at[a.first_block[shard]] + 4;
    if (shape.low == RUN) {
        if (lane == 0) {
            bytes[0] = RUN;
            a.blocks[b] = Block{at, 0, count};
        }
    } else {
        if (lane == 0) atomicOr(&words[0], shape.low);
        u32 highs = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) highs += gaps[k] >> shape.low;
        u32 high = warp_inclusive(highs) - highs;
        const u32 low_mask = (1u << shape.low) - 1;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const u32 i = 8 * lane + k;
            if (i < count) {
                const u32 bit = 8 + i * shape.low;
                const u64 low = (u64)(gaps[k] & low_mask) << (bit & 31);
                if ((u32)low) atomicOr(&words[bit / 32], (u32)low);
                if (low >> 32) atomicOr(&words[bit / 32 + 1], (u32)(low >> 32));
                high += gaps[k] >> shape.low;
                const u32 one = 8 * (1 + shape.low_bytes) + high + i;
                atomicOr(&words[one / 32], 1u << (one & 31));
                if (i + 1 == count) a.blocks[b] = Block{at, high + i, count};
            }
        }
    }
    __syncwarp();

    float values[8];
    u32 largest = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const u32 i = 8 * lane + k;
        values[k] = i < count ? a.picked[from + i] : 0.0f;
        largest = max(largest, magnitude(values[k]));
    }
    u8* coded = bytes + index_bytes;
#if VALUES == 2
    const float top = __uint_as_float(warp_max(largest));
    const bool sendable = is_sendable(top);
    const float scale = sendable ? top / 127.0f : 0.0f, inverse = sendable ? 127.0f / top : 0.0f;
    if (lane < 4) coded[lane] = (u8)(bits_of(scale) >> (8 * lane));
#endif
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const u32 i = 8 * lane + k;
        if (i >= count) continue;
#if VALUES == 0
        const u32 code = bits_of(values[k]);
        for (int c = 0; c < 4; c++) coded[4 * i + c] = (u8)(code >> (8 * c));
#elif VALUES == 1
        const u16 code = to_bf16(values[k]);
        coded[2 * i] = (u8)code;
        coded[2 * i + 1] = (u8)(code >> 8);
#else
        const float rounded = values[k] * inverse + ROUND;
        coded[4 + i] = (u8)bits_of(rounded);
        if (a.left) a.left[a.indices[from + i]] = values[k] - (rounded - ROUND) * scale;
#endif
    }
    __syncwarp();
    u8* out = a.out + a.block_at[b] + 5 * (u64)shard + 4;
    const u32 len = index_bytes + value_bytes(count);
    for (u32 i = lane; i < len; i += 32) out[i] = bytes[i];
}

struct Added {
    const u8* bytes; // eight bytes past the message can be read
    float* acc;
    u32* bad;
    const Block* blocks; // as the host's walk found them, or the encoder left them
    u64* reach; // number of elements that each block skips or names; later, of all before it
    u64 range;
    u32 count; // number of blocks
};

// 32 bits from bit `bit` of `bytes`, which need not be aligned. Reads aligned words.
__device__ __forceinline__ u32 bits_at(const u8* bytes, u64 bit) {
    const size_t byte = (size_t)bytes + (bit >> 3);
    const u32* word = (const u32*)(byte & ~(size_t)3);
    const u32 shift = (u32)(byte & 3) * 8 + (u32)(bit & 7);
    // A shift of up to 31.
    return __funnelshift_r(word[0], word[1], shift);
}

// The low parts of this lane's eight gaps.
__device__ __forceinline__ void load_lows(const u8* lows, u32 low, u32 count, u32 out[8]) {
    const u32 lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const u32 i = 8 * lane + k;
        out[k] = i < count && low > 0 ? bits_at(lows, (u64)i * low) & ((1u << low) - 1) : 0;
    }
}

extern "C" __global__ __launch_bounds__(32 * WARPS) void gap_sums(const __grid_constant__ Added a) {
    const u32 b = blockIdx.x * WARPS + threadIdx.x / 32;
    if (b >= a.count) return;
    const Block block = a.blocks[b];
    const u32 low = a.bytes[block.at];
    u64 reach = block.count;
    if (low != RUN) {
        u32 lows[8], sum = 0;
        load_lows(a.bytes + block.at + 1, low, block.count, lows);
        for (int k = 0; k < 8; k++) sum += lows[k];
        reach += warp_sum(sum) + ((u64)(block.last + 1 - block.count) << low);
    }
    if ((threadIdx.x & 31) == 0) a.reach[b] = reach;
}

extern "C" __global__ __launch_bounds__(1024) void gap_scan(const __grid_constant__ Added a) {
    __shared__ u64 warps[32];
    u64 done = 0;
    for (u32 first = 0; first < a.count; first += 4 * 1024) {
        const u32 b = first + 4 * threadIdx.x;
        u64 mine[4], sum = 0, total;
        for (int i = 0; i < 4; i++) {
            mine[i] = b + i < a.count ? a.reach[b + i] : 0;
            sum += mine[i];
        }
        u64 at = done + block_before64(sum, warps, &total);
        for (int i = 0; i < 4; i++) {
            if (b + i < a.count) a.reach[b + i] = at;
            at += mine[i];
        }
        done += total;
    }
    if (threadIdx.x == 0 && done > a.range) *a.bad = 1;
}

extern "C" __global__ __launch_bounds__(32 * WARPS) void
add_blocks(const __grid_constant__ Added a) {
    __shared__ u32 ones[WARPS][KEPT];
    const u32 b = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (b >= a.count) return;
    const Block block = a.blocks[b];
    u32* place = ones[threadIdx.x / 32];
    const u8* in = a.bytes + block.at;
    const u32 low = in[0], count = block.count;
    const u64 next = a.reach[b];
    u64 index[8];
    const u8* coded = in + 1;
    if (low == RUN) {
#pragma unroll
        for (int k = 0; k < 8; k++) index[k] = next + 8 * lane + k;
    } else {
        const u8* unary = in + 1 + (count * low + 7) / 8;
        const u64 bits = (u64)block.last + 1;
        u32 found = 0;
        for (u64 first = 0; first < bits; first += 1024) {
            const u64 at = first + 32 * lane;
            u32 word = at < bits ? bits_at(unary, at) : 0;
            if (at < bits && bits - at < 32) word &= (1u << (bits - at)) - 1;
            const u32 mine = __popc(word), inclusive = warp_inclusive(mine);
            u32 k = found + inclusive - mine;
            while (word) {
                if (k < KEPT) place[k] = (u32)(at + __ffs(word) - 1);
                k++;
                word &= word - 1;
            }
            found += __shfl_sync(FULL, inclusive, 31);
        }
        __syncwarp();
        u32 lows[8], sum = 0;
        load_lows(in + 1, low, count, lows);
#pragma unroll
        for (int k = 0; k < 8; k++) sum += lows[k];
        u32 before = warp_inclusive(sum) - sum;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const u32 i = 8 * lane + k;
            before += lows[k];
            index[k] = i < count ? next + before + ((u64)(place[i] - i) << low) + i : 0;
        }
        coded = unary + (bits + 7) / 8;
    }
    bool good = true;
#if VALUES == 2
    const float scale = float_at(coded);
    good = is_scale(scale);
    coded += 4;
#endif
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const u32 i = 8 * lane + k;
        if (i >= count) continue;
#if VALUES == 0
        const float value = float_at(coded + 4 * i);
#elif VALUES == 1
        const float value = from_bf16((u16)(coded[2 * i] | coded[2 * i + 1] << 8));
#else
        const float value = (float)(int)(i8)coded[i] * scale;
#endif
        good = good && magnitude(value) < INFINITE && index[k] < a.range;
        if (good) a.acc[index[k]] = a.acc[index[k]] + value;
    }
    if (!good) *a.bad = 1;
}
