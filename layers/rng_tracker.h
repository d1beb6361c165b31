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

// Named streams of random numbers for plain tensors, each rank's own: inside a parallel region ranks draw different
// numbers, outside the same. DTensors need none of it, see random.h: there an element's number is the same however the
// tensor is cut.
namespace tessera {

inline constexpr const char* kModelParallelRng = "model-parallel-rng";
inline constexpr const char* kDataParallelRng = "data-parallel-rng";
inline constexpr const char* kExpertParallelRng = "expert-parallel-rng";
inline std::string data_parallel_rng_tracker_name() { return kDataParallelRng; }
inline std::string expert_parallel_rng_tracker_name() { return kExpertParallelRng; }

// States of LibTorch's default generator of one device, by name. Exchanging them is local: nothing communicates. The
// default generator is the process's, so one thread at a time forks.
class RngStatesTracker {
 public:
  explicit RngStatesTracker(c10::Device device = c10::kCPU) : device_(device) {}
  RngStatesTracker(const RngStatesTracker&) = delete;
  RngStatesTracker& operator=(const RngStatesTracker&) = delete;

  // A stream called `name` that begins at `seed`; the default generator goes on as if nothing had been.
  // Throws std::invalid_argument on a name or a seed that is there already, and then has changed nothing.
  void add(const std::string& name, uint64_t seed);

  // While it lives the default generator draws from the stream. Then the stream keeps where it has got to, and the
  // generator goes on where it was; also when an exception ends it. Forks nest, of one stream too: the inner one goes
  // on where the outer one is.
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
    std::optional<std::string> outer_name_;  // of the stream that the generator drew from
    at::Tensor outer_state_;                 // where it drew from none
  };
  // Throws std::invalid_argument on a name that was not added, listing those that were and the calls that add them.
  Fork fork(const std::string& name = kModelParallelRng);

  // Copies, to be restored by set_states().
  std::map<std::string, at::Tensor> get_states() const;
  // In the place of all streams there are. Seeds taken stay taken. Throws std::logic_error within a fork, and
  // std::invalid_argument on a state that the device's generator does not take; then it has changed nothing.
  void set_states(const std::map<std::string, at::Tensor>& states);
  // Where the streams stand, and which of them the default generator draws from: what a checkpoint goes back to, and
  // puts back. The generator's own state is the caller's to restore beside it.
  struct Position {
    std::map<std::string, at::Tensor> states;
    std::optional<std::string> active;
  };
  Position position() const;
  void set_position(const Position& position);

  // Forgets streams and seeds. Throws std::logic_error within a fork.
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

// The process's, one for the CPU and one for each CUDA device. A CUDA device without an index is the current one.
RngStatesTracker& rng_tracker(c10::Device device = c10::kCPU);

struct ModelParallelSeeds {
  int64_t tensor_rank = 0;  // this rank's place in its tensor parallel group
  int64_t expert_rank = 0;  // and in its expert parallel group
  c10::Device device = c10::kCPU;
};
// Begins the streams anew, in the place of torch::manual_seed for that device: the default generator and
// "data-parallel-rng" at `seed`, the same on the ranks of a tensor parallel group; "model-parallel-rng" at seed + 2718
// + tensor_rank; "expert-parallel-rng" at seed + 1024 + 100 * expert_rank + tensor_rank. So streams of neighbouring
// seeds meet on neighbouring ranks, and those of expert_rank 17 and more meet the model's: give models seeds that are
// far apart.
// Source of the numbers: Megatron-Core, tensor_parallel/random.py.
void model_parallel_manual_seed(uint64_t seed, const ModelParallelSeeds& ranks = {});
// Of the ranks that this one is among on `tensor_mesh`, of one dimension, and its device. DTensors of its world are
// seeded too, by `seed` (manual_seed), which all ranks give alike; the streams above by seed + replica_offset, which is
// a replica's own: one of data, or a pipeline's stage.
// Throws std::invalid_argument on a mesh of several dimensions or without this rank.
void model_parallel_manual_seed(uint64_t seed, const DeviceMesh& tensor_mesh,
                                const std::optional<DeviceMesh>& expert_mesh = std::nullopt,
                                uint64_t replica_offset = 0);

}  // namespace tessera
