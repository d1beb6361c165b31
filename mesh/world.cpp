#include "tessera/mesh/world.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/mesh/backends/backend_group.h"
#include "tessera/mesh/backends/nccl_group.h"
#include "tessera/mesh/check_state.h"
#include "tessera/mesh/core/error_text.h"
#include "tessera/mesh/core/mismatch.h"
#include "tessera/mesh/device_type.h"
#include "tessera/mesh/environment.h"
#include "tessera/mesh/failure.h"
#include "tessera/mesh/group_table.h"
#include "tessera/mesh/recorder.h"
#include "tessera/mesh/store.h"

namespace tessera {
namespace {

// A rank whose collective failed searches for the reason for at most one of the first two times, and the rank that
// serves the store waits for the others to read it for at most the third. Together they are below the 5 seconds within
// which every rank must report a failure.
constexpr auto kSearchPatience = std::chrono::milliseconds(3000);
constexpr auto kShortPatience = std::chrono::milliseconds(100);
constexpr auto kLastPatience = std::chrono::milliseconds(1000);

const std::string kNoPath = "-";

uint64_t next_world_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

// Gloo and NCCL have no exception type for timeouts.
bool says_timeout(const std::string& text) {
  return text.find("imed out") != std::string::npos || text.find("timeout") != std::string::npos;
}

// Returns text such as "; ranks [2] did not come to it", or "" for no ranks.
std::string who_did_not_come(const std::vector<int64_t>& ranks) {
  return ranks.empty() ? "" : fmt::format("; ranks [{}] did not come to it", fmt::join(ranks, ", "));
}

// This is the start of a list: each Scope points to the one that its thread entered before it.
thread_local const World::Scope* innermost_scope = nullptr;

constexpr const char* kLocalSizeKey = "tessera/local_size";

// The tokens that observe() returns share this, so it may outlive the World.
struct Observers {
  std::mutex mutex;
  std::vector<std::shared_ptr<World::Sink>> sinks;
  std::atomic<bool> any{false};

  void remove(const World::Sink* sink) {
    const std::lock_guard lock(mutex);
    std::erase_if(sinks, [&](const auto& held) { return held.get() == sink; });
    any = !sinks.empty();
  }
};

void check_options(const WorldOptions& options) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    throw std::invalid_argument(fmt::format("World: rank {} is outside [0, {})", options.rank, options.size));
  }
  if (options.local_rank < 0 || options.local_size < 1 || options.local_size > options.size) {
    throw std::invalid_argument(fmt::format("World: local rank {} of {} does not fit a world of {}", options.local_rank,
                                            options.local_size, options.size));
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
      "MPI_HOME to another MPI, and build again without --define=tessera_mpi=false; or unset TESSERA_BACKEND");
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
  if (!environment.store_path.empty()) options.lost_file = environment.store_path + ".lost";
  return options;
}

}  // namespace

WorldOptions::WorldOptions() = default;
WorldOptions::WorldOptions(const WorldOptions&) = default;
WorldOptions::WorldOptions(WorldOptions&&) noexcept = default;
WorldOptions& WorldOptions::operator=(const WorldOptions&) = default;
WorldOptions& WorldOptions::operator=(WorldOptions&&) noexcept = default;
WorldOptions::~WorldOptions() = default;

struct World::Impl {
  explicit Impl(WorldOptions given)
      : options(std::move(given)),
        board(std::make_shared<FailureBoard>(options.size > 1 && !options.fake ? options.store : nullptr, options.rank,
                                             options.size, options.lost_file)),
        groups({.store = options.store,
                .board = board,
                .rank = options.rank,
                .size = options.size,
                .timeout = options.timeout,
                .one_host = options.local_size == options.size,
                .device_of = [this](c10::DeviceType type) { return device(type); },
                .fake = options.fake,
                .cpu_backend = options.cpu_backend,
                .gloo_for_cuda = options.gloo_for_cuda,
                .make_group = options.make_group,
                .busy =
                    [this] {
                      const std::thread::id inside = owner.load();
                      return inside != std::thread::id{} && inside != std::this_thread::get_id();
                    }}) {
    checks.enabled = options.checked;
  }

