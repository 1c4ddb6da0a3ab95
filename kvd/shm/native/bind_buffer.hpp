// Memory that Python hands in: any object with the buffer protocol, without numpy.
//
// Called by: the bind_*.cpp files, with the GIL held on construction and destruction. While a Buffer lives its memory
// stays where it is (a bytearray cannot be resized, an mmap cannot be closed), so the GIL may be released in between.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>

namespace kvd {

class Buffer {
 public:
  enum class Access { read, write, read_typed };  // read_typed also asks for the element format

  // Throws TypeError (no buffer) or BufferError (not contiguous, or read-only where it must be written), with the
  // argument's name in the message.
  Buffer(nanobind::handle object, const std::string& name, Access access) {
    int flags = PyBUF_SIMPLE;
    if (access == Access::write) flags = PyBUF_WRITABLE;
    if (access == Access::read_typed) flags = PyBUF_FORMAT | PyBUF_C_CONTIGUOUS;
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) == 0) return;
    PyErr_Clear();
    if (PyObject_CheckBuffer(object.ptr()) == 0) {
      const std::string type = nanobind::type_name(object.type()).c_str();
      throw nanobind::type_error((name + ": a bytes-like object is required, not " + type).c_str());
    }
    const char* what = access == Access::write ? ": the buffer is read-only or not C-contiguous"
                                               : ": the buffer is not C-contiguous";
    throw nanobind::buffer_error((name + what).c_str());
  }
  Buffer(Buffer&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() { PyBuffer_Release(&view_); }  // does nothing where obj is null

  std::uint8_t* data() const noexcept { return static_cast<std::uint8_t*>(view_.buf); }
  std::size_t size() const noexcept { return static_cast<std::size_t>(view_.len); }
  const Py_buffer& view() const noexcept { return view_; }

 private:
  Py_buffer view_{};
};

// Releases the GIL for work of `bytes` bytes if that takes more than about 50 microseconds.
class GilReleaseIfLong {
 public:
  static constexpr std::size_t bytes_min = std::size_t{512} << 10;
  explicit GilReleaseIfLong(std::size_t bytes) {
    if (bytes >= bytes_min) release_.emplace();
  }

 private:
  std::optional<nanobind::gil_scoped_release> release_;
};

}  // namespace kvd
