// CUDA C on the processor: enough of it for the kernels of commlib/gpu, compiled by g++ as they are.
//
// Every thread of a block is a fiber that runs until it meets others: at a barrier, or at an operation of its
// whole warp. Several blocks are under way at a time, and chance (a seed) says which block, and which warp of
// it, goes on: an order that a kernel must not depend on shows in its results. Threads that wait for each
// other in vain, lanes of a warp that meet in different operations, and arguments of the wrong kind are errors.

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

struct dim3 {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

#define __global__
#define __launch_bounds__(...)
#define __device__
// One copy for the block that runs; that of the others waits aside.
#define __shared__ static __attribute__((section("emulated_shared")))

namespace emulator {

enum Waiting { FOR_NOTHING, FOR_WARP, FOR_BLOCK, FINISHED };
enum Operation { SHUFFLE, BALLOT, MEETING };

struct Block;

struct Fiber {
    jmp_buf here;
    ucontext_t start;
    bool started = false;
    Waiting waiting = FINISHED;
    unsigned generation = 0;
    unsigned thread = 0;
    Block* block = nullptr;
    std::vector<char> stack = std::vector<char>(1 << 16);
};

struct Warp {
    unsigned long long values[2][32];
    unsigned arrived = 0, generation = 0;
    Operation operation = MEETING;
};

struct Block {
    unsigned index = 0, arrived = 0, generation = 0, finished = 0;
    bool active = false;
    std::vector<Fiber*> fibers;
    std::vector<Warp> warps;
    std::vector<char> shared;
};

static jmp_buf scheduler;
static ucontext_t scheduler_context;
static Fiber* running;
static std::mt19937 chance;
static std::string failure;
static void (*kernel)(void**);
static void** kernel_arguments;

}  // namespace emulator

static dim3 threadIdx, blockIdx, blockDim, gridDim;
extern "C" char __start_emulated_shared[] __attribute__((weak));
extern "C" char __stop_emulated_shared[] __attribute__((weak));

namespace emulator {

__attribute__((noinline)) static void leave(jmp_buf& from, jmp_buf& to) {
    if (!_setjmp(from)) _longjmp(to, 1);
}

[[noreturn]] static void fail(const std::string& what) {
    failure = what;
    _longjmp(scheduler, 1);
}

// The compiler traps where an address is no multiple of what is read there, and so does a wild one.
static void trapped(int signal) { fail(signal == SIGSEGV ? "no such address" : "an address that is not aligned"); }

struct Traps {
    static constexpr int SIGNALS[] = {SIGILL, SIGTRAP, SIGSEGV, SIGBUS};
    struct sigaction before[4];
    Traps() {
        struct sigaction now = {};
        now.sa_handler = trapped;
        now.sa_flags = SA_NODEFER;
        for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &now, before + i);
    }
    ~Traps() {
        for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], before + i, nullptr);
    }
};

static void body() {
    for (;;) {
        kernel(kernel_arguments);
        running->waiting = FINISHED;
        running->block->finished++;
        leave(running->here, scheduler);
    }
}

__attribute__((noinline)) static void resume(Fiber* fiber) {
    running = fiber;
    threadIdx = {fiber->thread, 0, 0};
    blockIdx = {fiber->block->index, 0, 0};
    if (_setjmp(scheduler)) return;
    if (fiber->started) _longjmp(fiber->here, 1);
    fiber->started = true;
    getcontext(&fiber->start);
    fiber->start.uc_stack.ss_sp = fiber->stack.data();
    fiber->start.uc_stack.ss_size = fiber->stack.size();
    fiber->start.uc_link = nullptr;
    makecontext(&fiber->start, body, 0);
    setcontext(&fiber->start);
}

static void wait(Waiting what, unsigned generation) {
    running->waiting = what;
    running->generation = generation;
    leave(running->here, scheduler);
}

// Let others go on, now and then.
static void perhaps_wait() {
    if (chance() % 32 == 0) wait(FOR_NOTHING, 0);
}

