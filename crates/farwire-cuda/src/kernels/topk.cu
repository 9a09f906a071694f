// The largest elements: codecs/topk/select.rs on the card.
//
// Which k are kept depends only on magnitude, then on the lowest index, so every way to find them
// gives the same ones. They are left in `indices` and `picked`, in ascending order of index.
//
// Per chunk (`select_chunks`): a thread block holds a chunk in shared memory. Every thread knows
// the largest of its sixteen elements. Each of the w warps finds a magnitude that ⌈k/w⌉ of its 32
// threads reach; the least of these magnitudes is reached by at least k elements, and by few more.
// Those elements are ranked against each other. A chunk that defeats this (equal magnitudes), has
// another size or is not full is searched bit by bit (`select_any`).
//
// Over the whole vector: `guess` takes a floor from a sample; `collect` fuses, writes, and lists
// the elements that reach the floor, by tiles of 4,096; `histogram` settles 11, 10 and 10 bits of
// the k-th magnitude; `tile_count`, `tile_scan` and `emit` copy the kept elements to their places.
// If the guess fails, they look at every element instead of the lists (`dense`).
//
// What rounding leaves of a kept element is written here, while its cache line is near, unless that
// takes a scale that is not known yet (int8).
//
// Set by the host: CHUNK, a power of two from 1,024 to 8,192 (or 0: not per chunk); VALUES (0 f32,
// 1 bf16, 2 int8).

#define TILE 4096
#define LISTED 512 // the most candidates of a tile
#define CANDIDATES 512 // the most candidates of a chunk

// How far the search has come. One for each job, zeroed by the host.
struct State {
    u32 floor; // the least magnitude of a candidate
    u32 dense; // a list was too short
    u32 prefix; // the settled bits of the k-th magnitude
    u32 remaining; // how many of the elements with this prefix are kept
    u64 listed; // candidates in all lists
    u64 total; // elements kept
    u32 tickets[3];
    u32 padding;
    u32 bins[3][2048];
};

struct Select {
    const void* values;
    const float* owed;
    float* left;
    u64* bad;
    u64 len;
    u32* indices;
    float* picked;
    State* state;
    u32* counts; // the length of each tile's list
    u16* places; // the listed elements' places in their tile, LISTED for each tile
    float* listed; // their values, LISTED for each tile
    u64* tallies; // for each tile, how many are larger than the k-th; in the high half, how many
                  // equal it
    u64 keep;
    u32 all; // keep all elements that are not zero
    u32 rank; // the floor's rank in the sample, or 0: no lists
};

// Whether to look at every element.
__device__ __forceinline__ bool is_dense(const Select& a) {
    return a.rank == 0 || a.state->dense || a.state->listed < a.keep;
}

// What rounding drops of a kept element, if no scale is needed to know it.
__device__ __forceinline__ float left_of(float value) {
    return VALUES == 0 ? 0.0f : value - from_bf16(to_bf16(value));
}

// Lists an element as kept, and writes what rounding drops of it.
__device__ __forceinline__ void keep_one(const Select& a, u64 place, u64 at, float value) {
    a.indices[place] = (u32)at;
    a.picked[place] = value;
#if VALUES != 2
    a.left[at] = left_of(value);
#endif
}

// Sum over the threads of a block, in every thread; `warps` is shared memory for 32.
__device__ __forceinline__ u32 block_sum(u32 x, u32* warps) {
    const u32 count = (blockDim.x + 31) >> 5;
    x = warp_sum(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = x;
    __syncthreads();
    x = 0;
    for (u32 i = 0; i < count; i++) x += warps[i];
    return x;
}

// Sum over the threads before this one; the sum over all in *total.
__device__ __forceinline__ u32 block_before(u32 x, u32* warps, u32* total) {
    const u32 count = (blockDim.x + 31) >> 5, warp = threadIdx.x >> 5;
    const u32 inclusive = warp_inclusive(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 31) warps[warp] = inclusive;
    __syncthreads();
    u32 before = 0, all = 0;
    for (u32 i = 0; i < count; i++) {
        before += i < warp ? warps[i] : 0;
        all += warps[i];
    }
    *total = all;
    return before + inclusive - x;
}

__device__ __forceinline__ u64 warp_inclusive64(u64 x) {
    const u32 lane = threadIdx.x & 31;
    for (int d = 1; d < 32; d <<= 1) {
        const u64 y = __shfl_up_sync(FULL, x, d);
        if (lane >= d) x += y;
    }
    return x;
}

// Sum over the threads in the warps before this one, in a block of 1,024; the sum over all in
// *total.
__device__ __forceinline__ u64 warp_before64(u64 x, u64* warps, u64* total) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(FULL, x, d);
    __syncthreads();
    if (lane == 0) warps[warp] = x;
    __syncthreads();
    const u64 inclusive = warp_inclusive64(warps[lane]);
    *total = __shfl_sync(FULL, inclusive, 31);
    return __shfl_sync(FULL, inclusive, warp) - __shfl_sync(FULL, warps[lane], warp);
}

