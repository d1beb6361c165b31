#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace tessera::testing {

// Counts this process's calls of CUDA's runtime that wait for the GPU, by CUPTI: from its construction to its
// destruction. There may be one at a time.
class WaitCounter {
 public:
  // Throws std::runtime_error where CUPTI cannot be used.
  WaitCounter();
  ~WaitCounter();
  WaitCounter(const WaitCounter&) = delete;
  WaitCounter& operator=(const WaitCounter&) = delete;

  // Returns the number of calls of each kind, "cudaStreamSynchronize in aten::item < aten::embedding" and the like: the
  // operators that run on the calling thread stand behind it, the innermost first.
  std::map<std::string, int64_t> calls() const;
  // Returns calls() as text, one line each.
  std::string text() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::testing
