#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "tessera/dtensor/io/block_checksums.h"
#include "tessera/mesh/device_mesh.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace torch::optim {
class LRScheduler;
class Optimizer;
}  // namespace torch::optim

namespace tessera {

class LossScaler;

// Names the parts of a training state: what a run needs to go on as if it had not stopped. Besides these parts a saved
// state has the seed and the counter of the mesh's World (dtensor/random.h). LibTorch's own random generators are not
// part of it: they may differ between ranks, and another number of ranks could not go on with them.
struct TrainingState {
  // Is the mesh whose ranks save and load together. Every DTensor's mesh must have ranks of this one alone.
  DeviceMesh mesh;
  torch::nn::Module& model;
  torch::optim::Optimizer* optimizer = nullptr;  // one of torch::optim's six classes, over parameters of `model`
  // Its number of steps is saved; the learning rates are saved with the optimizer. A ReduceLROnPlateauScheduler is no
  // LRScheduler, and cannot be saved.
  torch::optim::LRScheduler* scheduler = nullptr;
  LossScaler* scaler = nullptr;  // its scale, and the steps since that changed, are saved
  int64_t step = 0;
  // Holds whatever else the user needs: the position in the data, the configuration. Texts in UTF-8.
  std::map<std::string, std::string> values = {};
};

struct SaveStateOptions {
  // Is the number of whole states that stay in the folder: the one that was just saved, and those of the highest steps
  // below it; 0 keeps all. States of higher steps, which a run that has gone back has left, stay.
  int64_t keep = 0;
  // Tensors are put into a file until the next would make its data larger than this; 0 writes one file for the model
  // and one for the optimizer.
  int64_t max_shard_bytes = 0;
  // Is the number of bytes that have one checksum, at most 4 MiB. A rank that loads reads whole blocks.
  int64_t block_bytes = kUsualBlock;
  // Is called after each tensor, with the bytes that this rank has written so far and in total, on the thread that
  // writes. An exception of it counts as this rank's failure.
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress = {};
};

// Saves training states into `folder`, each in a folder of its own, "step_00000100", which appears whole or not at all:
//   model.safetensors       the weights, as save_weights writes them; or parts of at most max_shard_bytes and an index
//   optimizer.safetensors   the optimizer's state, as save_optimizer writes it; the same
//   state.json              step, random state, scheduler, loss scaler, values, and a CRC-32 of every block of the
//                           other files
//   .saved_by               the job and the ranks that have saved it; loading does without it
//
// Equal states give byte-equal files on any mesh, but for .saved_by: a state that is loaded on another mesh and saved
// at once is the same. Every byte is written by one rank: a rank writes what it holds, and ranks that hold the same
// divide it. A plain tensor is saved with the first rank's values.
//
// The files are written into a hidden folder of a random name beside it, synced and renamed, so that a killed process
// leaves the older states as they are; the next save removes what it left. Several jobs may save into one folder at
// once: each state is of one of them. A state of the same step is replaced, unless other ranks of the same job have
// saved it: at once, or, with a warning, by two renames where the file system cannot exchange names (NFS); a process
// that is killed between these leaves no state of the step.
//
// start() returns when this rank has copied the values that it will write into the saver's memory, which the next
// start() uses again; a thread writes them. Parameters may change at once. wait() returns when the state is in its
// folder. An error of any rank's thread is thrown by the next wait() or start() on every rank. The destructor waits for
// this rank's thread alone, and logs its error.
//
// Every rank of the state's mesh makes the same calls; other ranks do nothing. Communication: start() one all-reduce of
// 40 bytes and one broadcast of 64 bytes per mesh dimension, wait() one all-reduce of 40 bytes per mesh dimension if a
// save has been started. A Partial is reduced first. Throws, alike on every rank: std::invalid_argument on a parameter
// that the model does not have, an optimizer of another class, a DTensor on other ranks, a fake world of several ranks,
// a dtype that safetensors does not have, a negative step, options out of range, a state.json that would be longer than
// 1 GiB, a step that other ranks of the same job have saved there (by wait(), where they were faster), where ranks call
// with different arguments, and where a rank does not see the new folder within five seconds; std::runtime_error when
// the system refuses. An older state that cannot be removed stays, with a warning.
class TrainingStateSaver {
 public:
  explicit TrainingStateSaver(std::string folder, SaveStateOptions options = {});
  ~TrainingStateSaver();
  TrainingStateSaver(const TrainingStateSaver&) = delete;
  TrainingStateSaver& operator=(const TrainingStateSaver&) = delete;

