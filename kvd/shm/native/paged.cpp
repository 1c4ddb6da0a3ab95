#include "paged.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "copy.hpp"
#include "cpu.hpp"

namespace kvd {
namespace {

constexpr std::uint64_t line_bytes = 64;

// From these sizes on a run gains from going past the cache. A gather writes front to back, which a cache does well for
// short runs, unless all their lines are stored whole; a scatter writes in no order, which costs a read of each line that is
// not stored whole.
constexpr std::uint64_t gather_stream_run_bytes_min = 1024;
constexpr std::uint64_t gather_stream_lines_bytes_min = 192;
constexpr std::uint64_t scatter_stream_run_bytes_min = 1024;

bool streams(std::uint64_t run_bytes, PagedDirection direction, bool whole_lines) noexcept {
  if (direction == PagedDirection::gather) {
    return run_bytes >= (whole_lines ? gather_stream_lines_bytes_min : gather_stream_run_bytes_min);
  }
  return whole_lines || run_bytes >= scatter_stream_run_bytes_min;
}

// Whether every run that starts at `destination`, on the side that is written, fills whole lines.
bool fills_whole_lines(const PagedRun& run, const std::uint8_t* destination, PagedDirection direction) noexcept {
  const bool gather = direction == PagedDirection::gather;
  std::uint64_t together = reinterpret_cast<std::uintptr_t>(destination) | run.run_bytes;
  together |= gather ? run.object_block_stride : run.paged_block_stride;
  for (const PagedDim& dim : run.dims) together |= gather ? dim.object_stride : dim.paged_stride;
  return together % line_bytes == 0;
}

constexpr std::uint32_t buffers_max = 4096;  // tensors, sources or destinations of one call

[[noreturn]] void refuse(std::size_t index, const char* field, std::uint64_t value, const std::string& rule) {
  throw std::invalid_argument("runs[" + std::to_string(index) + "]." + field + " = " + std::to_string(value) + ": " +
                              rule);
}

// Adds count * stride to an extent; both stay below paged_extent_max, so the 128-bit product is exact.
void reach(std::uint64_t& extent, std::uint64_t count, std::uint64_t stride, std::size_t index, const char* field) {
  const auto sum = static_cast<unsigned __int128>(count) * stride + extent;
  if (sum > paged_extent_max) refuse(index, field, stride, "reaches past 2^48 bytes");
  extent = static_cast<std::uint64_t>(sum);
}

struct Extents {
  std::uint64_t paged, object, moved;  // first byte not touched on either side; bytes moved
};

// How far a run reaches over all its dims, `blocks_count` block ids and `blocks_per_object` blocks.
Extents check(const PagedRun& run, std::uint64_t blocks_count, std::uint64_t blocks_per_object, std::size_t index) {
  if (run.tensor >= buffers_max) refuse(index, "tensor", run.tensor, "must be below 4096");
  if (run.run_bytes == 0) refuse(index, "run_bytes", run.run_bytes, "must be at least 1");
  if (run.dims.size() > paged_dims_max) refuse(index, "dims", run.dims.size(), "at most 4 dims");
  Extents extents{0, 0, 0};
  reach(extents.paged, 1, run.run_bytes, index, "run_bytes");
  reach(extents.paged, 1, run.paged_offset, index, "paged_offset");
  reach(extents.paged, blocks_count - 1, run.paged_block_stride, index, "paged_block_stride");
  reach(extents.object, 1, run.run_bytes, index, "run_bytes");
  reach(extents.object, 1, run.object_offset, index, "object_offset");
  reach(extents.object, blocks_per_object - 1, run.object_block_stride, index, "object_block_stride");
  reach(extents.moved, blocks_per_object, run.run_bytes, index, "run_bytes");
  for (const PagedDim& dim : run.dims) {
    if (dim.count == 0) refuse(index, "dims.count", dim.count, "must be at least 1");
    reach(extents.paged, dim.count - 1, dim.paged_stride, index, "dims.paged_stride");
    reach(extents.object, dim.count - 1, dim.object_stride, index, "dims.object_stride");
    std::uint64_t grown = 0;
    reach(grown, dim.count, extents.moved, index, "dims.count");
    extents.moved = grown;
  }
  return extents;
}

void raise_to(std::vector<std::uint64_t>& bytes_min, std::uint32_t index, std::uint64_t bytes) {
  if (index >= bytes_min.size()) bytes_min.resize(index + std::size_t{1}, 0);
  bytes_min[index] = std::max(bytes_min[index], bytes);
}

// Fewer, longer runs for the same bytes, so that the copy loop sees the true contiguity.
PagedRun simplified(PagedRun run) {
  std::erase_if(run.dims, [](const PagedDim& dim) { return dim.count == 1; });
  while (!run.dims.empty() && run.dims.back().paged_stride == run.run_bytes &&
         run.dims.back().object_stride == run.run_bytes) {
    run.run_bytes *= run.dims.back().count;
    run.dims.pop_back();
  }
  for (std::size_t k = run.dims.size(); k-- > 1;) {  // an outer dim that continues the inner one
    PagedDim& outer = run.dims[k - 1];
    const PagedDim& inner = run.dims[k];
    if (outer.paged_stride == inner.paged_stride * inner.count &&
        outer.object_stride == inner.object_stride * inner.count) {
      outer = {outer.count * inner.count, inner.paged_stride, inner.object_stride};
      run.dims.erase(run.dims.begin() + static_cast<std::ptrdiff_t>(k));
    }
  }
  return run;
}

struct Sides {
  std::uint8_t* dst;
  const std::uint8_t* src;
};

// Executes one run for one block: the innermost dim in the kernel, the outer ones here.
class RunCopier {
 public:
  RunCopier(const PagedRun& run, PagedDirection direction, bool stream, const std::uint8_t* destination) noexcept
      : copy_runs_(kernels().copy_runs),
        run_bytes_(run.run_bytes),
        stream_(stream && streams(run.run_bytes, direction, fills_whole_lines(run, destination, direction))) {
    const bool gather = direction == PagedDirection::gather;
    for (const PagedDim& dim : run.dims) {
      const Level level{dim.count, gather ? dim.object_stride : dim.paged_stride,
                        gather ? dim.paged_stride : dim.object_stride};
      if (&dim == &run.dims.back()) {
        inner_ = level;
      } else {
        outer_[outer_count_++] = level;
        outer_steps_ *= level.count;
      }
    }
  }

