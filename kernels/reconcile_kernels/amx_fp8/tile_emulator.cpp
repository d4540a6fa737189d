// Tile instructions on a processor without AMX: a SIGILL handler that executes them in software.
//
// A binary compiled for AMX meets an undefined instruction; the handler decodes it, does what it
// does to the thread's own eight tiles, and lets the thread go on behind it. Executed are
// LDTILECFG, STTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILELOADDT1, TILESTORED and TDPBF16PS.
// Whatever is not one of them, or is one that a processor would refuse (#UD), goes to the handler
// that was there before, or ends the process as it would there; a configuration that a processor
// would refuse (#GP) raises SIGSEGV, as it does there.
//
// Sources: Intel SDM vol. 2 (encodings, faults), and for the order of additions in TDPBF16PS the
// Bochs emulator, see instructions.py.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <immintrin.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <atomic>

#include "cpu.h"

namespace {

constexpr int TILES = 8, ROWS = 16, BYTES = 64;

struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

struct State {
  alignas(64) uint8_t tile[TILES][ROWS][BYTES];
  Config config;
};

enum Kind { LDTILECFG, STTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED, TDPBF16PS, KINDS };

std::atomic<uint64_t> executed[KINDS];
std::atomic<const char *> fault{""};
struct sigaction previous;
std::atomic<bool> installed{false};
pthread_key_t owner;

// A pointer alone, in memory that every thread has from its start: nothing here may allocate
// through malloc, because a signal may have come in the middle of it.
thread_local State *state __attribute__((tls_model("initial-exec"))) = nullptr;

void free_state(void *memory) { munmap(memory, sizeof(State)); }

bool have_state() {
  if (state) return true;
  void *memory = mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                      -1, 0);
  if (memory == MAP_FAILED) return false;
  state = static_cast<State *>(memory);
  pthread_setspecific(owner, memory);
  return true;
}

// ---------------------------------------------------------------- decoding

// VEX.128.pp.0F38.W0 op /r: the one form that all of them have.
struct Instruction {
  int opcode, prefix;  // prefix: 0 none, 1 66, 2 F3, 3 F2
  int mod, reg, rm, third;  // the fields of ModRM; third: VEX.vvvv
  bool sib;
  uint64_t address, stride;
  const uint8_t *next;
};

constexpr int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                               REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                               REG_R12, REG_R13, REG_R14, REG_R15};

int32_t displacement32(const uint8_t *at) {
  int32_t value;
  memcpy(&value, at, sizeof value);
  return value;
}

bool decode(const greg_t *registers, Instruction &found) {
  const uint8_t *p = reinterpret_cast<const uint8_t *>(registers[REG_RIP]);
  if (p[0] != 0xc4 || (p[1] & 0x1f) != 2 || p[2] & 0x84) return false;  // VEX, 0F38, W0, L0
  const int x = ~p[1] >> 6 & 1, b = ~p[1] >> 5 & 1;
  if (~p[1] >> 7 & 1) return false;  // tile registers 8 and above do not exist
  found = Instruction();
  found.prefix = p[2] & 3;
  found.third = ~p[2] >> 3 & 15;
  found.opcode = p[3];
  found.mod = p[4] >> 6;
  found.reg = p[4] >> 3 & 7;
  found.rm = p[4] & 7;
  p += 5;
  if (found.mod != 3) {
    const auto value = [&](int number) { return (uint64_t)registers[REGISTERS[number]]; };
    int base = found.rm;
    found.sib = base == 4;
    if (found.sib) {
      const int index = (*p >> 3 & 7) | x << 3;
      base = *p & 7;
      if (index != 4) found.stride = value(index) << (*p >> 6);
      ++p;
    }
    const bool no_base = found.mod == 0 && base == 5;
    int64_t displacement = 0;
    if (found.mod == 1) {
      displacement = (int8_t)*p++;
    } else if (found.mod == 2 || no_base) {
      displacement = displacement32(p);
      p += 4;
    }
    if (!no_base) found.address = value(base | b << 3);
    if (no_base && !found.sib) found.address = reinterpret_cast<uint64_t>(p);  // relative to RIP
    found.address += (uint64_t)displacement;
  }
  found.next = p;
  return true;
}

// ---------------------------------------------------------------- execution

enum Outcome { DONE, NOT_OURS, UNDEFINED, GENERAL_PROTECTION };

Outcome refuse(Outcome outcome, const char *why) {
  fault = why;
  return outcome;
}

const char *wrong_config(const Config &config) {
  if (config.palette > 1) return "LDTILECFG: palette is neither 0 nor 1";
  if (!config.palette) return nullptr;
  for (const uint8_t byte : config.reserved)
    if (byte) return "LDTILECFG: a reserved byte is not 0";
  for (int t = 0; t < 16; ++t) {
    const int rows = config.rows[t], bytes = config.bytes_per_row[t];
    if (t >= TILES && (rows || bytes)) return "LDTILECFG: a tile above 7 has a shape";
    if (rows > ROWS || bytes > BYTES) return "LDTILECFG: a tile has over 16 rows or 64 bytes a row";
    if (!rows != !bytes) return "LDTILECFG: a tile has rows without bytes, or bytes without rows";
  }
  return nullptr;
}