// Keeps the `keep` largest of the n fused values from element `at` on: they go to `to`. All threads
// of the block must call this, and their number must be a multiple of 32.
__device__ void select_slow(const Select& a, u64 at, u32 n, u32 keep, u64 to) {
    __shared__ u32 warps[32];
    const float* values = a.left + at;
    if (keep == 0) return;
    u32 threshold = 0;
    for (int bit = 30; bit >= 0; bit--) {
        const u32 trial = threshold | 1u << bit;
        u32 count = 0;
        for (u32 i = threadIdx.x; i < n; i += blockDim.x) count += magnitude(values[i]) >= trial;
        count = block_sum(count, warps);
        if (count >= keep) threshold = trial;
    }
    u32 above = 0;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) above += magnitude(values[i]) > threshold;
    u32 ties = keep - block_sum(above, warps), done = 0;
    for (u32 first = 0; first < n; first += blockDim.x) {
        const u32 i = first + threadIdx.x;
        const float value = i < n ? values[i] : 0.0f;
        const bool tie = i < n && magnitude(value) == threshold;
        u32 tied, kept;
        const u32 rank = block_before(tie, warps, &tied);
        const bool mine = i < n && (magnitude(value) > threshold || (tie && rank < ties));
        const u32 place = block_before(mine, warps, &kept);
        if (mine) keep_one(a, to + done + place, at + i, value);
        done += kept;
        ties -= min(ties, tied);
    }
}

struct Chunks {
    u64 origin; // index of the job's first element in the whole vector
    u64 first_piece; // the piece that the grid starts with
    u64 chunk; // elements in a chunk
    u64 keep; // elements kept from a full chunk
    u64 keep_first; // elements kept from the first piece, which may be short
    u64 at; // first element of the first piece of the grid
    u64 to; // where the elements kept from it go
};

// Piece p of the job: where it starts, its length, how many elements are kept, and where they go.
__device__ __forceinline__ void piece(const Select& a, const Chunks& c, u64 p, u64* at, u32* n,
                                      u32* keep, u64* to) {
    const u64 grid = c.origin / c.chunk;
    const u64 start = max((grid + p) * c.chunk, c.origin) - c.origin;
    const u64 end = min((grid + p + 1) * c.chunk - c.origin, a.len);
    *at = start;
    *n = (u32)(end - start);
    *keep = p == 0 ? (u32)c.keep_first : (u32)((c.keep * *n + c.chunk - 1) / c.chunk);
    *to = p == 0 ? 0 : c.keep_first + (p - 1) * c.keep;
}

extern "C" __global__ __launch_bounds__(256) void select_any(const __grid_constant__ Select a,
                                                              const __grid_constant__ Chunks c) {
    u64 at, to;
    u32 n, keep;
    piece(a, c, c.first_piece + blockIdx.x, &at, &n, &keep, &to);
    if (blockIdx.x == 0 && threadIdx.x == 0) a.state->total = a.keep;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        const float x = fuse1(a.values, a.owed, at + i);
        if (magnitude(x) >= INFINITE) atomicMin(a.bad, at + i);
        a.left[at + i] = x;
    }
    __syncthreads();
    select_slow(a, at, n, keep, to);
}

#if CHUNK > 0
#define THREADS (CHUNK / 16)
// Thread blocks per multiprocessor: few enough that no registers are spilled.
#define CHUNKS_AT_ONCE (1536 / THREADS)

__device__ __forceinline__ void store_chunk(float* left, bool wide, const float4* chunk) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float4 v = chunk[threadIdx.x + THREADS * j];
        const float x[4] = {v.x, v.y, v.z, v.w};
        store4(left + 4 * (threadIdx.x + THREADS * j), wide, x);
    }
}

