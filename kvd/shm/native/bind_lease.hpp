// What Python holds of leases; bind_client.cpp makes them, bind_lease.cpp shows them.
#pragma once

#include <nanobind/nanobind.h>

#include "client.hpp"

namespace kvd {

namespace nb = nanobind;

struct LeaseBatch {
  LeaseRef set;
};

struct Lease {
  LeaseRef set;
  u32 index;
  u32 member;   // what view() shows if it is not told
  u32 showing;  // what the buffer slot shows right now
};

void bind_leases(nb::module_& module);

}  // namespace kvd
