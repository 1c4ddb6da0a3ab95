// What bind_table.cpp and bind_client.cpp share: columns in, columns out, writable memory.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bind_buffer.hpp"
#include "client.hpp"
#include "mapping.hpp"
#include "ring.hpp"

namespace kvd {

namespace nb = nanobind;

// A bytes-like argument as an array of T, copied only where it is not aligned.
template <class T>
class Column {
 public:
  Column(nb::handle object, const char* name) : buffer_(object, name, Buffer::Access::read) {
    if (buffer_.size() % sizeof(T) != 0) {
      fail<std::invalid_argument>(name, " has ", buffer_.size(), " bytes: not a multiple of ", sizeof(T));
    }
    data_ = reinterpret_cast<const T*>(buffer_.data());
    if (reinterpret_cast<std::uintptr_t>(data_) % alignof(T) != 0) {
      copy_.resize(size());
      std::memcpy(copy_.data(), buffer_.data(), buffer_.size());
      data_ = copy_.data();
    }
  }
  Column(nb::handle object, const char* name, u64 count) : Column(object, name) {
    if (size() != count) fail<std::invalid_argument>(name, " has ", size(), " elements, ", count, " are needed");
  }
  const T* data() const noexcept { return data_; }
  u64 size() const noexcept { return buffer_.size() / sizeof(T); }

 private:
  Buffer buffer_;
  const T* data_;
  std::vector<T> copy_;
};

// Keys of 32 bytes, one after the other.
class Keys {
 public:
  explicit Keys(nb::handle object) : bytes_(object, "keys") {
    if (bytes_.size() % identity_size != 0) {
      fail<std::invalid_argument>("keys has ", bytes_.size(), " bytes: not a multiple of ", identity_size);
    }
    if (count() >= none32) fail<std::invalid_argument>("keys: too many");
  }
  const u8* data() const noexcept { return bytes_.data(); }
  u64 count() const noexcept { return bytes_.size() / identity_size; }

 private:
  Column<u8> bytes_;
};

// A new bytes object of `count` T, to be filled before anybody else sees it.
template <class T>
class OutColumn {
 public:
  explicit OutColumn(u64 count)
      : bytes_(nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * sizeof(T))))) {
    if (!bytes_.is_valid()) throw nb::python_error();
  }
  T* data() const noexcept { return reinterpret_cast<T*>(PyBytes_AS_STRING(bytes_.ptr())); }
  nb::bytes take() const { return bytes_; }

 private:
  nb::bytes bytes_;
};

template <class T>
nb::bytes column_of(const std::vector<T>& values) {
  return nb::bytes(values.data(), values.size() * sizeof(T));
}

// Up to frames_max frames as [(type, op, payload)]. They leave the ring before the first Python object is made: making one
// may run Python code that comes back here. What was good before a bad frame is returned first; the bad one is
// met again by the next call.
inline nb::list pop_frames(Consumer& ring, u32 frames_max) {
  struct Taken {
    u16 type;
    u64 op;
    std::size_t begin, size;
  };
  std::vector<Taken> taken;
  std::string bytes;
  try {
    ring.pop(frames_max, [&](const FrameView& frame) {
      taken.push_back({frame.type, frame.op, bytes.size(), frame.size});
      bytes.append(reinterpret_cast<const char*>(frame.payload), frame.size);
    });
  } catch (const RingError&) {
    if (taken.empty()) throw;
  }
  nb::list frames;
  for (const Taken& frame : taken) {
    frames.append(nb::make_tuple(frame.type, frame.op, nb::bytes(bytes.data() + frame.begin, frame.size)));
  }
  return frames;
}

inline int push_frame(Producer& ring, u16 type, u64 op, nb::handle payload) {
  const Buffer bytes(payload, "payload", Buffer::Access::read);
  if (type == frame_pad) fail<std::invalid_argument>("type 65535 is the ring's own");
  return ring.push(type, op, bytes.data(), bytes.size());
}

// Memory of the pool that may be written. Exports the buffer protocol; its mapping lives as long as its views.
struct WritableView {
  std::shared_ptr<Mapping> mapping;
  std::shared_ptr<Writers> writers;
  u8* address;
  u64 size;
  u32 exports = 0;
  bool retired = false;
};

inline nb::object memoryview_of(nb::handle exporter) {
  PyObject* view = PyMemoryView_FromObject(exporter.ptr());
  if (view == nullptr) throw nb::python_error();
  return nb::steal(view);
}

}  // namespace kvd
