// The sums of many ranks' sorted entries, as a dense vector or as entries, and of ranks' rows.
//
// A block owns a tile of the vector. It adds one rank's entries after the other's, so that the order of the
// additions to an entry is that of the ranks, in every run; the indices of one rank are unique, so that no
// two threads meet. No entry of a dense sum is written twice, and nothing has to be zero before.
//
// `table`: of each rank, where its indices and its values lie and how many there are, three words.

#define TILE 4096  // entries of the vector
#define TILE_WORDS (TILE / WARP)
#define OWN_ENTRIES 4  // that a thread has under way together
#define BATCH (THREADS * OWN_ENTRIES)

// Of up to THREADS ranks, the entries that lie in a tile.
struct Parts {
    const Index* indices[THREADS];
    const float* values[THREADS];
    u32 before[THREADS];  // entries of the ranks before this one
    u64 sums[WARP + 1];
};

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

// Return the rank, of so many, to which an entry belongs when they are counted through.
__device__ inline int rank_of(const u32* before, int ranks, u32 entry) {
    int low = 0, high = ranks;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (before[middle] <= entry)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// Find the entries of so many ranks from `first` to before `end`; return how many there are. `skipped` grows
// by those below `first`.
__device__ inline u32 find_parts(
    const u64* table, int ranks, i64 first, i64 end, Parts& parts, u64* skipped) {
    u64 low = 0, count = 0;
    if ((int)threadIdx.x < ranks) {
        const u64* own = table + 3 * threadIdx.x;
        const Index* indices = (const Index*)own[0];
        low = first_from(indices, own[2], first);
        count = first_from(indices + low, smaller(own[2] - low, TILE), end);
        parts.indices[threadIdx.x] = indices + low;
        parts.values[threadIdx.x] = (const float*)own[1] + low;
    }
    sum_before_thread(low, parts.sums);
    *skipped += parts.sums[WARP];
    parts.before[threadIdx.x] = (u32)sum_before_thread(count, parts.sums);
    __syncthreads();
    return (u32)parts.sums[WARP];
}

// Sum a tile up. `touched`: a bit for each place that a rank has an entry for, where KEEPS_TOUCHED. Return
// how many entries there are before the tile.
//
// The entries of all ranks are counted through and loaded many at a time, whichever rank they belong to: only
// the additions, in shared memory, wait for each other.
template <bool KEEPS_TOUCHED>
__device__ inline u64 add_tile(
    const u64* table, int ranks, i64 first, i64 end, Parts& parts, float* tile, u32* touched) {
    u64 skipped = 0;
    for (int i = threadIdx.x; i < TILE; i += THREADS) tile[i] = 0;
    if (KEEPS_TOUCHED && threadIdx.x < TILE_WORDS) touched[threadIdx.x] = 0;
    for (int rank = 0; rank < ranks; rank += THREADS) {
        int here = ranks - rank < THREADS ? ranks - rank : THREADS;
        u32 entries = find_parts(table + 3 * rank, here, first, end, parts, &skipped);
        for (u32 base = 0; base < entries; base += BATCH) {
            int owners[OWN_ENTRIES], places[OWN_ENTRIES];
            float values[OWN_ENTRIES];
#pragma unroll
            for (int own = 0; own < OWN_ENTRIES; own++) {
                u32 entry = base + own * THREADS + threadIdx.x;
                owners[own] = -1;
                if (entry >= entries) continue;
                int owner = owners[own] = rank_of(parts.before, here, entry);
                u32 inside = entry - parts.before[owner];
                places[own] = (int)((i64)parts.indices[owner][inside] - first);
                values[own] = parts.values[owner][inside];
            }
            if (KEEPS_TOUCHED) {
#pragma unroll
                for (int own = 0; own < OWN_ENTRIES; own++)
                    if (owners[own] >= 0) atomicOr(touched + places[own] / WARP, 1u << places[own] % WARP);
            }
            u32 end_of_batch = entries - base < BATCH ? entries : base + BATCH;
            int last = rank_of(parts.before, here, end_of_batch - 1);
            for (int owner = rank_of(parts.before, here, base); owner <= last; owner++) {
#pragma unroll
                for (int own = 0; own < OWN_ENTRIES; own++)
                    if (owners[own] == owner) tile[places[own]] += values[own];
                __syncthreads();
            }
        }
    }
    return skipped;
}

__device__ inline i64 end_of_tile(i64 first, i64 size) { return first + TILE < size ? first + TILE : size; }

// The sum as a dense vector, a tile a block.
extern "C" __global__ void RESIDENT add_to_dense(const u64* table, int ranks, i64 size, float* dense) {
    __shared__ float tile[TILE];
    __shared__ Parts parts;
    i64 first = (i64)blockIdx.x * TILE, end = end_of_tile(first, size);
    add_tile<false>(table, ranks, first, end, parts, tile, 0);
    for (i64 i = first + threadIdx.x; i < end; i += THREADS) dense[i] = tile[i - first];
}

// The sum as sorted entries, zeros that came of adding included, in two kernels. In the first each block
// writes those of its `tiles` consecutive tiles, in order, from the place on that would be theirs if no two
// ranks shared an index before: nobody else writes there. `ranges`: all blocks' first places, then how many
// each has written.
extern "C" __global__ void RESIDENT add_to_ranges(
    const u64* table, int ranks, i64 size, i64 tiles, Index* indices, float* values, u64* ranges) {
    __shared__ float tile[TILE];
    __shared__ u32 touched[TILE_WORDS];
    __shared__ u32 before[TILE_WORDS];
    __shared__ Parts parts;
    i64 first = (i64)blockIdx.x * tiles * TILE, stop = first + tiles * TILE;
    if (stop > size) stop = size;
    u64 start = 0, written = 0;
    for (i64 low = first; low < stop; low += TILE) {
        u64 skipped = add_tile<true>(table, ranks, low, end_of_tile(low, size), parts, tile, touched);
        if (low == first) start = skipped;
        u32 count = threadIdx.x < TILE_WORDS ? __popc(touched[threadIdx.x]) : 0;
        u64 own = sum_before_thread(count, parts.sums);
        if (threadIdx.x < TILE_WORDS) before[threadIdx.x] = (u32)own;
        __syncthreads();
        for (int word = warp_of(); word < TILE_WORDS; word += WARPS) {
            u32 bits = touched[word];
            if (!(bits >> lane_of() & 1)) continue;
            int place = word * WARP + lane_of();
            u64 filled = start + written + before[word] + __popc(bits & lanes_below());
            indices[filled] = (Index)(low + place);
            values[filled] = tile[place];
        }
        written += parts.sums[WARP];
        __syncthreads();
    }
    if (threadIdx.x) return;
    ranges[blockIdx.x] = start;
    ranges[gridDim.x + blockIdx.x] = written;
}

// The second, of as many blocks: what they have written, without the gaps. How many there are comes after
// `ranges`.
extern "C" __global__ void RESIDENT join_ranges(
    u64* __restrict__ ranges, const Index* __restrict__ from_indices, const float* __restrict__ from_values,
    Index* __restrict__ indices, float* __restrict__ values) {
    __shared__ u64 sums[WARP + 1];
    const u64* counts = ranges + gridDim.x;
    u64 own = 0, start = ranges[blockIdx.x], count = counts[blockIdx.x];
#pragma unroll 4
    for (u32 block = threadIdx.x; block < blockIdx.x; block += THREADS) own += counts[block];
    sum_before_thread(own, sums);
    u64 before = sums[WARP];
#pragma unroll 4
    for (u64 i = threadIdx.x; i < count; i += THREADS) {
        indices[before + i] = from_indices[start + i];
        values[before + i] = from_values[start + i];
    }
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) ranges[2 * gridDim.x] = before + count;
}