  bool streams_runs() const noexcept { return stream_; }

  void copy(Sides at) const noexcept {
    std::uint64_t index[paged_dims_max] = {};
    for (std::uint64_t step = 0; step < outer_steps_; ++step) {
      copy_runs_(at.dst, at.src, run_bytes_, inner_.count, inner_.dst_stride, inner_.src_stride, stream_);
      for (std::size_t k = outer_count_; k-- > 0;) {  // the next place, as an odometer counts
        const Level& level = outer_[k];
        at.dst += level.dst_stride;
        at.src += level.src_stride;
        if (++index[k] < level.count) break;
        index[k] = 0;
        at.dst -= level.count * level.dst_stride;
        at.src -= level.count * level.src_stride;
      }
    }
  }

 private:
  struct Level {
    std::uint64_t count = 1, dst_stride = 0, src_stride = 0;
  };

  decltype(Kernels::copy_runs) copy_runs_;
  std::size_t run_bytes_;
  bool stream_;
  Level inner_;
  Level outer_[paged_dims_max - 1];
  std::size_t outer_count_ = 0;
  std::uint64_t outer_steps_ = 1;
};

}  // namespace

PagedPlan::PagedPlan(std::uint64_t object_bytes, std::uint64_t blocks_count, std::uint64_t blocks_per_object,
                     const std::vector<PagedRun>& runs)
    : object_bytes_(object_bytes), blocks_count_(blocks_count), blocks_per_object_(blocks_per_object) {
  if (object_bytes == 0 || object_bytes > paged_extent_max) {
    throw std::invalid_argument("object_bytes = " + std::to_string(object_bytes) + ": must be 1 .. 2^48");
  }
  if (blocks_count == 0 || blocks_count > (std::uint64_t{1} << 32)) {
    throw std::invalid_argument("blocks_count = " + std::to_string(blocks_count) + ": must be 1 .. 2^32");
  }
  if (blocks_per_object == 0 || blocks_per_object > (std::uint64_t{1} << 32)) {
    throw std::invalid_argument("blocks_per_object = " + std::to_string(blocks_per_object) + ": must be 1 .. 2^32");
  }
  if (runs.empty()) throw std::invalid_argument("runs is empty: the plan would copy nothing");
  for (std::size_t index = 0; index < runs.size(); ++index) {
    const Extents extents = check(runs[index], blocks_count, blocks_per_object, index);
    if (extents.object > object_bytes) {
      refuse(index, "object_offset", runs[index].object_offset,
             "the run ends at byte " + std::to_string(extents.object) + " of an object of " +
                 std::to_string(object_bytes));
    }
    reach(moved_bytes_, 1, extents.moved, index, "run_bytes");
    raise_to(tensor_bytes_min_, runs[index].tensor, extents.paged);
    runs_.push_back(simplified(runs[index]));
  }
}

namespace {

// Asks for the start of the sources of coming blocks. Their ids are in no order, so the hardware cannot guess them, and a
// short run is over before its own misses are served (runs of 256 bytes: three times as fast). Asking for more than the
// head of a long run, or little by little, gained nothing.
class BlocksAhead {
 public:
  BlocksAhead(const PagedRun& run, const std::uint8_t* paged, const std::uint32_t* ids, std::uint64_t count) noexcept
      : paged_(paged),
        ids_(ids),
        count_(count),
        stride_(run.paged_block_stride),
        asked_bytes_(run.run_bytes <= ahead_bytes ? run.run_bytes : head_bytes),
        distance_(std::min((distance_bytes(run.run_bytes) + run.run_bytes - 1) / run.run_bytes, blocks_max)) {
    for (std::uint64_t b = 0; b < std::min(distance_, count); ++b) ask(b);
  }

