// What all kernels share. It comes before each of the other files; NVRTC needs no header for it.
//
// The macro INDEX_64 chooses indices past 2^31 - 1. Entries of vectors are float32, here as their bits.
//
// A magnitude is a float32 without its sign, as an integer: finite ones order like integers, and those of
// infinity and NaN come above all others.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifdef INDEX_64
typedef i64 Index;
#else
typedef int Index;
#endif

#define WHOLE_WARP 0xffffffffu
#define MAGNITUDE 0x7fffffffu
#define INFINITE 0x7f800000u
#define WARP 32
#define THREADS 256  // of a block, unless its kernel says otherwise
#define WARPS (THREADS / WARP)

// What grids are made for: so many blocks of a kernel on each multiprocessor at a time.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
#define RESIDENT __launch_bounds__(THREADS, 4)
#else
#define RESIDENT __launch_bounds__(THREADS, 5)
#endif

__device__ inline int lane_of() { return threadIdx.x % WARP; }
__device__ inline int warp_of() { return threadIdx.x / WARP; }
__device__ inline u32 lanes_below() { return (1u << lane_of()) - 1u; }
__device__ inline i64 warp_of_grid() { return (i64)blockIdx.x * WARPS + warp_of(); }
__device__ inline i64 thread_of_grid() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline i64 threads_of_grid() { return (i64)gridDim.x * blockDim.x; }
__device__ inline u64 smaller(u64 a, u64 b) { return a < b ? a : b; }
__device__ inline u32 larger(u32 a, u32 b) { return a > b ? a : b; }

// A number that other blocks have just changed: not from the cache of this multiprocessor.
__device__ inline u64 fresh(const u64* place) { return *(const volatile u64*)place; }

// Return the largest of `value` among so many neighbouring lanes, a power of two, to all of them.
__device__ inline u32 largest_among(u32 value, int lanes) {
    for (int apart = lanes / 2; apart; apart /= 2)
        value = larger(value, __shfl_xor_sync(WHOLE_WARP, value, apart));
    return value;
}

__device__ inline u64 sum_of_warp(u64 value) {
    for (int apart = WARP / 2; apart; apart /= 2) value += __shfl_xor_sync(WHOLE_WARP, value, apart);
    return value;
}

// Return the sum of `value` over this lane and those below it.
__device__ inline u64 sum_up_to_lane(u64 value) {
    for (int apart = 1; apart < WARP; apart *= 2) {
        u64 other = __shfl_up_sync(WHOLE_WARP, value, apart);
        if (lane_of() >= apart) value += other;
    }
    return value;
}

// Return the sum of `value` over the threads before this one; `shared`: 33 numbers, the last the total.
// All threads of the block call it.
__device__ inline u64 sum_before_thread(u64 value, u64* shared) {
    u64 up_to_lane = sum_up_to_lane(value);
    __syncthreads();  // some threads may still read what lies in `shared`
    if (lane_of() == WARP - 1) shared[warp_of()] = up_to_lane;
    __syncthreads();
    if (warp_of() == 0) {
        u64 own = lane_of() < (int)blockDim.x / WARP ? shared[lane_of()] : 0;
        u64 up_to_warp = sum_up_to_lane(own);
        shared[lane_of()] = up_to_warp - own;
        if (lane_of() == WARP - 1) shared[WARP] = up_to_warp;
    }
    __syncthreads();
    return shared[warp_of()] + up_to_lane - value;
}

// Tallies, by which the second of two kernels over the same ranges of warps knows where each warp's own part
// of the output begins: `COLUMNS` numbers of each warp of the grid, then the sums of each block's.
// All threads of a block call both functions; `of_warps`: COLUMNS * WARPS numbers, shared.

// `own`: of this warp, the same in all its lanes.
template <int COLUMNS>
__device__ inline void write_tallies(const u64* own, u64* tallies, u64* of_warps) {
    u64* blocks = tallies + (u64)gridDim.x * WARPS * COLUMNS;
#pragma unroll
    for (int column = 0; column < COLUMNS; column++)
        if (lane_of() == 0) {
            of_warps[column * WARPS + warp_of()] = own[column];
            tallies[warp_of_grid() * COLUMNS + column] = own[column];
        }
    __syncthreads();
    if (threadIdx.x >= COLUMNS) return;
    u64 total = 0;
    for (int warp = 0; warp < WARPS; warp++) total += of_warps[threadIdx.x * WARPS + warp];
    blocks[(u64)blockIdx.x * COLUMNS + threadIdx.x] = total;
}

// Put the sums over all warps of the grid before this one into `before`.
template <int COLUMNS>
__device__ inline void read_tallies(const u64* tallies, u64* before, u64* of_warps) {
    const u64* blocks = tallies + (u64)gridDim.x * WARPS * COLUMNS;
    u64 own[COLUMNS] = {};
    for (u32 block = threadIdx.x; block < blockIdx.x; block += THREADS)
#pragma unroll
        for (int column = 0; column < COLUMNS; column++) own[column] += blocks[(u64)block * COLUMNS + column];
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
        own[column] = sum_of_warp(own[column]);
        if (lane_of() == 0) of_warps[column * WARPS + warp_of()] = own[column];
    }
    __syncthreads();
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
        before[column] = 0;
        for (int warp = 0; warp < WARPS; warp++) before[column] += of_warps[column * WARPS + warp];
        for (int warp = 0; warp < warp_of(); warp++)
            before[column] += tallies[((u64)blockIdx.x * WARPS + warp) * COLUMNS + column];
    }
}

// Whether this block is the last of `blocks` to come here; then what all of them have written before can be
// read, past the cache of this multiprocessor (`fresh`). All threads call it; `shared`: one number.
__device__ inline bool is_last_block(u64* ticket, u64 blocks, u64* shared) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // also for what the others of this block wrote before the barrier
        *shared = atomicAdd(ticket, (u64)1);
        __threadfence();
    }
    __syncthreads();
    return *shared == blocks - 1;
}

#define LANES 64     // sums side by side, one a thread
#define CHUNK 32768  // entries that one block adds up

#define AT_A_TIME 16  // of a thread's entries under way together

// Load the entries of a lane from `base` on, as many as are before `end`, zeros for the others.
__device__ inline void load_lane(const u32* vector, i64 base, i64 end, u32* entries) {
#pragma unroll
    for (int i = 0; i < AT_A_TIME; i++)
        entries[i] = base + i * LANES < end ? vector[base + i * LANES] : 0;
}

// Return the sum of 64 lanes, halves added to each other, to thread 0.
__device__ inline double sum_of_lanes(double own, double* lanes) {
    __syncthreads();
    lanes[threadIdx.x] = own;
    for (int half = LANES / 2; half; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half) lanes[threadIdx.x] += lanes[threadIdx.x + half];
    }
    __syncthreads();
    return lanes[0];
}
