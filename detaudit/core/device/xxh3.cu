// XXH3-64 (seed 0) of the leaves of device tensors, and copies of small tensors, several tensors per launch.
//
// The hash is that of Yann Collet's xxHash (XXH3, specification in its doc/xxhash_spec.md), bit for bit.
// What makes it fit a GPU: the eight accumulators of a long input only meet in a "scramble" after each block of
// 1,024 bytes, and what a block's sixteen 64-byte stripes add to them does not depend on them. So stripes are
// summed in parallel, by four threads to a stripe with 16 bytes (two accumulators) each, and only the
// scrambles, a handful of instructions per block, are sequential. How many stripes of a leaf are summed at a
// time depends on how many leaves there are to keep the GPU busy with.
//
// Included without any header: NVRTC compiles this file as it is.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

const u32 THREADS = 256;
const u32 MAX_DIMS = 4;
const u32 MAX_SOURCES = 8;
const u32 LEAF_BYTES = 65536;
const u32 STRIPE = 64, BLOCK_STRIPES = 16, BLOCK_BYTES = 1024;
const u32 AHEAD = 4;         // loads of 16 bytes that a thread has in flight
const u32 MIN_RESIDENT = 4;  // thread blocks per multiprocessor
const u32 FULL_WARP = 0xffffffffu;

const u64 PRIME32_1 = 0x9E3779B1ull, PRIME32_2 = 0x85EBCA77ull, PRIME32_3 = 0xC2B2AE3Dull;
const u64 PRIME64_1 = 0x9E3779B185EBCA87ull, PRIME64_2 = 0xC2B2AE3D27D4EB4Full;
const u64 PRIME64_3 = 0x165667B19E3779F9ull, PRIME64_4 = 0x85EBCA77C2B2AE63ull, PRIME64_5 = 0x27D4EB2F165667C5ull;
const u64 PRIME_MX1 = 0x165667919E3779F9ull, PRIME_MX2 = 0x9FB21C651E98DF25ull;

// The default secret's 192 bytes, little-endian; in constant memory, from where thread blocks with many leaves
// copy it to their own, and in global memory, where threads that want a few words once have them sooner.
#define SECRET_WORDS \
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull, \
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull, \
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull, \
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull, \
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull, \
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull
__constant__ u64 SECRET[24] = {SECRET_WORDS};
__device__ const u64 SECRET_IN_GLOBAL[24] = {SECRET_WORDS};

