#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "tessera/mesh/device_mesh.h"

// Declares named streams of random numbers for plain tensors, separate on each rank: ranks draw different numbers
// inside a parallel region and the same numbers outside. DTensors do not need them (see random.h): there an element's
// number does not depend on how the tensor is sharded.
namespace tessera {

inline constexpr const char* kModelParallelRng = "model-parallel-rng";
inline constexpr const char* kDataParallelRng = "data-parallel-rng";
inline constexpr const char* kExpertParallelRng = "expert-parallel-rng";
inline std::string data_parallel_rng_tracker_name() { return kDataParallelRng; }
inline std::string expert_parallel_rng_tracker_name() { return kExpertParallelRng; }

// Holds states of LibTorch's default generator of one device, by name. It does not communicate. The default generator
// belongs to the process, so only one thread at a time may fork.
//
// Invariants:
//   - states_ has one state per added stream, and seeds_ every seed that was ever added since reset();
//   - while a fork lives, active_ names the stream that the default generator draws from;
//   - a state tensor in states_ is replaced as a whole, never written.
class RngStatesTracker {
 public:
  explicit RngStatesTracker(c10::Device device = c10::kCPU) : device_(device) {}
  RngStatesTracker(const RngStatesTracker&) = delete;
  RngStatesTracker& operator=(const RngStatesTracker&) = delete;

  // Adds a stream that starts at `seed`; the default generator's own state does not change.
  // Throws std::invalid_argument, and changes nothing, on a name or a seed that was added before.
  void add(const std::string& name, uint64_t seed);

  // While a Fork lives, the default generator draws from the stream. Its destructor saves the stream's state and
  // restores the generator's, also when an exception ends it. Forks may nest, even of the same stream: the inner one
  // continues where the outer one is.
  class [[nodiscard]] Fork {
   public:
    ~Fork();
    Fork(const Fork&) = delete;
    Fork& operator=(const Fork&) = delete;

   private:
    friend class RngStatesTracker;
    Fork(RngStatesTracker& tracker, const std::string& name);
    RngStatesTracker& tracker_;
    const std::string name_;
    std::optional<std::string> outer_name_;  // the stream that the generator drew from before
    at::Tensor outer_state_;                 // the generator's state, where it drew from no stream
  };
  // Throws std::invalid_argument on a name that was not added; the text lists the names that were, and the calls that
  // add one.
  Fork fork(const std::string& name = kModelParallelRng);

  // Returns copies of the states; set_states() restores them.
  std::map<std::string, at::Tensor> get_states() const;
  // Replaces all streams; seeds that were used stay used. Throws std::logic_error within a fork, and
  // std::invalid_argument, changing nothing, on a state that the device's generator does not accept.
  void set_states(const std::map<std::string, at::Tensor>& states);
  // Holds the states of the streams, and which of them the default generator draws from. A checkpoint saves and
  // restores it, and must save and restore the generator's own state too.
  struct Position {
    std::map<std::string, at::Tensor> states;
    std::optional<std::string> active;
  };
  Position position() const;
  void set_position(const Position& position);

  // Removes all streams and seeds. Throws std::logic_error within a fork.
  void reset();

 private:
  at::Generator generator() const;
  void check_not_forked(const char* who) const;

  const c10::Device device_;
  mutable std::mutex mutex_;
  std::map<std::string, at::Tensor> states_;
  std::set<uint64_t> seeds_;
  std::optional<std::string> active_;
};

// Returns the process's tracker for the CPU or for a CUDA device; a CUDA device without an index is the current one.
RngStatesTracker& rng_tracker(c10::Device device = c10::kCPU);

struct ModelParallelSeeds {
  int64_t tensor_rank = 0;  // this rank's number in its tensor parallel group
  int64_t expert_rank = 0;  // this rank's number in its expert parallel group
  c10::Device device = c10::kCPU;
};
// Starts the streams anew, in the place of torch::manual_seed for that device:
//   default generator and "data-parallel-rng"   seed, the same on the ranks of a tensor parallel group
//   "model-parallel-rng"                        seed + 2718 + tensor_rank
//   "expert-parallel-rng"                       seed + 1024 + 100 * expert_rank + tensor_rank
// Models with seeds close to each other would share a stream on neighbouring ranks, and an expert_rank of 17 or more
// can share the model's stream: give models seeds that are far apart.
// Source of the numbers: Megatron-Core, tensor_parallel/random.py.
void model_parallel_manual_seed(uint64_t seed, const ModelParallelSeeds& ranks);
// Seeds from this rank's position on the 1-D `tensor_mesh` (and `expert_mesh`), for that mesh's device. It also seeds
// the DTensors of its world by `seed` (manual_seed), which must be the same on all ranks of a DTensor's mesh; a
// pipeline stage that draws on DTensors needs a seed of its own. The streams above are seeded by seed + replica_offset,
// where each replica gives its own offset: a data parallel replica, or a pipeline stage. Throws std::invalid_argument
// on a mesh of several dimensions or without this rank.
void model_parallel_manual_seed(uint64_t seed, const DeviceMesh& tensor_mesh,
                                const std::optional<DeviceMesh>& expert_mesh = std::nullopt,
                                uint64_t replica_offset = 0);

}  // namespace tessera