// ---- Rows ----

#define ABREAST 4  // rows whose entries a thread has under way together

// Four entries of a row.
struct Quad {
    float values[4];
    __device__ void add(const Quad& other) {
#pragma unroll
        for (int i = 0; i < 4; i++) values[i] += other.values[i];
    }
};

__device__ inline Quad load_quad(const float* from) {
    uint4 words = *(const uint4*)from;
    Quad quad;
    quad.values[0] = __uint_as_float(words.x), quad.values[1] = __uint_as_float(words.y);
    quad.values[2] = __uint_as_float(words.z), quad.values[3] = __uint_as_float(words.w);
    return quad;
}

// The sum of rows, one after the other: `own` is number `place` of them, and before and after it come
// `others`, which lie `stride` apart, a multiple of four. `aligned`: whether `own` begins at one of 16 bytes.
extern "C" __global__ void RESIDENT add_rows(
    const float* others, i64 stride, int rows, const float* own, int aligned, int place, i64 size,
    float* sums) {
    for (i64 first = 4 * thread_of_grid(); first < size; first += 4 * threads_of_grid()) {
        bool is_whole = first + 4 <= size;
        Quad mine;
        if (aligned && is_whole) {
            mine = load_quad(own + first);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) mine.values[i] = first + i < size ? own[first + i] : 0;
        }
        // Past `size` a row has room that may hold anything; its sums are not written.
        const float* row = others + first;
        Quad sum = place ? load_quad(row) : mine;
        for (int next = 1; next < rows; next += ABREAST) {
            Quad quads[ABREAST];
#pragma unroll
            for (int i = 0; i < ABREAST; i++) {
                int number = next + i;
                if (number < rows && number != place)
                    quads[i] = load_quad(row + (number - (number > place)) * stride);
            }
#pragma unroll
            for (int i = 0; i < ABREAST; i++)
                if (next + i < rows) sum.add(next + i == place ? mine : quads[i]);
        }
        if (is_whole) {
            __stwb(
                (uint4*)(sums + first),
                make_uint4(
                    __float_as_uint(sum.values[0]), __float_as_uint(sum.values[1]),
                    __float_as_uint(sum.values[2]), __float_as_uint(sum.values[3])));
            continue;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (first + i < size) sums[first + i] = sum.values[i];
    }
}

// The entries put into a vector, in place of what is there.
extern "C" __global__ void put(const Index* indices, const float* values, i64 entries, float* dense) {
    for (i64 i = thread_of_grid(); i < entries; i += threads_of_grid()) dense[indices[i]] = values[i];
}
