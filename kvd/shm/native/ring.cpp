#include "ring.hpp"

#include <cstring>

#include "mapping.hpp"
#include "mutants.hpp"

namespace kvd {
namespace {

// The header is read word by word, so that what is checked is what is used even if the peer rewrites it meanwhile.
u64 load_word(const u8* at) {
  return std::atomic_ref<u64>(*reinterpret_cast<u64*>(const_cast<u8*>(at))).load(std::memory_order_relaxed);
}

}  // namespace

PushResult Producer::push(u16 type, u64 op, const void* payload, u64 size) {
  if (size > payload_bytes_max()) {
    fail<std::invalid_argument>("a payload of ", size, " bytes does not fit the ring: at most ", payload_bytes_max());
  }
  const u64 used = tail_ - ring_.head->load(std::memory_order_acquire);
  if (!mutant::ring_bounds && used > ring_.bytes) {
    fail<RingError>("the consumer's cursor is ", used, " bytes behind in a ring of ", ring_.bytes);
  }
  const u64 need = Consumer::frame_bytes(size);
  const u64 position = tail_ & (ring_.bytes - 1), to_end = ring_.bytes - position;
  const u64 pad = to_end < need ? to_end : 0;  // a frame never wraps
  if (ring_.bytes - used < pad + need) return push_full;
  if (pad != 0) {
    const Frame mark{0, frame_pad, 0, 0};
    std::memcpy(ring_.base + position, &mark, 8);  // at the very end there is room for no more than these 8 bytes
  }
  u8* at = ring_.base + ((position + pad) & (ring_.bytes - 1));
  const Frame frame{static_cast<u32>(size), type, 0, op};
  std::memcpy(at, &frame, sizeof frame);
  if (size != 0) std::memcpy(at + sizeof frame, payload, size);
  step("push.written");
  tail_ += pad + need;
  ring_.tail->store(tail_, std::memory_order_release);
  step("push.visible");
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (ring_.sleeping->load(std::memory_order_relaxed) == 0) return push_done;
  ring_.sleeping->store(0, std::memory_order_relaxed);
  return push_wake;
}

bool Consumer::may_sleep() noexcept {
  ring_.sleeping->store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!waiting()) return true;
  awake();
  return false;
}

u64 Consumer::checked_tail() const {
  const u64 tail = ring_.tail->load(std::memory_order_acquire);
  if (!mutant::ring_bounds && (tail - head_ > ring_.bytes || tail % 8 != 0)) {
    fail<RingError>("the producer's cursor ", tail, " does not fit ", head_, " in a ring of ", ring_.bytes, " bytes");
  }
  return tail;
}

bool Consumer::next(u64 tail, FrameView& frame) {
  while (head_ != tail) {
    const u64 position = head_ & (ring_.bytes - 1), to_end = ring_.bytes - position, ready = tail - head_;
    const u64 first = load_word(ring_.base + position);
    const u32 size = low32(first);
    const u16 type = static_cast<u16>(first >> 32), flags = static_cast<u16>(first >> 48);
    if (type == frame_pad) {
      if (!mutant::ring_bounds && (to_end > ready || size != 0)) fail<RingError>("a pad leaves the ring");
      head_ += to_end;
      continue;
    }
    const u64 need = frame_bytes(size);
    if (!mutant::ring_bounds && (need > ready || need > to_end || need > ring_.bytes / 2 || flags != 0)) {
      fail<RingError>("a frame of type ", type, " with flags ", flags, " and ", size, " payload bytes leaves the ring: ",
                      ready, " bytes are ready, ", to_end, " to its end");
    }
    frame = {type, load_word(ring_.base + position + 8), ring_.base + position + sizeof(Frame), size};
    return true;
  }
  return false;
}

}  // namespace kvd
