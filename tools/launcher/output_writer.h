#pragma once

#include <cstddef>
#include <memory>
#include <string_view>
#include <thread>

namespace tessera {

// Writes to a file descriptor on a thread of its own, so that the caller goes on when the descriptor's reader stalls.
//
// Invariants:
//   - Bytes are written in the order of add(), and none is dropped while the descriptor can be written.
//   - After a write has failed nothing more is written, and error() says why.
//   - No signal is handled on its thread.
//
// Its functions may be called from any thread. They never wait for the reader.
class OutputWriter {
 public:
  // Does not own `fd`. Ignore SIGPIPE, which would end this process when the reader has gone.
  explicit OutputWriter(int fd);
  // Drops what waits. A thread that is inside a write is left alone; it uses nothing of this object.
  ~OutputWriter();
  OutputWriter(const OutputWriter&) = delete;
  OutputWriter& operator=(const OutputWriter&) = delete;

  void add(std::string_view bytes);
  // Returns the number of bytes that are not written yet.
  std::size_t waiting() const;
  // Returns whether less than 1 MiB waits. Whoever adds only while this holds keeps the memory bounded.
  bool has_room() const;
  // Returns errno of the write that failed, or 0.
  int error() const;

 private:
  struct State;
  static void write_all(const std::shared_ptr<State>& state, int fd);

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace tessera
