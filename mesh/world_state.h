#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tessera/mesh/backends/backend_group.h"
#include "tessera/mesh/check_state.h"
#include "tessera/mesh/device_type.h"
#include "tessera/mesh/failure.h"
#include "tessera/mesh/group_table.h"
#include "tessera/mesh/observers.h"
#include "tessera/mesh/recorder.h"
#include "tessera/mesh/timed_store.h"
#include "tessera/mesh/world.h"

// Defines what a World holds, for the sources that implement it.
namespace tessera {

uint64_t next_world_id();
// Returns the options by which ranks would send different things if they differed.
std::string settings_of(const WorldOptions& options);

struct World::Impl {
  // The watch calls `on_failure` when it has found that the job has failed.
  Impl(WorldOptions given, std::function<void()> on_failure)
      : options(std::move(given)),
        store(!options.store || never_blocks(*options.store) ? options.store
                                                             : timed_store(options.store, options.timeout)),
        board(std::make_shared<FailureBoard>(
            FailureBoard::Options{.store = has_peers() ? options.store : nullptr,
                                  .rank = options.rank,
                                  .size = options.size,
                                  .settings = settings_of(options),
                                  .timeout = options.timeout,
                                  .lost_file = options.lost_file,
                                  .rank_0_serves_store = has_peers() && rank_0_serves_store(options)})),
        groups({.store = store,
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
                .busy = [this] { return busy(); },
                .busy_for = [this] { return busy_for(); },
                .busy_in = [this] { return std::string(owner_op.load()); },
                .on_failure = std::move(on_failure)}) {
    checks.enabled = options.checked;
  }

  static bool rank_0_serves_store(const WorldOptions& options) {
    return !options.agent_serves_store &&
           dynamic_cast<const c10d::TCPStore*>(&innermost_store(*options.store)) != nullptr;
  }
  // Says whether another thread than the caller's is in a collective.
  bool busy() const {
    const std::thread::id inside = owner.load();
    return inside != std::thread::id{} && inside != std::this_thread::get_id();
  }
  // Returns how long that thread has been in one call.
  std::chrono::milliseconds busy_for() const {
    if (!busy()) return std::chrono::milliseconds::zero();
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - progress.load());
  }
  // Returns the text of a call that finds that the job has failed before it does anything.
  std::string failed_text() const;
  // Writes what `recorder` holds to the folder of records, if there is one. What was written first stays, unless it was
  // written with `may_change`.
  void keep_records(const Recorder& recorder, const std::string& failure, bool may_change) noexcept;
  bool has_peers() const { return options.size > 1 && !options.fake; }
  c10::Device device(c10::DeviceType type) const {
    if (type == c10::DeviceType::CPU) return c10::Device(type);
    if (options.fake) return {type, 0};
    const int index = device_index_of(type, options.rank, options.local_rank, options.device_index);
    return {type, static_cast<c10::DeviceIndex>(index)};
  }

  const WorldOptions options;
  const pid_t owner_process = ::getpid();
  // Says whether another process has made this world, and has forked this one, which must not use what they share.
  bool is_forked() const { return ::getpid() != owner_process; }
  const c10::intrusive_ptr<c10d::Store> store;  // each call ends within the world's time limit
  const uint64_t id = next_world_id();
  RandomState random;
  int gradient_accumulations = 0;
  CheckState checks;
  std::shared_ptr<Observers> observers = std::make_shared<Observers>();
  std::atomic<std::thread::id> owner{};
  // Is when the owner's thread entered the call that it is in; far ahead where there is none, or the call is over and
  // an error is studied.
  std::atomic<std::chrono::steady_clock::time_point> progress{std::chrono::steady_clock::time_point::max()};
  std::atomic<const char*> owner_op{""};  // that thread's operator; a second thread names it in its error
  std::once_flag host_size_read;
  std::mutex records_mutex;   // guards records_kept, and is held while records are written
  bool records_kept = false;  // the records that were written stay
  int64_t host_size = 1;      // rank 0's local_size
  int depth = 0;              // how many Exclusives the owner's thread holds
  uint64_t adoptions = 0;
  std::atomic<bool> retired = false;
  std::shared_ptr<FailureBoard> board;
  GroupTable groups;  // the last member, since its thread uses the board
};

}  // namespace tessera
