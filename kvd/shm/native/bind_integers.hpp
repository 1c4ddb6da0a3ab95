// Token and block ids that Python hands in, as unsigned 32-bit integers, checked once.
//
// Called by: the bind_*.cpp files, with the GIL held on construction.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "bind_buffer.hpp"

namespace kvd {

class IntegerArray {
 public:
  // From a one-dimensional buffer of int32, uint32, int64 or uint64, or a list or tuple of int. Throws TypeError or
  // ValueError naming the argument, the position and the value. A buffer of 32 bits is used in place.
  IntegerArray(nanobind::handle object, const char* name);

  std::size_t count() const noexcept { return count_; }
  // The values as u32 little-endian bytes, of any alignment; valid while this object lives.
  const std::uint8_t* bytes() const noexcept { return bytes_; }
  std::vector<std::uint32_t> values() const;
  // Throws ValueError naming the first value that is not below `limit`.
  void check_below(std::uint64_t limit) const;
  // Throws ValueError naming the first value that stands there twice. All have to be below `limit`.
  void check_distinct(std::uint64_t limit) const;

 private:
  void from_list(nanobind::handle object);
  void from_buffer(nanobind::handle object);
  template <typename Source>
  void take(const std::uint8_t* data);

  std::string name_;
  std::size_t count_ = 0;
  const std::uint8_t* bytes_ = nullptr;
  std::optional<Buffer> buffer_;
  std::vector<std::uint32_t> converted_;
};

}  // namespace kvd
