#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/FunctionRef.h>

#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/random/draws.h"
#include "tessera/mesh/core/deferred_tensor.h"

// Implements what ShardedInit records: tensors without values (deferred tensors), and the operators that compute their
// values. A deferred tensor is on the meta device and has the dispatch key DeferredInit, which sends every operator on
// it to deferred.cpp. It is internal to the library.
namespace tessera::detail {

// Identifies some elements of a storage. Deferred tensors with equal Elements hold the same values, whichever handles
// they are.
struct Elements {
  explicit Elements(const at::Tensor& t);
  const void* memory() const { return storage.unsafeGetStorageImpl(); }
  int64_t numel() const;
  friend bool operator<(const Elements& a, const Elements& b);

  c10::Storage storage;  // has no memory; kept so that no other storage gets its address
  int64_t offset;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType dtype;
  bool conjugate;
  bool negative;
};

// Records one call of an operator.
struct Recorded {
  struct Input {  // a deferred tensor among the arguments
    std::size_t arg;
    std::size_t index;  // in that argument's list
    Elements elements;
  };
  struct Plain {  // a tensor with values among the arguments
    at::Tensor tensor;
    uint32_t version;
  };
  c10::OperatorHandle op;
  torch::jit::Stack args;  // inputs are replaced by undefined tensors
  std::vector<Input> inputs;
  std::vector<Plain> plain;
  std::vector<std::optional<Elements>> results;  // lists are flattened; nullopt: an undefined result
  std::vector<const void*> touched;              // the storages that it makes, views or writes, as Elements::memory
  std::optional<DrawKey> draw;                   // set for a random operator
};

// Lists the recorded calls in order. It holds no tensor that refers to it.
struct Tape {
  std::shared_ptr<World> world;
  std::vector<Recorded> calls;
};

// Returns the tape of a deferred tensor.
const Tape& tape_of(const at::Tensor& deferred);

// While a Recording is alive, new tensors of its thread are recorded on its tape. A Recording made while another is
// alive uses the other's tape.
class Recording {
 public:
  explicit Recording(std::shared_ptr<World> world);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

 private:
  std::shared_ptr<Tape> previous_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

// Makes the deferred tensor `t` a DTensor of `spec`, with the values that the recorded calls give; tensors that it
// shares memory with are computed again. `path` is the parameter's path for messages, or empty. Throws
// std::invalid_argument, alike on every rank, where a whole sharded tensor or communication would be needed;
// std::runtime_error when the job fails meanwhile.
void materialize(const at::Tensor& t, const SpecPtr& spec, const std::string& path = "");

}  // namespace tessera::detail