// Full chunks only.
extern "C" __global__ __launch_bounds__(THREADS, CHUNKS_AT_ONCE) void
select_chunks(const __grid_constant__ Select a, const __grid_constant__ Chunks c) {
    __shared__ float4 chunk[CHUNK / 4];
    __shared__ ulonglong2 pairs[CANDIDATES / 2];
    __shared__ u32 kept[CHUNK / 32]; // a bit for each element
    __shared__ u32 before[CHUNK / 32];
    __shared__ u32 count, nonzeros, least;
    float* values = (float*)chunk;
    u64* keys = (u64*)pairs;
    const u32 lane = threadIdx.x & 31, keep = (u32)c.keep;
    const u64 at = c.at + (u64)blockIdx.x * CHUNK, to = c.to + (u64)blockIdx.x * keep;
    if (threadIdx.x == 0) {
        if (blockIdx.x == 0) a.state->total = a.keep;
        count = 0;
        nonzeros = 0;
        least = FULL;
    }
    if (threadIdx.x < CHUNK / 32) kept[threadIdx.x] = 0;
    const bool wide = is_wide(a.values, a.owed, a.left, at);
    u32 top = 0;
    {
        float x[16];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 e = 4 * threadIdx.x + CHUNK / 4 * j;
            fuse4(a.values, a.owed, at + e, 4, wide, a.bad, &x[4 * j]);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) top = max(top, magnitude(x[i]));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            chunk[threadIdx.x + THREADS * j] =
                make_float4(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
        }
    }
    // The floor, to six bits of the mantissa.
    const u32 share = (keep + THREADS / 32 - 1) / (THREADS / 32);
    u32 floor = 0;
    if (share <= 32) {
#pragma unroll
        for (int bit = 30; bit >= 17; bit--) {
            const u32 trial = floor | 1u << bit;
            if (__popc(__ballot_sync(FULL, top >= trial)) >= share) floor = trial;
        }
    }
    __syncthreads();
    if (lane == 0) atomicMin(&least, floor);
    __syncthreads();
    floor = least;
    u32 early = 0;
    if (floor == 0) {
        // Many zeros. The first of them are kept, so it is enough to look at the zeros among the
        // first keep + nonzeros elements.
        u32 mine = 0;
        for (u32 e = threadIdx.x; e < CHUNK; e += THREADS) mine += magnitude(values[e]) > 0;
        mine = warp_sum(mine);
        if (lane == 0) atomicAdd(&nonzeros, mine);
        __syncthreads();
        early = keep + nonzeros;
        floor = 1;
    }
    u32 chosen = 0;
    if (top >= floor || early > 0) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const u32 e = (i & 3) + 4 * threadIdx.x + CHUNK / 4 * (i >> 2);
            chosen |= (u32)(magnitude(values[e]) >= floor || e < early) << i;
        }
    }
    u32 k = warp_inclusive(__popc(chosen));
    u32 base = 0;
    if (lane == 31) base = atomicAdd(&count, k);
    k += __shfl_sync(FULL, base, 31) - __popc(chosen);
    for (; chosen && k < CANDIDATES; chosen &= chosen - 1, k++) {
        const u32 i = __ffs(chosen) - 1;
        const u32 e = (i & 3) + 4 * threadIdx.x + CHUNK / 4 * (i >> 2);
        const float x = values[e];
        // Ordered by magnitude, then lowest index; the sign rides along.
        keys[k] = (u64)magnitude(x) << 32 | (0x7fff - e) << 1 | bits_of(x) >> 31;
    }
    __syncthreads();
    const u32 total = count;
    if (total > CANDIDATES) {
        store_chunk(a.left + at, wide, chunk);
        __syncthreads();
        select_slow(a, at, CHUNK, keep, to);
        return;
    }
    if (threadIdx.x == 0 && total % 2 == 1) keys[total] = 0;
    __syncthreads();
    // Two threads to a candidate: each compares it with every other pair.
    for (u32 first = 0; first < total; first += THREADS / 2) {
        const u32 i = first + threadIdx.x / 2;
        const u64 mine = i < total ? keys[i] : ~0ull;
        u32 rank = 0;
#pragma unroll 4
        for (u32 p = threadIdx.x & 1; p < (total + 1) / 2; p += 2) {
            const ulonglong2 two = pairs[p];
            rank += (two.x > mine) + (two.y > mine);
        }
        rank += __shfl_xor_sync(FULL, rank, 1);
        const u32 e = 0x7fff - ((u32)mine >> 1);
        if (i < total && rank < keep && (threadIdx.x & 1) == 0) {
            atomicOr(&kept[e / 32], 1u << (e & 31));
        }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        // CHUNK / 1024 neighbouring words to a lane.
        u32 ones = 0;
#pragma unroll
        for (int j = 0; j < CHUNK / 1024; j++) ones += __popc(kept[CHUNK / 1024 * lane + j]);
        u32 sum = warp_inclusive(ones) - ones;
#pragma unroll
        for (int j = 0; j < CHUNK / 1024; j++) {
            before[CHUNK / 1024 * lane + j] = sum;
            sum += __popc(kept[CHUNK / 1024 * lane + j]);
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < total; i += THREADS) {
        const u64 key = keys[i];
        const u32 e = 0x7fff - ((u32)key >> 1), word = kept[e / 32], bit = 1u << (e & 31);
        if (word & bit) {
            const u64 place = to + before[e / 32] + __popc(word & (bit - 1));
            const float value = __uint_as_float((u32)(key >> 32) | (u32)key << 31);
            a.indices[place] = (u32)(at + e);
            a.picked[place] = value;
#if VALUES != 2
            values[e] = left_of(value);
#endif
        }
    }
    __syncthreads();
    store_chunk(a.left + at, wide, chunk);
}
#endif

