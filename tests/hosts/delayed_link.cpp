#include "tessera/tests/hosts/delayed_link.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <unistd.h>

namespace tessera::testing {
namespace {

using Clock = std::chrono::steady_clock;

int make_tap(const std::string& name) {
  const int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  ifreq request{};
  request.ifr_flags = IFF_TAP | IFF_NO_PI;
  std::strncpy(request.ifr_name, name.c_str(), IFNAMSIZ - 1);
  if (fd >= 0 && ioctl(fd, TUNSETIFF, &request) == 0) return fd;
  const std::string reason = std::strerror(errno);
  if (fd >= 0) close(fd);
  throw std::runtime_error(fmt::format("the network device {} cannot be made: {}", name, reason));
}

// Holds the frames that are on their way in one direction.
struct Lane {
  struct Frame {
    Clock::time_point due;
    std::vector<char> bytes;
  };
  int from;
  int to;
  std::deque<Frame> frames = {};

  void take(std::chrono::milliseconds delay) {
    std::array<char, 65536> buffer;
    while (true) {
      const ssize_t length = ::read(from, buffer.data(), buffer.size());
      if (length <= 0) return;
      frames.push_back({Clock::now() + delay, {buffer.data(), buffer.data() + length}});
    }
  }
  // A device that is down refuses frames; a cable loses them.
  void give() {
    while (!frames.empty() && frames.front().due <= Clock::now()) {
      [[maybe_unused]] const ssize_t written = ::write(to, frames.front().bytes.data(), frames.front().bytes.size());
      frames.pop_front();
    }
  }
};

}  // namespace

DelayedLink::DelayedLink(const std::string& netns, const std::string& one, const std::string& other,
                         std::chrono::milliseconds delay) {
  // Only the thread that makes the devices enters the namespace.
  std::string problem;
  std::thread([&] {
    try {
      const int fd = open(("/run/netns/" + netns).c_str(), O_RDONLY | O_CLOEXEC);
      if (fd < 0 || setns(fd, CLONE_NEWNET) != 0) throw std::runtime_error(netns + " cannot be entered");
      close(fd);
      one_ = make_tap(one);
      other_ = make_tap(other);
    } catch (const std::exception& error) {
      problem = error.what();
    }
  }).join();
  if (!problem.empty()) {
    if (one_ >= 0) close(one_);
    throw std::runtime_error(problem);
  }
  carrier_ = std::thread([this, delay] { carry(delay); });
}

DelayedLink::~DelayedLink() {
  stopped_ = true;
  carrier_.join();
  close(one_);
  close(other_);
}

void DelayedLink::carry(std::chrono::milliseconds delay) const {
  std::array<Lane, 2> lanes = {Lane{one_, other_}, Lane{other_, one_}};
  while (!stopped_) {
    std::array<pollfd, 2> polled = {pollfd{one_, POLLIN, 0}, pollfd{other_, POLLIN, 0}};
    ::poll(polled.data(), polled.size(), 1);
    for (Lane& lane : lanes) lane.take(delay);
    for (Lane& lane : lanes) lane.give();
  }
}

}  // namespace tessera::testing