__constant__ u64 INITIAL[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                               PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

// Where the pieces of work are; detaudit/core/device/plan.py builds the same layout.
enum Kind {
    COPY = 0,
    THREAD_PER_LEAF = 1,
    GROUP_OF_4 = 2,
    GROUP_OF_8 = 3,
    GROUP_OF_16 = 4,
    GROUP_OF_32 = 5,
    BLOCK_PER_LEAF = 6,
};

struct Source {
    u64 base;         // address of the first byte
    u64 out;          // address of the first leaf digest, or of the copy
    u32 first_block;  // thread blocks first_block to first_block + blocks - 1 work on it
    u32 blocks;
    u64 rows;         // rows of row_bytes contiguous bytes each
    u64 row_bytes;
    u64 stride[MAX_DIMS];  // bytes between rows, outermost dimension first
    u64 size[MAX_DIMS];
    u32 dims;
    u32 rows_per_leaf;  // more than 1 only where rows follow each other without a gap
    u32 leaves_per_row;
    u32 leaves;
    u32 kind;
    u32 alignment;  // 16, 8, or 4 for any: of every leaf's first byte
};

struct Batch {
    u32 count, padding[3];
    Source source[MAX_SOURCES];
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

// 16 aligned bytes, past the L1 cache. The L2 cache keeps them as any other: the model is about to read them.
__device__ __forceinline__ uint4 read_aligned(const uint4 *at) {
#ifdef __CUDA_ARCH__
    uint4 words;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(at));
    return words;
#else
    return __ldg(at);
#endif
}

__device__ __forceinline__ u32 read32(const u8 *at) {
    return at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24;
}

template <u32 ALIGNMENT>
__device__ __forceinline__ Pair read128(const u8 *at) {
    if (ALIGNMENT == 16) {
        const uint4 words = read_aligned((const uint4 *)at);
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

// What 8 bytes add to their own accumulator; the plain bytes are added to the neighbouring one.
__device__ __forceinline__ u64 keyed(u64 data, u64 key) {
    const u64 value = data ^ key;
    return (u64)(u32)value * (u32)(value >> 32);
}

// Two neighbouring accumulators: numbers 2 * (thread & 3) and the next, or what is to be added to them.
struct Sums {
    u64 even, odd;

    __device__ __forceinline__ void add(Pair data, u64 even_key, u64 odd_key) {
        even += data.high + keyed(data.low, even_key);
        odd += data.low + keyed(data.high, odd_key);
    }
    __device__ __forceinline__ void scramble(u64 even_key, u64 odd_key) {
        even = (even ^ even >> 47 ^ even_key) * PRIME32_1;
        odd = (odd ^ odd >> 47 ^ odd_key) * PRIME32_1;
    }
};

template <u32 ALIGNMENT>
__device__ __forceinline__ Pair last_stripe(Leaf leaf, u32 thread) {
    const u8 *at = leaf.start + leaf.bytes - STRIPE + 16 * (thread & 3);
    return leaf.bytes % ALIGNMENT == 0 ? read128<ALIGNMENT>(at) : read128<4>(at);
}

// Adds the last stripe to the accumulators, which four neighbouring threads hold, and merges them.
__device__ __forceinline__ u64 finished(Sums sums, Pair last, u32 bytes, const u64 *secret, u32 thread, u32 mask) {
    const u32 offset = 16 * (thread & 3);
    sums.add(last, secret64(secret, 121 + offset), secret64(secret, 129 + offset));
    u64 merged = folded_product(sums.even ^ secret64(secret, 11 + offset), sums.odd ^ secret64(secret, 19 + offset));
    merged += __shfl_xor_sync(mask, merged, 1);
    merged += __shfl_xor_sync(mask, merged, 2);
    return avalanche(bytes * PRIME64_1 + merged);
}

// ---- many leaves: a group of 4 * SLOTS threads each ----

template <u32 SLOTS>
__device__ __forceinline__ u64 over_slots(u64 sum, u32 mask) {
    for (u32 step = 4; step < 4 * SLOTS; step *= 2) sum += __shfl_xor_sync(mask, sum, step);
    return sum;
}

template <u32 ALIGNMENT, u32 SLOTS>
__device__ __forceinline__ u64 group_hash(Leaf leaf, const u64 *secret, u32 thread) {
    const u32 batch = AHEAD * SLOTS, blocks = batch > BLOCK_STRIPES ? batch / BLOCK_STRIPES : 1;
    const u32 lane = 2 * (thread & 3), slot = thread / 4 % SLOTS;
    const u32 mask = SLOTS == 8 ? FULL_WARP : ((1u << 4 * SLOTS) - 1) << thread % 32 / (4 * SLOTS) * (4 * SLOTS);
    const u32 stripes = (leaf.bytes - 1) / STRIPE, scrambled = stripes / BLOCK_STRIPES * BLOCK_STRIPES;
    const u8 *at = leaf.start + STRIPE * slot + 8 * lane;
    const Pair last = last_stripe<ALIGNMENT>(leaf, thread);
    Sums sums = {INITIAL[lane], INITIAL[lane + 1]}, part[blocks] = {};
    for (u32 first = 0; first < stripes; first += batch) {
        Pair data[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++)
            if (first + slot + SLOTS * i < stripes) data[i] = read128<ALIGNMENT>(at + STRIPE * (first + SLOTS * i));
        const u64 *key = secret + first % BLOCK_STRIPES + slot + lane;
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            const u32 n = SLOTS * i % BLOCK_STRIPES;
            if (first + slot + SLOTS * i < stripes) part[i * blocks / AHEAD].add(data[i], key[n], key[n + 1]);
        }
#pragma unroll
        for (u32 i = 0; i < blocks; i++) {
            const u32 end = first + batch / blocks * (i + 1);
            if (end % BLOCK_STRIPES || end > scrambled) continue;
            sums.even += over_slots<SLOTS>(part[i].even, mask);
            sums.odd += over_slots<SLOTS>(part[i].odd, mask);
            sums.scramble(secret[16 + lane], secret[17 + lane]);
            part[i] = {0, 0};
        }
    }
    // What was not scrambled away is of one block at most.
    for (u32 i = 1; i < blocks; i++) part[0] = {part[0].even + part[i].even, part[0].odd + part[i].odd};
    sums.even += over_slots<SLOTS>(part[0].even, mask);
    sums.odd += over_slots<SLOTS>(part[0].odd, mask);
    return finished(sums, last, leaf.bytes, secret, thread, mask);
}

template <u32 ALIGNMENT, u32 SLOTS>
__device__ __forceinline__ void group_per_leaf(const Source &source, u32 block, const u64 *secret) {
    const u32 size = 4 * SLOTS, groups = THREADS / size;
    for (u32 at = block * groups + threadIdx.x / size; at < source.leaves; at += source.blocks * groups) {
        const Leaf leaf = leaf_at(source, at);
        const u64 hash = leaf.bytes > 240 ? group_hash<ALIGNMENT, SLOTS>(leaf, secret, threadIdx.x)
                                          : hash_short(leaf.start, leaf.bytes, secret);
        if (threadIdx.x % size == 0) ((u64 *)source.out)[at] = hash;
    }
}

// ---- few leaves: a thread block each ----
//
// Its warps take two blocks at a time and leave their sums in shared memory, and four threads go through these.

template <u32 ALIGNMENT>
__device__ __forceinline__ void sum_two_blocks(const u8 *at, u32 stripes, const u64 *secret, u64 *sums, u32 thread) {
    const u32 lane = 2 * (thread & 3), slot = thread / 4;
    Pair data[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        if (8 * i + slot < stripes) data[i] = read128<ALIGNMENT>(at + 512 * i + 16 * thread);
    Sums block[2] = {{0, 0}, {0, 0}};
    const u64 *key = secret + slot + lane;
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        if (8 * i + slot < stripes) block[i / 2].add(data[i], key[8 * (i % 2)], key[8 * (i % 2) + 1]);
    // The first exchange leaves each half of the warp one block, the second each quarter one accumulator.
    const bool second = thread & 16, odd = thread & 8;
    const Sums give = {second ? block[0].even : block[1].even, second ? block[0].odd : block[1].odd};
    Sums mine = {second ? block[1].even : block[0].even, second ? block[1].odd : block[0].odd};
    mine.even += __shfl_xor_sync(FULL_WARP, give.even, 16);
    mine.odd += __shfl_xor_sync(FULL_WARP, give.odd, 16);
    u64 sum = (odd ? mine.odd : mine.even) + __shfl_xor_sync(FULL_WARP, odd ? mine.even : mine.odd, 8);
    sum += __shfl_xor_sync(FULL_WARP, sum, 4);
    if ((thread & 4) == 0) sums[8 * (thread / 16) + lane + (odd ? 1 : 0)] = sum;
}

template <u32 ALIGNMENT>
__device__ __forceinline__ void block_per_leaf(const Source &source, u32 block, const u64 *secret, u64 *sums) {
    const u32 thread = threadIdx.x % 32, warp = threadIdx.x / 32, lane = 2 * (thread & 3);
    for (u32 at = block; at < source.leaves; at += source.blocks) {
        const Leaf leaf = leaf_at(source, at);
        if (leaf.bytes <= 240) {
            if (threadIdx.x == 0) ((u64 *)source.out)[at] = hash_short(leaf.start, leaf.bytes, secret);
            continue;
        }
        const u32 stripes = (leaf.bytes - 1) / STRIPE, scrambles = stripes / BLOCK_STRIPES;
        const Pair last = last_stripe<ALIGNMENT>(leaf, thread);
        for (u32 first = 2 * warp; first * BLOCK_STRIPES < stripes; first += 2 * THREADS / 32)
            sum_two_blocks<ALIGNMENT>(leaf.start + first * BLOCK_BYTES, stripes - first * BLOCK_STRIPES, secret,
                                      sums + 8 * first, thread);
        __syncthreads();
        if (warp == 0) {
            Sums total = {INITIAL[lane], INITIAL[lane + 1]};
#pragma unroll 4
            for (u32 i = 0; i < scrambles; i++) {
                total.even += sums[8 * i + lane];
                total.odd += sums[8 * i + lane + 1];
                total.scramble(secret[16 + lane], secret[17 + lane]);
            }
            if (stripes % BLOCK_STRIPES) {
                total.even += sums[8 * scrambles + lane];
                total.odd += sums[8 * scrambles + lane + 1];
            }
            const u64 hash = finished(total, last, leaf.bytes, secret, thread, FULL_WARP);
            if (thread == 0) ((u64 *)source.out)[at] = hash;
        }
        __syncthreads();
    }
}

// ---- short leaves, and copies ----

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

template <u32 ALIGNMENT>
__device__ __forceinline__ void many_leaves(const Source &source, u32 block, const u64 *secret) {
    switch (source.kind) {
        case GROUP_OF_4: return group_per_leaf<ALIGNMENT, 1>(source, block, secret);
        case GROUP_OF_8: return group_per_leaf<ALIGNMENT, 2>(source, block, secret);
        case GROUP_OF_16: return group_per_leaf<ALIGNMENT, 4>(source, block, secret);
        case GROUP_OF_32: return group_per_leaf<ALIGNMENT, 8>(source, block, secret);
    }
}

__device__ __forceinline__ void run(const Source &source) {
    __shared__ u64 secret[24];
    __shared__ u64 sums[LEAF_BYTES / BLOCK_BYTES * 8];
    const u32 block = blockIdx.x - source.first_block;
    if (source.kind == COPY) return copy_rows(source, block);
    if (source.kind == BLOCK_PER_LEAF) {
        if (source.alignment == 16) return block_per_leaf<16>(source, block, SECRET_IN_GLOBAL, sums);
        if (source.alignment == 8) return block_per_leaf<8>(source, block, SECRET_IN_GLOBAL, sums);
        return block_per_leaf<4>(source, block, SECRET_IN_GLOBAL, sums);
    }
    if (threadIdx.x < 24) secret[threadIdx.x] = SECRET[threadIdx.x];
    __syncthreads();
    if (source.kind == THREAD_PER_LEAF) return thread_per_leaf(source, block, secret);
    if (source.alignment == 16) return many_leaves<16>(source, block, secret);
    if (source.alignment == 8) return many_leaves<8>(source, block, secret);
    many_leaves<4>(source, block, secret);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_RESIDENT) digest_batch(const __grid_constant__ Batch batch) {
    u32 which = 0;
    while (which + 1 < batch.count && blockIdx.x >= batch.source[which + 1].first_block) which++;
    run(batch.source[which]);
}