#define SAMPLES 16

// Finds a magnitude that probably a few more than `keep` elements reach: 1,024 threads, one block.
extern "C" __global__ __launch_bounds__(1024) void guess(const __grid_constant__ Select a) {
    __shared__ u32 counts[9][3];
    u32 m[SAMPLES];
    // 1,024 runs of 16 neighbours, half a warp to each.
    const u32 stride = (u32)(a.len / 1024), lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < SAMPLES; i++) {
        const u32 run = (threadIdx.x & ~31) + 2 * i + lane / 16;
        const u64 at = (u64)run * stride + mix32(0, run) % (stride - 15);
        m[i] = magnitude(fuse1(a.values, a.owed, at + lane % 16));
    }
    if (threadIdx.x < 27) counts[threadIdx.x / 3][threadIdx.x % 3] = 0;
    __syncthreads();
    // Two bits at a time, down to ten of the mantissa.
    u32 floor = 0;
    for (int step = 0; step < 9; step++) {
        const int shift = 29 - 2 * step;
        u32 reached[3] = {0, 0, 0};
#pragma unroll
        for (int i = 0; i < SAMPLES; i++) {
#pragma unroll
            for (u32 digit = 1; digit <= 3; digit++) {
                reached[digit - 1] += m[i] >= (floor | digit << shift);
            }
        }
#pragma unroll
        for (int digit = 0; digit < 3; digit++) {
            const u32 sum = warp_sum(reached[digit]);
            if ((threadIdx.x & 31) == 0) atomicAdd(&counts[step][digit], sum);
        }
        __syncthreads();
        u32 digit = 0;
        for (int k = 0; k < 3; k++) digit += counts[step][k] >= a.rank;
        floor |= digit << shift;
    }
    if (threadIdx.x == 0) a.state->floor = max(floor, 1u);
}

