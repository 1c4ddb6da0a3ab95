// Files that are mapped: size, seals, mode, and what a fork does to them.
//
// Owns: the life of each mapping. Called by: Table, Region, Client. Throws std::system_error (the operating system
// refused) or std::invalid_argument (not such a file).
// Invariants: a mapping is MADV_DONTFORK; an object made before a fork refuses to work in the child, where its memory is
// not mapped, and its destructor touches nothing there.
#pragma once

#include <memory>
#include <sstream>
#include <string>

#include "layout.hpp"

namespace kvd {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class Error, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(text(parts...));
}

// Knows whether the process forked since it was made.
class ForkGuard {
 public:
  ForkGuard() noexcept;
  bool forked() const noexcept;
  void check(const char* what) const;  // std::runtime_error in a forked child

 private:
  u64 forks_;
};

class Mapping {
 public:
  enum class Pages { small, huge };  // huge: advised, obtained only if the system is set up for it

  // Maps the whole file. The descriptor may be closed afterwards.
  static std::shared_ptr<Mapping> of(int fd, bool writable, Pages pages, const char* what);
  Mapping(u8* data, u64 size, bool writable) noexcept : data_(data), size_(size), writable_(writable) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  u8* data() const noexcept { return data_; }
  u64 size() const noexcept { return size_; }
  bool writable() const noexcept { return writable_; }
  const ForkGuard& guard() const noexcept { return guard_; }

  // Maps pages ahead of their first use, which then does not fault page by page. No memory for it, or an old kernel: they
  // come one by one as before.
  void prefault(u64 offset, u64 bytes) const noexcept;

  // The byte range as a T, or std::runtime_error if it leaves the mapping.
  template <class T>
  T* at(u64 offset, u64 count, const char* what) const {
    check_range(offset, count, sizeof(T), alignof(T), what);
    return reinterpret_cast<T*>(data_ + offset);
  }

 private:
  void check_range(u64 offset, u64 count, u64 size, u64 align, const char* what) const;
  u8* data_;
  u64 size_;
  bool writable_;
  ForkGuard guard_;
};

// Gives an empty memfd its size and mode 0600.
void size_file(int fd, u64 bytes, const char* what);
void seal_resizing(int fd, const char* what);  // SHRINK, GROW, SEAL: nobody can take pages away under a mapping
void seal_writing(int fd, const char* what);   // and FUTURE_WRITE: existing writable mappings alone stay so

u64 now_ns() noexcept;  // CLOCK_MONOTONIC

}  // namespace kvd
