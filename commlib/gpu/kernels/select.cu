// Exact selection of the k largest magnitudes, ties by lowest index.
//
// 1. measure or sum: one pass over the vector finds the largest magnitude of every 64 entries. A histogram of
//    the leading 12 bits of these maxima gives a threshold that k or a few more of them reach, and hence at
//    least k entries. Where k is too much of the size, the histogram is one of all entries.
// 2. gather: what reaches the threshold lies in few blocks of 64; only they are read again. Each warp of the
//    grid owns a range of blocks and puts its candidates, in order, into a segment of the buffer.
// 3. refine, twice: the k-th largest by histograms of the next 10 bits and the last 9, over the candidates.
// 4. tally and emit: warp after warp, what is selected goes in order to the output.
//
// Candidates that do not fit are no error: the later steps then read the vector instead ("direct").
// Nothing here waits for the host. All counts are in a scratch, zeros before each run: the first kernel of a
// run clears that of the run before.

#define BLOCK 64          // entries
#define LEADING_SHIFT 19  // leaves the exponent and four bits of the mantissa
#define LEADING_BINS 4096
#define MIDDLE_BINS 1024
#define LAST_BINS 512
#define LOWERINGS 40     // of a guessed threshold
#define FEW_LOWERINGS 7  // enough for most gradients

enum State {
    NONFINITE,  // whether an entry is a NaN or an infinity: then nothing is selected
    SELECTED,   // entries in the output
    WANTED,     // entries to select
    RANK,       // of the last one wanted, among those that agree with PREFIX so far, from 1
    PREFIX,     // the bits of the last one's magnitude, as far as they are known
    LOWEST,     // the magnitude that candidates reach
    REACHED,    // how many reach it
    DIRECT,     // whether the vector is read instead of the candidates
    SHORT,      // whether fewer reach LOWEST than are wanted
    RESOLVED,   // whether WANTED and LOWEST of a guessed threshold are settled
    TICKETS,    // from here on one for each kernel that has a last block
    // Histograms, and how long the scratch is.
    OF_MAXIMA = 32,
    OF_LEADING = OF_MAXIMA + LEADING_BINS,
    OF_MIDDLE = OF_LEADING + LEADING_BINS,
    OF_LAST = OF_MIDDLE + MIDDLE_BINS,
    OF_FEW = OF_LAST + LAST_BINS,
    OF_ALL = OF_FEW + FEW_LOWERINGS + 1,
    SCRATCH_WORDS = OF_ALL + LOWERINGS + 1
};
enum Ticket { BY_MEASURE, BY_GATHER, BY_RECOUNT, BY_MIDDLE, BY_LAST, BY_MOMENTS, BY_FEW, BY_ALL };
enum Counting { NOTHING, MAXIMA, ENTRIES };

// ---- 1. The pass over the vector ----

// Sources: `whole` loads a lane's piece where all of the warp's are inside and aligned, so that many loads
// are under way without a branch between them; `part` any other piece, with zeros, which are no one's
// maximum, beyond the end. `finish` makes the entries of it.

// Entries as they come, 16 bytes a lane.
struct Plain {
    static const int PER_LANE = 4;
    static const int UNROLLED = 4;  // pieces under way before the first is used
    struct Piece {
        uint4 words;
    };
    const u32* vector;
    i64 size;
    bool aligned;  // to 16 bytes

    __device__ Piece whole(i64 first) const {
        Piece piece = {*(const uint4*)(vector + first)};
        return piece;
    }
    __device__ Piece part(i64 first) const {
        u32 words[4] = {0, 0, 0, 0};
        int inside = (int)smaller(PER_LANE, first < size ? size - first : 0);
        const u32* own = vector + first;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (i < inside) words[i] = own[i];
        Piece piece = {make_uint4(words[0], words[1], words[2], words[3])};
        return piece;
    }
    __device__ void finish(Piece&, i64, bool) const {}
    static __device__ u32 magnitude(const Piece& piece, int i) {
        const uint4& words = piece.words;
        return (i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w) & MAGNITUDE;
    }
};

// The sum of a gradient and a float32 residual, written to `out`; four entries a lane.
struct Summed {
    static const int PER_LANE = 4;
    static const int UNROLLED = 2;
    struct Piece {
        u32 gradient[4];
        u32 residual[4];
    };
    const u32* gradient;
    const u32* residual;
    u32* out;
    i64 size;
    bool aligned;  // the residual and the sum to 16 bytes, the gradient to four entries

