// XXH3-64 (seed 0) of the leaves of device tensors, and copies of small tensors, several tensors per launch.
//
// The hash is that of Yann Collet's xxHash (XXH3, specification in its doc/xxhash_spec.md), bit for bit.
// What makes it fit a GPU: the eight accumulators of a long input only meet in a "scramble" after each block of
// 1,024 bytes, and what a block's sixteen 64-byte stripes add to them does not depend on them. So threads
// sum stripes in parallel, four to a stripe with 16 bytes (two accumulators) each, and only the scrambles, a
// handful of instructions per block, are sequential.
//
// Included without any header: NVRTC compiles this file as it is.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

const u32 THREADS = 256;
const u32 MAX_DIMS = 6;
const u32 MAX_SOURCES = 8;
const u32 LEAF_BYTES = 65536;
const u32 STRIPE = 64, BLOCK_STRIPES = 16, BLOCK_BYTES = 1024;
const u32 CHUNK_BLOCKS = 4, CHUNK_STRIPES = 64, CHUNK_BYTES = 4096;  // what a warp takes at a time
const u32 FULL_WARP = 0xffffffffu;

#ifndef MIN_BLOCKS
#define MIN_BLOCKS 2
#endif
#ifndef LOAD16
#define LOAD16 __ldg
#endif

const u64 PRIME32_1 = 0x9E3779B1ull, PRIME32_2 = 0x85EBCA77ull, PRIME32_3 = 0xC2B2AE3Dull;
const u64 PRIME64_1 = 0x9E3779B185EBCA87ull, PRIME64_2 = 0xC2B2AE3D27D4EB4Full;
const u64 PRIME64_3 = 0x165667B19E3779F9ull, PRIME64_4 = 0x85EBCA77C2B2AE63ull, PRIME64_5 = 0x27D4EB2F165667C5ull;
const u64 PRIME_MX1 = 0x165667919E3779F9ull, PRIME_MX2 = 0x9FB21C651E98DF25ull;

