#include "tessera/tools/launcher/output_writer.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>

namespace tessera {
namespace {

constexpr std::size_t kMostWaiting = std::size_t{1} << 20;
constexpr std::size_t kPiece = std::size_t{1} << 16;

// Writes some of the bytes. Returns their number, or -1 with errno.
ssize_t write_some(int fd, const char* bytes, std::size_t count) {
  while (true) {
    const ssize_t written = ::write(fd, bytes, count);
    if (written >= 0 || (errno != EAGAIN && errno != EINTR)) return written;
    // Another process may have made the descriptor non-blocking.
    pollfd writable = {.fd = fd, .events = POLLOUT, .revents = 0};
    ::poll(&writable, 1, -1);
  }
}

}  // namespace

struct OutputWriter::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::string queue;        // what the thread has not taken yet
  std::size_t waiting = 0;  // bytes in `queue` and those that the thread has taken and not written
  int error = 0;
  bool is_ended = false;
};

OutputWriter::OutputWriter(int fd) : state_(std::make_shared<State>()) {
  // A thread inherits the mask of the one that makes it.
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([state = state_, fd] { write_all(state, fd); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

OutputWriter::~OutputWriter() {
  bool is_idle = false;
  {
    const std::lock_guard lock(state_->mutex);
    state_->is_ended = true;
    is_idle = state_->waiting == 0;
  }
  state_->changed.notify_all();
  is_idle ? thread_.join() : thread_.detach();
}

void OutputWriter::write_all(const std::shared_ptr<State>& state, int fd) {
  std::unique_lock lock(state->mutex);
  while (true) {
    state->changed.wait(lock, [&] { return state->is_ended || !state->queue.empty(); });
    if (state->is_ended) return;
    const std::string taken = std::exchange(state->queue, {});
    for (std::size_t done = 0; done < taken.size() && state->error == 0 && !state->is_ended;) {
      lock.unlock();
      const ssize_t written = write_some(fd, taken.data() + done, std::min(kPiece, taken.size() - done));
      const int error = written < 0 ? errno : 0;
      lock.lock();
      state->error = error;
      if (error != 0) break;
      done += static_cast<std::size_t>(written);
      state->waiting -= static_cast<std::size_t>(written);
    }
    if (state->error == 0) continue;
    state->waiting = 0;
    return;
  }
}

void OutputWriter::add(std::string_view bytes) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->error != 0) return;
    state_->queue += bytes;
    state_->waiting += bytes.size();
  }
  state_->changed.notify_all();
}

std::size_t OutputWriter::waiting() const {
  const std::lock_guard lock(state_->mutex);
  return state_->waiting;
}

bool OutputWriter::has_room() const { return waiting() < kMostWaiting; }

int OutputWriter::error() const {
  const std::lock_guard lock(state_->mutex);
  return state_->error;
}

}  // namespace tessera
