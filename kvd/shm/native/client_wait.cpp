// Client: sleeping until the daemon has answered.
#include "client.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace kvd {

Client::Wait Client::poll_once(int wake_fd, int stir_fd, u64 deadline_ns) {
  const u64 now = now_ns(), left = deadline_ns > now ? deadline_ns - now : 0;
  const timespec timeout{static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
  pollfd fds[2] = {{wake_fd, POLLIN, 0}, {stir_fd, POLLIN, 0}};
  const pollfd& wake = fds[0];
  const int ready = ppoll(fds, stir_fd < 0 ? 1 : 2, &timeout, nullptr);
  if (ready == 0) return wait_deadline;
  if (ready < 0) {
    if (errno == EINTR) return wait_interrupted;
    throw std::system_error(errno, std::generic_category(), "waiting for the daemon");
  }
  if ((wake.revents & POLLNVAL) != 0) {
    throw std::system_error(EBADF, std::generic_category(), "waiting for the daemon");
  }
  if (stir_fd >= 0 && fds[1].revents != 0) {
    u64 stirred;
    if (read(stir_fd, &stirred, sizeof stirred) < 0 && errno != EAGAIN && errno != EINTR) {
      throw std::system_error(errno, std::generic_category(), "waiting for the daemon");
    }
    if (wake.revents == 0) return wait_stirred;
  }
  char bytes[256];
  for (;;) {
    const ssize_t count = recv(wake_fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (count > 0) continue;
    if (count == 0 || errno == ECONNRESET || errno == EPIPE) return wait_gone;
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return wait_again;
    throw std::system_error(errno, std::generic_category(), "draining the wake socket");
  }
}

}  // namespace kvd