  bool has_peers() const { return options.size > 1 && !options.fake; }
  c10::Device device(c10::DeviceType type) const {
    if (type == c10::DeviceType::CPU) return c10::Device(type);
    if (options.fake) return {type, 0};
    const int index = cuda_device_of(options.rank, options.local_rank, options.device_index);
    return {type, static_cast<c10::DeviceIndex>(index)};
  }

  const WorldOptions options;
  const uint64_t id = next_world_id();
  RandomState random;
  int gradient_accumulations = 0;
  CheckState checks;
  std::shared_ptr<Observers> observers = std::make_shared<Observers>();
  std::atomic<std::thread::id> owner{};
  std::atomic<const char*> owner_op{""};  // that thread's operator; a second thread names it in its error
  std::once_flag host_size_read;
  int64_t host_size = 1;  // rank 0's local_size
  int depth = 0;          // how many Exclusives the owner's thread holds
  uint64_t adoptions = 0;
  std::shared_ptr<FailureBoard> board;
  GroupTable groups;  // the last member, since its thread uses the board
};

World::World(WorldOptions options)
    : recorder_(std::make_unique<Recorder>(options.rank, options.recorder_capacity)),
      impl_(std::make_unique<Impl>(std::move(options))) {
  if (impl_->has_peers() && rank() == 0) store()->set(kLocalSizeKey, std::to_string(local_size()));
}
World::~World() = default;

std::shared_ptr<World> World::create(WorldOptions options) {
  check_options(options);
  const std::shared_ptr<World> world(new World(std::move(options)));
  world->start();
  return world;
}

void World::start() {
  try {
    impl_->groups.start();
  } catch (const std::exception& error) {
    std::vector<int64_t> everyone(static_cast<std::size_t>(size()));
    std::iota(everyone.begin(), everyone.end(), int64_t{0});
    rethrow_collective_failure("starting MPI", everyone, error);
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
  // The store lives until the process ends: a later World must not find a peer's server or file that is being removed.
  static std::optional<std::pair<Environment, c10::intrusive_ptr<c10d::Store>>> process_store;
  static int64_t generation = 0;
  const std::lock_guard lock(mutex);
  if (auto world = current.lock()) return world;
  const Environment environment = resolve_environment(process_environment());
  WorldOptions options = options_from(environment);
  if (environment.size > 1) {
    if (!process_store || process_store->first != environment)
      process_store.emplace(environment, make_store(environment));
    // A second world of this process must not read the keys of the first.
    options.store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("world{}", generation), process_store->second);
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
    const std::vector<uint8_t> text = store()->get(kLocalSizeKey);
    impl_->host_size = std::stoll(std::string(text.begin(), text.end()));
  });
  return impl_->host_size;
}
bool World::is_fake() const { return impl_->options.fake; }
CpuBackend World::cpu_backend() const { return impl_->options.cpu_backend; }
std::chrono::milliseconds World::timeout() const { return impl_->options.timeout; }
const c10::intrusive_ptr<c10d::Store>& World::store() const { return impl_->options.store; }
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

void World::end_watch() { impl_->groups.end_watch(); }

void World::fail(const std::string& where, const std::string& text) noexcept {
  if (!impl_->has_peers() || impl_->board->failed()) return;
  try {
    const Failure failure{.kind = Failure::Kind::kError, .rank = rank(), .where = where, .text = text};
    impl_->board->publish(failure);
    impl_->board->acknowledge(failure);
  } catch (...) {
    // If there is no memory for the text, the groups are closed nevertheless; the other ranks then report a lost peer.
  }
  impl_->groups.close_all();
  impl_->board->wait_until_acknowledged(kLastPatience);
}

void World::check_alive() const {
  if (!impl_->board->failed()) [[likely]]
    return;
  throw std::runtime_error(fmt::format("rank {}: the job has failed: {}", rank(), to_string(impl_->board->failure())));
}

