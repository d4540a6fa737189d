// The grid on the CPU: one fiber (a stack of its own) per CUDA thread of the running block, on the
// calling thread. Blocks run one after the other. A fiber runs until it waits at a barrier or in a
// warp collective; then the next one does.
//
// Reported as errors, with block and thread:
//   - global loads and stores outside an array, vector loads that are not aligned;
//   - shared memory: outside an array, read before it was written, more than a block may have;
//   - two threads that touch one shared element, one of them writing, with no barrier (or, in one
//     warp, no warp collective) between the two, whatever order they happened to run in;
//   - __syncthreads that some threads of the block do not reach, or reach in another line;
//   - a warp collective that some lanes of the warp do not reach.
//
// Not supplied: atomics, partial masks, cooperative groups, textures, inline PTX, tensor cores.
// Time is not modelled.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#if !defined(__x86_64__) || defined(RECONCILE_UCONTEXT)
#define RECONCILE_USES_UCONTEXT
#include <ucontext.h>
#endif

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct alignas(8) uint2 {
  uint32_t x, y;
};

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

struct alignas(16) float4 {
  float x, y, z, w;
};

namespace grid {

constexpr unsigned WARP = 32;
constexpr size_t STACK = 64 << 10;
constexpr size_t SHARED_LIMIT = 48 << 10;  // bytes of static shared memory of a block

struct Fault {
  std::string text;
};

// --------------------------------------------------------------------------------- contexts

#ifdef RECONCILE_USES_UCONTEXT

typedef ucontext_t Context;

static inline void switch_to(Context& from, Context& to) { swapcontext(&from, &to); }

static inline void make(Context& context, char* stack, size_t size, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = size;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}

#else

struct Context {
  void* stack_pointer = nullptr;
};

// Saves what the System V ABI lets a callee keep, and takes up another stack.
extern "C" void reconcile_grid_switch(void** save, void* take)
    __attribute__((visibility("hidden")));
asm(R"(
.text
.weak reconcile_grid_switch
.hidden reconcile_grid_switch
.type reconcile_grid_switch,@function
reconcile_grid_switch:
  endbr64
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size reconcile_grid_switch,.-reconcile_grid_switch
)");

static inline void switch_to(Context& from, Context& to) {
  reconcile_grid_switch(&from.stack_pointer, to.stack_pointer);
}

static inline void make(Context& context, char* stack, size_t size, void (*entry)()) {
  void** top = (void**)(stack + size - 16);
  *--top = nullptr;         // where entry would return to: it never does
  *--top = (void*)entry;    // what the first switch returns to
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
}

#endif

// ----------------------------------------------------------------------------------- fibers

enum class State { READY, AT_BARRIER, IN_WARP, DONE };

struct Fiber {
  Context context;
  State state;
  uint3 thread_index;
  unsigned rank;       // its number in the block
  int line;            // where it waits
  unsigned exchanges;  // warp collectives that it has passed
};

struct Warp {
  uint32_t slots[2][WARP];  // of the running collective and of the one before
  int lines[WARP];
  unsigned arrived, lanes, generation;
};

// What is known of one shared element: its last write, and its reads since the last barrier.
struct Trace {
  int64_t write_epoch = -1, read_epoch = -1;
  unsigned writer = 0, write_exchange = 0;
  unsigned reader = 0, read_exchange = 0;
  bool readers = false;  // more than one
  bool written = false;
};

struct Array {
  std::string name;
  std::vector<char> bytes;
  std::vector<Trace> traces;
};

struct Place {
  uint3 block_index, thread_index;
  dim3 block_size, grid_size;
};

struct Block {
  Place place;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<std::unique_ptr<Array>> arrays;
  Context scheduler;
  Fiber* running = nullptr;
  const std::function<void()>* body = nullptr;
  int64_t epoch = 0;  // barriers that the block has passed
  std::string fault;
};

// One per thread of the CPU, so that several may launch.
static thread_local Block* block_here = nullptr;
static thread_local std::string last_fault;
static thread_local bool has_failed = false;

static inline const Place& here() { return block_here->place; }

static inline std::string text(const uint3& at) {
  return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) +
         ")";
}

[[noreturn]] static inline void fail(const std::string& what) {
  throw Fault{what + " in thread " + text(block_here->running->thread_index) + " of block " +
              text(block_here->place.block_index)};
}

static inline void wait(State state) {
  Fiber* self = block_here->running;
  self->state = state;
  switch_to(self->context, block_here->scheduler);
}

static inline void barrier(int line) {
  block_here->running->line = line;
  wait(State::AT_BARRIER);
}