// Give `value` to the lanes of this warp; return what all of them gave, once all have.
static const unsigned long long* meet(Operation operation, unsigned mask, unsigned long long value) {
    Warp& warp = running->block->warps[running->thread / 32];
    unsigned lane = running->thread % 32, generation = warp.generation;
    if (mask != 0xffffffffu) fail("an operation of some lanes only");
    if (warp.arrived && warp.operation != operation) fail("lanes of a warp meet in different operations");
    warp.operation = operation;
    warp.values[generation & 1][lane] = value;
    warp.arrived |= 1u << lane;
    if (warp.arrived == 0xffffffffu) {
        warp.arrived = 0;
        warp.generation++;
    } else {
        wait(FOR_WARP, generation);
    }
    return warp.values[generation & 1];
}

template <class T>
static T shuffle(unsigned mask, T value, int source) {
    static_assert(sizeof(T) <= 8, "wider than a shuffle");
    unsigned long long raw = 0;
    memcpy(&raw, &value, sizeof(T));
    const unsigned long long* all = meet(SHUFFLE, mask, raw);
    memcpy(&value, all + source, sizeof(T));
    return value;
}

static bool can_go_on(const Fiber& fiber) {
    if (fiber.waiting == FOR_WARP) return fiber.block->warps[fiber.thread / 32].generation != fiber.generation;
    if (fiber.waiting == FOR_BLOCK) return fiber.block->generation != fiber.generation;
    return fiber.waiting == FOR_NOTHING;
}

static size_t shared_bytes() { return __stop_emulated_shared - __start_emulated_shared; }

static void begin(Block& block, unsigned index, unsigned threads) {
    static std::vector<Fiber*> idle;
    while (block.fibers.size() < threads) block.fibers.push_back(new Fiber);
    block.index = index;
    block.arrived = block.generation = block.finished = 0;
    block.active = true;
    block.warps.assign(threads / 32, Warp());
    block.shared.assign(shared_bytes(), char(0xa5));  // nothing is zero before
    for (unsigned thread = 0; thread < threads; thread++) {
        Fiber& fiber = *block.fibers[thread];
        fiber.thread = thread;
        fiber.block = &block;
        fiber.waiting = FOR_NOTHING;
    }
}

// Let each thread of most warps of a block go on once, from a random one on. Return whether any could.
static bool advance(Block& block, unsigned threads) {
    bool progress = false;
    memcpy(__start_emulated_shared, block.shared.data(), shared_bytes());
    unsigned first = chance() % (threads / 32) * 32;
    for (unsigned i = 0; i < threads && failure.empty(); i++) {
        if (i % 32 == 0 && chance() % 4 == 0) {
            i += 31;
            continue;
        }
        Fiber& fiber = *block.fibers[(first + i) % threads];
        if (fiber.waiting == FINISHED || !can_go_on(fiber)) continue;
        progress = true;
        resume(&fiber);
    }
    memcpy(block.shared.data(), __start_emulated_shared, shared_bytes());
    return progress;
}

static void run_blocks(unsigned blocks, unsigned threads, unsigned under_way) {
    static std::vector<Block> slots;  // their fibers are used again
    if (slots.size() < under_way) slots.resize(under_way);
    std::vector<unsigned> order(blocks);
    for (unsigned i = 0; i < blocks; i++) order[i] = i;
    std::shuffle(order.begin(), order.end(), chance);
    size_t next = 0;
    for (Block& slot : slots) slot.active = false;
    for (unsigned i = 0; i < under_way && next < blocks; i++) begin(slots[i], order[next++], threads);
    for (unsigned active = std::min(under_way, blocks), idle = 0; active;) {
        Block& block = slots[chance() % under_way];
        if (!block.active) continue;
        idle = advance(block, threads) ? 0 : idle + 1;
        if (failure.empty() && idle > 64 * under_way) failure = "threads wait for each other in vain";
        if (!failure.empty()) {
            slots.clear();  // fibers in the middle of a kernel are left behind
            return;
        }
        if (block.finished < threads) continue;
        block.active = false;
        if (next < blocks)
            begin(block, order[next++], threads);
        else
            active--;
    }
}

struct Argument {
    char kind;  // p: a pointer; i: an integer; f: a floating-point number
    unsigned bytes;  // of what a pointer points to
};

template <class T>
static Argument described() {
    if constexpr (std::is_pointer_v<T>)
        return {'p', sizeof(std::remove_pointer_t<T>)};
    else
        return {std::is_integral_v<T> ? 'i' : 'f', sizeof(T)};
}

