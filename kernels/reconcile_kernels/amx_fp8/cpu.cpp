#include "cpu.h"

extern "C" uint32_t reconcile_cpu_features() { return cpu::features(); }
extern "C" int reconcile_cpu_request_tiles() { return cpu::request_tiles(); }
