#include "bind_integers.hpp"

#include <algorithm>
#include <type_traits>

namespace nb = nanobind;

namespace kvd {
namespace {

template <typename Integer>
Integer load(const std::uint8_t* data, std::size_t index) noexcept {
  Integer value;
  std::memcpy(&value, data + index * sizeof value, sizeof value);
  return value;
}

template <typename Integer>
bool fits(Integer value) noexcept {
  return value == static_cast<Integer>(static_cast<std::uint32_t>(value));
}
template <>
bool fits(std::int32_t value) noexcept {
  return value >= 0;
}

[[noreturn]] void refuse_value(const std::string& name, std::size_t position, const std::string& value,
                               std::uint64_t limit) {
  throw nb::value_error((name + "[" + std::to_string(position) + "] = " + value + ": must be 0 .. " +
                         std::to_string(limit - 1)).c_str());
}

constexpr std::uint64_t u32_limit = std::uint64_t{1} << 32;

}  // namespace

IntegerArray::IntegerArray(nb::handle object, const char* name) : name_(name) {
  if (PyList_Check(object.ptr()) || PyTuple_Check(object.ptr())) {
    from_list(object);
  } else {
    from_buffer(object);
  }
}

void IntegerArray::from_list(nb::handle object) {
  PyObject** items = PySequence_Fast_ITEMS(object.ptr());
  count_ = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(object.ptr()));
  converted_.resize(count_);
  for (std::size_t i = 0; i < count_; ++i) {
    PyObject* item = items[i];
    if (!PyLong_CheckExact(item)) {  // bool too: a truth value among token ids is a mistake
      const std::string type = Py_TYPE(item)->tp_name;
      throw nb::type_error((name_ + "[" + std::to_string(i) + "]: an int is required, not " + type).c_str());
    }
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
    if (overflow != 0 || !fits(value)) refuse_value(name_, i, nb::str(nb::handle(item)).c_str(), u32_limit);
    converted_[i] = static_cast<std::uint32_t>(value);
  }
  bytes_ = reinterpret_cast<const std::uint8_t*>(converted_.data());
}

template <typename Source>
void IntegerArray::take(const std::uint8_t* data) {
  std::uint64_t bad = 0;  // one pass without branches; the position is looked for only when there is one
  if constexpr (sizeof(Source) == sizeof(std::uint32_t)) {
    if constexpr (std::is_signed_v<Source>) {
      for (std::size_t i = 0; i < count_; ++i) bad |= load<std::uint32_t>(data, i) & 0x80000000U;
    }
    bytes_ = data;
  } else {
    converted_.resize(count_);
    for (std::size_t i = 0; i < count_; ++i) {
      const auto value = load<std::uint64_t>(data, i);
      bad |= value >> 32;
      converted_[i] = static_cast<std::uint32_t>(value);
    }
    bytes_ = reinterpret_cast<const std::uint8_t*>(converted_.data());
  }
  if (bad == 0) return;
  std::size_t i = 0;
  while (fits(load<Source>(data, i))) ++i;
  refuse_value(name_, i, std::to_string(load<Source>(data, i)), u32_limit);
}

void IntegerArray::from_buffer(nb::handle object) {
  if (PyObject_CheckBuffer(object.ptr()) == 0) {
    const std::string type = nb::type_name(object.type()).c_str();
    throw nb::type_error((name_ + ": a buffer of int32, uint32, int64 or uint64 or a list of int is required, not " +
                          type + " (for a tensor pass tensor.numpy())").c_str());
  }
  buffer_.emplace(object, name_, Buffer::Access::read_typed);
  const Py_buffer& view = buffer_->view();
  if (view.ndim != 1) {
    throw nb::value_error((name_ + " has " + std::to_string(view.ndim) + " dimensions: one is required").c_str());
  }
  count_ = static_cast<std::size_t>(view.len / view.itemsize);
  const char* format = view.format == nullptr ? "B" : view.format;
  const char* code = format + (*format == '<' || *format == '=' || *format == '@' ? 1 : 0);
  const bool is_signed = *code != '\0' && std::strchr("ilq", *code) != nullptr;
  const bool is_unsigned = *code != '\0' && std::strchr("ILQ", *code) != nullptr;
  if (code[0] != '\0' && code[1] == '\0' && (is_signed || is_unsigned)) {
    const auto* data = buffer_->data();
    if (view.itemsize == 4) return is_signed ? take<std::int32_t>(data) : take<std::uint32_t>(data);
    if (view.itemsize == 8) return is_signed ? take<std::int64_t>(data) : take<std::uint64_t>(data);
  }
  throw nb::type_error((name_ + ": elements have format '" + format +
                        "': int32, uint32, int64 or uint64 (little-endian) is required").c_str());
}

std::vector<std::uint32_t> IntegerArray::values() const {
  std::vector<std::uint32_t> values(count_);
  if (count_ != 0) std::memcpy(values.data(), bytes_, count_ * sizeof(std::uint32_t));
  return values;
}

void IntegerArray::check_below(std::uint64_t limit) const {
  for (std::size_t i = 0; i < count_; ++i) {
    const auto value = load<std::uint32_t>(bytes_, i);
    if (value >= limit) refuse_value(name_, i, std::to_string(value), limit);
  }
}

void IntegerArray::check_distinct(std::uint64_t limit) const {
  constexpr std::uint64_t bits = 64;
  std::uint32_t twice = 0;
  bool found = false;
  if (limit / bits <= bits * count_) {  // a bit a value, while clearing them costs less than sorting would
    std::vector<std::uint64_t> seen((limit + bits - 1) / bits);
    for (std::size_t i = 0; i < count_ && !found; ++i) {
      const auto value = load<std::uint32_t>(bytes_, i);
      const std::uint64_t bit = std::uint64_t{1} << (value % bits);
      found = (seen[value / bits] & bit) != 0;
      seen[value / bits] |= bit;
      twice = value;
    }
  } else {
    std::vector<std::uint32_t> sorted = values();
    std::sort(sorted.begin(), sorted.end());
    const auto at = std::adjacent_find(sorted.begin(), sorted.end());
    found = at != sorted.end();
    if (found) twice = *at;
  }
  if (!found) return;
  const auto next = [&](std::size_t from) {
    while (load<std::uint32_t>(bytes_, from) != twice) ++from;
    return from;
  };
  const std::size_t first = next(0), second = next(first + 1);
  throw nb::value_error((name_ + "[" + std::to_string(second) + "] = " + std::to_string(twice) +
                         ": stands at " + name_ + "[" + std::to_string(first) + "] too; each can be written once")
                            .c_str());
}

}  // namespace kvd
