#include "tessera/mesh/group_table.h"

#include <algorithm>
#include <condition_variable>
#include <optional>
#include <stdexcept>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/mesh/watched_store.h"

namespace tessera {
namespace {

constexpr auto kWatchPeriod = std::chrono::milliseconds(200);
constexpr auto kClosePeriod = std::chrono::milliseconds(10);

}  // namespace

GroupTable::GroupTable(Options options) : options_(std::move(options)) {}

GroupTable::~GroupTable() {
  watcher_.request_stop();
  if (watcher_.joinable()) watcher_.join();
}

c10::intrusive_ptr<c10d::Backend> GroupTable::get(const std::vector<int64_t>& ranks, c10::DeviceType device) {
  const Key key(device, ranks);
  {
    const std::lock_guard lock(mutex_);
    const auto found = groups_.find(key);
    if (found != groups_.end()) return found->second.backend;
  }
  // Before the group, so that its failing is seen while the others still join.
  if (!options_.fake && ranks.size() > 1 && !watcher_.joinable()) {
    watcher_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
  }
  BackendGroup made = make(key);
  spdlog::debug("rank {}: made the group of ranks [{}]", options_.rank, fmt::join(ranks, ", "));
  const std::lock_guard lock(mutex_);
  const auto inserted = groups_.emplace(key, std::move(made)).first;
  // The job may have failed meanwhile, and whoever closed the groups did not see this one.
  if (options_.board->failed()) inserted->second.close();
  return inserted->second.backend;
}

BackendGroup GroupTable::make(const Key& key) const {
  const auto& [device, ranks] = key;
  const auto place = std::find(ranks.begin(), ranks.end(), options_.rank) - ranks.begin();
  const int size = static_cast<int>(ranks.size());
  if (options_.fake) return make_fake_group(static_cast<int>(place), size);
  const std::string prefix =
      fmt::format("tessera/group/{}/{}", c10::DeviceTypeName(device, /*lower_case=*/true), fmt::join(ranks, "-"));
  // A world of one has no store; its group of one wants one all the same.
  c10::intrusive_ptr<c10d::Store> base = options_.store;
  if (!base) base = c10::make_intrusive<c10d::HashStore>();
  const GroupRequest request{
      .store = c10::make_intrusive<c10d::PrefixStore>(prefix, watch_store(std::move(base), options_.board, ranks)),
      .rank = static_cast<int>(place),
      .size = size,
      .ranks = ranks,
      .device = device,
      .timeout = options_.timeout,
      .one_host = options_.one_host,
      .device_index = options_.device_index,
  };
  request.store->setTimeout(options_.timeout);
  if (options_.make_group) return options_.make_group(request);
  return device == c10::DeviceType::CUDA ? make_nccl_group(request) : make_gloo_group(request);
}

bool GroupTable::close_all() noexcept {
  // The world has failed before this is asked, and a collective asks whether it has failed after it counts as busy: so
  // either it is seen here, or it sees the failure.
  if (options_.busy()) return false;
  const std::lock_guard lock(mutex_);
  for (const auto& [key, group] : groups_) group.close();
  return true;
}

void GroupTable::watch(const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any wake;
  std::unique_lock lock(mutex);
  auto period = kWatchPeriod;
  while (!wake.wait_for(lock, stop, period, [&] { return stop.stop_requested(); })) {
    if (stop.stop_requested()) return;
    if (!options_.board->failed()) {
      const std::optional<Failure> found = options_.board->find();
      if (!found.has_value()) continue;
      options_.board->adopt(*found);
    }
    if (close_all()) return;
    period = kClosePeriod;
  }
}

}  // namespace tessera
