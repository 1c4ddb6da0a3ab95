// For tests only: safety mechanisms that can be left out one at a time, and steps at which a process can be stopped.
//
// A build with KVD_TESTING reads, once, KVD_MUTANT (a name such as READER_FENCE: that mechanism is left out) and
// KVD_STOP_AT (a step such as lease.hazard, or lease.hazard:3 for its third time: the process stops itself with SIGSTOP
// there, so that a test can look, kill it or let it go on). A normal build knows neither and pays nothing.
#pragma once

#if defined(KVD_TESTING)
#include <signal.h>

#include <cstdlib>
#include <cstring>
#endif

namespace kvd {

#if defined(KVD_TESTING)

inline bool left_out(const char* name) {
  const char* wanted = std::getenv("KVD_MUTANT");
  return wanted != nullptr && std::strcmp(wanted, name) == 0;
}

inline void step(const char* name) {
  static const char* const wanted = std::getenv("KVD_STOP_AT");
  static long left = [] {
    const char* count = wanted != nullptr ? std::strchr(wanted, ':') : nullptr;
    return count != nullptr ? std::atol(count + 1) : 1L;
  }();
  if (wanted == nullptr) return;
  const std::size_t length = std::strcspn(wanted, ":");
  if (std::strlen(name) == length && std::strncmp(name, wanted, length) == 0 && --left == 0) raise(SIGSTOP);
}

#define KVD_MUTANT(variable, name) inline const bool variable = left_out(name)

#else

inline constexpr void step(const char*) {}
#define KVD_MUTANT(variable, name) inline constexpr bool variable = false

#endif

namespace mutant {

KVD_MUTANT(reader_fence, "READER_FENCE");  // no fence between hazard and re-read
KVD_MUTANT(daemon_fence, "DAEMON_FENCE");  // no fence between EVICTING and the scan
KVD_MUTANT(revalidate, "REVALIDATE");      // sg is not read again after the hazard
KVD_MUTANT(hazard_scan, "HAZARD_SCAN");    // evict looks at no hazard
KVD_MUTANT(generation, "GENERATION");      // a reused entry keeps its generation
KVD_MUTANT(owner_check, "OWNER_CHECK");    // publish believes what it is told
KVD_MUTANT(exports, "EXPORTS");            // release drops the hazard under live views
KVD_MUTANT(identity, "IDENTITY");          // an equal tag is taken for an equal key
KVD_MUTANT(revoked, "REVOKED");           // a lease is taken through the META of a daemon that is gone
KVD_MUTANT(ring_bounds, "RING_BOUNDS");    // cursors and lengths of a peer are believed

}  // namespace mutant

#undef KVD_MUTANT

}  // namespace kvd