Outcome load_config(uint64_t address) {
  Config config;
  memcpy(&config, reinterpret_cast<const void *>(address), sizeof config);
  if (const char *why = wrong_config(config)) return refuse(GENERAL_PROTECTION, why);
  memset(state, 0, sizeof *state);
  if (config.palette) state->config = config;
  return DONE;
}

// Row by row, from where an interrupted instruction stopped; what a row or a tile lacks is 0.
void load(int t, uint64_t address, uint64_t stride) {
  const Config &config = state->config;
  const size_t bytes = config.bytes_per_row[t];
  for (int row = config.start_row; row < ROWS; ++row) {
    memset(state->tile[t][row], 0, BYTES);
    if (row < config.rows[t])
      memcpy(state->tile[t][row], reinterpret_cast<const void *>(address + row * stride), bytes);
  }
  state->config.start_row = 0;
}

void store(int t, uint64_t address, uint64_t stride) {
  const Config &config = state->config;
  for (int row = config.start_row; row < config.rows[t]; ++row)
    memcpy(reinterpret_cast<void *>(address + row * stride), state->tile[t][row],
           config.bytes_per_row[t]);
  state->config.start_row = 0;
}

const char *wrong_shapes(int c, int a, int b) {
  const Config &config = state->config;
  const int rows = config.rows[c], a_bytes = config.bytes_per_row[a];
  if (c == a || c == b || a == b) return "TDPBF16PS: one tile is named twice";
  if (!rows || !config.rows[a] || !config.rows[b]) return "TDPBF16PS: a tile has no shape";
  if (config.bytes_per_row[c] % 4 || a_bytes % 4) return "TDPBF16PS: a row is no multiple of 4 bytes";
  if (config.rows[a] != rows) return "TDPBF16PS: sums and a differ in rows";
  if (config.bytes_per_row[b] != config.bytes_per_row[c])
    return "TDPBF16PS: sums and b differ in columns";
  if (a_bytes / 4 != config.rows[b]) return "TDPBF16PS: a has another number of pairs than b has rows";
  return nullptr;
}

__m512 as_floats(__m512i bits) { return _mm512_castsi512_ps(bits); }

// Even and odd k are summed apart from zero, then added to each other and to the tile; each step
// rounds to nearest even, and subnormals are zeros.
void multiply(int c, int a, int b) {
  const Config &config = state->config;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x1f80 | 0x8040);  // FTZ and DAZ
  const __mmask16 columns = (__mmask16)((1u << config.bytes_per_row[c] / 4) - 1);
  const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
  for (int row = 0; row < ROWS; ++row) {
    __m512 even = _mm512_setzero_ps(), odd = even;
    if (row >= config.rows[c]) {
      _mm512_store_ps(state->tile[c][row], even);
      continue;
    }
    for (int pair = 0; pair < config.rows[b]; ++pair) {
      int x;
      memcpy(&x, &state->tile[a][row][4 * pair], sizeof x);
      const __m512i xs = _mm512_set1_epi32(x), w = _mm512_load_si512(state->tile[b][pair]);
      even = _mm512_fmadd_ps(as_floats(_mm512_slli_epi32(xs, 16)),
                             as_floats(_mm512_slli_epi32(w, 16)), even);
      odd = _mm512_fmadd_ps(as_floats(_mm512_and_si512(xs, high)),
                            as_floats(_mm512_and_si512(w, high)), odd);
    }
    const __m512 sum = _mm512_add_ps(_mm512_load_ps(state->tile[c][row]), _mm512_add_ps(even, odd));
    _mm512_store_ps(state->tile[c][row], _mm512_maskz_mov_ps(columns, sum));
  }
  _mm_setcsr(before);
}

Outcome tile_or_fault(int t, bool restartable) {
  if (!state->config.palette) return refuse(UNDEFINED, "a tile instruction before LDTILECFG");
  if (!state->config.rows[t]) return refuse(UNDEFINED, "a tile without a shape is used");
  if (!restartable && state->config.start_row)
    return refuse(UNDEFINED, "start_row is not 0 in an instruction that cannot be resumed");
  return DONE;
}

Outcome counted(Kind kind) {
  executed[kind].fetch_add(1, std::memory_order_relaxed);
  return DONE;
}