extern "C" __global__ __launch_bounds__(256, 6) void collect(const __grid_constant__ Select a) {
    __shared__ u32 mask[TILE / 32];
    __shared__ u32 before[TILE / 32];
    const u64 at = (u64)blockIdx.x * TILE;
    const u32 n = (u32)min(a.len - at, (u64)TILE);
    const bool wide = is_wide(a.values, a.owed, a.left, at);
    const bool listing = a.rank > 0;
    const u32 floor = listing ? a.state->floor : FULL;
    float x[16];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int e = 4 * threadIdx.x + 1024 * j;
        fuse4(a.values, a.owed, at + e, (int)n - e, wide, a.bad, &x[4 * j]);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const u32 e = 4 * threadIdx.x + 1024 * j;
        if (e + 4 <= n) {
            store4(a.left + at + e, wide, &x[4 * j]);
        } else {
#pragma unroll
            for (int c = 0; c < 4; c++) if (e + c < n) a.left[at + e + c] = x[4 * j + c];
        }
    }
    if (!listing) return;
    // One bit for each element, eight threads to a word.
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 bits = 0;
#pragma unroll
        for (int c = 0; c < 4; c++) bits |= (u32)(magnitude(x[4 * j + c]) >= floor) << c;
        bits |= __shfl_down_sync(FULL, bits, 1) << 4;
        bits |= __shfl_down_sync(FULL, bits, 2) << 8;
        bits |= __shfl_down_sync(FULL, bits, 4) << 16;
        if ((threadIdx.x & 7) == 0) mask[threadIdx.x / 8 + 32 * j] = bits;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        u32 sum = 0;
        for (int j = 0; j < TILE / 1024; j++) {
            const u32 ones = __popc(mask[32 * j + threadIdx.x]);
            const u32 inclusive = warp_inclusive(ones);
            before[32 * j + threadIdx.x] = sum + inclusive - ones;
            sum += __shfl_sync(FULL, inclusive, 31);
        }
        if (threadIdx.x == 0) {
            a.counts[blockIdx.x] = min(sum, LISTED);
            if (sum > LISTED) a.state->dense = 1;
            if (sum > 0) atomicAdd(&a.state->listed, (u64)sum);
        }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const u32 e = 4 * threadIdx.x + 1024 * j;
        const u32 word = mask[e / 32];
        if ((word >> (e & 31) & 15) == 0) continue;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const u32 bit = (e & 31) + c;
            if (word >> bit & 1) {
                const u32 k = before[e / 32] + __popc(word & ((1u << bit) - 1));
                if (k < LISTED) {
                    a.places[(u64)blockIdx.x * LISTED + k] = (u16)(e + c);
                    a.listed[(u64)blockIdx.x * LISTED + k] = x[4 * j + c];
                }
            }
        }
    }
}

// Element i of a tile, or of its list.
__device__ __forceinline__ float candidate(const Select& a, bool dense, u64 tile, u32 i) {
    return dense ? a.left[tile * TILE + i] : a.listed[tile * LISTED + i];
}

// Number of elements in a tile, or in its list.
__device__ __forceinline__ u32 candidates(const Select& a, bool dense, u64 tile) {
    return dense ? (u32)min(a.len - tile * TILE, (u64)TILE) : a.counts[tile];
}