template <auto F>
struct Call;

template <class... A, void (*F)(A...)>
struct Call<F> {
    template <size_t... I>
    static void spread(void** given, std::index_sequence<I...>) {
        F(*(A*)given[I]...);
    }
    static void run(void** given) { spread(given, std::index_sequence_for<A...>()); }
    static std::vector<Argument> arguments() { return {described<A>()...}; }
};

struct Kernel {
    const char* name;
    void (*run)(void**);
    std::vector<Argument> (*arguments)();
};

static std::string misfit(const Kernel& kernel, int count, const Argument* given) {
    std::vector<Argument> expected = kernel.arguments();
    if ((int)expected.size() != count)
        return "expected " + std::to_string(expected.size()) + " arguments, got " + std::to_string(count);
    for (int i = 0; i < count; i++) {
        bool null = given[i].kind == 'p' && given[i].bytes == 0;
        if (given[i].kind != expected[i].kind || (!null && given[i].bytes != expected[i].bytes))
            return "argument " + std::to_string(i) + ": expected " + expected[i].kind +
                   std::to_string(expected[i].bytes) + ", got " + given[i].kind + std::to_string(given[i].bytes);
    }
    return "";
}

static const Kernel* find(const char* name);

}  // namespace emulator

extern "C" __attribute__((visibility("default"))) const char* emulate(
    const char* name, unsigned blocks, unsigned threads, int count, const emulator::Argument* given,
    void** arguments, unsigned seed, unsigned under_way) {
    using namespace emulator;
    const Kernel* found = find(name);
    failure = found ? misfit(*found, count, given) : "no such kernel";
    if (failure.empty() && (blocks == 0 || threads == 0 || threads > 1024 || threads % 32))
        failure = "no grid: " + std::to_string(blocks) + " blocks of " + std::to_string(threads);
    if (!failure.empty()) return failure.c_str();
    kernel = found->run;
    kernel_arguments = arguments;
    chance.seed(seed);
    blockDim = {threads, 1, 1};
    gridDim = {blocks, 1, 1};
    Traps traps;
    run_blocks(blocks, threads, under_way);
    return failure.c_str();
}

// ---- What the kernels call ----

static inline void __syncthreads() {
    emulator::Block& block = *emulator::running->block;
    unsigned generation = block.generation;
    if (++block.arrived == blockDim.x) {
        block.arrived = 0;
        block.generation++;
    } else {
        emulator::wait(emulator::FOR_BLOCK, generation);
    }
}
static inline void __syncwarp() { emulator::meet(emulator::MEETING, 0xffffffffu, 0); }
static inline void __threadfence() { emulator::perhaps_wait(); }
template <class T>
static inline T __ldcg(const T* place) {
    return *place;
}
template <class T>
static inline void __stwb(T* place, T value) {
    *place = value;
}
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline int __ffs(unsigned bits) { return __builtin_ffs((int)bits); }

static inline unsigned __ballot_sync(unsigned mask, bool predicate) {
    const unsigned long long* all = emulator::meet(emulator::BALLOT, mask, predicate);
    unsigned ballot = 0;
    for (int lane = 0; lane < 32; lane++) ballot |= (unsigned)all[lane] << lane;
    return ballot;
}
template <class T>
static inline T __shfl_sync(unsigned mask, T value, int source) {
    return emulator::shuffle(mask, value, source % 32);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int apart) {
    return emulator::shuffle(mask, value, (int)(threadIdx.x % 32) ^ apart);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned apart) {
    int lane = (int)(threadIdx.x % 32);
    return emulator::shuffle(mask, value, lane < (int)apart ? lane : lane - (int)apart);
}

template <class T>
static inline T atomicAdd(T* place, T value) {
    emulator::perhaps_wait();
    T before = *place;
    *place = before + value;
    return before;
}
template <class T>
static inline T atomicExch(T* place, T value) {
    emulator::perhaps_wait();
    T before = *place;
    *place = value;
    return before;
}
template <class T>
static inline T atomicOr(T* place, T value) {
    emulator::perhaps_wait();
    T before = *place;
    *place = before | value;
    return before;
}

static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
