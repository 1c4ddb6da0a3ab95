// Gather from and scatter into an engine's paged KV cache, by block id.
//
// Owns: the plan (which bytes of a block go where in an object) and its execution. The plan is made once for a pair of
// layouts by kvd/layout; it knows nothing of heads or layers.
//
//   object o, block b of it, id = block_ids[o * blocks_per_object + b], run r, indexes i0..i3 below the dims' counts:
//   paged  address = tensors[r.tensor] + r.paged_offset  + id * r.paged_block_stride  + sum(i_k * dims[k].paged_stride)
//   object address = objects[o]        + r.object_offset + b  * r.object_block_stride + sum(i_k * dims[k].object_stride)
//   r.run_bytes contiguous bytes are copied: to the object (gather) or to the tensor (scatter).
//
// A strided plan is the same without blocks: between numbered sources and destinations, as re-sharding needs it.
//
// Called by: the binding, for clients. Any thread; a plan is immutable and may be shared.
// Invariant: all bounds are checked before the first byte moves. Fenced like copy_nt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvd {

inline constexpr std::size_t paged_dims_max = 4;
inline constexpr std::uint64_t paged_extent_max = std::uint64_t{1} << 48;  // of any offset, stride or size, bytes

struct PagedDim {
  std::uint64_t count = 0;
  std::uint64_t paged_stride = 0;   // bytes
  std::uint64_t object_stride = 0;  // bytes
};

struct PagedRun {
  std::uint32_t tensor = 0;  // index into the tensors of a call
  std::uint64_t run_bytes = 0;
  std::uint64_t paged_offset = 0;
  std::uint64_t object_offset = 0;
  std::uint64_t paged_block_stride = 0;   // bytes between block ids
  std::uint64_t object_block_stride = 0;  // bytes between the blocks of an object
  std::vector<PagedDim> dims;             // outermost first, at most paged_dims_max
};

enum class PagedDirection : int { gather = 0, scatter = 1 };

class PagedPlan {
 public:
  // Throws std::invalid_argument naming the run and the field if a value is zero where it may not be, too large, or
  // reaches past the object.
  PagedPlan(std::uint64_t object_bytes, std::uint64_t blocks_count, std::uint64_t blocks_per_object,
            const std::vector<PagedRun>& runs);

  std::uint64_t object_bytes() const noexcept { return object_bytes_; }
  std::uint64_t blocks_count() const noexcept { return blocks_count_; }
  std::uint64_t blocks_per_object() const noexcept { return blocks_per_object_; }
  // Payload that one object's copy moves. A gather must fill the whole object: moved_bytes == object_bytes.
  std::uint64_t moved_bytes() const noexcept { return moved_bytes_; }
  // The least size of each tensor, so that the last block id stays inside.
  const std::vector<std::uint64_t>& tensor_bytes_min() const noexcept { return tensor_bytes_min_; }

 private:
  friend void paged_copy(const PagedPlan&, PagedDirection, std::uint8_t* const*, std::size_t, std::uint8_t* const*,
                         const std::uint32_t*);

  std::uint64_t object_bytes_;
  std::uint64_t blocks_count_;
  std::uint64_t blocks_per_object_;
  std::uint64_t moved_bytes_ = 0;
  std::vector<std::uint64_t> tensor_bytes_min_;
  std::vector<PagedRun> runs_;  // simplified: no dim of one, none that only continues a run
};

// Copy `objects_count` objects. The caller has checked: sizes of objects and tensors, and that there are
// objects_count * blocks_per_object ids, each below blocks_count. On scatter the objects are only read, on gather the
// tensors are.
void paged_copy(const PagedPlan& plan, PagedDirection direction, std::uint8_t* const* objects,
                std::size_t objects_count, std::uint8_t* const* tensors, const std::uint32_t* block_ids);

struct StridedCopy {
  std::uint32_t source = 0;       // index into the sources of a call
  std::uint32_t destination = 0;  // index into the destinations
  std::uint64_t run_bytes = 0;
  std::uint64_t source_offset = 0;
  std::uint64_t destination_offset = 0;
  struct Loop {
    std::uint64_t count = 0, source_stride = 0, destination_stride = 0;  // strides in bytes
  };
  std::vector<Loop> loops;  // outermost first, at most paged_dims_max
};

class StridedPlan {
 public:
  // Throws std::invalid_argument naming the copy and the field, as PagedPlan does.
  explicit StridedPlan(const std::vector<StridedCopy>& copies);

  std::uint64_t moved_bytes() const noexcept { return moved_bytes_; }
  const std::vector<std::uint64_t>& source_bytes_min() const noexcept { return source_bytes_min_; }
  const std::vector<std::uint64_t>& destination_bytes_min() const noexcept { return destination_bytes_min_; }

 private:
  friend void strided_copy(const StridedPlan&, std::uint8_t* const*, std::uint8_t* const*);

  struct Step {
    std::uint32_t destination;
    PagedRun run;  // the source as `tensor`, the destination as object
  };
  std::uint64_t moved_bytes_ = 0;
  std::vector<std::uint64_t> source_bytes_min_;
  std::vector<std::uint64_t> destination_bytes_min_;
  std::vector<Step> steps_;
};

// Carries out a plan. The caller has checked the sizes of sources and destinations. Fenced like copy_nt.
void strided_copy(const StridedPlan& plan, std::uint8_t* const* sources, std::uint8_t* const* destinations);

}  // namespace kvd