// The default secret's 192 bytes, little-endian.
__constant__ u64 SECRET[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

__constant__ u64 INITIAL[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                               PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

// Where the pieces of work are; detaudit/core/device/plan.py builds the same layout.
enum Kind { COPY = 0, THREAD_PER_LEAF = 1, QUAD_PER_LEAF = 2, WARP_PER_LEAF = 3, BLOCK_PER_LEAF = 4 };

struct Source {
    u64 base;             // address of the first byte
    u64 out;              // address of the first leaf digest, or of the copy
    u64 rows;             // rows of row_bytes contiguous bytes each
    u64 row_bytes;
    u64 stride[MAX_DIMS];  // bytes between rows, outermost dimension first
    u64 size[MAX_DIMS];
    u32 dims;
    u32 rows_per_leaf;    // more than 1 only where rows follow each other without a gap
    u32 leaves_per_row;
    u32 leaves;
    u32 kind;
    u32 alignment;        // 16, 8, or less: of every leaf's first byte
    u32 first_block;
    u32 blocks;
};

struct Batch {
    Source source[MAX_SOURCES];
    u32 count;
};

struct Leaf {
    const u8 *start;
    u32 bytes;
};

__device__ __noinline__ u64 row_offset(const Source *source, u64 row) {
    u64 offset = 0;
    for (u32 dim = source->dims - 1; dim > 0; dim--) {
        const u64 size = source->size[dim];
        const u64 outer = (row | size) >> 32 ? row / size : (u32)row / (u32)size;
        offset += (row - outer * size) * source->stride[dim];
        row = outer;
    }
    return offset + row * source->stride[0];
}

__device__ __forceinline__ const u8 *row_start(const Source &source, u64 row) {
    return (const u8 *)(source.base + (source.dims == 1 ? row * source.stride[0] : row_offset(&source, row)));
}

__device__ __forceinline__ Leaf leaf_at(const Source &source, u32 leaf) {
    if (source.leaves_per_row == 1) {
        const u64 row = (u64)leaf * source.rows_per_leaf;
        const u64 left = source.rows - row;
        const u32 rows = left < source.rows_per_leaf ? (u32)left : source.rows_per_leaf;
        return {row_start(source, row), (u32)(rows * source.row_bytes)};
    }
    const u32 row = leaf / source.leaves_per_row;
    const u64 offset = (u64)(leaf - row * source.leaves_per_row) * LEAF_BYTES;
    const u64 left = source.row_bytes - offset;
    return {row_start(source, row) + offset, left < LEAF_BYTES ? (u32)left : LEAF_BYTES};
}

// ---- reading ----

struct Pair {
    u64 low, high;
};

__device__ __forceinline__ u64 joined(u32 low, u32 high) { return low | (u64)high << 32; }

// 8 bytes at any address. Only words that hold a wanted byte are touched, so nothing outside the tensor's own
// 4-byte words is.
__device__ __forceinline__ u64 read64(const u8 *at) {
    const u32 past = (u32)(u64)at & 3;
    const u32 *words = (const u32 *)(at - past);
    const u32 low = __ldg(words), high = __ldg(words + 1);
    if (past == 0) return joined(low, high);
    const u32 next = __ldg(words + 2);
    return joined(__funnelshift_r(low, high, 8 * past), __funnelshift_r(high, next, 8 * past));
}

__device__ __forceinline__ u32 read32(const u8 *at) {
    return at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24;
}

template <u32 ALIGNMENT>
__device__ __forceinline__ Pair read128(const u8 *at) {
    if (ALIGNMENT == 16) {
        const uint4 words = LOAD16((const uint4 *)at);
        return {joined(words.x, words.y), joined(words.z, words.w)};
    }
    if (ALIGNMENT == 8) return {__ldg((const u64 *)at), __ldg((const u64 *)at + 1)};
    const u32 past = (u32)(u64)at & 3;
    const u32 *words = (const u32 *)(at - past);
    u32 word[5];
    for (u32 i = 0; i < 4; i++) word[i] = __ldg(words + i);
    if (past == 0) return {joined(word[0], word[1]), joined(word[2], word[3])};
    word[4] = __ldg(words + 4);
    for (u32 i = 0; i < 4; i++) word[i] = __funnelshift_r(word[i], word[i + 1], 8 * past);
    return {joined(word[0], word[1]), joined(word[2], word[3])};
}

// ---- XXH3 ----

__device__ __forceinline__ u64 secret64(const u64 *secret, u32 offset) {
    const u32 word = offset / 8, shift = offset % 8 * 8;
    return shift == 0 ? secret[word] : secret[word] >> shift | secret[word + 1] << (64 - shift);
}

__device__ __forceinline__ u64 folded_product(u64 a, u64 b) { return a * b ^ __umul64hi(a, b); }

__device__ __forceinline__ u64 avalanche(u64 hash) {
    hash = (hash ^ hash >> 37) * PRIME_MX1;
    return hash ^ hash >> 32;
}

__device__ __forceinline__ u64 mix16(const u8 *at, const u64 *secret, u32 offset) {
    return folded_product(read64(at) ^ secret64(secret, offset), read64(at + 8) ^ secret64(secret, offset + 8));
}

// Inputs of 1 to 240 bytes, by one thread.
__device__ __noinline__ u64 hash_short(const u8 *at, u32 bytes, const u64 *secret) {
    if (bytes <= 3) {
        const u32 mixed = (u32)at[0] << 16 | (u32)at[bytes / 2] << 24 | at[bytes - 1] | bytes << 8;
        u64 hash = mixed ^ (u64)((u32)secret[0] ^ (u32)(secret[0] >> 32));
        hash = (hash ^ hash >> 33) * PRIME64_2;
        hash = (hash ^ hash >> 29) * PRIME64_3;
        return hash ^ hash >> 32;
    }
    if (bytes <= 8) {
        u64 hash = joined(read32(at + bytes - 4), read32(at)) ^ secret[1] ^ secret[2];
        hash ^= (hash << 49 | hash >> 15) ^ (hash << 24 | hash >> 40);
        hash *= PRIME_MX2;
        hash = (hash ^ ((hash >> 35) + bytes)) * PRIME_MX2;
        return hash ^ hash >> 28;
    }
    if (bytes <= 16) {
        const u64 low = read64(at) ^ secret[3] ^ secret[4], high = read64(at + bytes - 8) ^ secret[5] ^ secret[6];
        const u64 swapped = joined(__byte_perm((u32)(low >> 32), 0, 0x0123), __byte_perm((u32)low, 0, 0x0123));
        return avalanche(bytes + swapped + high + folded_product(low, high));
    }
    u64 sum = bytes * PRIME64_1;
    if (bytes <= 128) {
        for (u32 i = 0; i < (bytes + 31) / 32; i++) {
            sum += mix16(at + 16 * i, secret, 32 * i);
            sum += mix16(at + bytes - 16 * (i + 1), secret, 32 * i + 16);
        }
        return avalanche(sum);
    }
    for (u32 i = 0; i < 8; i++) sum += mix16(at + 16 * i, secret, 16 * i);
    sum = avalanche(sum);
    for (u32 i = 8; i < bytes / 16; i++) sum += mix16(at + 16 * i, secret, 16 * (i - 8) + 3);
    return avalanche(sum + mix16(at + bytes - 16, secret, 119));
}

__device__ __forceinline__ u64 initial(u32 lane) {
    return INITIAL[lane];
}

// What 8 bytes add to their own accumulator; the plain bytes are added to the neighbouring one.
__device__ __forceinline__ u64 keyed(u64 data, u64 key) {
    const u64 value = data ^ key;
    return (u64)(u32)value * (u32)(value >> 32);
}

__device__ __forceinline__ u64 scrambled(u64 sum, u64 key) { return (sum ^ sum >> 47 ^ key) * PRIME32_1; }

// ---- long leaves: a warp sums chunks of four blocks ----
//
// Thread t of a warp reads the 16 bytes 16 * t of each half block: accumulators 2 * (t & 3) and the next, of
// stripes t / 4 and 8 + t / 4. After the reduction it holds the sum of block t / 8 for accumulator LANE(t).

__device__ __forceinline__ u32 lane_of(u32 thread) { return 2 * (thread & 3) + (thread >> 2 & 1); }

struct ChunkKeys {
    u64 word[2][2];

    __device__ __forceinline__ ChunkKeys(const u64 *secret, u32 thread) {
        const u32 first = thread / 4 + 2 * (thread & 3);
        for (u32 half = 0; half < 2; half++)
            for (u32 i = 0; i < 2; i++) word[half][i] = secret[first + 8 * half + i];
    }
};

template <u32 ALIGNMENT>
__device__ __forceinline__ u64 chunk_sum(const u8 *chunk, int stripes, const ChunkKeys &keys, u32 thread) {
    u64 sum[CHUNK_BLOCKS][2];
    Pair data[2 * CHUNK_BLOCKS];
    const u8 *at = chunk + 16 * thread;
    const bool whole = stripes >= (int)CHUNK_STRIPES;
    const int own = stripes - (int)(thread / 4);  // a stripe is there if its index is below this
#pragma unroll
    for (u32 i = 0; i < 2 * CHUNK_BLOCKS; i++)
        if (whole || (int)(8 * i) < own) data[i] = read128<ALIGNMENT>(at + 512 * i);
#pragma unroll
    for (u32 i = 0; i < 2 * CHUNK_BLOCKS; i++) {
        u64 add[2] = {0, 0};
        if (whole || (int)(8 * i) < own) {
            add[0] = data[i].high + keyed(data[i].low, keys.word[i % 2][0]);
            add[1] = data[i].low + keyed(data[i].high, keys.word[i % 2][1]);
        }
        for (u32 j = 0; j < 2; j++) sum[i / 2][j] = i % 2 ? sum[i / 2][j] + add[j] : add[j];
    }
    // Each step adds up two threads' sums and halves what a thread holds.
    const bool bit16 = thread & 16, bit8 = thread & 8, bit4 = thread & 4;
    u64 two[2][2], one[2];
#pragma unroll
    for (u32 b = 0; b < 2; b++)
        for (u32 j = 0; j < 2; j++)
            two[b][j] = (bit16 ? sum[b + 2][j] : sum[b][j]) +
                        __shfl_xor_sync(FULL_WARP, bit16 ? sum[b][j] : sum[b + 2][j], 16);
#pragma unroll
    for (u32 j = 0; j < 2; j++)
        one[j] = (bit8 ? two[1][j] : two[0][j]) + __shfl_xor_sync(FULL_WARP, bit8 ? two[0][j] : two[1][j], 8);
    return (bit4 ? one[1] : one[0]) + __shfl_xor_sync(FULL_WARP, bit4 ? one[0] : one[1], 4);
}

// Adds the last stripe to the accumulators (each group of eight threads holds all of them) and merges them.
__device__ __forceinline__ u64 finished(u64 sum, Leaf leaf, const u64 *secret, u32 thread) {
    const u32 lane = lane_of(thread);
    const u64 data = read64(leaf.start + leaf.bytes - STRIPE + 8 * lane);
    sum += __shfl_xor_sync(FULL_WARP, data, 4) + keyed(data, secret64(secret, 121 + 8 * lane));
    sum ^= secret64(secret, 11 + 8 * lane);
    u64 merged = folded_product(sum, __shfl_xor_sync(FULL_WARP, sum, 4));
    merged += __shfl_xor_sync(FULL_WARP, merged, 1);
    merged += __shfl_xor_sync(FULL_WARP, merged, 2);
    return avalanche(leaf.bytes * PRIME64_1 + merged);
}

template <u32 ALIGNMENT>
__device__ __forceinline__ void warp_per_leaf(const Source &source, u32 block, const u64 *secret) {
    const u32 thread = threadIdx.x % 32, lane = lane_of(thread);
    const ChunkKeys keys(secret, thread);
    const u64 scramble = secret[16 + lane];
    u64 *out = (u64 *)source.out;
    for (u32 at = block * (THREADS / 32) + threadIdx.x / 32; at < source.leaves; at += source.blocks * (THREADS / 32)) {
        const Leaf leaf = leaf_at(source, at);
        if (leaf.bytes <= 240) {
            if (thread == 0) out[at] = hash_short(leaf.start, leaf.bytes, secret);
            continue;
        }
        const u32 stripes = (leaf.bytes - 1) / STRIPE, blocks = (leaf.bytes - 1) / BLOCK_BYTES;
        u64 sum = initial(lane);
        for (u32 chunk = 0; chunk * CHUNK_STRIPES < stripes; chunk++) {
            const u64 part = chunk_sum<ALIGNMENT>(leaf.start + chunk * CHUNK_BYTES,
                                                  (int)(stripes - chunk * CHUNK_STRIPES), keys, thread);
#pragma unroll
            for (u32 i = 0; i < CHUNK_BLOCKS; i++) {
                sum += __shfl_sync(FULL_WARP, part, 8 * i + thread % 8);
                if (chunk * CHUNK_BLOCKS + i < blocks) sum = scrambled(sum, scramble);
            }
        }
        const u64 hash = finished(sum, leaf, secret, thread);
        if (thread == 0) out[at] = hash;
    }
}

// Eight warps share a leaf: they leave the blocks' sums in shared memory, and the first goes through them.
template <u32 ALIGNMENT>
__device__ __forceinline__ void block_per_leaf(const Source &source, u32 block, const u64 *secret, u64 *sums) {
    const u32 thread = threadIdx.x % 32, warp = threadIdx.x / 32, lane = lane_of(thread);
    const ChunkKeys keys(secret, thread);
    u64 *out = (u64 *)source.out;
    for (u32 at = block; at < source.leaves; at += source.blocks) {
        const Leaf leaf = leaf_at(source, at);
        if (leaf.bytes <= 240) {
            if (threadIdx.x == 0) out[at] = hash_short(leaf.start, leaf.bytes, secret);
            continue;
        }
        const u32 stripes = (leaf.bytes - 1) / STRIPE, blocks = (leaf.bytes - 1) / BLOCK_BYTES;
        for (u32 chunk = warp; chunk * CHUNK_STRIPES < stripes; chunk += THREADS / 32)
            sums[32 * chunk + thread] = chunk_sum<ALIGNMENT>(leaf.start + chunk * CHUNK_BYTES,
                                                             (int)(stripes - chunk * CHUNK_STRIPES), keys, thread);
        __syncthreads();
        if (warp == 0) {
            const u64 scramble = secret[16 + lane];
            u64 sum = initial(lane);
#pragma unroll 8
            for (u32 i = 0; i < blocks; i++) sum = scrambled(sum + sums[8 * i + thread % 8], scramble);
            if (stripes % BLOCK_STRIPES) sum += sums[8 * blocks + thread % 8];
            const u64 hash = finished(sum, leaf, secret, thread);
            if (thread == 0) out[at] = hash;
        }
        __syncthreads();
    }
}

// ---- leaves of at most 1,024 bytes: four threads each, which never scramble ----

template <u32 ALIGNMENT>
__device__ __forceinline__ u64 quad_sum(Leaf leaf, const u64 *secret, u32 thread) {
    const u32 lane = 2 * (thread & 3), stripes = (leaf.bytes - 1) / STRIPE;
    const u8 *at = leaf.start + 8 * lane;
    const Pair last = {read64(at + leaf.bytes - STRIPE), read64(at + leaf.bytes - STRIPE + 8)};
    u64 even = initial(lane) + last.high + keyed(last.low, secret64(secret, 121 + 8 * lane));
    u64 odd = initial(lane + 1) + last.low + keyed(last.high, secret64(secret, 129 + 8 * lane));
    const u32 AHEAD = 4;
    for (u32 first = 0; first < stripes; first += AHEAD) {
        Pair data[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++)
            if (first + i < stripes) data[i] = read128<ALIGNMENT>(at + STRIPE * (first + i));
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++)
            if (first + i < stripes) {
                even += data[i].high + keyed(data[i].low, secret[first + i + lane]);
                odd += data[i].low + keyed(data[i].high, secret[first + i + lane + 1]);
            }
    }
    return folded_product(even ^ secret64(secret, 11 + 8 * lane), odd ^ secret64(secret, 19 + 8 * lane));
}

template <u32 ALIGNMENT>
__device__ __forceinline__ void quad_per_leaf(const Source &source, u32 block, const u64 *secret) {
    const u32 quads = THREADS / 4, step = source.blocks * quads;
    u64 *out = (u64 *)source.out;
    // The bound is rounded up to whole warps, whose threads have to meet in the shuffles.
    for (u32 at = block * quads + threadIdx.x / 4; at < (source.leaves + 7) / 8 * 8; at += step) {
        Leaf leaf = {0, 0};
        u64 merged = 0;
        if (at < source.leaves) leaf = leaf_at(source, at);
        if (leaf.bytes > 240) merged = quad_sum<ALIGNMENT>(leaf, secret, threadIdx.x);
        merged += __shfl_xor_sync(FULL_WARP, merged, 1);
        merged += __shfl_xor_sync(FULL_WARP, merged, 2);
        if (threadIdx.x % 4 || at >= source.leaves) continue;
        out[at] = leaf.bytes > 240 ? avalanche(leaf.bytes * PRIME64_1 + merged)
                                   : hash_short(leaf.start, leaf.bytes, secret);
    }
}

__device__ __forceinline__ void thread_per_leaf(const Source &source, u32 block, const u64 *secret) {
    for (u32 at = block * THREADS + threadIdx.x; at < source.leaves; at += source.blocks * THREADS) {
        const Leaf leaf = leaf_at(source, at);
        ((u64 *)source.out)[at] = hash_short(leaf.start, leaf.bytes, secret);
    }
}

// Small tensors: their bytes in row-major order.
__device__ __forceinline__ void copy_rows(const Source &source, u32 block) {
    const u32 row_bytes = (u32)source.row_bytes, bytes = (u32)source.rows * row_bytes;
    for (u32 at = block * THREADS + threadIdx.x; at < bytes; at += source.blocks * THREADS) {
        const u32 row = at / row_bytes;
        ((u8 *)source.out)[at] = row_start(source, row)[at - row * row_bytes];
    }
}

__device__ __forceinline__ void run(const Source &source) {
    __shared__ u64 secret[24];
    __shared__ u64 sums[LEAF_BYTES / BLOCK_BYTES * 8];
    if (threadIdx.x < 24) secret[threadIdx.x] = SECRET[threadIdx.x];
    __syncthreads();
    const u32 block = blockIdx.x - source.first_block;
#define ALIGNED(function, ...)                                        \
    if (source.alignment == 16) function<16>(source, __VA_ARGS__);    \
    else if (source.alignment == 8) function<8>(source, __VA_ARGS__); \
    else function<4>(source, __VA_ARGS__)
    switch (source.kind) {
        case COPY: copy_rows(source, block); break;
        case THREAD_PER_LEAF: thread_per_leaf(source, block, secret); break;
        case QUAD_PER_LEAF: ALIGNED(quad_per_leaf, block, secret); break;
        case WARP_PER_LEAF: ALIGNED(warp_per_leaf, block, secret); break;
        case BLOCK_PER_LEAF: ALIGNED(block_per_leaf, block, secret, sums); break;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) digest_batch(const __grid_constant__ Batch batch) {
    u32 which = 0;
    while (which + 1 < batch.count && blockIdx.x >= batch.source[which + 1].first_block) which++;
    run(batch.source[which]);
}
