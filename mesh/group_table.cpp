#include "tessera/mesh/group_table.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/mesh/backends/nccl_group.h"
#include "tessera/mesh/backends/orderly_end.h"
#include "tessera/mesh/core/logger.h"
#include "tessera/mesh/core/within.h"
#include "tessera/mesh/watched_store.h"

namespace tessera {
namespace {

using Names = std::vector<std::string>;

constexpr auto kWatchPeriod = std::chrono::milliseconds(200);
constexpr auto kClosePeriod = std::chrono::milliseconds(10);
// A backend that has not returned so long after its limit is given up. With the time that the ranks then have to say
// whether they came, this is below the ten seconds that docs/reliability.md promises.
constexpr auto kBackendIsLater = std::chrono::seconds(8);

// Returns the backends that make() has for tensors on `device`, the default first.
Names backends_of(c10::DeviceType device, CpuBackend cpu_backend, bool gloo_for_cuda) {
  if (device == c10::DeviceType::CUDA) return gloo_for_cuda ? Names{"gloo", "nccl"} : Names{"nccl", "gloo"};
  if (device == c10::DeviceType::CPU && cpu_backend == CpuBackend::kMpi) return {"mpi", "gloo"};
  return {"gloo"};
}

// Returns text that distinguishes the store keys of groups of the same ranks, such as "/limit=30000".
std::string suffix_of(const GroupOptions& options) {
  return (options.backend.empty() ? "" : "/" + options.backend) +
         (options.timeout.has_value() ? fmt::format("/limit={}", options.timeout->count()) : "");
}

// Wraps a backend that the caller has made.
BackendGroup wrap(c10::intrusive_ptr<c10d::Backend> backend) {
  return backend->getBackendName() == "nccl" ? wrap_nccl_group(std::move(backend)) : wrap_group(std::move(backend));
}

// Returns the limit of each wait in a group that the caller has made, or zero where it does not say.
std::chrono::milliseconds limit_of(c10d::Backend& backend) {
  try {
    const auto options = backend.getBackendOptions();
    return options ? std::min(options->timeout, kLongestTimeout) : std::chrono::milliseconds::zero();
  } catch (const c10::Error&) {
    return std::chrono::milliseconds::zero();  // this backend has no options
  }
}

// Returns what a user's function has made.
BackendGroup checked(BackendGroup made) {
  if (made.backend && made.close) return made;
  throw std::invalid_argument(
      fmt::format("WorldOptions::make_group returned a group without a {}; wrap_group(backend) sets both",
                  made.backend ? "close function" : "backend"));
}

// Starts to close `group` on a thread of its own. If none can be had, closes it on this one.
void start_to_close(const BackendGroup& group, std::vector<std::jthread>& closers) noexcept {
  try {
    closers.emplace_back([&group] { group.close(); });
  } catch (const std::exception& error) {  // also where there is no memory
    logger().debug("closing a group without a thread of its own: {}", error.what());
    group.close();
  }
}

}  // namespace

GroupTable::GroupTable(Options options) : options_(std::move(options)) {}

GroupTable::~GroupTable() {
  end();
  if (options_.board->failed() && is_over_mpi()) skip_mpi_end();
}

// The watch goes on meanwhile, so that the loss of a rank ends the wait for what it does not send any more.
std::string GroupTable::drain() noexcept {
  for (const auto& [key, group] : groups_) {
    std::string text = drain_one(group);
    if (!text.empty() || is_late_) return text;
  }
  return {};
}

std::string GroupTable::drain_one(const BackendGroup& group) noexcept {
  const std::string text = end_one(group, &OrderlyEnd::drain);
  // A world that lives as long as the process may end after CUDA's library, with nothing left to do.
  return is_own_error(text) && text.find("driver shutting down") == std::string::npos ? text : "";
}

void GroupTable::end() noexcept {
  if (std::exchange(ended_, true)) return;
  // Nobody asks any more whether a collective was aborted whose values are in use.
  if (!options_.board->failed()) {
    if (const std::optional<WaitError> error = aborted()) logger().warn("rank {}: {}", options_.rank, error->what());
  }
  end_watch();
  for (const auto& [key, group] : groups_) {
    if (is_late_ && group.closes_while_busy) {
      group.close();
    } else {
      end_one(group, &OrderlyEnd::end);
    }
  }
}

std::string GroupTable::end_one(const BackendGroup& group, void (OrderlyEnd::*step)()) noexcept {
  auto* const orderly = dynamic_cast<OrderlyEnd*>(group.backend.get());
  if (orderly == nullptr || options_.board->failed()) return {};
  try {
    (orderly->*step)();
    return {};
  } catch (const LateError& error) {
    is_late_ = true;
    logger().warn("rank {}: ending a group: {}; what it has queued is given up", options_.rank, error.what());
    return error.what();
  } catch (const std::exception& error) {
    logger().debug("rank {}: ending a group: {}", options_.rank, error.what());
    return error.what();
  }
}

GroupOptions GroupTable::normalized(GroupOptions options, c10::DeviceType device) const {
  if (options == GroupOptions{}) [[likely]]
    return options;
  if (options.timeout.has_value() && *options.timeout <= std::chrono::milliseconds::zero()) {
    throw std::invalid_argument(
        fmt::format("group options: a timeout of {} ms is not positive; leave it out for the world's {} ms",
                    options.timeout->count(), options_.timeout.count()));
  }
  if (options.timeout.has_value() && *options.timeout > kLongestTimeout) {
    throw std::invalid_argument(fmt::format("group options: a timeout of {} ms is too long; give at most {} ms",
                                            options.timeout->count(), kLongestTimeout.count()));
  }
  const Names backends = backends_of(device, options_.cpu_backend, options_.gloo_for_cuda);
  if (!options.backend.empty() && std::find(backends.begin(), backends.end(), options.backend) == backends.end()) {
    throw std::invalid_argument(fmt::format("group options: there is no backend '{}' for tensors on {}; use one of: {}",
                                            options.backend, c10::DeviceTypeName(device, /*lower_case=*/true),
                                            fmt::join(backends, ", ")));
  }
  if (options.timeout == options_.timeout) options.timeout.reset();
  if (options.backend == backends.front()) options.backend.clear();
  return options;
}

c10::intrusive_ptr<c10d::Backend> GroupTable::get(const std::vector<int64_t>& ranks, c10::DeviceType device,
                                                  const GroupOptions& options) {
  const Key key{.device = device, .ranks = ranks, .options = options};
  {
    const std::lock_guard lock(mutex_);
    const auto found = groups_.find(key);
    if (found != groups_.end()) return found->second.backend;
    longest_limit_ = std::max(longest_limit_, options.timeout.value_or(longest_limit_));
  }
  // The watch starts before the group is made, so that a failure during that is seen.
  start_watch(ranks);
  BackendGroup made = make(key);
  if (options_.size > 1 && !options_.fake) {
    options_.board->remember(ranks);
    throw_if_mixed();
  }
  logger().debug("rank {}: made the group of ranks [{}]", options_.rank, fmt::join(ranks, ", "));
  const std::lock_guard lock(mutex_);
  if (made.aborted) some_abort_themselves_ = true;
  const auto inserted = groups_.emplace(key, std::move(made)).first;
  // If the job has failed meanwhile, close_all() has not closed this group.
  if (options_.board->failed()) inserted->second.close();
  return inserted->second.backend;
}

// The ranks of a group may belong to two jobs that use one store; each has found its place free. Those whose places
// were taken have written a failure, which a short job would not wait for.
void GroupTable::throw_if_mixed() const {
  const std::optional<Failure> found = options_.board->find();
  if (found.has_value()) throw std::runtime_error(to_string(*found));
}

void GroupTable::adopt(const std::vector<int64_t>& ranks, c10::DeviceType device,
                       c10::intrusive_ptr<c10d::Backend> backend) {
  start_watch(ranks);
  const Key key{.device = device, .ranks = ranks, .options = {}};
  const std::chrono::milliseconds limit = limit_of(*backend);
  const BackendGroup adopted = wrap(std::move(backend));
  BackendGroup replaced;
  {
    const std::lock_guard lock(mutex_);
    longest_limit_ = std::max(longest_limit_, limit);
    if (const auto found = groups_.find(key); found != groups_.end()) replaced = found->second;
  }
  if (replaced.backend == adopted.backend) return;
  // Its collectives are done before it goes. While the table has it, the loss of a rank ends this wait.
  if (const std::string own_error = drain_one(replaced); !own_error.empty()) throw std::runtime_error(own_error);
  {
    const std::lock_guard lock(mutex_);
    if (adopted.aborted) some_abort_themselves_ = true;
    groups_.insert_or_assign(key, adopted);
    if (options_.board->failed()) {
      adopted.close();
      if (replaced.close) replaced.close();
    }
  }
  end_one(replaced, &OrderlyEnd::end);
}

std::size_t GroupTable::size() const {
  const std::lock_guard lock(mutex_);
  return groups_.size();
}

std::optional<WaitError> GroupTable::aborted() const {
  if (!some_abort_themselves_) [[likely]]
    return std::nullopt;
  const std::lock_guard lock(mutex_);
  for (const auto& [key, group] : groups_) {
    const std::optional<WaitError::Cause> cause = group.aborted ? group.aborted() : std::nullopt;
    if (!cause.has_value()) continue;
    const char* const why = *cause == WaitError::Cause::kTimeout ? "its time limit" : "an error of NCCL";
    return WaitError(*cause, fmt::format("NCCL has aborted the group's collectives after {}", why), key.ranks);
  }
  return std::nullopt;
}

void GroupTable::start_watch(const std::vector<int64_t>& ranks) {
  if (options_.fake || ranks.size() == 1 || watcher_.joinable()) return;
  watcher_ = std::jthread([this](const std::stop_token& stop) { close_after_failure(stop); });
}

void GroupTable::end_watch() {
  watcher_.request_stop();
  if (watcher_.joinable()) watcher_.join();
}

void GroupTable::start() {
  if (!is_over_mpi()) return;
  std::vector<int64_t> everyone(static_cast<std::size_t>(options_.size));
  std::iota(everyone.begin(), everyone.end(), int64_t{0});
  start_mpi(request("tessera/mpi", everyone, {}, c10::DeviceType::CPU));
}

BackendGroup GroupTable::make(const Key& key) const {
  const auto& [device, ranks, options] = key;
  const GroupRequest asked =
      request(fmt::format("tessera/group/{}/{}{}", c10::DeviceTypeName(device, /*lower_case=*/true),
                          fmt::join(ranks, "-"), suffix_of(options)),
              ranks, options, device);
  if (options_.fake) return make_fake_group(asked.rank, asked.size);
  if (options_.make_group) return checked(options_.make_group(asked));
  if (device == c10::DeviceType::CPU) return make_cpu_group(asked, options.backend);
  const Names backends = backends_of(device, options_.cpu_backend, options_.gloo_for_cuda);
  const std::string& backend = options.backend.empty() ? backends.front() : options.backend;
  return make_in_time(asked, backend == "gloo" ? make_gloo_group : make_nccl_group);
}

BackendGroup GroupTable::make_cpu_group(const GroupRequest& request, const std::string& backend) const {
  // A world of one rank needs no MPI: mpirun need not have started it.
  const bool over_mpi = options_.cpu_backend == CpuBackend::kMpi && options_.size > 1 && backend.empty();
  return make_in_time(request, over_mpi ? make_mpi_group : make_gloo_group);
}

// Neither Gloo, MPI nor NCCL can be interrupted while it makes connections, and Gloo waits several times.
BackendGroup GroupTable::make_in_time(const GroupRequest& request,
                                      BackendGroup (*make_group)(const GroupRequest& request)) {
  if (request.size == 1) return make_group(request);
  return within(
      request.timeout, "making the connections", [request, make_group] { return make_group(request); },
      [&] { return request.lost(request.ranks); });
}

GroupRequest GroupTable::request(const std::string& prefix, const std::vector<int64_t>& ranks,
                                 const GroupOptions& options, c10::DeviceType device) const {
  const auto place = std::find(ranks.begin(), ranks.end(), options_.rank) - ranks.begin();
  // A world of one rank has no store, but its group of one rank needs one.
  c10::intrusive_ptr<c10d::Store> base = options_.store;
  if (!base) base = c10::make_intrusive<c10d::HashStore>();
  GroupRequest request{
      .store = c10::make_intrusive<c10d::PrefixStore>(prefix, watch_store(std::move(base), options_.board, ranks)),
      .rank = static_cast<int>(place),
      .size = static_cast<int>(ranks.size()),
      .ranks = ranks,
      .device = device,
      .timeout = options.timeout.value_or(options_.timeout),
      .one_host = options_.one_host,
      .device_index = options_.device_of(device).index(),
      .lost = [board = options_.board](const std::vector<int64_t>& awaited) { return board->has_lost(awaited); },
  };
  request.store->setTimeout(request.timeout);
  return request;
}

// Says whether the world is over MPI. A failure of another world leaves the end of MPI alone.
bool GroupTable::is_over_mpi() const {
  return options_.cpu_backend == CpuBackend::kMpi && options_.size > 1 && !options_.fake;
}

bool GroupTable::close_all() noexcept {
  if (is_over_mpi()) skip_mpi_end();
  // The failure is recorded before this call, and a collective checks for a failure after it counts as busy. So either
  // this call sees the collective, or the collective sees the failure.
  const bool busy = options_.busy();
  std::unique_lock lock(mutex_, std::defer_lock);
  if (!busy) {
    lock.lock();
  } else if (!lock.try_lock()) {
    return false;  // another thread uses the table; the watch tries again
  }
  // The abort of an NCCL group takes up to some seconds, and may wait for a kernel that another group's abort ends.
  std::vector<std::jthread> closers;  // they are joined before the mutex is free
  for (const auto& [key, group] : groups_) {
    if (group.closes_while_busy) {
      start_to_close(group, closers);
    } else if (!busy) {
      group.close();
    }
  }
  return !busy;
}

std::optional<Failure> GroupTable::find_late_call() const {
  const std::chrono::milliseconds busy = options_.busy_for();
  if (busy <= options_.timeout + kBackendIsLater) return std::nullopt;
  const std::chrono::milliseconds limit = [this] {
    const std::lock_guard lock(mutex_);
    return std::max(options_.timeout, longest_limit_);
  }();
  if (busy <= limit + kBackendIsLater) return std::nullopt;
  const std::string op = options_.busy_in();
  return Failure{.kind = Failure::Kind::kTimeout,
                 .rank = options_.rank,
                 .where = op.empty() ? "a collective" : op,
                 .text = fmt::format("the backend has not returned within its limit of {} ms", limit.count())};
}

void GroupTable::close_after_failure(const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any wake;
  std::unique_lock lock(mutex);
  auto period = kWatchPeriod;
  while (!wake.wait_for(lock, stop, period, [&] { return stop.stop_requested(); })) {
    if (stop.stop_requested()) return;
    bool is_new = false;
    if (!options_.board->failed()) {
      std::optional<Failure> found = options_.board->find();
      if (!found.has_value() && (found = find_late_call())) {
        options_.board->publish(*found, kWatchPeriod);
      }
      if (!found.has_value()) continue;
      options_.board->acknowledge(*found);
      is_new = true;
    }
    const bool closed = close_all();
    if (is_new && options_.on_failure) options_.on_failure();  // last, since ranks wait for the groups to close
    if (closed) return;
    period = kClosePeriod;
  }
}

}  // namespace tessera