    __device__ Piece whole(i64 first) const {
        Piece piece;
        uint4 words = *(const uint4*)(residual + first);
        piece.residual[0] = words.x, piece.residual[1] = words.y;
        piece.residual[2] = words.z, piece.residual[3] = words.w;
        words = *(const uint4*)(gradient + first);
        piece.gradient[0] = words.x, piece.gradient[1] = words.y;
        piece.gradient[2] = words.z, piece.gradient[3] = words.w;
        return piece;
    }
    __device__ Piece part(i64 first) const {
        Piece piece;
        int inside = (int)smaller(PER_LANE, first < size ? size - first : 0);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            piece.gradient[i] = i < inside ? gradient[first + i] : 0;
            piece.residual[i] = i < inside ? residual[first + i] : 0;
        }
        return piece;
    }
    __device__ void finish(Piece& piece, i64 first, bool is_whole) const {
        u32* sums = piece.gradient;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            sums[i] = __float_as_uint(__uint_as_float(sums[i]) + __uint_as_float(piece.residual[i]));
        if (is_whole) {
            // As an intrinsic: the compiler makes four stores of one through a pointer.
            __stwb((uint4*)(out + first), make_uint4(sums[0], sums[1], sums[2], sums[3]));
            return;
        }
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (first + i < size) out[first + i] = sums[i];
    }
    static __device__ u32 magnitude(const Piece& piece, int i) { return piece.gradient[i] & MAGNITUDE; }
};

__device__ inline void clear(u32* table, int bins) {
    for (int bin = threadIdx.x; bin < bins; bin += blockDim.x) table[bin] = 0;
    __syncthreads();
}

__device__ inline void add_to(u64* counts, const u32* table, int bins) {
    __syncthreads();
    for (int bin = threadIdx.x; bin < bins; bin += blockDim.x)
        if (table[bin]) atomicAdd(counts + bin, (u64)table[bin]);
}

// Return one number of a histogram, or the sum of two neighbours, the first at an even place: of the whole
// grid's, past the cache of this multiprocessor, or of this block's.
__device__ inline u64 count_at(const u64* counts, int bin) { return __ldcg(counts + bin); }
__device__ inline u64 count_at(const u32* table, int bin) { return table[bin]; }
__device__ inline u64 pair_at(const u64* counts, int bin) {
    uint4 both = __ldcg((const uint4*)(counts + bin));
    return ((u64)both.y << 32 | both.x) + ((u64)both.w << 32 | both.z);
}
__device__ inline u64 pair_at(const u32* table, int bin) { return (u64)table[bin] + table[bin + 1]; }

// Find the bin that holds the `rank`-th largest and its rank in there: `digit` and `left`, which stay as they
// are where fewer are counted. The whole block calls it; `shared`: 33 numbers.
template <int BINS, int OF_BLOCK, class Count>
__device__ inline void descend(const Count* counts, u64 rank, u64* shared, u64* digit, u64* left) {
    const int own = BINS > OF_BLOCK ? BINS / OF_BLOCK : 1;  // bins of a thread, from the top
    int top = BINS - 1 - (int)threadIdx.x * own;
    u64 count = 0;
    if (own == 1) {
        if (top >= 0) count = count_at(counts, top);
    } else {
#pragma unroll 4
        for (int i = 1; i < own; i += 2) count += pair_at(counts, top - i);
    }
    u64 above = sum_before_thread(count, shared);
    if (above < rank && rank <= above + count) {
#pragma unroll 4
        for (int i = 0; i < own; i++) {
            u64 here = count_at(counts, top - i);
            if (above < rank && rank <= above + here) *digit = top - i, *left = rank - above;
            above += here;
        }
    }
    __syncthreads();
}

// Clear the scratch that the run before this one left.
__device__ inline void clear_stale(u64* stale) {
    for (i64 i = thread_of_grid(); i < SCRATCH_WORDS; i += threads_of_grid()) stale[i] = 0;
}

