#include "tessera/tools/launcher/rank_outputs.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kDrain{200};
constexpr std::chrono::milliseconds kDrainPoll{10};
constexpr std::size_t kLongestLine = std::size_t{1} << 16;

std::size_t capacity_of(int fd) {
  const int size = ::fcntl(fd, F_GETPIPE_SZ);
  return size > 0 ? static_cast<std::size_t>(size) : kLongestLine;
}

}  // namespace

RankOutputs::~RankOutputs() {
  for (const Output& output : outputs_) ::close(output.fd);
}

void RankOutputs::add(int64_t rank, const Child& child) {
  constexpr std::size_t no_limit = std::numeric_limits<std::size_t>::max();
  outputs_.push_back({rank, OutputStream::kStdout, child.out, {}, no_limit});
  outputs_.push_back({rank, OutputStream::kStderr, child.err, {}, no_limit});
}

void RankOutputs::read(std::chrono::milliseconds wait) {
  const bool out = !sinks_.has_room || sinks_.has_room(OutputStream::kStdout);
  const bool err = !sinks_.has_room || sinks_.has_room(OutputStream::kStderr);
  read_from([&](const Output& output) { return output.stream == OutputStream::kStdout ? out : err; }, wait);
}

void RankOutputs::drain() {
  for (Output& output : outputs_) output.left = capacity_of(output.fd);
  const Clock::time_point until = Clock::now() + kDrain;
  while (!outputs_.empty() && Clock::now() < until) {
    read_from([](const Output& output) { return output.left > 0; }, kDrainPoll);
  }
  for (Output& output : outputs_) give_rest(output);
}

void RankOutputs::read_from(const std::function<bool(const Output&)>& is_wanted, std::chrono::milliseconds wait) {
  std::vector<pollfd> polled;
  polled.reserve(outputs_.size());
  // poll() ignores negative descriptors.
  for (const Output& output : outputs_) polled.push_back({is_wanted(output) ? output.fd : -1, POLLIN, 0});
  if (::poll(polled.data(), polled.size(), static_cast<int>(wait.count())) <= 0) return;
  for (std::size_t i = outputs_.size(); i-- > 0;) {
    if (polled[i].revents == 0 || read_output(outputs_[i])) continue;
    give_rest(outputs_[i]);
    ::close(outputs_[i].fd);
    outputs_.erase(outputs_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

// Passes what is available to on_output, or its complete lines to on_line. Returns false at the end of the stream.
bool RankOutputs::read_output(Output& output) {
  std::array<char, kLongestLine> buffer;
  const ssize_t count = ::read(output.fd, buffer.data(), std::min(buffer.size(), output.left));
  if (count < 0) return errno == EAGAIN || errno == EINTR;
  if (count == 0) return false;
  output.left -= static_cast<std::size_t>(count);
  const std::string_view bytes(buffer.data(), static_cast<std::size_t>(count));
  if (output.stream == OutputStream::kStdout && sinks_.on_output) {
    sinks_.on_output(output.rank, bytes);
    return true;
  }
  output.partial += bytes;
  give_lines(output);
  return true;
}

void RankOutputs::give_lines(Output& output) {
  const std::string_view text = output.partial;
  std::size_t begin = 0;
  while (true) {
    const std::size_t end = text.find('\n', begin);
    const std::size_t size = (end == std::string_view::npos ? text.size() : end) - begin;
    if (size > kLongestLine) {
      give_line(output, text.substr(begin, kLongestLine));
      begin += kLongestLine;
    } else if (end != std::string_view::npos) {
      give_line(output, text.substr(begin, size));
      begin = end + 1;
    } else {
      break;
    }
  }
  output.partial.erase(0, begin);
}

void RankOutputs::give_line(const Output& output, std::string_view line) const {
  if (sinks_.on_line) sinks_.on_line(output.rank, output.stream, line);
}

// Passes on a last line without a newline.
void RankOutputs::give_rest(Output& output) {
  if (!output.partial.empty()) give_line(output, output.partial);
  output.partial.clear();
}

}  // namespace tessera
