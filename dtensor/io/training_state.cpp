#include "tessera/dtensor/io/training_state.h"

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/dtensor/agreement.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/block_reader.h"
#include "tessera/dtensor/io/checkpoint.h"
#include "tessera/dtensor/io/checkpoint_index.h"
#include "tessera/dtensor/io/optimizer_contents.h"
#include "tessera/dtensor/io/scheduler_steps.h"
#include "tessera/dtensor/io/state_manifest.h"
#include "tessera/dtensor/io/state_plan.h"
#include "tessera/dtensor/io/step_folders.h"
#include "tessera/dtensor/io/weight_slots.h"
#include "tessera/dtensor/loss_scaler.h"
#include "tessera/dtensor/over_meshes.h"
#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/core/logger.h"
#include "tessera/mesh/values_on_host.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kOp = "load_training_state";

// Holds one training state that is opened, and what of it this rank has planned and read.
class Loading {
 public:
  explicit Loading(TrainingState& state) : state_(state), tensors_(module_tensors(state.model)) {
    check_meshes(saved_weights(state.model), state.mesh, kOp);
    if (state.optimizer != nullptr) optimizer_.emplace(*state.optimizer, state.model, kOp);
  }

  void plan(const std::string& step_folder) {
    folder_ = step_folder;
    text_ = read_state_manifest(folder_);
    manifest_ = parse_state_manifest(text_, (fs::path(folder_) / kManifestName).string());
    const std::string model_path = (fs::path(folder_) / kWeightsName).string();
    model_.emplace(model_path, &manifest_.files);
    slots_ = match_weights(tensors_, *model_, model_path, nullptr, kOp);
    if (optimizer_) {
      const std::string optimizer_path = (fs::path(folder_) / kOptimizerName).string();
      check_saved(manifest_.files.contains(kOptimizerName) || manifest_.files.contains(index_path(kOptimizerName)),
                  "an optimizer");
      optimizer_file_.emplace(optimizer_path, &manifest_.files);
      optimizer_->plan(*optimizer_file_, optimizer_path);
    }
    if (state_.scheduler != nullptr) check_saved(manifest_.scheduler_steps.has_value(), "a scheduler");
    if (state_.scaler != nullptr) {
      check_saved(manifest_.loss_scaler.has_value(), "a loss scaler");
      LossScaler().set_state(*manifest_.loss_scaler);  // throws what the caller's scaler would
    }
  }

  // Returns what tells this state from every other one.
  const std::string& fingerprint() const { return text_; }

  void read() {
    read_weights(slots_, *model_, {});
    if (optimizer_) optimizer_->read();
  }

  void apply() {
    write_weights(slots_);
    if (optimizer_) optimizer_->apply();
    if (state_.scheduler != nullptr) set_scheduler_steps(*state_.scheduler, *manifest_.scheduler_steps);
    if (state_.scaler != nullptr) state_.scaler->set_state(*manifest_.loss_scaler);
    state_.mesh.world().random_state() = manifest_.random;
    state_.step = manifest_.step;
    state_.values = manifest_.values;
  }

 private:
  void check_saved(bool saved, const char* part) const {
    if (saved) return;
    throw std::invalid_argument(
        fmt::format("{}: '{}' was saved without {}; load it without one, or load another state", kOp, folder_, part));
  }

  TrainingState& state_;
  const std::vector<ModuleTensor> tensors_;
  std::string folder_;
  std::string text_;
  StateManifest manifest_;
  std::optional<Checkpoint> model_;
  std::optional<Checkpoint> optimizer_file_;
  std::vector<WeightSlot> slots_;
  std::optional<OptimizerLoad> optimizer_;
};

bool is_gone(const std::string& path) {
  std::error_code error;
  return !fs::exists(path, error) && !error;
}

// Says what is wrong with the files of a state: kGone says that it is not there any more, or no longer the newest. Of
// what ranks say, the largest counts.
enum class Trouble : int64_t { kNone, kDamaged, kGone };