  void start(const TrainingState& state);
  void wait();
  // Says whether this rank's thread has nothing left to do. Does not communicate, so ranks may get different answers at
  // one time: do not decide by it whether to call wait(), which is collective.
  bool done() const;

  // Does what start() and wait() do, without a copy of the values.
  void save(const TrainingState& state);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Saves one training state: TrainingStateSaver(folder, options).save(state).
void save_training_state(const TrainingState& state, const std::string& folder, const SaveStateOptions& options = {});

// Loads what a TrainingStateSaver saved, on any mesh and with any placements, into the parts that `state` names, and
// sets its step and values, and the random state of the mesh's World. `step_folder` is the folder of one step. What is
// saved and not named is not loaded; what is named must have been saved.
//
// Each rank reads the blocks that hold its pieces, and verifies them. Nothing changes until every rank has read
// everything; a throw leaves all as it was. Until then a rank holds its pieces twice.
//
// Every rank of the state's mesh calls it. Communication: two all-reduces of 40 bytes per mesh dimension.
// Throws, alike on every rank: std::invalid_argument when ranks found different states, when a block is not what was
// saved (the text names file, block and checksums) or the disk has lost it (EIO, EBADMSG, EUCLEAN), when a DTensor is
// on other ranks, when the state has another version, when `step_folder` holds folders of steps, and when the state
// does not fit the parts, as load_weights and load_optimizer do; std::runtime_error when the system cannot read for
// another reason.
void load_training_state(TrainingState& state, const std::string& step_folder);

// Does the same with the newest state in `folder`. Returns false, on every rank, and changes nothing if there are no
// step folders; throws std::invalid_argument if it is the folder of one step, or no folder. Where a rank finds that the
// state is not whole (see newest_training_state) or that a file of it is damaged, the newest one before it is loaded,
// and so on; for each, the mesh's first rank logs a warning with the reason, and `state.step` says which one was
// loaded. If none is left, throws std::invalid_argument with the reason of the newest: a run that has lost its states
// must not begin anew unnoticed. A job that saves meanwhile may save a newer state between the looks of two ranks, or
// remove the state that they found: where the ranks could not load one, and a rank sees either, all look for the newest
// again, 10 times at most, and then throw std::invalid_argument. Each state that is passed over or looked for again
// takes, per mesh dimension, two all-reduces of 40 bytes at most, one of the reason and one of 8 bytes more.
bool load_newest_training_state(TrainingState& state, const std::string& folder);

// Returns the step folder of the highest step in `folder` whose state is whole: state.json has its checksum, and every
// file is there with its size. It passes over others without a word, since every rank may call it; loading warns of
// them. nullopt if there are no step folders. Does not communicate. Throws std::invalid_argument where there are some
// and none is whole, and on a state of another version; std::system_error where the system refuses to list the folder
// or to read a state that is there, unless it says EIO, EBADMSG or EUCLEAN: such a state is not whole.
std::optional<std::string> newest_training_state(const std::string& folder);

// Holds what can be known of a saved state without its tensors.
struct SavedTrainingState {
  int64_t step = 0;
  std::map<std::string, std::string> values;
};
// Reads the state in `step_folder`: its state.json alone. Does not communicate. Throws std::invalid_argument when the
// file is damaged, std::runtime_error when the system cannot read it.
SavedTrainingState read_training_state(const std::string& step_folder);

}  // namespace tessera
