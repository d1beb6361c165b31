#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <filesystem>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/dtensor/agreement.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/checkpoint_index.h"
#include "tessera/dtensor/io/optimizer_contents.h"
#include "tessera/dtensor/io/scheduler_steps.h"
#include "tessera/dtensor/io/state_writer.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/dtensor/io/two_buffers.h"
#include "tessera/dtensor/loss_scaler.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/core/error_text.h"
#include "tessera/mesh/core/in_memory.h"
#include "tessera/mesh/core/logger.h"
#include "tessera/mesh/failing.h"
#include "tessera/mesh/failure.h"
#include "tessera/mesh/values_on_host.h"
#include "tessera/mesh/world.h"
#include "tessera/placement/placement.h"

namespace tessera {
namespace {

constexpr const char* kOp = "save_training_state";
constexpr int64_t kAlignment = 64;
constexpr std::chrono::milliseconds kLongestUnseen(5000);  // a file system of a network may show a new folder late
constexpr std::chrono::milliseconds kBetweenLooks(10);

void check_options(const SaveStateOptions& options, int64_t step) {
  const auto refuse = [](const char* name, int64_t value, const char* what) {
    throw std::invalid_argument(fmt::format("{}: {} is {}; pass {}", kOp, name, value, what));
  };
  if (options.keep < 0) refuse("keep", options.keep, "a number of states, or 0 to keep all");
  if (options.block_bytes < 1 || options.block_bytes > kLargestBlock)
    refuse("block_bytes", options.block_bytes, "a number from 1 to 4194304");
  if (step < 0 || step == std::numeric_limits<int64_t>::max())
    refuse("step", step, "the number of steps that were made");
}

// Throws where readers would refuse state.json with the checksums of these files, which make most of it and are known
// only when all is written.
void check_manifest(StateManifest manifest, const std::vector<FilePlan>& files, int64_t block_bytes) {
  for (const FilePlan& file : files)
    manifest.files[file.name] = {.file_bytes = file.bytes, .block_bytes = block_bytes, .crc32 = {}};
  const int64_t bytes = bytes_with_checksums(std::move(manifest));
  if (bytes <= kMaxManifestBytes) return;
  throw std::invalid_argument(
      fmt::format("{}: state.json would have {} bytes, and at most {} are read; a larger max_shard_bytes makes it no "
                  "shorter: pass block_bytes above {} (at most {}), shorter values or fewer tensors",
                  kOp, bytes, kMaxManifestBytes, block_bytes, kLargestBlock));
}

// Returns the value with pending reductions carried out, replicated where they were pending.
at::Tensor reduced(const at::Tensor& tensor) {
  if (!is_dtensor(tensor) || !spec_of(tensor).partial) return tensor;
  return redistribute(tensor, without_partial(placements_of(tensor)));
}

// Returns the mesh's first rank's text of at most 64 bytes.
std::string from_first_rank(const std::string& text, const DeviceMesh& mesh) {
  constexpr int64_t kMostBytes = 64;
  at::Tensor bytes = at::zeros({kMostBytes}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  bytes = bytes.to(mesh.device());
  const World::Scope scope(mesh.world(), kOp);
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) bytes = broadcast(bytes, mesh, dim, 0);
  bytes = values_on_host(bytes, mesh.world());
  const auto* const characters = static_cast<const char*>(bytes.const_data_ptr());
  return std::string(characters, strnlen(characters, kMostBytes));
}

// Throws where this rank does not see the folder that the first rank of `mesh` has just made.
void check_seen(const std::string& folder, const DeviceMesh& mesh) {
  const auto limit = std::chrono::steady_clock::now() + kLongestUnseen;
  std::error_code error;
  while (!std::filesystem::exists(folder, error)) {
    if (std::chrono::steady_clock::now() > limit) {
      throw std::invalid_argument(
          fmt::format("{}: this rank does not see '{}'{}, which rank {} has just made; save into one folder that all "
                      "ranks share, on several hosts that of a file system which all of them have (NFS may take half "
                      "a minute to show a folder that was looked for before: make it before the job)",
                      kOp, folder, error ? " (" + error.message() + ")" : "", mesh.mesh().ranks().front()));
    }
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

// Returns the plain values of the tile that this rank holds.
at::Tensor values_of(const TensorToWrite& item) {
  const at::Tensor local = is_dtensor(item.tensor) ? to_local(item.tensor) : item.tensor;
  return in_memory(local.detach());
}

// Holds copies of values from one save to the next, so that only the first save of a size pays for fresh memory.
class HeldValues {
 public:
  // Copies the values of all shares, one after the other, into one piece of memory.
  void hold(std::vector<ShareToWrite>& shares) {
    int64_t bytes = 0;
    for (const ShareToWrite& share : shares) bytes += aligned(share.place.bytes());
    if (!memory_.defined() || memory_.numel() < bytes) {
      memory_.reset();  // first, so that two are never held
      memory_ = at::empty({bytes}, at::kByte);
    }
    int64_t begin = 0;
    for (ShareToWrite& share : shares) {
      const at::Tensor values = packed(share.place);
      const at::Tensor copy = memory_.narrow(0, begin, share.place.bytes()).view(values.scalar_type());
      if (values.is_cpu()) {
        std::memcpy(copy.mutable_data_ptr(), values.const_data_ptr(), static_cast<std::size_t>(share.place.bytes()));
      } else {
        auto* const to = static_cast<char*>(copy.mutable_data_ptr());
        write_from_device(values, [&](const char* from, int64_t position, int64_t count) {
          std::memcpy(to + position, from, static_cast<std::size_t>(count));
        });
      }
      begin += aligned(share.place.bytes());
      share.bytes = copy;
      share.place.tensor.reset();
    }
  }

 private:
  static int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  at::Tensor memory_;
};

}  // namespace

struct TrainingStateSaver::Impl {
  Impl(std::string to, SaveStateOptions with) : folder(std::move(to)), options(std::move(with)) {}

  void begin(const TrainingState& state, bool hold);
  void plan(const TrainingState& state);
  void prepare_folder(const TrainingState& state);
  void agree(const TrainingState& state);
  void find_shares(bool hold);
  std::string fingerprint() const;
  void run();

  const std::string folder;
  const SaveStateOptions options;
  HeldValues held;

  // These belong to the save that is going on.
  std::optional<DeviceMesh> mesh;  // nullopt: there is none
  StatePlan layout;
  StateJob job;
  std::exception_ptr failure;
  std::thread thread;
  std::atomic<bool> running{false};
};

// Sets the layout and the job's manifest, without a look at the disk.
void TrainingStateSaver::Impl::plan(const TrainingState& state) {
  check_options(options, state.step);
  refuse_fake_world({state.mesh}, kOp);
  const std::vector<SavedTensor> weights = saved_weights(state.model);
  check_meshes(weights, state.mesh, kOp);
  append_files(layout, kWeightsName, weights, plan_files(weights, options.max_shard_bytes, {{"format", "pt"}}));
  if (state.optimizer != nullptr) {
    const OptimizerContents contents = optimizer_contents(*state.optimizer, state.model, kOp);
    check_meshes(contents.tensors, state.mesh, kOp);
    append_files(layout, kOptimizerName, contents.tensors,
                 plan_files(contents.tensors, options.max_shard_bytes, contents.metadata));
  }
  job.manifest = {.step = state.step, .random = state.mesh.world().random_state(), .values = state.values};
  if (state.scheduler != nullptr) job.manifest.scheduler_steps = scheduler_steps(*state.scheduler);
  if (state.scaler != nullptr) job.manifest.loss_scaler = state.scaler->state();
  check_manifest(job.manifest, layout.files, options.block_bytes);
}

std::string TrainingStateSaver::Impl::fingerprint() const {
  std::string text = fmt::format("{} {} {}\n", folder, options.keep, options.block_bytes);
  text += serialize_state_manifest(job.manifest);
  for (const FilePlan& file : layout.files) text += fmt::format("{} {}\n{}", file.name, file.bytes, file.head);
  return text;
}

void TrainingStateSaver::Impl::prepare_folder(const TrainingState& state) {
  job.rank = state.mesh.world().rank();
  job.ranks = state.mesh.mesh().ranks();
  job.world = state.mesh.world_ptr();
  job.is_from_gpu = !state.mesh.device().is_cpu();
  job.files = layout.files;
  job.block_bytes = options.block_bytes;
  job.progress = options.progress;
  job.folder = folder;
  job.keep = options.keep;
  if (job.rank != job.ranks.front()) return;
  const World& world = *job.world;
  const SavedBy by = {.job = world.size() > 1 && !world.is_fake() ? job_name(world.store()) : "", .ranks = job.ranks};
  job.new_folder = std::make_unique<NewStepFolder>(folder, state.step, by);
  create_files(job.new_folder->path(), job.files);
}

// Finds this rank's bytes. With `hold`, and from a GPU, copies them to the host; with `hold` the memory is kept for the
// next save.
void TrainingStateSaver::Impl::find_shares(bool hold) {
  for (TensorToWrite& item : layout.tensors) {
    find_share(item, job.rank == job.ranks.front());
    if (item.bytes() == 0) continue;
    item.tensor = values_of(item);
    job.shares.push_back({.place = std::move(item), .bytes = {}});
  }
  layout = {};
  if (hold) {
    held.hold(job.shares);
  } else if (!mesh->device().is_cpu()) {
    HeldValues().hold(job.shares);
  } else {
    for (ShareToWrite& share : job.shares) {
      if (!share.place.tensor.is_cpu()) share.bytes = packed(share.place).cpu();
    }
  }
}

void TrainingStateSaver::Impl::run() {
  running = true;
  thread = std::thread([this] {
    try {
      write_state(job);
    } catch (...) {
      failure = std::current_exception();
    }
    running = false;
  });
}

// Makes the plan and the folder, alike on every rank. The folder's name is sent first, so that one agreement is also on
// whether every rank sees the folder.
void TrainingStateSaver::Impl::agree(const TrainingState& state) {
  World& world = state.mesh.world();
  std::exception_ptr refused;
  try {
    plan(state);
    prepare_folder(state);
  } catch (...) {
    refused = std::current_exception();
  }
  const bool is_made = job.new_folder && !refused;
  std::string name;
  world.guard(kOp, [&] { name = from_first_rank(is_made ? job.new_folder->name() : "", state.mesh); });
  job.path = folder + "/" + name;
  Agreement({state.mesh}, kOp)
      .run(
          [&] {
            if (refused) std::rethrow_exception(refused);
            if (!name.empty()) check_seen(job.path, state.mesh);  // else the first rank has failed, and says why
          },
          [&] { return fingerprint(); },
          "the ranks would save different states; every rank must give the same folder, options, step, values and "
          "state of random numbers, and a model and an optimizer of the same names, shapes, dtypes and placements");
  failing_unless_refused(world, kOp, [&] {
    for (TensorToWrite& item : layout.tensors) item.tensor = reduced(item.tensor);
  });
}

void TrainingStateSaver::Impl::begin(const TrainingState& state, bool hold) {
  if (!state.mesh.is_member()) return;
  const at::NoGradGuard no_grad;
  const detail::NotDeferred own_tensors;
  layout = {};
  job = {};
  failure = nullptr;
  try {
    agree(state);
  } catch (...) {
    layout = {};
    job = {};  // removes the new folder
    throw;
  }
  mesh = state.mesh;
  try {
    find_shares(hold);
    run();
  } catch (...) {
    // Memory or threads may be short on this rank alone. The others learn of it in wait(), as of an error of the
    // thread.
    failure = std::current_exception();
    running = false;
    layout = {};
    job.shares.clear();
    give_up(job, "this rank could not hold the values to save");
  }
}

TrainingStateSaver::TrainingStateSaver(std::string folder, SaveStateOptions options)
    : impl_(std::make_unique<Impl>(std::move(folder), std::move(options))) {}

TrainingStateSaver::~TrainingStateSaver() {
  if (impl_->thread.joinable()) impl_->thread.join();
  try {
    if (impl_->failure) std::rethrow_exception(impl_->failure);
  } catch (...) {
    logger().error("{}: {}", kOp, current_error_text());
  }
}

void TrainingStateSaver::start(const TrainingState& state) {
  wait();
  impl_->begin(state, /*hold=*/true);
}

void TrainingStateSaver::save(const TrainingState& state) {
  wait();
  impl_->begin(state, /*hold=*/false);
  wait();
}

void TrainingStateSaver::wait() {
  if (impl_->thread.joinable()) impl_->thread.join();
  if (!impl_->mesh) return;
  const Agreement agreement({*std::exchange(impl_->mesh, std::nullopt)}, kOp);
  impl_->job.shares.clear();
  // A folder of a save that failed is removed when no rank writes into it any more. Before, the others would fail for
  // want of it, and it would not be seen whose failure was the first.
  const std::unique_ptr<NewStepFolder> failed = std::move(impl_->job.new_folder);
  const std::exception_ptr failure = std::exchange(impl_->failure, nullptr);  // the destructor must not log it too
  agreement.run([&] {
    if (failure) std::rethrow_exception(failure);
  });
}

bool TrainingStateSaver::done() const { return !impl_->running; }

}  // namespace tessera
