// What travels: indices as gaps or as a bitmap, values in 16, 8, 4 or 2 bits; bit by bit as on the CPU.
//
// Words are of 32 bits, the first bit the lowest. Whatever sets single bits needs zeros before. Where the
// place of what a warp writes depends on what the warps before it have, a first kernel tallies it.

__device__ inline void set_bit(u32* words, u64 place) { atomicOr(words + (place >> 5), 1u << (place & 31)); }

__device__ inline void set_bits(u32* words, u64 place, u64 value) {
    u32 into = place & 31;
    u32* word = words + (place >> 5);
    u64 low = value << into, high = into ? value >> (64 - into) : 0;
    if ((u32)low) atomicOr(word, (u32)low);
    if (low >> 32) atomicOr(word + 1, (u32)(low >> 32));
    if (high) atomicOr(word + 2, (u32)high);
}

__device__ inline u64 bits_at(const u32* words, i64 count, u64 place, int bits) {
    i64 word = place >> 5;
    u32 into = place & 31;
    u64 low = words[word] | (u64)(word + 1 < count ? words[word + 1] : 0) << 32;
    u64 value = low >> into;
    if (into && word + 2 < count) value |= (u64)words[word + 2] << 32 << (32 - into);
    return value & (((u64)1 << bits) - 1);
}

// ---- gap: the low bits of all gaps, then the quotients in unary ----

__device__ inline u64 gap_at(const Index* indices, i64 i) {
    return (u64)indices[i] - (i ? (u64)indices[i - 1] + 1 : 0);
}

extern "C" __global__ void tally_quotients(
    const Index* indices, i64 entries, int shift, i64 per_warp, u64* tallies) {
    __shared__ u64 of_warps[WARPS];
    i64 first = warp_of_grid() * per_warp, end = first + per_warp < entries ? first + per_warp : entries;
    u64 own = 0;
    for (i64 i = first + lane_of(); i < end; i += WARP) own += gap_at(indices, i) >> shift;
    own = sum_of_warp(own);
    write_tallies<1>(&own, tallies, of_warps);
}

// `header_words`: of 32 bits, 1 or 2, before those of the gaps. `bits`: how many the gaps take.
extern "C" __global__ void write_gaps(
    const Index* indices, i64 entries, int shift, i64 per_warp, const u64* tallies, int header_words,
    u32* message, u64* bits) {
    __shared__ u64 of_warps[WARPS];
    u64 quotients;
    read_tallies<1>(tallies, &quotients, of_warps);
    i64 first = warp_of_grid() * per_warp, end = first + per_warp < entries ? first + per_warp : entries;
    u32* words = message + header_words;
    if (thread_of_grid() < header_words) message[threadIdx.x] = (u32)((u64)entries >> (32 * threadIdx.x));
    for (i64 base = first; base < end; base += WARP) {
        i64 i = base + lane_of();
        u64 gap = i < end ? gap_at(indices, i) : 0;
        u64 up_to_lane = quotients + sum_up_to_lane(gap >> shift);
        if (i < end) {
            u64 place = (u64)entries * shift + up_to_lane + i;
            set_bits(words, (u64)i * shift, gap & (((u64)1 << shift) - 1));
            set_bit(words, place);
            if (i == entries - 1) *bits = place + 1;
        }
        quotients = __shfl_sync(WHOLE_WARP, up_to_lane, WARP - 1);
    }
}

// ---- Ones of a range of bits, for both ----

__device__ inline u32 word_from(const u32* words, i64 word, u64 first_bit) {
    if (word > (i64)(first_bit >> 5)) return words[word];
    return words[word] >> (first_bit & 31) << (first_bit & 31);
}

