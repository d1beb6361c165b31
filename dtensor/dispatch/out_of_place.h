#pragma once

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera::dispatch {

// Returns the overload of the same operator that takes the same arguments without the out= ones and writes nothing;
// nullopt for an overload without out=, and if there is none.
std::optional<c10::OperatorHandle> without_out(const c10::OperatorHandle& op);

// Runs an out= overload that LibTorch decomposes, as its boxed kernel. The operators that it decomposes into resize
// tensors and write views of them, which a DTensor refuses or would lose. So it runs `functional` and copies its
// results. Throws std::invalid_argument on an out tensor of other sizes, or of a dtype to which LibTorch does not cast
// the result, and where an argument requires a gradient.
class OutOfPlace final : public c10::OperatorKernel {
 public:
  explicit OutOfPlace(const c10::OperatorHandle& functional) : functional_(functional) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

 private:
  c10::OperatorHandle functional_;
};

}  // namespace tessera::dispatch