  // Due before block `b` is copied. Inlined by force: gcc takes a function that only prefetches for one without effect,
  // and drops its calls.
  [[gnu::always_inline]] void before(std::uint64_t b) const noexcept {
    if (b + distance_ < count_) ask(b + distance_);
  }

 private:
  static constexpr std::uint64_t ahead_bytes = 4096;
  static constexpr std::uint64_t head_bytes = 2048;
  static constexpr std::uint64_t short_bytes_max = 1024;
  static constexpr std::uint64_t blocks_max = 64;

  static constexpr std::uint64_t distance_bytes(std::uint64_t run_bytes) noexcept {
    return run_bytes <= short_bytes_max ? 2 * ahead_bytes : ahead_bytes;
  }

  [[gnu::always_inline]] void ask(std::uint64_t b) const noexcept {
    const std::uint8_t* block = paged_ + ids_[b] * stride_;
    for (std::uint64_t at = 0; at < asked_bytes_; at += line_bytes) __builtin_prefetch(block + at);
    __builtin_prefetch(block + asked_bytes_ - 1);  // a run that starts within a line ends in one line more
  }

  const std::uint8_t* paged_;
  const std::uint32_t* ids_;
  std::uint64_t count_, stride_, asked_bytes_, distance_;
};

// One short run a block and nothing else: what a call for each of them costs is then most of the time.
template <std::size_t run_bytes>
void gather_short(const PagedRun& run, std::uint8_t* object, const std::uint8_t* paged, const std::uint32_t* ids,
                  std::uint64_t count) {
  const BlocksAhead ahead(run, paged, ids, count);
  const std::uint64_t stride = run.paged_block_stride, step = run.object_block_stride;
  for (std::uint64_t b = 0; b < count; ++b, object += step) {
    ahead.before(b);
    std::memcpy(object, paged + ids[b] * stride, run_bytes);
  }
}

bool gather_if_short(const PagedRun& run, std::uint8_t* object, const std::uint8_t* paged, const std::uint32_t* ids,
                     std::uint64_t count) {
  if (!run.dims.empty()) return false;
  switch (run.run_bytes) {
    case 16: return gather_short<16>(run, object, paged, ids, count), true;
    case 32: return gather_short<32>(run, object, paged, ids, count), true;
    case 64: return gather_short<64>(run, object, paged, ids, count), true;
    case 128: return gather_short<128>(run, object, paged, ids, count), true;
    case 256: return gather_short<256>(run, object, paged, ids, count), true;
    default: return false;
  }
}

void gather_run(const RunCopier& copier, const PagedRun& run, std::uint8_t* object, const std::uint8_t* paged,
                const std::uint32_t* ids, std::uint64_t count) {
  if (!copier.streams_runs() && gather_if_short(run, object, paged, ids, count)) return;
  const BlocksAhead ahead(run, paged, ids, count);
  for (std::uint64_t b = 0; b < count; ++b, object += run.object_block_stride) {
    ahead.before(b);
    copier.copy({object, paged + ids[b] * run.paged_block_stride});
  }
}

void scatter_run(const RunCopier& copier, const PagedRun& run, const std::uint8_t* object, std::uint8_t* paged,
                 const std::uint32_t* ids, std::uint64_t count) {
  if (!copier.streams_runs()) {  // through the cache a store waits for its line as a load does
    const BlocksAhead ahead(run, paged, ids, count);
    for (std::uint64_t b = 0; b < count; ++b, object += run.object_block_stride) {
      ahead.before(b);
      copier.copy({paged + ids[b] * run.paged_block_stride, object});
    }
    return;
  }
  for (std::uint64_t b = 0; b < count; ++b, object += run.object_block_stride) {
    copier.copy({paged + ids[b] * run.paged_block_stride, object});
  }
}

}  // namespace

void paged_copy(const PagedPlan& plan, PagedDirection direction, std::uint8_t* const* objects,
                std::size_t objects_count, std::uint8_t* const* tensors, const std::uint32_t* block_ids) {
  const bool stream = plan.moved_bytes_ * objects_count >= stream_bytes_min;
  for (std::size_t o = 0; o < objects_count; ++o, block_ids += plan.blocks_per_object_) {
    for (const PagedRun& run : plan.runs_) {
      std::uint8_t* paged = tensors[run.tensor] + run.paged_offset;
      std::uint8_t* object = objects[o] + run.object_offset;
      const RunCopier copier(run, direction, stream, direction == PagedDirection::gather ? object : paged);
      if (direction == PagedDirection::gather) {
        gather_run(copier, run, object, paged, block_ids, plan.blocks_per_object_);
      } else {
        scatter_run(copier, run, object, paged, block_ids, plan.blocks_per_object_);
      }
    }
  }
  store_fence();
}

StridedPlan::StridedPlan(const std::vector<StridedCopy>& copies) {
  if (copies.empty()) throw std::invalid_argument("runs is empty: the plan would copy nothing");
  for (std::size_t index = 0; index < copies.size(); ++index) {
    const StridedCopy& copy = copies[index];
    PagedRun run{copy.source, copy.run_bytes, copy.source_offset, copy.destination_offset, 0, 0, {}};
    for (const auto& loop : copy.loops) run.dims.push_back({loop.count, loop.source_stride, loop.destination_stride});
    if (copy.destination >= buffers_max) refuse(index, "destination", copy.destination, "must be below 4096");
    const Extents extents = check(run, 1, 1, index);
    reach(moved_bytes_, 1, extents.moved, index, "run_bytes");
    raise_to(source_bytes_min_, copy.source, extents.paged);
    raise_to(destination_bytes_min_, copy.destination, extents.object);
    steps_.push_back({copy.destination, simplified(std::move(run))});
  }
}

void strided_copy(const StridedPlan& plan, std::uint8_t* const* sources, std::uint8_t* const* destinations) {
  const bool stream = plan.moved_bytes_ >= stream_bytes_min;
  for (const StridedPlan::Step& step : plan.steps_) {
    std::uint8_t* destination = destinations[step.destination] + step.run.object_offset;
    const RunCopier copier(step.run, PagedDirection::gather, stream, destination);
    copier.copy({destination, sources[step.run.tensor] + step.run.paged_offset});
  }
  store_fence();
}

}  // namespace kvd
