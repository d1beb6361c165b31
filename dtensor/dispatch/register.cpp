// Registers the DTensor kernels with LibTorch's dispatcher when the program is loaded.

#include <cstdlib>
#include <stdexcept>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/core/tensor_lists.h"
#include "tessera/dtensor/dispatch/dispatcher.h"
#include "tessera/dtensor/dispatch/out_of_place.h"
#include "tessera/dtensor/dispatch/unboxed.h"

namespace tessera::dispatch {
namespace {

// Says whether an operator has only a composite kernel, which calls other operators that are dispatched.
bool decomposes(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

// Handles ZeroTensors, which autograd's formulas make where a derivative is zero, for one operator. LibTorch would
// replace them by plain zeros before our kernel sees them, and plain tensors among DTensors are refused. Beside a
// DTensor they are passed on as they are, since they are the same on every rank; elsewhere LibTorch's kernel runs.
class ZerosBesideDTensors final : public c10::OperatorKernel {
 public:
  explicit ZerosBesideDTensors(const c10::OperatorHandle& op)
      : elsewhere_(op.getComputedKernelForDispatchKey(c10::DispatchKey::ZeroTensor)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (!keys.has(detail::kDTensorKey)) return elsewhere_.callBoxed(op, keys, stack);
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::ZeroTensor),
                       stack);
  }

 private:
  c10::SafeKernelFunction elsewhere_;
};

// Registers a kernel for each operator that LibTorch has now, since composite kernels take precedence over a backend
// fallback.
std::vector<c10::RegistrationHandleRAII> register_all() {
  std::vector<c10::RegistrationHandleRAII> handles;
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  const auto add_kernel = [&](const c10::OperatorName& name, c10::DispatchKey key, c10::KernelFunction kernel) {
    handles.push_back(dispatcher.registerImpl(name, key, std::move(kernel), std::nullopt, nullptr, "tessera"));
  };
  const auto add = [&](const c10::OperatorName& name, c10::DispatchKey key, auto kernel) {
    add_kernel(name, key, c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)));
  };
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(detail::kDTensorKey)) continue;
    // Sums and products have kernels for ZeroTensors of their own, which are right beside DTensors too.
    if (!decomposes(*op) && !op->hasKernelForDispatchKey(c10::DispatchKey::ZeroTensor)) {
      add(name, c10::DispatchKey::ZeroTensor, std::make_unique<ZerosBesideDTensors>(*op));
    }
    if (auto unboxed = unboxed_kernel(*op)) {
      add_kernel(name, detail::kDTensorKey, std::move(*unboxed));
    } else if (!decomposes(*op)) {
      add(name, detail::kDTensorKey, std::make_unique<OpDispatcher>(*op));
    } else if (const auto functional = without_out(*op)) {
      add(name, detail::kDTensorKey, std::make_unique<OutOfPlace>(*functional));
      add(name, c10::DispatchKey::AutogradPrivateUse3, std::make_unique<OutOfPlace>(*functional));
    }
  }
  std::atexit([] { clear_dispatch_cache(); });
  return handles;
}

// Refuses an operator on a DTensor and a sparse tensor, which LibTorch dispatches to keys of their own.
void refuse_sparse(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    detail::each_tensor(value, [&](const at::Tensor& t, std::size_t) {
      if (!t.defined() || t.layout() == c10::kStrided) return;
      throw std::invalid_argument(fmt::format(
          "{}: a sparse tensor of sizes [{}] among DTensors, whose pieces are strided; give a dense one, to_dense(), "
          "or take the rows that its indices name by index_select, and add them up by index_add or scatter_add",
          op.schema().name(), fmt::join(t.sizes(), ", ")));
    });
  }
  throw std::invalid_argument(
      fmt::format("{}: it would make a sparse tensor of DTensors, whose pieces are strided; make it of plain tensors, "
                  "full_tensor(x)",
                  op.schema().name()));
}

const auto* const kHandles =
    new std::vector<c10::RegistrationHandleRAII>(register_all());  // NOLINT: for the program's life

// Dispatches operators that are registered later, such as those of a user's library loaded at run time.
TORCH_LIBRARY_IMPL(_, PrivateUse3, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch_boxed>()); }
// Lets operators without an autograd kernel run; they throw only when a gradient is computed through them.
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse3, m) { m.fallback(torch::autograd::autogradNotImplementedFallback()); }

TORCH_LIBRARY_IMPL(_, SparsePrivateUse3, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_sparse>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse3, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_sparse>());
}

}  // namespace
}  // namespace tessera::dispatch