// Opcode 49: configuration and zeroing.
Outcome configure(const Instruction &i) {
  if (i.third) return NOT_OURS;
  const bool memory = i.mod != 3 && i.reg == 0;
  const uint64_t address = i.address + i.stride;
  if (memory && i.prefix == 0) {
    const Outcome outcome = load_config(address);
    return outcome == DONE ? counted(LDTILECFG) : outcome;
  }
  if (memory && i.prefix == 1) {
    memcpy(reinterpret_cast<void *>(address), &state->config, sizeof state->config);
    return counted(STTILECFG);
  }
  if (i.mod != 3 || i.rm != 0) return NOT_OURS;
  if (i.prefix == 0 && i.reg == 0) {
    memset(state, 0, sizeof *state);
    return counted(TILERELEASE);
  }
  if (i.prefix != 3) return NOT_OURS;
  const Outcome outcome = tile_or_fault(i.reg, false);
  if (outcome != DONE) return outcome;
  memset(state->tile[i.reg], 0, sizeof state->tile[i.reg]);
  return counted(TILEZERO);
}

// Opcode 4B: loads (F2, and 66 with a hint for the caches) and the store (F3).
Outcome move(const Instruction &i) {
  if (i.third || i.mod == 3 || !i.sib || i.prefix == 0) return NOT_OURS;
  const Outcome outcome = tile_or_fault(i.reg, true);
  if (outcome != DONE) return outcome;
  if (i.prefix == 2) {
    store(i.reg, i.address, i.stride);
    return counted(TILESTORED);
  }
  load(i.reg, i.address, i.stride);
  return counted(TILELOADD);
}

// Opcode 5C, F3.
Outcome dot_product(const Instruction &i) {
  if (i.mod != 3 || i.prefix != 2 || i.third > 7) return NOT_OURS;
  const Outcome outcome = tile_or_fault(i.reg, false);
  if (outcome != DONE) return outcome;
  if (const char *why = wrong_shapes(i.reg, i.rm, i.third)) return refuse(UNDEFINED, why);
  multiply(i.reg, i.rm, i.third);
  return counted(TDPBF16PS);
}

Outcome step(greg_t *registers) {
  Instruction instruction;
  if (!decode(registers, instruction)) return NOT_OURS;
  Outcome outcome = NOT_OURS;
  if (instruction.opcode == 0x49) outcome = configure(instruction);
  if (instruction.opcode == 0x4b) outcome = move(instruction);
  if (instruction.opcode == 0x5c) outcome = dot_product(instruction);
  if (outcome == DONE) registers[REG_RIP] = reinterpret_cast<greg_t>(instruction.next);
  return outcome;
}

// ---------------------------------------------------------------- the handler

void say_fault() {
  const char *parts[] = {"tile emulator: ", fault.load(), "\n"};
  for (const char *part : parts) {
    const ssize_t written = write(STDERR_FILENO, part, strlen(part));
    (void)written;
  }
}

void to_previous(int signal_number, siginfo_t *info, void *context) {
  if (previous.sa_flags & SA_SIGINFO) {
    previous.sa_sigaction(signal_number, info, context);
  } else if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) {
    signal(signal_number, SIG_DFL);  // the instruction runs again and ends the process
  } else {
    previous.sa_handler(signal_number);
  }
}

void on_undefined(int signal_number, siginfo_t *info, void *context) {
  greg_t *registers = static_cast<ucontext_t *>(context)->uc_mcontext.gregs;
  Outcome outcome = have_state() ? step(registers) : NOT_OURS;
  if (outcome == DONE) {  // those that follow without a gap cost no further signal
    for (int more = 0; more < 64 && outcome == DONE; ++more) outcome = step(registers);
    return;  // what ended the run faults again by itself, if it is an instruction that faults
  }
  if (outcome != NOT_OURS) say_fault();
  if (outcome == GENERAL_PROTECTION)
    raise(SIGSEGV);
  else
    to_previous(signal_number, info, context);
}

}  // namespace

// 0: installed, or it was. 1: the tiles are real here. 2: the signal cannot be taken (errno).
extern "C" int tile_emulator_install() {
  if (cpu::tiles_are_real()) return 1;
  if (installed) return 0;
  static const int made = pthread_key_create(&owner, free_state);
  struct sigaction wanted = {};
  wanted.sa_sigaction = on_undefined;
  wanted.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  if (made || sigaction(SIGILL, &wanted, &previous)) return 2;
  installed = true;
  return 0;
}

// 0: what was there before is back, or nothing was installed. 1: another handler lies above ours.
extern "C" int tile_emulator_remove() {
  if (!installed) return 0;
  struct sigaction current;
  if (sigaction(SIGILL, nullptr, &current) || current.sa_sigaction != on_undefined) return 1;
  if (sigaction(SIGILL, &previous, nullptr)) return 1;
  installed = false;
  return 0;
}

// Instructions executed so far, in the order of `Kind`; returns how many kinds there are.
extern "C" int tile_emulator_counts(uint64_t *counts) {
  for (int kind = 0; kind < KINDS; ++kind) counts[kind] = executed[kind];
  return KINDS;
}
