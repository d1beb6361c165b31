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

// What stands behind ShardedInit: tensors without values, and the record of the operators that give them theirs. Such a
// tensor is on the meta device with the key DeferredInit, by which every operator on it comes to deferred.cpp. The
// library's own.
namespace tessera::detail {

// Some elements of a storage: tensors that say the same of it hold the same values, whatever handles they are.
struct Elements {
  explicit Elements(const at::Tensor& t);
  const void* memory() const { return storage.unsafeGetStorageImpl(); }
  int64_t numel() const;
  friend bool operator<(const Elements& a, const Elements& b);

  c10::Storage storage;  // without memory; kept, so that no other gets its address
  int64_t offset;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType dtype;
  bool conjugate;
  bool negative;
};

// One operator's call.
struct Recorded {
  struct Input {  // a deferred tensor among the arguments
    std::size_t arg;
    std::size_t index;  // in that argument's list
    Elements elements;
  };
  struct Plain {  // one with values
    at::Tensor tensor;
    uint32_t version;
  };
  c10::OperatorHandle op;
  torch::jit::Stack args;  // undefined tensors in the places of the inputs
  std::vector<Input> inputs;
  std::vector<Plain> plain;
  std::vector<std::optional<Elements>> results;  // flattened; none: undefined
  std::vector<const void*> touched;              // what it makes, views or writes, as Elements::memory
  std::optional<DrawKey> draw;                   // of a random operator
};

// The calls in their order. It holds no tensor that holds it.
struct Tape {
  std::shared_ptr<World> world;
  std::vector<Recorded> calls;
};

// That of a deferred tensor.
const Tape& tape_of(const at::Tensor& deferred);

// While one lives, on its thread, new tensors are recorded on `tape`. One made while another lives goes on with the
// other's.
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

// Makes the deferred tensor `t` a DTensor of `spec` with the values that its calls give; what it shares with other
// tensors is computed anew. `path` is the parameter's, for messages; may be empty. Throws std::invalid_argument, alike
// on every rank, where a whole sharded tensor or communication would be needed; std::runtime_error when the job fails
// meanwhile.
void materialize(const at::Tensor& t, const SpecPtr& spec, const std::string& path = "");

}  // namespace tessera::detail