template <class Source, int COUNTING>
__device__ inline void measure_all(
    const Source& source, u64* state, u64* stale, u32* maxima, u64 wanted, u32* table, u64* shared) {
    const int per_lane = Source::PER_LANE, unrolled = Source::UNROLLED, sharing = BLOCK / per_lane;
    const i64 per_warp = WARP * per_lane;
    clear_stale(stale);
    if (COUNTING != NOTHING) clear(table, LEADING_BINS);
    i64 groups = (source.size + per_warp - 1) / per_warp, stride = (i64)gridDim.x * WARPS * unrolled;
    for (i64 group = warp_of_grid() * unrolled; group < groups; group += stride) {
        typename Source::Piece pieces[unrolled];
        i64 first = group * per_warp + lane_of() * per_lane;
        bool is_whole = source.aligned && (group + unrolled) * per_warp <= source.size;
        if (is_whole) {
#pragma unroll
            for (int u = 0; u < unrolled; u++) pieces[u] = source.whole(first + u * per_warp);
        } else {
#pragma unroll
            for (int u = 0; u < unrolled; u++) pieces[u] = source.part(first + u * per_warp);
        }
#pragma unroll
        for (int u = 0; u < unrolled; u++) {
            i64 own = first + u * per_warp;
            source.finish(pieces[u], own, is_whole);
            if (COUNTING == ENTRIES) {
#pragma unroll
                for (int i = 0; i < per_lane; i++)
                    if (own + i < source.size)
                        atomicAdd(table + (Source::magnitude(pieces[u], i) >> LEADING_SHIFT), 1u);
            }
            u32 largest = 0;
#pragma unroll
            for (int i = 0; i < per_lane; i++) largest = larger(largest, Source::magnitude(pieces[u], i));
            largest = largest_among(largest, sharing);
            if (lane_of() % sharing || own >= source.size) continue;
            maxima[own / BLOCK] = largest;
            if (largest >= INFINITE) atomicExch(state + NONFINITE, (u64)1);
            if (COUNTING == MAXIMA) atomicAdd(table + (largest >> LEADING_SHIFT), 1u);
        }
    }
    if (COUNTING == NOTHING) return;
    u64* counts = state + OF_MAXIMA;
    add_to(counts, table, LEADING_BINS);
    if (!is_last_block(state + TICKETS + BY_MEASURE, gridDim.x, shared)) return;
    descend<LEADING_BINS, THREADS>(counts, wanted, shared, state + LOWEST, state + RANK);
    if (threadIdx.x) return;
    state[LOWEST] <<= LEADING_SHIFT;
    state[WANTED] = wanted;
}

#define MEASURE(NAME, COUNTING, BINS)                                                                  \
    extern "C" __global__ void RESIDENT measure_##NAME(                                                \
        const u32* vector, int aligned, u64* state, u64* stale, i64 size, u32* maxima, u64 wanted) {   \
        __shared__ u32 table[BINS];                                                                    \
        __shared__ u64 shared[WARP + 1];                                                               \
        Plain source = {vector, size, aligned != 0};                                                   \
        measure_all<Plain, COUNTING>(source, state, stale, maxima, wanted, table, shared);             \
    }                                                                                                  \
    extern "C" __global__ void RESIDENT sum_##NAME(                                                    \
        const u32* gradient, const u32* residual, u32* out, int aligned, u64* state, u64* stale,       \
        i64 size, u32* maxima, u64 wanted) {                                                           \
        __shared__ u32 table[BINS];                                                                    \
        __shared__ u64 shared[WARP + 1];                                                               \
        Summed source = {gradient, residual, out, size, aligned != 0};                                 \
        measure_all<Summed, COUNTING>(source, state, stale, maxima, wanted, table, shared);            \
    }

MEASURE(only, NOTHING, 1)
MEASURE(maxima, MAXIMA, LEADING_BINS)
MEASURE(entries, ENTRIES, LEADING_BINS)

// ---- 2. Candidates ----

#define ABREAST 2  // blocks whose entries are under way together

