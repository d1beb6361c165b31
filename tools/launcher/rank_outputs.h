#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/tools/launcher/spawn.h"

namespace tessera {

enum class OutputStream { kStdout, kStderr };

// Says where the output of ranks goes.
struct OutputSinks {
  // Called with each line that a rank writes, without its newline. A line longer than 64 KiB comes in pieces of that
  // size, so that one without an end takes no more memory.
  std::function<void(int64_t rank, OutputStream stream, std::string_view line)> on_line;
  // If given, called with what a rank writes to standard output, as it comes; on_line then gets standard error alone.
  std::function<void(int64_t rank, std::string_view bytes)> on_output;
  // If given, called before ranks' output is read. While it returns false for a stream, the ranks' pipes are left full,
  // so that a rank that writes more waits.
  std::function<bool(OutputStream stream)> has_room;
};

// Reads the pipes into which ranks write.
//
// Invariants:
//   - It holds less than 64 KiB of each pipe: the beginning of a line.
//   - It reads no stream for which has_room() is false, except in drain().
class RankOutputs {
 public:
  explicit RankOutputs(OutputSinks sinks) : sinks_(std::move(sinks)) {}
  // Closes the pipes.
  ~RankOutputs();
  RankOutputs(const RankOutputs&) = delete;
  RankOutputs& operator=(const RankOutputs&) = delete;

  // Takes the reading ends of the child's pipes.
  void add(int64_t rank, const Child& child);

  // Passes on what is there, or what comes within `wait`.
  void read(std::chrono::milliseconds wait);

  // Passes on what is still in the pipes when every rank has ended, whether or not there is room: at most what a pipe
  // can hold. Waits at most 200 ms for pipes to end, since a process that a rank has started may hold one open. Then
  // passes on the last lines, which lack their newline.
  void drain();

 private:
  struct Output {
    int64_t rank;
    OutputStream stream;
    int fd;
    std::string partial;
    std::size_t left;  // bytes that may still be read
  };
  void read_from(const std::function<bool(const Output&)>& is_wanted, std::chrono::milliseconds wait);
  bool read_output(Output& output);
  void give_lines(Output& output);
  void give_line(const Output& output, std::string_view line) const;
  void give_rest(Output& output);

  const OutputSinks sinks_;
  std::vector<Output> outputs_;
};

}  // namespace tessera