// Words from that of `first_bit` on, `count` in all.
extern "C" __global__ void tally_ones(
    const u32* words, i64 count, u64 first_bit, i64 per_warp, u64* tallies) {
    __shared__ u64 of_warps[WARPS];
    i64 first = (i64)(first_bit >> 5) + warp_of_grid() * per_warp;
    i64 end = first + per_warp < count ? first + per_warp : count;
    u64 own = 0;
    for (i64 word = first + lane_of(); word < end; word += WARP)
        own += __popc(word_from(words, word, first_bit));
    own = sum_of_warp(own);
    write_tallies<1>(&own, tallies, of_warps);
}

// The places of the ones, counted from `first_bit` on, no more than `entries`.
extern "C" __global__ void write_ones(
    const u32* words, i64 count, u64 first_bit, i64 per_warp, const u64* tallies, i64 entries,
    Index* places) {
    __shared__ u64 of_warps[WARPS];
    u64 found;
    read_tallies<1>(tallies, &found, of_warps);
    i64 first = (i64)(first_bit >> 5) + warp_of_grid() * per_warp;
    i64 end = first + per_warp < count ? first + per_warp : count;
    for (i64 base = first; base < end; base += WARP) {
        i64 word = base + lane_of();
        u32 left = word < end ? word_from(words, word, first_bit) : 0;
        u64 up_to_lane = found + sum_up_to_lane(__popc(left));
        for (u64 i = up_to_lane - __popc(left); left && i < (u64)entries; i++, left &= left - 1)
            places[i] = (Index)((u64)word * 32 + __ffs(left) - 1 - first_bit);
        found = __shfl_sync(WHOLE_WARP, up_to_lane, WARP - 1);
    }
}

extern "C" __global__ void tally_low_bits(
    const u32* words, i64 count, i64 entries, int shift, i64 per_warp, u64* tallies) {
    __shared__ u64 of_warps[WARPS];
    i64 first = warp_of_grid() * per_warp, end = first + per_warp < entries ? first + per_warp : entries;
    u64 own = 0;
    for (i64 i = first + lane_of(); i < end; i += WARP) own += bits_at(words, count, (u64)i * shift, shift);
    own = sum_of_warp(own);
    write_tallies<1>(&own, tallies, of_warps);
}

// Replace the places of the ones, i + the sum of i + 1 quotients, by indices.
extern "C" __global__ void read_gaps(
    const u32* words, i64 count, i64 entries, int shift, i64 per_warp, const u64* tallies,
    Index* indices) {
    __shared__ u64 of_warps[WARPS];
    u64 low_bits;
    read_tallies<1>(tallies, &low_bits, of_warps);
    i64 first = warp_of_grid() * per_warp, end = first + per_warp < entries ? first + per_warp : entries;
    for (i64 base = first; base < end; base += WARP) {
        i64 i = base + lane_of();
        u64 low = i < end ? bits_at(words, count, (u64)i * shift, shift) : 0;
        u64 up_to_lane = low_bits + sum_up_to_lane(low);
        if (i < end) indices[i] = (Index)((((u64)indices[i] - i) << shift) + up_to_lane + i);
        low_bits = __shfl_sync(WHOLE_WARP, up_to_lane, WARP - 1);
    }
}

// ---- bitmap ----

extern "C" __global__ void write_bitmap(const Index* indices, i64 entries, u32* words) {
    for (i64 i = thread_of_grid(); i < entries; i += threads_of_grid()) set_bit(words, (u64)indices[i]);
}

// ---- Values in 16 bits, rounded to the nearest, ties to even ----
// Finite ones beyond the type become its largest.

__device__ inline u16 to_float16(u32 bits) {
    u32 magnitude = bits & MAGNITUDE, half;
    if (magnitude > INFINITE)
        half = 0x7e00u | (magnitude >> 13 & 0x3ffu);
    else if (magnitude == INFINITE)
        half = 0x7c00u;
    else if (magnitude >= 0x477fe000u)  // 65504
        half = 0x7bffu;
    else if (magnitude >= 0x38800000u)  // 2^-14: the exponent's bias changes, 13 bits go
        half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    else  // denormal: the sum with a half has just its bits
        half = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
    return (u16)(bits >> 16 & 0x8000u | half);
}