// Call `see(place, bits, inside)` for the blocks of 64 among this warp's `per_warp` whose maximum reaches
// `lowest`, in order, 32 entries at a time, all lanes together.
template <class See>
__device__ inline void see_blocks(
    const u32* vector, i64 size, const u32* maxima, i64 per_warp, u32 lowest, See& see) {
    i64 first = warp_of_grid() * per_warp, end = first + per_warp, blocks = (size + BLOCK - 1) / BLOCK;
    if (end > blocks) end = blocks;
    i64 own = first + lane_of();
    u32 maximum = own < end ? maxima[own] : 0;
    for (i64 base = first; base < end; base += WARP) {
        u32 mask = __ballot_sync(WHOLE_WARP, own < end && maximum >= lowest);
        own += WARP;
        maximum = own < end ? maxima[own] : 0;  // of the next turn, under way during this one
        while (mask) {
            u32 low[ABREAST], high[ABREAST], left = mask;
#pragma unroll
            for (int b = 0; b < ABREAST; b++, left &= left - 1) {
                i64 place = (base + __ffs(left) - 1) * BLOCK + lane_of();
                low[b] = left && place < size ? vector[place] : 0;
                high[b] = left && place + WARP < size ? vector[place + WARP] : 0;
            }
#pragma unroll
            for (int b = 0; b < ABREAST; b++, mask &= mask - 1) {
                if (!mask) break;
                i64 place = (base + __ffs(mask) - 1) * BLOCK + lane_of();
                see(place, low[b], place < size);
                see(place + WARP, high[b], place + WARP < size);
            }
        }
    }
}

struct CountReaching {
    u32 lowest;
    u32* table;
    u64 count;
    __device__ void operator()(i64, u32 bits, bool inside) {
        u32 magnitude = bits & MAGNITUDE;
        bool reaches = inside && magnitude >= lowest;
        if (reaches) atomicAdd(table + (magnitude >> LEADING_SHIFT), 1u);
        count += __popc(__ballot_sync(WHOLE_WARP, reaches));
    }
};

struct WriteReaching {
    u32 lowest;
    u32* candidates;
    Index* places;
    __device__ void operator()(i64 place, u32 bits, bool inside) {
        bool reaches = inside && (bits & MAGNITUDE) >= lowest;
        u32 mask = __ballot_sync(WHOLE_WARP, reaches);
        int before = __popc(mask & lanes_below());
        if (reaches) candidates[before] = bits, places[before] = (Index)place;
        candidates += __popc(mask), places += __popc(mask);
    }
};

// `segments`: where each warp's candidates begin, and how many there are.
extern "C" __global__ void RESIDENT gather(
    const u32* vector, u64* state, i64 size, const u32* maxima, i64 per_warp, u32* candidates, Index* places,
    u64 capacity, u64* segments) {
    __shared__ u32 table[LEADING_BINS];
    __shared__ u64 shared[WARP + 1];
    clear(table, LEADING_BINS);
    u32 lowest = (u32)state[LOWEST];
    CountReaching counted = {lowest, table, 0};
    see_blocks(vector, size, maxima, per_warp, lowest, counted);
    u64 start = 0;
    if (lane_of() == 0 && counted.count) start = atomicAdd(state + REACHED, counted.count);
    start = __shfl_sync(WHOLE_WARP, start, 0);
    if (lane_of() == 0) {
        segments[2 * warp_of_grid()] = start;
        segments[2 * warp_of_grid() + 1] = counted.count;
        if (start + counted.count > capacity) atomicExch(state + DIRECT, (u64)1);
    }
    if (counted.count && start + counted.count <= capacity) {
        WriteReaching written = {lowest, candidates + start, places + start};
        see_blocks(vector, size, maxima, per_warp, lowest, written);
    }
    u64* counts = state + OF_LEADING;
    add_to(counts, table, LEADING_BINS);
    if (!is_last_block(state + TICKETS + BY_GATHER, gridDim.x, shared)) return;
    descend<LEADING_BINS, THREADS>(counts, state[WANTED], shared, state + PREFIX, state + RANK);
    if (threadIdx.x) return;
    state[PREFIX] <<= LEADING_SHIFT;
    if (fresh(state + REACHED) < state[WANTED]) state[SHORT] = state[DIRECT] = 1;
}

// After a guessed threshold that too few reach: the leading digit, from all entries.
extern "C" __global__ void RESIDENT recount(const u32* vector, u64* state, i64 size) {
    __shared__ u32 table[LEADING_BINS];
    __shared__ u64 shared[WARP + 1];
    if (!state[SHORT]) return;
    clear(table, LEADING_BINS);
#pragma unroll 4
    for (i64 i = thread_of_grid(); i < size; i += threads_of_grid())
        atomicAdd(table + ((vector[i] & MAGNITUDE) >> LEADING_SHIFT), 1u);
    u64* counts = state + OF_LEADING;
    add_to(counts, table, LEADING_BINS);
    if (!is_last_block(state + TICKETS + BY_RECOUNT, gridDim.x, shared)) return;
    descend<LEADING_BINS, THREADS>(counts, state[WANTED], shared, state + PREFIX, state + RANK);
    if (threadIdx.x == 0) state[PREFIX] <<= LEADING_SHIFT;
}