// Holds how this rank looks for one state to load, and what it finds.
struct Look {
  std::function<std::optional<std::string>()> find;  // returns the state's folder; nullopt where there is none
  bool may_go = false;  // another job may remove the state meanwhile, when it has saved a newer one
  std::optional<std::string> folder = {};
  Trouble trouble = Trouble::kNone;

  // Returns whether the folder that was found has gone, and notes it.
  bool note_if_gone() {
    if (may_go && folder && is_gone(*folder)) trouble = Trouble::kGone;
    return trouble == Trouble::kGone;
  }
};

// Runs a part that reads the files of one state, and notes where these are damaged or gone. Every rank is to ask then
// what the others have noted, so either is a std::invalid_argument: damage is DamagedFile, also in the place of a
// system error that means it.
void noting_trouble(Look& look, const std::function<void()>& part) {
  try {
    part();
  } catch (const std::exception& error) {
    if (look.note_if_gone()) throw std::invalid_argument(error.what());
    if (dynamic_cast<const DamagedFile*>(&error) != nullptr) {
      look.trouble = Trouble::kDamaged;
      throw;
    }
    const auto* const of_system = dynamic_cast<const std::system_error*>(&error);
    if (of_system == nullptr || !means_damage(of_system->code())) throw;
    look.trouble = Trouble::kDamaged;
    throw DamagedFile(fmt::format("{}; load another state", error.what()));
  }
}

// Loads the state that `look` finds, and returns whether there is one. When it throws, `look` says what this rank has
// found wrong with the files.
bool load_found(TrainingState& state, Look& look) {
  if (!state.mesh.is_member()) return false;
  const at::NoGradGuard no_grad;
  const detail::NotDeferred own_tensors;
  const Agreement agreement({state.mesh}, kOp);
  std::optional<Loading> loading;
  agreement.run(
      [&] {
        noting_trouble(look, [&] {
          look.folder = look.find();
          if (look.folder) loading.emplace(state).plan(*look.folder);
        });
      },
      [&] { return loading ? loading->fingerprint() : "none"; },
      "the ranks found different training states: the path leads to different folders, or a state was saved or removed "
      "meanwhile; pass a folder that all ranks share, and load again");
  if (!loading) return false;
  agreement.run([&] { noting_trouble(look, [&] { loading->read(); }); });
  loading->apply();
  return true;
}

Trouble on_any_rank(Trouble here, const DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  const detail::NotDeferred own_tensors;
  const at::Tensor largest = max_over_meshes(at::tensor(static_cast<int64_t>(here)), {mesh}, kOp);
  return static_cast<Trouble>(values_on_host(largest, mesh.world()).item<int64_t>());
}

// Says whether this is the folder of one step.
bool has_manifest(const std::string& folder) {
  std::error_code error;
  return std::filesystem::exists(std::filesystem::path(folder) / kManifestName, error);
}

// Throws where `folder`, in which steps are looked for, is the folder of one step, or no folder: a run must not begin
// anew unnoticed.
void check_holds_steps(const std::string& folder) {
  if (has_manifest(folder)) {
    throw std::invalid_argument(fmt::format(
        "'{}' is the folder of one step; give the folder in which it lies, or call load_training_state", folder));
  }
  std::error_code error;
  if (std::filesystem::exists(folder, error) && !std::filesystem::is_directory(folder, error))
    throw std::invalid_argument(fmt::format("'{}' is no folder; give the one that the steps lie in", folder));
}

constexpr int kMostLooks = 10;  // a remote file system may go on listing a folder that is gone

// Returns the folder of the newest step below `end`, and sets `end` to that step; nullopt where there is none. Throws
// what check_whole_state throws where that state is not whole. A job that saves meanwhile may remove the listed state
// after it has saved a newer one, so where the folder is gone it lists them again.
std::optional<std::string> newest_below(const std::string& folder, int64_t& end) {
  check_holds_steps(folder);
  for (int looks = 1;; ++looks) {
    const std::map<int64_t, std::string> found = step_folders(folder);
    const auto next = found.lower_bound(end);
    if (next == found.begin()) return std::nullopt;
    const auto& [step, path] = *std::prev(next);
    const int64_t before = std::exchange(end, step);
    try {
      check_whole_state(path);
      return path;
    } catch (const DamagedFile&) {
      if (looks == kMostLooks || !is_gone(path)) throw;
      end = before;
    }
  }
}

