#include "mapping.hpp"

#include <algorithm>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace kvd {
namespace {

// Counts the forks between the process that loaded this library and this one. Only the child's handler writes it.
std::atomic<u64> forks{0};
[[maybe_unused]] const int forks_registered =
    pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

[[noreturn]] void fail_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

u64 file_bytes(int fd, const char* what) {
  struct stat status{};
  if (fstat(fd, &status) != 0) fail_errno(text(what, ": fstat of descriptor ", fd));
  return static_cast<u64>(status.st_size);
}

// A file that is sealed already (a descriptor kept over a restart) is accepted if it has all the seals.
void add_seals(int fd, int seals, const char* what) {
  const int have = fcntl(fd, F_GET_SEALS);
  if (have < 0) fail_errno(text(what, ": descriptor ", fd, " cannot be sealed"));
  if ((have & seals) == seals) return;
  if (fcntl(fd, F_ADD_SEALS, seals) != 0) fail_errno(text(what, ": sealing descriptor ", fd));
}

}  // namespace

ForkGuard::ForkGuard() noexcept : forks_(forks.load(std::memory_order_relaxed)) {}
bool ForkGuard::forked() const noexcept { return forks_ != forks.load(std::memory_order_relaxed); }
void ForkGuard::check(const char* what) const {
  if (forked()) {
    fail<std::runtime_error>(what, " was made before this process forked; shared memory is not inherited: attach anew");
  }
}

std::shared_ptr<Mapping> Mapping::of(int fd, bool writable, Pages pages, const char* what) {
  const u64 size = file_bytes(fd, what);
  if (size == 0) fail<std::invalid_argument>(what, ": descriptor ", fd, " is an empty file");
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* data = mmap(nullptr, size, protection, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) fail_errno(text(what, ": mapping ", size, " bytes of descriptor ", fd));
  auto mapping = std::make_shared<Mapping>(static_cast<u8*>(data), size, writable);
  if (madvise(data, size, MADV_DONTFORK) != 0) fail_errno(text(what, ": MADV_DONTFORK"));
  // Advice only: refused where the kernel has no huge pages or the file consists of them already.
  if (pages == Pages::huge) madvise(data, size, MADV_HUGEPAGE);
  return mapping;
}

Mapping::~Mapping() {
  if (!guard_.forked()) munmap(data_, size_);
}

void Mapping::prefault(u64 offset, u64 bytes) const noexcept {
  if (offset >= size_ || guard_.forked()) return;
  madvise(data_ + offset, std::min(bytes, size_ - offset), writable_ ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
}

void Mapping::check_range(u64 offset, u64 count, u64 size, u64 align, const char* what) const {
  if (offset % align != 0 || offset > size_ || count > (size_ - offset) / size) {
    fail<std::runtime_error>(what, ": ", count, " x ", size, " bytes at offset ", offset, " leave the mapping of ", size_,
                             " bytes");
  }
}

void size_file(int fd, u64 bytes, const char* what) {
  if (const u64 old = file_bytes(fd, what); old != 0) {
    fail<std::invalid_argument>(what, ": descriptor ", fd, " has ", old, " bytes; an empty memfd is needed");
  }
  if (fchmod(fd, 0600) != 0) fail_errno(text(what, ": fchmod of descriptor ", fd));
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) fail_errno(text(what, ": ftruncate to ", bytes, " bytes"));
}

void seal_resizing(int fd, const char* what) { add_seals(fd, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL, what); }
void seal_writing(int fd, const char* what) {
  add_seals(fd, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL, what);
}

u64 now_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<u64>(now.tv_sec) * 1'000'000'000 + static_cast<u64>(now.tv_nsec);
}

}  // namespace kvd