void World::rethrow_collective_failure(const std::string& where, const std::vector<int64_t>& ranks,
                                       const std::exception& error) {
  FailureBoard& board = *impl_->board;
  const std::string library_text = error_text(error);
  if (!board.failed()) {
    // After a timeout no rank is taken as lost, and of a WaitError only the awaited ones: other ranks may have ended
    // because they had finished their part.
    const auto* const wait = dynamic_cast<const WaitError*>(&error);
    const bool timeout = wait != nullptr ? wait->cause == WaitError::Cause::kTimeout : says_timeout(library_text);
    const bool known = wait != nullptr && wait->cause == WaitError::Cause::kLeft;
    const std::vector<int64_t> awaited = timeout ? std::vector<int64_t>() : wait != nullptr ? wait->awaited : ranks;
    std::optional<Failure> found = board.search(awaited, timeout || known ? kShortPatience : kSearchPatience);
    if (!found.has_value()) {
      found = timeout ? Failure{Failure::Kind::kTimeout, rank(), where, library_text}
                      : Failure{Failure::Kind::kLost, -1, where, known ? library_text : "which one is not known"};
    }
    if (found->where.empty()) found->where = where;
    board.publish(*found);
    board.acknowledge(*found);
  }
  board.announce_arrival();
  impl_->groups.close_all();
  const Failure failure = board.failure();
  std::string text = to_string(failure);
  if (failure.kind == Failure::Kind::kTimeout) text += who_did_not_come(board.absent(ranks, kLastPatience));
  board.wait_until_acknowledged(kLastPatience);
  const bool told = text.find(library_text) != std::string::npos || library_text.find(text) != std::string::npos;
  throw std::runtime_error(fmt::format("rank {}, {} over ranks [{}]: {}{}", rank(), where, fmt::join(ranks, ", "), text,
                                       told ? "" : fmt::format(" ({})", library_text)));
}

void World::guard(const std::string& where, const std::function<void()>& callback) {
  try {
    callback();
  } catch (const MismatchError&) {
    throw;  // every rank of the group throws it, and no data was sent
  } catch (const std::exception& error) {
    fail(where, error_text(error));
    throw;
  } catch (...) {
    fail(where, "an exception that is not a std::exception");
    throw;
  }
}

std::shared_ptr<void> World::observe(Sink sink) {
  auto held = std::make_shared<Sink>(std::move(sink));
  const std::shared_ptr<Observers> observers = impl_->observers;
  {
    const std::lock_guard lock(observers->mutex);
    observers->sinks.push_back(held);
    observers->any = true;
  }
  const Sink* const key = held.get();
  return {nullptr, [observers, key](void*) { observers->remove(key); }};
}

void World::record(const CollectiveRecord& record) {
  std::vector<std::shared_ptr<Sink>> sinks;
  {
    const std::lock_guard lock(impl_->observers->mutex);
    sinks = impl_->observers->sinks;
  }
  for (const auto& sink : sinks) (*sink)(record);
}

bool World::observed() const { return impl_->observers->any.load(std::memory_order_relaxed); }

World::Scope::Scope(World& world, const char* op, const std::string* path)
    : world_(world),
      outer_(innermost_scope),
      op_(op != nullptr ? op : world.current_op()),
      path_(path != nullptr ? path : &world.current_path()) {
  innermost_scope = this;
}

World::Scope::~Scope() { innermost_scope = outer_; }

const World::Scope* World::Scope::of(const World& world) {
  const Scope* scope = innermost_scope;
  while (scope != nullptr && &scope->world_ != &world) scope = scope->outer_;
  return scope;
}

const char* World::current_op() const {
  const Scope* const scope = Scope::of(*this);
  return scope != nullptr ? scope->op_ : "";
}

const std::string& World::current_path() const {
  const Scope* const scope = Scope::of(*this);
  return scope != nullptr ? *scope->path_ : kNoPath;
}

World::Exclusive::Exclusive(World& world) : world_(world) {
  const std::thread::id me = std::this_thread::get_id();
  std::thread::id nobody{};
  if (world_.impl_->owner.load(std::memory_order_relaxed) != me &&
      !world_.impl_->owner.compare_exchange_strong(nobody, me)) {
    throw std::runtime_error(fmt::format(
        "rank {}: two threads communicate at once, one of them in {}; all ranks must issue collectives in the same "
        "order, so communicate from one thread, or give each thread a world of its own",
        world_.rank(), *world_.impl_->owner_op.load() == '\0' ? "a collective" : world_.impl_->owner_op.load()));
  }
  if (world_.impl_->depth++ == 0) world_.impl_->owner_op = world_.current_op();
}

World::Exclusive::~Exclusive() {
  if (--world_.impl_->depth == 0) world_.impl_->owner.store(std::thread::id{});
}

}  // namespace tessera
