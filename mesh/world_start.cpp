// Implements how a World starts, what it says of itself, and its groups.
#include "tessera/mesh/world.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <filesystem>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/mesh/backends/nccl_group.h"
#include "tessera/mesh/core/logger.h"
#include "tessera/mesh/environment.h"
#include "tessera/mesh/record_file.h"
#include "tessera/mesh/recorder.h"
#include "tessera/mesh/store.h"
#include "tessera/mesh/watched_store.h"
#include "tessera/mesh/world_state.h"

namespace tessera {
namespace {

constexpr const char* kLocalSizeKey = "tessera/local_size";

void check_options(const WorldOptions& options) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    throw std::invalid_argument(fmt::format("World: rank {} is outside [0, {})", options.rank, options.size));
  }
  if (options.local_rank < 0 || options.local_rank >= options.local_size || options.local_size > options.size) {
    throw std::invalid_argument(
        fmt::format("World: local rank {} of {} does not fit a world of {}; set WorldOptions::local_size to the number "
                    "of ranks on this host, and local_rank to a number below it",
                    options.local_rank, options.local_size, options.size));
  }
  if (options.size > 1 && !options.fake && !options.store) {
    throw std::invalid_argument(
        fmt::format("World: {} ranks need a store to find each other; set WorldOptions::store (a c10d::FileStore or "
                    "c10d::TCPStore that all ranks open), or start the ranks with tools/launch, torchrun or mpirun",
                    options.size));
  }
  if (options.timeout <= std::chrono::milliseconds::zero()) {
    throw std::invalid_argument(fmt::format("World: a timeout of {} ms is not positive", options.timeout.count()));
  }
  if (options.timeout > kLongestTimeout) {
    throw std::invalid_argument(fmt::format("World: a timeout of {} ms is too long; give at most {} ms",
                                            options.timeout.count(), kLongestTimeout.count()));
  }
}

// Without TESSERA_BACKEND, MPI is used only if this build's MPI has started the process: under the launcher of another
// MPI each process would be a job of its own.
CpuBackend cpu_backend_for(const Environment& environment) {
  if (environment.backend == to_string(CpuBackend::kGloo) || environment.size == 1) return CpuBackend::kGloo;
  const std::string_view built = mpi_flavor();
  if (environment.backend.empty())
    return !built.empty() && environment.mpi == built ? CpuBackend::kMpi : CpuBackend::kGloo;
  if (!built.empty()) return CpuBackend::kMpi;
  throw std::invalid_argument(
      "environment: TESSERA_BACKEND=mpi, and this build has no MPI; install libopenmpi-dev (tools/setup does), or set "
      "MPI_HOME to another MPI, and build again after `bazel shutdown`, without --define=tessera_mpi=false; or unset "
      "TESSERA_BACKEND");
}

void check_members(const World& world, const std::vector<int64_t>& ranks) {
  if (std::find(ranks.begin(), ranks.end(), world.rank()) == ranks.end()) {
    throw std::invalid_argument(fmt::format("group of ranks [{}]: rank {} is not among them; only members make a group",
                                            fmt::join(ranks, ", "), world.rank()));
  }
  const auto outside = std::find_if(ranks.begin(), ranks.end(), [&](int64_t r) { return r < 0 || r >= world.size(); });
  if (outside != ranks.end()) {
    throw std::invalid_argument(fmt::format("group of ranks [{}]: rank {} is outside the world of {}",
                                            fmt::join(ranks, ", "), *outside, world.size()));
  }
  std::vector<int64_t> sorted = ranks;
  std::ranges::sort(sorted);
  const auto twice = std::ranges::adjacent_find(sorted);
  if (twice != sorted.end()) {
    throw std::invalid_argument(fmt::format("group of ranks [{}]: rank {} is listed twice; list each rank once",
                                            fmt::join(ranks, ", "), *twice));
  }
}

WorldOptions options_from(const Environment& environment) {
  WorldOptions options;
  options.rank = environment.rank;
  options.size = environment.size;
  options.local_rank = environment.local_rank;
  options.local_size = environment.local_size;
  options.timeout = std::chrono::seconds(environment.timeout_seconds);
  options.cpu_backend = cpu_backend_for(environment);
  options.gloo_for_cuda = environment.cuda_backend == "gloo";
  options.checked = environment.checked;
  options.agent_serves_store = environment.agent_store;
  options.records_folder = environment.records_folder;
  // The program may go to another folder before it is used.
  if (!environment.store_path.empty()) options.lost_file = std::filesystem::absolute(environment.store_path + ".lost");
  return options;
}