// Counts the candidates that agree with the settled bits of the magnitude, by their next bits. The
// last thread block to finish settles those bits.
extern "C" __global__ __launch_bounds__(1024) void
histogram(const __grid_constant__ Select a, u32 round) {
    __shared__ u32 bins[2048];
    __shared__ u32 warps[32];
    __shared__ u32 last;
    for (u32 i = threadIdx.x; i < 2048; i += blockDim.x) bins[i] = 0;
    const u32 shift = round == 0 ? 20 : round == 1 ? 10 : 0;
    const u32 bits = round == 0 ? 11 : 10;
    const u32 prefix = round == 0 ? 0 : a.state->prefix;
    // 64 bits wide, because the shift is up to 31.
    const u64 settled = (u64)prefix >> (shift + bits);
    const u64 tiles = (a.len + TILE - 1) / TILE;
    const bool dense = is_dense(a);
    __syncthreads();
    // A warp to a tile.
    for (u64 tile = 32 * blockIdx.x + threadIdx.x / 32; tile < tiles; tile += 32 * gridDim.x) {
        const u32 n = candidates(a, dense, tile);
        for (u32 first = 0; first < n; first += 32) {
            const u32 i = first + (threadIdx.x & 31);
            const u32 m = i < n ? magnitude(candidate(a, dense, tile, i)) : 0;
            const bool counts = i < n && (u64)m >> (shift + bits) == settled;
            // Most fall into a few bins: one addition for all lanes that share a bin.
            const u32 bin = counts ? m >> shift & ((1u << bits) - 1) : FULL;
            const u32 same = __match_any_sync(FULL, bin);
            const bool first_of_them = __ffs(same) - 1 == (threadIdx.x & 31);
            if (counts && first_of_them) atomicAdd(&bins[bin], __popc(same));
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < 2048; i += blockDim.x) {
        if (bins[i]) atomicAdd(&a.state->bins[round][i], bins[i]);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&a.state->tickets[round], 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    // Thread t has bins 2047 − 2t and 2046 − 2t.
    u32 mine[2], sum = 0, total;
    for (int i = 0; i < 2; i++) {
        mine[i] = __ldcg(&a.state->bins[round][2047 - 2 * threadIdx.x - i]);
        sum += mine[i];
    }
    const u32 remaining = round == 0 ? (u32)a.keep : a.state->remaining;
    u32 larger = block_before(sum, warps, &total);
    __syncthreads();
    for (int i = 0; i < 2; i++) {
        if (larger < remaining && larger + mine[i] >= remaining) {
            a.state->prefix = prefix | (2047 - 2 * threadIdx.x - i) << shift;
            a.state->remaining = remaining - larger;
        }
        larger += mine[i];
    }
}

// The least magnitude that is kept, and how many elements of exactly that magnitude are kept.
__device__ __forceinline__ u32 threshold_of(const Select& a) { return a.all ? 0 : a.state->prefix; }
__device__ __forceinline__ u32 ties_of(const Select& a) { return a.all ? 0 : a.state->remaining; }

// A warp to a tile.
extern "C" __global__ __launch_bounds__(256) void tile_count(const __grid_constant__ Select a) {
    const u64 tile = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    if (tile * TILE >= a.len) return;
    const bool dense = is_dense(a);
    const u32 threshold = threshold_of(a), n = candidates(a, dense, tile);
    u32 above = 0, ties = 0;
    for (u32 i = threadIdx.x & 31; i < n; i += 32) {
        const u32 m = magnitude(candidate(a, dense, tile, i));
        above += m > threshold;
        ties += m == threshold;
    }
    above = warp_sum(above);
    ties = warp_sum(ties);
    if ((threadIdx.x & 31) == 0) a.tallies[tile] = (u64)ties << 32 | above;
}

// For each tile, sums over the tiles before it: 1,024 threads, one block. Both halves of a tally at
// once: neither sum reaches 2³².
extern "C" __global__ __launch_bounds__(1024) void tile_scan(const __grid_constant__ Select a) {
    __shared__ u64 warps[32];
    const u64 tiles = (a.len + TILE - 1) / TILE;
    u64 done = 0;
    for (u64 first = 0; first < tiles; first += 16 * 1024) {
        u64 mine[16], sum = 0, total;
        // Lane l of a warp has tallies 32·k + l of the warp's 512, so loads are next to each other.
        const u64 at = first + 512 * (threadIdx.x >> 5) + (threadIdx.x & 31);
#pragma unroll
        for (int k = 0; k < 16; k++) mine[k] = at + 32 * k < tiles ? a.tallies[at + 32 * k] : 0;
#pragma unroll
        for (int k = 0; k < 16; k++) sum += mine[k];
        u64 before = done + warp_before64(sum, warps, &total);
#pragma unroll
        for (int k = 0; k < 16; k++) {
            const u64 inclusive = warp_inclusive64(mine[k]);
            if (at + 32 * k < tiles) a.tallies[at + 32 * k] = before + inclusive - mine[k];
            before += __shfl_sync(FULL, inclusive, 31);
        }
        done += total;
    }
    if (threadIdx.x == 0) a.state->total = (u64)(u32)done + ties_of(a);
}

// A warp to a tile.
extern "C" __global__ __launch_bounds__(256) void emit(const __grid_constant__ Select a) {
    const u64 tile = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    if (tile * TILE >= a.len) return;
    const bool dense = is_dense(a);
    const u32 lane = threadIdx.x & 31, lower = (1u << lane) - 1;
    const u32 threshold = threshold_of(a), ties = ties_of(a), n = candidates(a, dense, tile);
    u32 tied = (u32)(a.tallies[tile] >> 32);
    u64 to = (u32)a.tallies[tile] + (u64)min(tied, ties);
    for (u32 first = 0; first < n; first += 32) {
        const u32 i = first + lane;
        const float value = i < n ? candidate(a, dense, tile, i) : 0.0f;
        const u32 m = magnitude(value);
        const bool tie = i < n && m == threshold;
        const u32 equal = __ballot_sync(FULL, tie);
        const bool mine = i < n && (m > threshold || (tie && tied + __popc(equal & lower) < ties));
        const u32 kept = __ballot_sync(FULL, mine);
        if (mine) {
            const u64 at = tile * TILE + (dense ? i : a.places[tile * LISTED + i]);
            keep_one(a, to + __popc(kept & lower), at, value);
        }
        tied += __popc(equal);
        to += __popc(kept);
    }
}
