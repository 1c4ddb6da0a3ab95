// The one compiled extension of kvd: kvd.shm._native. Each bind_*.cpp adds the functions of one part.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_compute(nb::module_& module);
#if defined(KVD_HAVE_TABLE)
void bind_table(nb::module_& module);
#endif

NB_MODULE(_native, module) {
  module.doc() = "kvd's native part: copies and hashes, index, rings and hazards. Use the facades in kvd.shm.";
  // A process may end with leases and stores alive; the kernel gives back what they hold, and nobody needs to read of it.
  nb::set_leak_warnings(false);
  bind_compute(module);
#if defined(KVD_HAVE_TABLE)
  bind_table(module);
#endif
}