// Returns the folder of records by a path that stays right where the program goes to another folder. Where the current
// folder is gone it stays as it is, and start() says that there will be no records.
std::string absolute_path(const std::string& folder) {
  if (folder.empty()) return folder;
  std::error_code is_gone;
  const std::filesystem::path path = std::filesystem::absolute(folder, is_gone);
  return is_gone ? folder : path.string();
}

// Keeps the store of from_environment() until the process ends: a later World must not find a peer's server or file
// that is being removed. A forked process that ends leaves the store alone: its threads are not there to be ended.
class ProcessStore {
 public:
  ~ProcessStore() {
    if (getpid() != owner_) static_cast<void>(store_.release());
  }
  const c10::intrusive_ptr<c10d::Store>& of(const Environment& environment) {
    if (store_ && environment_ == environment) return store_;
    store_ = make_store(environment);
    environment_ = environment;
    owner_ = getpid();
    return store_;
  }

 private:
  pid_t owner_ = getpid();
  Environment environment_;
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

WorldOptions::WorldOptions() = default;
WorldOptions::WorldOptions(const WorldOptions&) = default;
WorldOptions::WorldOptions(WorldOptions&&) noexcept = default;
WorldOptions& WorldOptions::operator=(const WorldOptions&) = default;
WorldOptions& WorldOptions::operator=(WorldOptions&&) noexcept = default;
WorldOptions::~WorldOptions() = default;

uint64_t next_world_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

std::string settings_of(const WorldOptions& options) {
  return fmt::format("{} for CPU tensors, {} for CUDA tensors, collectives {}", to_string(options.cpu_backend),
                     options.gloo_for_cuda ? "Gloo" : "NCCL", options.checked ? "checked" : "not checked");
}

World::World(WorldOptions options)
    : recorder_(std::make_unique<Recorder>(options.rank, options.recorder_capacity)),
      impl_(std::make_unique<Impl>(std::move(options), [this] {
        // A thread that is in a collective says later where it was.
        impl_->keep_records(*recorder_, impl_->failed_text(), impl_->busy());
      })) {}
World::~World() {
  // A process that this one forked has neither the threads nor the sockets of its own that the end of groups needs.
  if (impl_->is_forked()) {
    static_cast<void>(impl_.release());
    return;
  }
  // A check that has failed on this rank's GPU may show only now, while others wait for what the rank will not send.
  const std::string own_error = impl_->groups.drain();
  if (!own_error.empty()) fail("the end of its world", own_error);
  impl_->groups.end();  // its watch uses the members
}

std::shared_ptr<World> World::create(WorldOptions options) {
  check_options(options);
  options.records_folder = absolute_path(options.records_folder);
  std::shared_ptr<World> world(new World(std::move(options)));
  world->start();
  return world;
}

void World::start() {
  const std::string& records = impl_->options.records_folder;
  if (const std::string why = records.empty() ? "" : prepare_records(records, rank(), size()); !why.empty()) {
    logger().warn("rank {}: there will be no records of a failure in {}: {}", rank(), records, why);
  }
  const char* step = "saying how many ranks a host has";
  try {
    if (impl_->has_peers() && rank() == 0) store()->set(kLocalSizeKey, std::to_string(local_size()));
    step = "starting MPI";
    impl_->groups.start();
  } catch (const std::exception& error) {
    std::vector<int64_t> everyone(static_cast<std::size_t>(size()));
    std::iota(everyone.begin(), everyone.end(), int64_t{0});
    rethrow_collective_failure(step, everyone, error);
  }
}

std::shared_ptr<World> World::fake(int64_t rank, int64_t size) {
  WorldOptions options;
  options.rank = rank;
  options.size = size;
  options.fake = true;
  return create(std::move(options));
}

std::shared_ptr<World> World::from_environment() {
  static std::mutex mutex;
  static std::weak_ptr<World> current;
  static ProcessStore process_store;
  static int64_t generation = 0;
  const std::lock_guard lock(mutex);
  if (auto world = current.lock()) return world;
  const Environment environment = resolve_environment(process_environment());
  WorldOptions options = options_from(environment);
  if (environment.size > 1) {
    // A second world of this process must not read the keys of the first.
    options.store =
        c10::make_intrusive<c10d::PrefixStore>(fmt::format("world{}", generation), process_store.of(environment));
  }
  auto world = create(std::move(options));
  ++generation;
  current = world;
  return world;
}

uint64_t World::id() const { return impl_->id; }
int64_t World::rank() const { return impl_->options.rank; }
int64_t World::size() const { return impl_->options.size; }
int64_t World::local_rank() const { return impl_->options.local_rank; }
c10::Device World::device(c10::DeviceType type) const { return impl_->device(type); }
int64_t World::local_size() const { return impl_->options.local_size; }
int64_t World::ranks_per_host() const {
  if (!impl_->has_peers()) return local_size();
  std::call_once(impl_->host_size_read, [&] {
    try {
      const auto watched = watch_store(store(), impl_->board, {0});
      watched->setTimeout(timeout());
      const std::vector<uint8_t> text = watched->get(kLocalSizeKey);
      impl_->host_size = std::stoll(std::string(text.begin(), text.end()));
    } catch (const std::exception& error) {
      rethrow_collective_failure("asking rank 0 how many ranks a host has", {0}, error);
    }
  });
  return impl_->host_size;
}
bool World::is_fake() const { return impl_->options.fake; }
CpuBackend World::cpu_backend() const { return impl_->options.cpu_backend; }
std::chrono::milliseconds World::timeout() const { return impl_->options.timeout; }
const c10::intrusive_ptr<c10d::Store>& World::store() const { return impl_->store; }
CheckState& World::check_state() { return impl_->checks; }
RandomState& World::random_state() { return impl_->random; }
int& World::gradient_accumulations() { return impl_->gradient_accumulations; }

c10::intrusive_ptr<c10d::Backend> World::group(const std::vector<int64_t>& ranks, c10::DeviceType device,
                                               const GroupOptions& given) {
  check_alive();
  check_members(*this, ranks);
  const GroupOptions options = normalized(given, device);
  const Exclusive exclusive(*this);
  const auto where = [&] {
    return fmt::format("{}{}making a process group", current_op(), *current_op() == '\0' ? "" : ": ");
  };
  try {
    return impl_->groups.get(ranks, device, options);
  } catch (const c10::Error& error) {
    rethrow_collective_failure(where(), ranks, error);
  } catch (const std::exception& error) {
    // Without peers it is this rank's own error. A build without NCCL is every rank's.
    const bool no_nccl = device == c10::DeviceType::CUDA && !impl_->options.gloo_for_cuda && !built_with_nccl();
    if (!impl_->has_peers() || no_nccl) throw;
    rethrow_collective_failure(where(), ranks, error);
  }
}

GroupOptions World::normalized(const GroupOptions& options, c10::DeviceType device) const {
  return impl_->groups.normalized(options, device);
}

void World::adopt(const std::vector<int64_t>& ranks, c10::DeviceType device,
                  c10::intrusive_ptr<c10d::Backend> backend) {
  check_members(*this, ranks);
  if (!backend) throw std::invalid_argument(fmt::format("group of ranks [{}]: it is null", fmt::join(ranks, ", ")));
  const auto place = std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin();
  if (static_cast<std::size_t>(backend->getSize()) != ranks.size() || backend->getRank() != place) {
    throw std::invalid_argument(
        fmt::format("group of ranks [{}]: rank {} has position {} of {} in it; list the ranks in the group's own order",
                    fmt::join(ranks, ", "), rank(), backend->getRank(), backend->getSize()));
  }
  const Exclusive exclusive(*this);
  impl_->groups.adopt(ranks, device, std::move(backend));
  ++impl_->adoptions;
}

uint64_t World::adoptions() const { return impl_->adoptions; }

std::size_t World::group_count() const { return impl_->groups.size(); }

void World::retire() {
  if (impl_->options.on_retire) impl_->options.on_retire();
  impl_->groups.end_watch();
  impl_->retired = true;
}

bool World::is_retired() const { return impl_->retired; }

std::shared_ptr<void> World::observe(Sink sink) { return impl_->observers->add(std::move(sink)); }
void World::record(const CollectiveRecord& record) { impl_->observers->record(record); }
bool World::observed() const { return impl_->observers->any(); }

}  // namespace tessera
