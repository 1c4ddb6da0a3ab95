// What the native tests share: a condition that ends the test by name, and files of memory.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "layout.hpp"

#define CHECK(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                       \
    }                                                                                     \
  } while (0)

#define CHECK_THROWS(error, call)  \
  do {                             \
    bool caught = false;           \
    try {                          \
      call;                        \
    } catch (const error&) {       \
      caught = true;               \
    }                              \
    CHECK(caught && #call);        \
  } while (0)

inline int memory_file(const char* name, kvd::u64 bytes = 0) {
  const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0);
  return fd;
}
