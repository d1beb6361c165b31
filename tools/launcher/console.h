#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/tools/launcher/output_writer.h"
#include "tessera/tools/launcher/rank_outputs.h"

namespace tessera {

// Passes the ranks' output on to this process's standard output and standard error, and adds the launcher's own lines.
//
// Invariants:
//   - No function but finish() waits for whoever reads the output.
//   - The lines of one stream keep their order; so do those of both where both go to the same file.
class Console {
 public:
  // `is_bare`: lines are passed on as they are, and standard output to the byte. Else each line begins with its rank.
  explicit Console(bool is_bare);

  OutputSinks sinks();
  // Adds a line of the launcher to standard error.
  void say(const std::string& text);

  // Says which stream can no longer be written and why, such as "standard output: Broken pipe"; else is empty.
  std::string broken() const;
  // Returns the exit code for such a stream: 128 + SIGPIPE when its reader has gone, else 1.
  int broken_code() const;

  // Waits until all is written or can no longer be written, while `goes_on` returns true. What is left is dropped, and
  // standard error, if it is still read, says how much. Returns whether nothing was dropped.
  bool finish(const std::function<bool()>& goes_on);

 private:
  OutputWriter& writer(OutputStream stream) { return stream == OutputStream::kStderr && err_ ? *err_ : out_; }
  std::size_t waiting() const { return out_.waiting() + (err_ ? err_->waiting() : 0); }

  const bool is_bare_;
  OutputWriter out_;
  const std::unique_ptr<OutputWriter> err_;  // null where both streams are the same file
};

}  // namespace tessera