// Says whether another state than `found` is the newest below `end` now.
bool has_newer(const std::string& folder, int64_t end, const std::optional<std::string>& found) {
  try {
    return newest_below(folder, end) != found;
  } catch (const std::exception&) {
    return false;  // the caller throws an error that it has already
  }
}

// Throws where there are states and none is whole: a run must not begin anew unnoticed.
[[noreturn]] void throw_none_whole(const char* who, const std::string& folder, int64_t states,
                                   const std::string& of_newest) {
  throw std::invalid_argument(
      fmt::format("{}: '{}' has training states of {} steps, and none is whole; bring one back from a copy, or remove "
                  "them if they are not needed. The newest: {}",
                  who, folder, states, of_newest));
}

constexpr int64_t kNoEnd = std::numeric_limits<int64_t>::max();

}  // namespace

void save_training_state(const TrainingState& state, const std::string& folder, const SaveStateOptions& options) {
  TrainingStateSaver(folder, options).save(state);
}

void load_training_state(TrainingState& state, const std::string& step_folder) {
  const auto find = [&] {
    if (!has_manifest(step_folder) && !step_folders(step_folder).empty()) {
      throw std::invalid_argument(fmt::format(
          "'{}' holds folders of steps; give one of them, or call load_newest_training_state", step_folder));
    }
    return std::optional(step_folder);
  };
  Look look = {.find = find};
  load_found(state, look);
}

// A failure of one rank throws the same error on all ranks, and trouble with the files throws std::invalid_argument, so
// all ranks ask alike which it was.
bool load_newest_training_state(TrainingState& state, const std::string& folder) {
  int64_t damaged = 0;
  std::string of_newest;
  int gone = 0;
  for (int64_t end = kNoEnd;;) {
    const int64_t before = end;
    Look look = {.find = [&] { return newest_below(folder, end); }, .may_go = true};
    try {
      if (load_found(state, look)) return true;
      break;
    } catch (const std::invalid_argument& error) {
      // The state may have gone after this rank has read it.
      look.note_if_gone();
      if (look.trouble == Trouble::kNone && has_newer(folder, before, look.folder)) look.trouble = Trouble::kGone;
      const Trouble trouble = on_any_rank(look.trouble, state.mesh);
      if (trouble == Trouble::kNone || (trouble == Trouble::kGone && gone++ == kMostLooks)) throw;
      if (trouble == Trouble::kGone) {
        end = kNoEnd;
        damaged = 0;
        continue;
      }
      if (state.mesh.world().rank() == state.mesh.mesh().ranks().front())
        logger().warn("{}: {}; an older state is looked for", kOp, error.what());
      if (damaged++ == 0) of_newest = error.what();
    }
  }
  if (damaged > 0) throw_none_whole(kOp, folder, damaged, of_newest);
  return false;
}

std::optional<std::string> newest_training_state(const std::string& folder) {
  int64_t damaged = 0;
  std::string of_newest;
  for (int64_t end = kNoEnd;;) {
    try {
      if (const std::optional<std::string> found = newest_below(folder, end)) return found;
      break;
    } catch (const DamagedFile& error) {
      if (damaged++ == 0) of_newest = error.what();
    }
  }
  if (damaged > 0) throw_none_whole("newest_training_state", folder, damaged, of_newest);
  return std::nullopt;
}

SavedTrainingState read_training_state(const std::string& step_folder) {
  StateManifest manifest = parse_state_manifest(read_state_manifest(step_folder),
                                                (std::filesystem::path(step_folder) / kManifestName).string());
  return {.step = manifest.step, .values = std::move(manifest.values)};
}

}  // namespace tessera
