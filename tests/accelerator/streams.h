#pragma once

#include <chrono>
#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/StreamGuard.h>

namespace tessera::testing {

// Makes the calling thread's current stream one that no other rank of the same test uses, as long as it exists: for
// each `number` another one. Each piece of work on it takes at least `least`.
class OwnStream {
 public:
  explicit OwnStream(int64_t number = 0, std::chrono::microseconds least = {});

 private:
  c10::StreamGuard guard_;
};

// Returns how often a test repeats what must not depend on chance.
inline constexpr int kRounds = 20;

// Returns [rows, columns] on the accelerator, made by work that the current stream does late: element (r, c) is
// `first` + 10 r + c.
at::Tensor late_numbers(double first, int64_t rows, int64_t columns);
// Returns the same on the CPU.
at::Tensor numbers_at_once(double first, int64_t rows, int64_t columns);

// Says whether `got`, on the accelerator, has the values of `want`, on the CPU. Waits for the current stream alone.
bool same_values(const at::Tensor& got, const at::Tensor& want);

}  // namespace tessera::testing
