// The sum of many ranks' sorted entries, as a dense vector.
//
// A block owns a tile of the vector. It adds one rank's entries after the other's, so that the order of the
// additions to an entry is that of the ranks, in every run; the indices of one rank are unique, so that no two
// threads meet. No entry is written twice, and nothing has to be zero before.

#define TILE 4096  // entries of the vector

// Return the first of `count` sorted indices that is not below `bound`.
__device__ inline u64 first_from(const Index* indices, u64 count, i64 bound) {
    u64 low = 0, high = count;
    while (low < high) {
        u64 middle = low + (high - low) / 2;
        if ((i64)indices[middle] < bound)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// `starts`, `counts`: where each rank's entries begin in `indices` and `values`, and how many there are.
// Every sum is divided by `divisor`.
extern "C" __global__ void add_ranks(
    const Index* indices, const float* values, const u64* starts, const u64* counts, int ranks,
    float* dense, i64 size, float divisor) {
    __shared__ float tile[TILE];
    __shared__ u64 lows[THREADS], highs[THREADS];
    i64 first = (i64)blockIdx.x * TILE, end = first + TILE < size ? first + TILE : size;
    for (int i = threadIdx.x; i < TILE; i += THREADS) tile[i] = 0;
    for (int rank = 0; rank < ranks; rank += THREADS) {
        int own = rank + threadIdx.x;
        if (own < ranks) {
            u64 start = starts[own], low = first_from(indices + start, counts[own], first);
            lows[threadIdx.x] = start + low;
            highs[threadIdx.x] = start + low + first_from(indices + start + low, counts[own] - low, end);
        }
        __syncthreads();
        for (int other = 0; other < THREADS && rank + other < ranks; other++) {
            for (u64 i = lows[other] + threadIdx.x; i < highs[other]; i += THREADS)
                tile[(i64)indices[i] - first] += values[i];
            __syncthreads();
        }
    }
    __syncthreads();
    for (i64 i = first + threadIdx.x; i < end; i += THREADS) dense[i] = tile[i - first] / divisor;
}

// The entries put into a vector, in place of what is there.
extern "C" __global__ void put(const Index* indices, const float* values, i64 entries, float* dense) {
    for (i64 i = thread_of_grid(); i < entries; i += threads_of_grid()) dense[indices[i]] = values[i];
}