__device__ inline u16 to_bfloat16(u32 bits) {
    u32 magnitude = bits & MAGNITUDE;
    if (magnitude > INFINITE) return (u16)(bits >> 16 & 0x8000u | 0x7fc0u);
    if (magnitude < INFINITE && magnitude > 0x7f7f0000u) magnitude = 0x7f7f0000u;
    return (u16)((bits >> 16 & 0x8000u) | ((magnitude + 0x7fffu + (magnitude >> 16 & 1u)) >> 16));
}

__device__ inline u32 from_float16(u16 raw) {
    u32 magnitude = raw & 0x7fffu;
    // The exponent moves to its place, and 2^112 corrects its bias, exactly, also for denormals.
    u32 bits = __float_as_uint(__uint_as_float(magnitude << 13) * __uint_as_float(0x77800000u));
    if (magnitude >= 0x7c00u) bits |= INFINITE;
    return (u32)(raw & 0x8000u) << 16 | bits;
}

__device__ inline u32 from_bfloat16(u16 raw) { return (u32)raw << 16; }

#define SIXTEEN_BITS(TYPE)                                                                              \
    extern "C" __global__ void write_##TYPE(const u32* values, i64 count, u16* message) {                  \
        for (i64 i = thread_of_grid(); i < count; i += threads_of_grid())                               \
            message[i] = to_##TYPE(values[i]);                                                          \
    }                                                                                                   \
    extern "C" __global__ void read_##TYPE(const u16* message, i64 count, u32* values) {                \
        for (i64 i = thread_of_grid(); i < count; i += threads_of_grid())                               \
            values[i] = from_##TYPE(message[i]);                                                        \
    }

SIXTEEN_BITS(float16)
SIXTEEN_BITS(bfloat16)

// ---- QSGD: for every 512 values their largest magnitude, and a signed level of each ----

#define BUCKET 512
#define OWN (BUCKET / WARP)  // consecutive values of a lane: whole bytes of levels, whatever their bits

// A warp a bucket.
extern "C" __global__ void quantize(
    const u32* values, i64 count, int bits, float* scales, unsigned char* levels) {
    i64 bucket = warp_of_grid(), first = bucket * BUCKET + lane_of() * OWN;
    if (bucket * BUCKET >= count) return;
    u32 own[OWN], largest = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        own[i] = first + i < count ? values[first + i] : 0;
        largest = larger(largest, own[i] & MAGNITUDE);
    }
    largest = largest_among(largest, WARP);
    if (lane_of() == 0) scales[bucket] = __uint_as_float(largest);
    // In float64 no float32 is out of range, and the step is exact enough for the largest to come back.
    bool usable = largest > 0 && largest < INFINITE;
    double per_unit = usable ? ((1 << (bits - 1)) - 1) / (double)__uint_as_float(largest) : 0;
    int per_byte = 8 / bits;
    u32 byte = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (first + i >= count) break;
        int level = usable ? (int)rint(__uint_as_float(own[i]) * per_unit) : 0;
        byte |= ((u32)level & ((1u << bits) - 1)) << (i % per_byte * bits);
        if ((i + 1) % per_byte && first + i + 1 < count) continue;
        levels[(first + i) / per_byte] = (unsigned char)byte;
        byte = 0;
    }
}

extern "C" __global__ void dequantize(
    const float* scales, const unsigned char* levels, i64 count, int bits, float* values) {
    int per_byte = 8 / bits, largest_level = (1 << (bits - 1)) - 1;
    for (i64 i = thread_of_grid(); i < count; i += threads_of_grid()) {
        int code = levels[i / per_byte] >> (i % per_byte * bits) & ((1 << bits) - 1), sign = 1 << (bits - 1);
        values[i] = (float)(((code ^ sign) - sign) * ((double)scales[i / BUCKET] / largest_level));
    }
}
