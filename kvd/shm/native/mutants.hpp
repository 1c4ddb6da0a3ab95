// Safety mechanisms that a build can leave out one at a time, to show that the tests notice each of them missing.
//
// Build with -DKVD_DEFINES="KVD_MUTANT_READER_FENCE=1". A normal build has every value 0 and pays nothing; what a build
// left out is listed in kvd.shm._native.mutants.
#pragma once

#ifndef KVD_MUTANT_READER_FENCE
#define KVD_MUTANT_READER_FENCE 0
#endif
#ifndef KVD_MUTANT_DAEMON_FENCE
#define KVD_MUTANT_DAEMON_FENCE 0
#endif
#ifndef KVD_MUTANT_REVALIDATE
#define KVD_MUTANT_REVALIDATE 0
#endif
#ifndef KVD_MUTANT_HAZARD_SCAN
#define KVD_MUTANT_HAZARD_SCAN 0
#endif
#ifndef KVD_MUTANT_GENERATION
#define KVD_MUTANT_GENERATION 0
#endif
#ifndef KVD_MUTANT_OWNER_CHECK
#define KVD_MUTANT_OWNER_CHECK 0
#endif
#ifndef KVD_MUTANT_EXPORTS
#define KVD_MUTANT_EXPORTS 0
#endif
#ifndef KVD_MUTANT_IDENTITY
#define KVD_MUTANT_IDENTITY 0
#endif
#ifndef KVD_MUTANT_RING_BOUNDS
#define KVD_MUTANT_RING_BOUNDS 0
#endif

namespace kvd::mutant {

inline constexpr bool reader_fence = KVD_MUTANT_READER_FENCE != 0;  // no fence between hazard and re-read
inline constexpr bool daemon_fence = KVD_MUTANT_DAEMON_FENCE != 0;  // no fence between EVICTING and the scan
inline constexpr bool revalidate = KVD_MUTANT_REVALIDATE != 0;      // sg is not read again after the hazard
inline constexpr bool hazard_scan = KVD_MUTANT_HAZARD_SCAN != 0;    // evict looks at no hazard
inline constexpr bool generation = KVD_MUTANT_GENERATION != 0;      // a reused entry keeps its generation
inline constexpr bool owner_check = KVD_MUTANT_OWNER_CHECK != 0;    // publish believes what it is told
inline constexpr bool exports = KVD_MUTANT_EXPORTS != 0;            // release drops the hazard under live views
inline constexpr bool identity = KVD_MUTANT_IDENTITY != 0;          // an equal tag is taken for an equal key
inline constexpr bool ring_bounds = KVD_MUTANT_RING_BOUNDS != 0;    // cursors and lengths of a peer are believed

}  // namespace kvd::mutant
