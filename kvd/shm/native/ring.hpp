// One direction of a ring between the daemon and one client: frames of bytes, one producer, one consumer.
//
// Owns: private cursors; the shared ones are published for the other side and never believed. Called by: Region and
// Client, each from one thread at a time. Throws RingError when the other side broke the protocol, std::invalid_argument
// for a frame that can never fit.
//
//   push:      bytes; tail (release); fence; sleeping? then the peer must be woken
//   may sleep: sleeping = 1; fence; look at tail once more
// The two fences see to it that either the consumer sees the frame or the producer sees the sleeper.
#pragma once

#include <stdexcept>

#include "layout.hpp"

namespace kvd {

struct RingError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

struct RingWords {
  u8* base = nullptr;
  u32 bytes = 0;  // a power of two
  Shared<u64>* tail = nullptr;
  Shared<u64>* head = nullptr;
  Shared<u32>* sleeping = nullptr;  // the consumer's
};

enum PushResult : int { push_full = 0, push_done = 1, push_wake = 3 };

class Producer {
 public:
  explicit Producer(const RingWords& ring) : ring_(ring) {}
  // A frame may take half of the ring, so that one always fits an empty ring wherever it stands.
  u32 payload_bytes_max() const noexcept { return ring_.bytes / 2 - u32{sizeof(Frame)}; }
  PushResult push(u16 type, u64 op, const void* payload, u64 size);

 private:
  RingWords ring_;
  u64 tail_ = 0;
};

struct FrameView {
  u16 type;
  u64 op;
  const u8* payload;  // still in the ring: the receiver copies it, then looks
  u32 size;
};

class Consumer {
 public:
  explicit Consumer(const RingWords& ring) : ring_(ring) {}

  // Calls sink(FrameView) for up to frames_max frames, then hands their space back.
  template <class Sink>
  void pop(u32 frames_max, Sink&& sink) {
    const u64 tail = checked_tail();
    for (FrameView frame{}; frames_max > 0 && next(tail, frame); --frames_max) {
      sink(frame);
      head_ += frame_bytes(frame.size);
    }
    ring_.head->store(head_, std::memory_order_release);
  }

  bool waiting() const noexcept { return ring_.tail->load(std::memory_order_acquire) != head_; }
  bool may_sleep() noexcept;
  void awake() noexcept { ring_.sleeping->store(0, std::memory_order_relaxed); }

  static constexpr u64 frame_bytes(u64 payload) { return (sizeof(Frame) + payload + 7) & ~u64{7}; }

 private:
  u64 checked_tail() const;
  bool next(u64 tail, FrameView& frame);
  RingWords ring_;
  u64 head_ = 0;
};

}  // namespace kvd