// Every lane gives a value; each gets the slots of all.
static inline const uint32_t* exchange(uint32_t value, int line) {
  Block& block = *block_here;
  Fiber* self = block.running;
  Warp& warp = block.warps[self->rank / WARP];
  const unsigned lane = self->rank % WARP, generation = warp.generation;
  uint32_t* slots = warp.slots[generation % 2];
  slots[lane] = value;
  warp.lines[lane] = line;
  self->line = line;
  if (++warp.arrived == warp.lanes) {
    for (unsigned other = 0; other < warp.lanes; ++other)
      if (line && warp.lines[other] && warp.lines[other] != line)
        fail("lanes of one warp meet in different collectives");
    warp.arrived = 0;
    ++warp.generation;
  } else {
    wait(State::IN_WARP);
  }
  self->exchanges = generation + 1;
  return slots;
}

template <typename T>
static inline T shuffle_xor(unsigned mask, T value, int lanes, int width) {
  static_assert(sizeof(T) == 4, "shuffles are of 32 bits");
  if (mask != 0xffffffffu) fail("a shuffle with a partial mask is not supplied");
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const unsigned lane = block_here->running->rank % WARP, other = lane ^ (unsigned)lanes;
  const uint32_t* slots = exchange(bits, 0);
  const bool inside = other / (unsigned)width == lane / (unsigned)width;
  memcpy(&value, &slots[inside ? other : lane], 4);
  return value;
}

// ----------------------------------------------------------------------------------- memory

template <typename T>
struct Global {
  T* start;
  int64_t count;
  Global(T* start_, int64_t count_) : start(start_), count(count_) {}

  T get(int64_t i) const {
    check(i, 1, "load");
    return start[i];
  }
  void set(int64_t i, T value) const {
    check(i, 1, "store");
    start[i] = value;
  }
  template <typename V>
  V vector(int64_t i) const {
    check(i, sizeof(V) / sizeof(T), "vector load");
    if ((uintptr_t)(start + i) % sizeof(V))
      fail("misaligned vector load of " + std::to_string(sizeof(V)) + " bytes at element " +
           std::to_string(i));
    V value;
    memcpy(&value, (const void*)(start + i), sizeof value);
    return value;
  }

 private:
  void check(int64_t i, int64_t elements, const char* what) const {
    if (i < 0 || i + elements > count)
      fail(std::string(what) + " out of bounds: elements " + std::to_string(i) + " to " +
           std::to_string(i + elements - 1) + " of " + std::to_string(count));
  }
};

template <typename T>
struct Shared {
  Array* array;

  T get(int i) const {
    Trace& trace = at(i);
    const Fiber& self = *block_here->running;
    if (!trace.written) report(i, "is read before it was written");
    if (unordered(trace.write_epoch, trace.writer, trace.write_exchange))
      report(i, "is read without a barrier after the write of thread " +
                    std::to_string(trace.writer));
    const bool same = trace.read_epoch == block_here->epoch;
    trace.readers = same && (trace.readers || trace.reader != self.rank);
    trace.read_epoch = block_here->epoch;
    trace.reader = self.rank;
    trace.read_exchange = self.exchanges;
    return ((const T*)array->bytes.data())[i];
  }

  void set(int i, T value) const {
    Trace& trace = at(i);
    const Fiber& self = *block_here->running;
    if (unordered(trace.write_epoch, trace.writer, trace.write_exchange))
      report(i, "is written without a barrier after the write of thread " +
                    std::to_string(trace.writer));
    if ((trace.read_epoch == block_here->epoch && trace.readers) ||
        unordered(trace.read_epoch, trace.reader, trace.read_exchange))
      report(i, "is written without a barrier after the read of thread " +
                    std::to_string(trace.reader));
    trace.write_epoch = block_here->epoch;
    trace.writer = self.rank;
    trace.write_exchange = self.exchanges;
    trace.written = true;
    ((T*)array->bytes.data())[i] = value;
  }

 private:
  Trace& at(int i) const {
    if (i < 0 || (size_t)i >= array->traces.size())
      fail("shared " + array->name + "[" + std::to_string(i) + "] is out of bounds: it has " +
           std::to_string(array->traces.size()) + " elements");
    return array->traces[(size_t)i];
  }

  // Whether an access of another thread has neither a barrier nor a collective of its warp behind
  // it.
  static bool unordered(int64_t epoch, unsigned rank, unsigned exchanges) {
    const Fiber& self = *block_here->running;
    if (epoch != block_here->epoch || rank == self.rank) return false;
    return rank / WARP != self.rank / WARP || exchanges == self.exchanges;
  }

  void report(int i, const std::string& what) const {
    fail("shared " + array->name + "[" + std::to_string(i) + "] " + what);
  }
};

template <typename T>
static inline Shared<T> shared(const char* name, size_t count) {
  Block& block = *block_here;
  size_t bytes = count * sizeof(T);
  for (auto& array : block.arrays) {
    if (array->name == name) return Shared<T>{array.get()};
    bytes += array->bytes.size();
  }
  if (bytes > SHARED_LIMIT)
    fail("shared memory of " + std::to_string(bytes) + " bytes, a block has " +
         std::to_string(SHARED_LIMIT));
  block.arrays.emplace_back(new Array{name, std::vector<char>(count * sizeof(T)),
                                      std::vector<Trace>(count)});
  return Shared<T>{block.arrays.back().get()};
}