// ---- 3. The next digit of the k-th largest ----

#define OWN_CANDIDATES 4  // that a thread has under way together

// Count the digits of those among `count` that agree with PREFIX so far; by `blocks` blocks.
__device__ inline void count_digit(
    const u32* vector, const u32* candidates, bool direct, i64 count, i64 blocks, u64 known, u32* table,
    int shift, int bits) {
    u32 prefix = (u32)known >> (shift + bits), mask = (1u << bits) - 1;
    i64 stride = blocks * THREADS;
    for (i64 first = thread_of_grid(); first < count; first += OWN_CANDIDATES * stride) {
        u32 magnitudes[OWN_CANDIDATES];
#pragma unroll
        for (int own = 0; own < OWN_CANDIDATES; own++) {
            i64 i = first + own * stride;
            magnitudes[own] = WHOLE_WARP;  // agrees with no prefix
            if (i < count) magnitudes[own] = (direct ? vector[i] : candidates[i]) & MAGNITUDE;
        }
#pragma unroll
        for (int own = 0; own < OWN_CANDIDATES; own++)
            if (magnitudes[own] >> (shift + bits) == prefix)
                atomicAdd(table + (magnitudes[own] >> shift & mask), 1u);
    }
}

// Of the grid, which is enough for all of the vector, only as many blocks do something as there are
// candidates for: a histogram that is added up has its price.
#define REFINE(NAME, SHIFT, BITS, COUNTS, TICKET)                                                      \
    extern "C" __global__ void RESIDENT refine_##NAME(                                                 \
        const u32* vector, u64* state, i64 size, const u32* candidates) {                              \
        __shared__ u32 table[1 << BITS];                                                               \
        __shared__ u64 shared[WARP + 1];                                                               \
        __shared__ u64 digit;                                                                          \
        bool direct = state[DIRECT] != 0;                                                              \
        i64 count = direct ? size : (i64)state[REACHED];                                               \
        i64 needed = (count + THREADS * OWN_CANDIDATES - 1) / (THREADS * OWN_CANDIDATES);              \
        i64 blocks = needed < 1 ? 1 : needed < gridDim.x ? needed : gridDim.x;                         \
        if (blockIdx.x >= blocks) return;                                                              \
        clear(table, 1 << BITS);                                                                       \
        count_digit(vector, candidates, direct, count, blocks, state[PREFIX], table, SHIFT, BITS);     \
        u64* counts = state + COUNTS;                                                                  \
        add_to(counts, table, 1 << BITS);                                                              \
        if (!is_last_block(state + TICKETS + TICKET, blocks, shared)) return;                          \
        if (threadIdx.x == 0) digit = 0;                                                               \
        descend<1 << BITS, THREADS>(counts, state[RANK], shared, &digit, state + RANK);                \
        if (threadIdx.x == 0) state[PREFIX] |= digit << SHIFT;                                         \
    }

REFINE(middle, 9, 10, OF_MIDDLE, BY_MIDDLE)
REFINE(last, 0, 9, OF_LAST, BY_LAST)

// ---- 4. The output, in order ----

// What a warp looks through: its segment of the candidates, or its range of the vector.
struct Span {
    const u32* vector;
    const u32* candidates;
    const Index* places;
    i64 first, count;
    bool direct;

    __device__ u32 bits(i64 i) const { return direct ? vector[first + i] : candidates[first + i]; }
    __device__ Index place(i64 i) const { return direct ? (Index)(first + i) : places[first + i]; }
};

__device__ inline Span span_of_warp(
    const u32* vector, i64 size, i64 per_warp, const u32* candidates, const Index* places,
    const u64* segments, const u64* state) {
    Span span = {vector, candidates, places, 0, 0, state[DIRECT] != 0};
    span.first = span.direct ? warp_of_grid() * per_warp * BLOCK : (i64)segments[2 * warp_of_grid()];
    span.count = span.direct ? per_warp * BLOCK : (i64)segments[2 * warp_of_grid() + 1];
    if (span.direct && span.first + span.count > size) span.count = size > span.first ? size - span.first : 0;
    return span;
}

enum Tally { ABOVE, TIES, TALLIED };

