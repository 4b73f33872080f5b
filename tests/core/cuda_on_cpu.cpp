// Runs xxh3.cu on the CPU: a thread of a CUDA block is a fiber, and barriers and shuffles switch between fibers.
// Built by test_device_kernel.py as one shared library, with -DKERNEL="...".
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ucontext.h>
#include <map>
#include <vector>

#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx;

struct uint4 {
    unsigned x, y, z, w;
};

// The lowest and highest address that may be read; anything else is a fault of the kernel.
static uint64_t readable_from, readable_to;

template <class T>
static T __ldg(const T *at) {
    const uint64_t address = (uint64_t)at;
    if (address % sizeof(T) || address + sizeof(T) <= readable_from || address >= readable_to) {
        fprintf(stderr, "read of %zu bytes at offset %lld of %lld\n", sizeof(T),
                (long long)(address - readable_from), (long long)(readable_to - readable_from));
        abort();
    }
    return *at;
}

static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
static uint64_t __umul64hi(uint64_t a, uint64_t b) { return (uint64_t)((unsigned __int128)a * b >> 64); }
static unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = (uint64_t)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}

struct Meeting {  // of threads of a warp, or of a block
    unsigned size = 0, arrived = 0, round = 0;
    uint64_t word[32] = {};
};

static const unsigned BLOCK_THREADS = 256;
static ucontext_t scheduler, fiber[BLOCK_THREADS];
static bool done[BLOCK_THREADS];
static std::map<unsigned, Meeting> groups[BLOCK_THREADS / 32];  // of a warp, by the mask of its threads
static Meeting whole;
static bool progress;

static void meet(Meeting &meeting) {
    const unsigned round = meeting.round;
    progress = true;
    if (++meeting.arrived == meeting.size) {
        meeting.arrived = 0;
        meeting.round++;
        return;
    }
    const unsigned self = threadIdx.x;
    while (meeting.round == round) {
        swapcontext(&fiber[self], &scheduler);
        threadIdx.x = self;
    }
}

static void __syncthreads() { meet(whole); }

template <class T>
static T __shfl_sync(unsigned mask, T value, unsigned lane) {
    const unsigned self = threadIdx.x;
    if (!(mask >> self % 32 & 1) || !(mask >> lane % 32 & 1)) abort();
    Meeting &group = groups[self / 32][mask];
    group.size = __builtin_popcount(mask);
    group.word[self % 32] = (uint64_t)value;
    meet(group);
    const T result = (T)group.word[lane % 32];
    meet(group);
    return result;
}
template <class T>
static T __shfl_xor_sync(unsigned mask, T value, unsigned lanes) {
    return __shfl_sync(mask, value, threadIdx.x % 32 ^ lanes);
}

#include KERNEL

static const Batch *current;
static void body() {
    const unsigned self = threadIdx.x;
    digest_batch(*current);
    done[self] = true;
    progress = true;
}

extern "C" int launch(const void *batch, unsigned blocks, uint64_t from, uint64_t to) {
    static std::vector<std::vector<char>> stacks(BLOCK_THREADS, std::vector<char>(1 << 16));
    current = (const Batch *)batch;
    readable_from = from;
    readable_to = to;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        whole = Meeting{BLOCK_THREADS};
        for (auto &group : groups) group.clear();
        for (unsigned i = 0; i < BLOCK_THREADS; i++) {
            getcontext(&fiber[i]);
            fiber[i].uc_stack.ss_sp = stacks[i].data();
            fiber[i].uc_stack.ss_size = stacks[i].size();
            fiber[i].uc_link = &scheduler;
            makecontext(&fiber[i], body, 0);
            done[i] = false;
        }
        for (unsigned left = BLOCK_THREADS; left;) {
            progress = false;
            left = 0;
            for (unsigned i = 0; i < BLOCK_THREADS; i++) {
                if (done[i]) continue;
                threadIdx.x = i;
                swapcontext(&scheduler, &fiber[i]);
                left += !done[i];
            }
            if (left && !progress) return 1;  // threads wait for one that has left: a deadlock on a GPU too
        }
    }
    return 0;
}
