#include "tessera/tools/launcher/console.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include <fmt/format.h>

namespace tessera {
namespace {

constexpr std::chrono::milliseconds kLook{5};

bool is_one_file(int one, int other) {
  struct stat first = {}, second = {};
  return ::fstat(one, &first) == 0 && ::fstat(other, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

}  // namespace

Console::Console(bool is_bare)
    : is_bare_(is_bare),
      out_(STDOUT_FILENO),
      err_(is_one_file(STDOUT_FILENO, STDERR_FILENO) ? nullptr : std::make_unique<OutputWriter>(STDERR_FILENO)) {}

OutputSinks Console::sinks() {
  OutputSinks sinks;
  sinks.on_line = [this](int64_t rank, OutputStream stream, std::string_view line) {
    writer(stream).add(is_bare_ ? fmt::format("{}\n", line) : fmt::format("[{}] {}\n", rank, line));
  };
  // A program may write text that is no line yet, and bytes that are no text.
  if (is_bare_) sinks.on_output = [this](int64_t, std::string_view bytes) { out_.add(bytes); };
  sinks.has_room = [this](OutputStream stream) { return writer(stream).has_room(); };
  return sinks;
}

void Console::say(const std::string& text) { writer(OutputStream::kStderr).add(text + "\n"); }

std::string Console::broken() const {
  if (out_.error() != 0) return fmt::format("standard output: {}", std::strerror(out_.error()));
  if (err_ && err_->error() != 0) return fmt::format("standard error: {}", std::strerror(err_->error()));
  return "";
}

int Console::broken_code() const {
  const int error = out_.error() != 0 || !err_ ? out_.error() : err_->error();
  return error == EPIPE ? 128 + SIGPIPE : 1;
}

bool Console::finish(const std::function<bool()>& goes_on) {
  while (waiting() > 0 && goes_on()) std::this_thread::sleep_for(kLook);
  const std::size_t dropped = waiting();
  if (dropped == 0) return true;
  if (!err_ || err_->waiting() > 0) return false;
  say(fmt::format("launch: {} bytes of output were dropped, since nobody read them", dropped));
  // A terminal or a file takes a line at once.
  for (int looks = 0; err_->waiting() > 0 && looks < 20; ++looks) std::this_thread::sleep_for(kLook);
  return false;
}

}  // namespace tessera