// How many of each warp's span are above the k-th largest, and how many tie with it.
extern "C" __global__ void RESIDENT tally(
    const u32* vector, const u64* state, i64 size, i64 per_warp, const u32* candidates, const Index* places,
    const u64* segments, u64* tallies) {
    __shared__ u64 of_warps[TALLIED * WARPS];
    Span span = span_of_warp(vector, size, per_warp, candidates, places, segments, state);
    u32 kth = (u32)state[PREFIX];
    u64 own[TALLIED] = {0, 0};
#pragma unroll 4
    for (i64 i = lane_of(); i < span.count; i += WARP) {
        u32 magnitude = span.bits(i) & MAGNITUDE;
        own[ABOVE] += magnitude > kth;
        own[TIES] += magnitude == kth;
    }
    own[ABOVE] = sum_of_warp(own[ABOVE]);
    own[TIES] = sum_of_warp(own[TIES]);
    write_tallies<TALLIED>(own, tallies, of_warps);
}

extern "C" __global__ void RESIDENT emit(
    const u32* vector, u64* state, i64 size, i64 per_warp, const u32* candidates,
    const Index* places, const u64* segments, const u64* tallies, Index* indices, u32* values) {
    __shared__ u64 of_warps[TALLIED * WARPS];
    u64 before[TALLIED];
    read_tallies<TALLIED>(tallies, before, of_warps);
    u64 above = before[ABOVE], ties = before[TIES];
    if (state[NONFINITE]) return;
    if (thread_of_grid() == 0) state[SELECTED] = state[WANTED];
    Span span = span_of_warp(vector, size, per_warp, candidates, places, segments, state);
    u32 kth = (u32)state[PREFIX];
    u64 wanted_ties = state[RANK];
    for (i64 base = 0; base < span.count; base += WARP) {
        i64 i = base + lane_of();
        bool inside = i < span.count;
        u32 bits = inside ? span.bits(i) : 0, magnitude = bits & MAGNITUDE;
        bool is_above = inside && magnitude > kth, is_tie = inside && magnitude == kth;
        u32 above_mask = __ballot_sync(WHOLE_WARP, is_above), tie_mask = __ballot_sync(WHOLE_WARP, is_tie);
        u64 ties_here = ties + __popc(tie_mask & lanes_below());
        if (is_above || (is_tie && ties_here < wanted_ties)) {
            u64 filled = above + __popc(above_mask & lanes_below()) + smaller(ties_here, wanted_ties);
            indices[filled] = span.place(i);
            values[filled] = bits;
        }
        above += __popc(above_mask);
        ties += __popc(tie_mask);
    }
}

// ---- Guessed thresholds: a sample, a normal distribution ----

#define SAMPLING_THREADS 1024
#define OWN_SAMPLES 18  // of a thread: a sample is of fewer than 10/9 * 2^14 entries

__device__ inline void count_samples(const u32* own, u32 prefix, u32* table, int shift, int bits) {
    clear(table, 1 << bits);
#pragma unroll
    for (int i = 0; i < OWN_SAMPLES; i++)
        if ((u64)own[i] >> (shift + bits) == (u64)prefix >> (shift + bits))
            atomicAdd(table + (own[i] >> shift & ((1u << bits) - 1)), 1u);
    __syncthreads();
}

// The `rank`-th largest magnitude of every `stride`-th entry becomes LOWEST. One block of 1024 threads.
extern "C" __global__ void __launch_bounds__(SAMPLING_THREADS) sample(
    const u32* vector, u64* state, i64 size, i64 stride, u64 rank, u64 wanted) {
    __shared__ u32 table[LEADING_BINS];
    __shared__ u64 shared[WARP + 1];
    __shared__ u64 digit, left;
    u32 own[OWN_SAMPLES];
#pragma unroll
    for (int i = 0; i < OWN_SAMPLES; i++) {
        i64 place = ((i64)threadIdx.x + i * SAMPLING_THREADS) * stride;
        own[i] = place < size ? vector[place] & MAGNITUDE : WHOLE_WARP;  // agrees with no prefix
    }
    if (threadIdx.x == 0) left = rank;
    count_samples(own, 0, table, LEADING_SHIFT, 12);
    descend<LEADING_BINS, SAMPLING_THREADS>(table, rank, shared, &digit, &left);
    u32 prefix = (u32)digit << LEADING_SHIFT;
    count_samples(own, prefix, table, 9, 10);
    descend<MIDDLE_BINS, SAMPLING_THREADS>(table, left, shared, &digit, &left);
    prefix |= (u32)digit << 9;
    count_samples(own, prefix, table, 0, 9);
    descend<LAST_BINS, SAMPLING_THREADS>(table, left, shared, &digit, &left);
    if (threadIdx.x) return;
    state[LOWEST] = prefix | (u32)digit;
    state[WANTED] = wanted;
}

