// Sums of squares of the segments of a flat vector, in float64.
//
// The order depends on the number of a segment's entries alone: each chunk of 32,768 is added up in 64 lanes,
// entry i in lane i mod 64, whose halves are added to each other; so are the sums of the chunks after it.

// Blocks of 64 threads, one a chunk: `count` entries from `first` on.
extern "C" __global__ void square_chunks(
    const u32* vector, const u64* firsts, const u64* counts, double* sums) {
    __shared__ double lanes[LANES];
    const u32* chunk = vector + firsts[blockIdx.x];
    i64 count = (i64)counts[blockIdx.x];
    double squares = 0;
    for (i64 base = threadIdx.x; base < count; base += AT_A_TIME * LANES) {
        u32 entries[AT_A_TIME];
        load_lane(chunk, base, count, entries);
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++) {
            double entry = __uint_as_float(entries[i]);
            squares += entry * entry;  // exact: a float32 squared needs 48 bits; what lies beyond is zeros
        }
    }
    squares = sum_of_lanes(squares, lanes);
    if (threadIdx.x == 0) sums[blockIdx.x] = squares;
}

// Blocks of 64 threads, one a segment, whose chunks are bounds[i] … bounds[i + 1] - 1.
extern "C" __global__ void add_chunks(const double* sums, const u64* bounds, double* squares) {
    __shared__ double lanes[LANES];
    double own = 0;
#pragma unroll 8
    for (u64 i = bounds[blockIdx.x] + threadIdx.x; i < bounds[blockIdx.x + 1]; i += LANES) own += sums[i];
    own = sum_of_lanes(own, lanes);
    if (threadIdx.x == 0) squares[blockIdx.x] = own;
}