// --------------------------------------------------------------------------------- scheduler

static void entry() {
  Block& block = *block_here;
  for (;;) {
    Fiber* self = block.running;
    try {
      (*block.body)();
    } catch (const Fault& fault) {
      if (block.fault.empty()) block.fault = fault.text;
    }
    self->state = State::DONE;
    switch_to(self->context, block.scheduler);
  }
}

// Stacks that a thread of the CPU keeps, each above a page that must not be touched.
static inline char* stack_of(unsigned rank) {
  static thread_local std::vector<char*> stacks;
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  while (stacks.size() <= rank) {
    void* found = mmap(nullptr, STACK + page, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) throw Fault{"no memory for the stack of a CUDA thread"};
    mprotect(found, page, PROT_NONE);
    stacks.push_back((char*)found + page);
  }
  return stacks[rank];
}

static inline void begin(Block& block, unsigned threads) {
  const dim3& size = block.place.block_size;
  block.fibers.resize(threads);
  block.warps.resize((threads + WARP - 1) / WARP);
  block.arrays.clear();
  block.epoch = 0;
  for (unsigned rank = 0; rank < threads; ++rank) {
    Fiber& fiber = block.fibers[rank];
    fiber.state = State::READY;
    fiber.thread_index = {rank % size.x, rank / size.x % size.y, rank / (size.x * size.y)};
    fiber.rank = rank;
    fiber.line = 0;
    fiber.exchanges = 0;
    make(fiber.context, stack_of(rank), STACK, entry);
  }
  for (size_t w = 0; w < block.warps.size(); ++w) {
    Warp& warp = block.warps[w];
    warp.arrived = warp.generation = 0;
    warp.lanes = std::min<unsigned>(WARP, threads - (unsigned)w * WARP);
  }
}

static inline bool can_run(const Block& block, const Fiber& fiber) {
  if (fiber.state == State::IN_WARP)
    return block.warps[fiber.rank / WARP].generation != fiber.exchanges;
  return fiber.state == State::READY;
}

// Why no thread can go on, where not all wait at one barrier.
static inline std::string stuck(const Block& block) {
  unsigned done = 0, waiting = 0;
  const Fiber *first = nullptr, *other = nullptr;
  for (const Fiber& fiber : block.fibers) {
    done += fiber.state == State::DONE;
    if (fiber.state != State::AT_BARRIER) continue;
    ++waiting;
    if (!first) first = &fiber;
    if (fiber.line != first->line) other = &fiber;
  }
  const std::string where = " in block " + text(block.place.block_index);
  if (!waiting) return "a warp collective that not all lanes reach" + where;
  if (other)
    return "barrier divergence" + where + ": thread " + text(first->thread_index) +
           " waits in line " + std::to_string(first->line) + ", thread " +
           text(other->thread_index) + " in line " + std::to_string(other->line);
  if (waiting == block.fibers.size()) return "";
  return "barrier divergence" + where + ": " + std::to_string(waiting) + " of " +
         std::to_string(block.fibers.size()) + " threads wait in line " +
         std::to_string(first->line) + ", " + std::to_string(done) + " have returned";
}

static inline void run(Block& block) {
  for (;;) {
    bool progress = false, done = true;
    for (Fiber& fiber : block.fibers) {
      if (can_run(block, fiber)) {
        fiber.state = State::READY;
        block.running = &fiber;
        block.place.thread_index = fiber.thread_index;
        switch_to(block.scheduler, fiber.context);
        progress = true;
        if (!block.fault.empty()) return;
      }
      done = done && fiber.state == State::DONE;
    }
    if (done) return;
    if (progress) continue;
    block.fault = stuck(block);
    if (!block.fault.empty()) return;
    ++block.epoch;
    for (Fiber& fiber : block.fibers) fiber.state = State::READY;
  }
}

static inline void launch(dim3 grid_size, dim3 block_size, const std::function<void()>& body) {
  static thread_local Block block;
  block_here = &block;
  block.fault.clear();
  block.body = &body;
  block.place.grid_size = grid_size;
  block.place.block_size = block_size;
  uint3& at = block.place.block_index;
  try {
    for (at.z = 0; at.z < grid_size.z; ++at.z)
      for (at.y = 0; at.y < grid_size.y; ++at.y)
        for (at.x = 0; at.x < grid_size.x; ++at.x) {
          begin(block, block_size.x * block_size.y * block_size.z);
          run(block);
          if (!block.fault.empty()) throw Fault{block.fault};
        }
  } catch (const Fault& fault) {
    last_fault = fault.text;
    has_failed = true;
  }
}

static inline int last_error() {
  const int code = has_failed ? 700 : 0;  // as cudaErrorIllegalAddress
  has_failed = false;
  return code;
}

static inline const char* error_text(int code) {
  return code == 0 ? "no error" : last_fault.c_str();
}

}  // namespace grid