// The sum and the sum of squares of each chunk, then of all of them, in float64 and in an order that depends
// on the size alone; from these the threshold |mean| + z * deviation and its forty lowerings by a tenth.
// Blocks of 64 threads, one for each chunk.
extern "C" __global__ void moments(
    const u32* vector, u64* state, i64 size, double z, double* chunks, u32* thresholds) {
    __shared__ double lanes[LANES];
    __shared__ u64 shared[1];
    i64 first = (i64)blockIdx.x * CHUNK, end = first + CHUNK < size ? first + CHUNK : size;
    double total = 0, squares = 0;
    for (i64 base = first + threadIdx.x; base < end; base += AT_A_TIME * LANES) {
        u32 entries[AT_A_TIME];
        load_lane(vector, base, end, entries);
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++) {
            double entry = __uint_as_float(entries[i]);
            if (base + i * LANES < end) total += entry, squares += entry * entry;
        }
    }
    total = sum_of_lanes(total, lanes);
    squares = sum_of_lanes(squares, lanes);
    if (threadIdx.x == 0) chunks[2 * blockIdx.x] = total, chunks[2 * blockIdx.x + 1] = squares;
    if (!is_last_block(state + TICKETS + BY_MOMENTS, gridDim.x, shared)) return;
    total = squares = 0;
#pragma unroll 8
    for (i64 chunk = threadIdx.x; chunk < gridDim.x; chunk += LANES) {
        total += __ldcg(chunks + 2 * chunk);
        squares += __ldcg(chunks + 2 * chunk + 1);
    }
    total = sum_of_lanes(total, lanes);
    squares = sum_of_lanes(squares, lanes);
    if (threadIdx.x) return;
    double mean = total / size, variance = squares / size - mean * mean;
    double threshold = fabs(mean) + z * sqrt(variance > 0 ? variance : 0);
    for (int i = 0; i <= LOWERINGS; i++, threshold *= 0.9) {
        double largest = __uint_as_float(INFINITE - 1);
        thresholds[i] = __float_as_uint((float)(threshold < largest ? threshold : largest));
    }
}

struct CountLowered {
    const u32* thresholds;  // falling
    int last;
    u32* table;
    __device__ void operator()(i64, u32 bits, bool inside) {
        u32 magnitude = bits & MAGNITUDE;
        if (!inside || magnitude < thresholds[last]) return;
        int low = 0, high = last;  // the first threshold that it reaches
        while (low < high) {
            int middle = (low + high) / 2;
            if (magnitude >= thresholds[middle])
                high = middle;
            else
                low = middle + 1;
        }
        atomicAdd(table + low, 1u);
    }
};

// Choose the first of the thresholds that 3/4 of k reach: WANTED is how many do, or `at_most`, and LOWEST the
// threshold. Where none of all of them does, WANTED is k, of all entries.
__device__ inline void choose_lowering(
    const u32* thresholds, int last, const u64* counts, u64 k, u64 at_most, u64* state) {
    u64 reaching = 0;
    for (int i = 0; i <= last; i++) {
        reaching += fresh(counts + i);
        if (reaching <= at_most && 4 * reaching < 3 * k) continue;
        state[WANTED] = smaller(reaching, at_most);
        state[LOWEST] = thresholds[i];
        state[RESOLVED] = 1;
        return;
    }
    if (last < LOWERINGS) return;
    state[WANTED] = k;
    state[LOWEST] = 0;
    state[RESOLVED] = 1;
}

#define LOWER(NAME, LAST, COUNTS, TICKET)                                                              \
    extern "C" __global__ void RESIDENT lower_##NAME(                                                  \
        const u32* vector, u64* state, i64 size, const u32* maxima, i64 per_warp,                      \
        const u32* thresholds, u64 k, u64 at_most) {                                                   \
        __shared__ u32 table[LAST + 1];                                                                \
        __shared__ u64 shared[1];                                                                      \
        if (state[RESOLVED]) return;                                                                   \
        clear(table, LAST + 1);                                                                        \
        CountLowered counted = {thresholds, LAST, table};                                              \
        see_blocks(vector, size, maxima, per_warp, thresholds[LAST], counted);                         \
        u64* counts = state + COUNTS;                                                                  \
        add_to(counts, table, LAST + 1);                                                               \
        if (!is_last_block(state + TICKETS + TICKET, gridDim.x, shared) || threadIdx.x) return;        \
        choose_lowering(thresholds, LAST, counts, k, at_most, state);                                  \
    }

LOWER(few, FEW_LOWERINGS, OF_FEW, BY_FEW)
LOWER(all, LOWERINGS, OF_ALL, BY_ALL)

// ---- So many of every 512 ----

#define BUCKET 512
#define ROWS (BUCKET / WARP)
#define FEW 8  // of a bucket, found one by one from the largest down

__device__ inline u32 count_reaching(const u32* magnitudes, u32 lowest) {
    u32 count = 0;
#pragma unroll
    for (int row = 0; row < ROWS; row++)
        count += __popc(__ballot_sync(WHOLE_WARP, magnitudes[row] >= lowest));
    return count;
}

// Return the largest threshold that `share` entries of the bucket reach, between 1, which all of its
// `entries` do, and the largest.
__device__ inline u32 threshold_of_bucket(const u32* magnitudes, u32 largest, u32 entries, u32 share) {
    u32 lowest = largest, beyond = largest + 1, reaching = entries;
    if (share <= FEW) {
        while (count_reaching(magnitudes, lowest) < share) {
            u32 next = 0;
#pragma unroll
            for (int row = 0; row < ROWS; row++)
                if (magnitudes[row] < lowest) next = larger(next, magnitudes[row]);
            lowest = largest_among(next, WARP);
        }
        return lowest;
    }
    lowest = 1;
    while (reaching > share && beyond - lowest > 1) {
        u32 middle = lowest + (beyond - lowest) / 2, count = count_reaching(magnitudes, middle);
        if (count < share)
            beyond = middle;
        else
            lowest = middle, reaching = count;
    }
    return lowest;
}

// A warp a bucket. Before entry n, ⌊n·k/size⌋ are selected, so that every bucket knows its place by itself.
// `residual`, float32, is added where there is one, and the sum written to `out`.
extern "C" __global__ void select_buckets(
    const u32* vector, const u32* residual, u32* out, u64* state, u64* stale, i64 size, u64 k,
    Index* indices, u32* values) {
    clear_stale(stale);
    i64 first = warp_of_grid() * BUCKET;
    if (first >= size) return;
    if (first == 0 && lane_of() == 0) state[SELECTED] = k;
    i64 end = first + BUCKET < size ? first + BUCKET : size;
    u64 filled = (u64)first * k / size, share = (u64)end * k / size - filled;
    u32 bits[ROWS], above[ROWS];  // above: the magnitude and one, 0 for what lies beyond the end
    u32 largest = 0;
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        i64 place = first + row * WARP + lane_of();
        bits[row] = place < end ? vector[place] : 0;
        if (residual && place < end) {
            bits[row] = __float_as_uint(__uint_as_float(bits[row]) + __uint_as_float(residual[place]));
            out[place] = bits[row];
        }
        above[row] = place < end ? (bits[row] & MAGNITUDE) + 1 : 0;
        largest = larger(largest, above[row]);
    }
    largest = largest_among(largest, WARP);
    if (largest > INFINITE && lane_of() == 0) atomicExch(state + NONFINITE, (u64)1);
    if (share == 0 || largest > INFINITE) return;
    u32 lowest = threshold_of_bucket(above, largest, (u32)(end - first), (u32)share);
    u32 ties = (u32)share - count_reaching(above, lowest + 1);
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        u32 tie_mask = __ballot_sync(WHOLE_WARP, above[row] == lowest);
        bool taken =
            above[row] > lowest || (above[row] == lowest && (u32)__popc(tie_mask & lanes_below()) < ties);
        u32 mask = __ballot_sync(WHOLE_WARP, taken);
        if (taken) {
            u64 place = filled + __popc(mask & lanes_below());
            indices[place] = (Index)(first + row * WARP + lane_of());
            values[place] = bits[row];
        }
        filled += __popc(mask);
        ties -= (u32)smaller(ties, __popc(tie_mask));
    }
}
