#include "tessera/mesh/in_process.h"

#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include <ATen/autocast_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/mesh/backends/backend_group.h"
#include "tessera/mesh/backends/thread_group.h"
#include "tessera/mesh/core/error_text.h"
#include "tessera/mesh/environment.h"
#include "tessera/mesh/failure.h"

namespace tessera {
namespace {

// Makes one rank leave the hub, at the latest when it is destroyed. The World owns it through its options.
class Seat {
 public:
  Seat(std::shared_ptr<ThreadHub> hub, int64_t rank) : hub_(std::move(hub)), rank_(rank) {}
  ~Seat() { leave(); }
  Seat(const Seat&) = delete;
  Seat& operator=(const Seat&) = delete;

  void leave() const { hub_->leave(rank_); }
  BackendGroup make(const GroupRequest& request) const { return make_thread_group(hub_, request); }

 private:
  const std::shared_ptr<ThreadHub> hub_;
  const int64_t rank_;
};

// MKL computes many of LibTorch's functions, and sets itself up in its first call. Where two ranks made that call at
// once their sines differed by 6e-9, in 1 of 12,000 processes: so it is made here, before ranks are threads.
void set_up_mkl() { static const at::Tensor once = at::sin(at::ones({8}, at::kDouble)); }

// Collects the exceptions of the ranks of one run.
class Errors {
 public:
  // Adds the current exception. Call it in the catch block of rank `rank`.
  void add(int64_t rank, std::string text) {
    const std::lock_guard lock(mutex_);
    all_.push_back({rank, std::move(text), std::current_exception()});
  }
  bool empty() const { return all_.empty(); }
  // Rethrows the exception of the rank whose failure the job recorded, else the first one added. The first one added
  // may be a consequence: a failure may wake a rank before the rank that failed has reached its catch block.
  [[noreturn]] void rethrow_first(int64_t size, const std::optional<Failure>& recorded) const {
    const Entry* first = &all_.front();
    for (const Entry& entry : all_) {
      if (recorded && recorded->kind == Failure::Kind::kError && entry.rank == recorded->rank) first = &entry;
    }
    try {
      std::rethrow_exception(first->error);
    } catch (...) {
      std::throw_with_nested(std::runtime_error(fmt::format("rank {} of {}: {}", first->rank, size, first->text)));
    }
  }

 private:
  struct Entry {
    int64_t rank;
    std::string text;
    std::exception_ptr error;
  };
  std::mutex mutex_;
  std::vector<Entry> all_;
};

void run_rank(std::shared_ptr<World> world, const std::function<void(const std::shared_ptr<World>&)>& body,
              Errors& errors) {
  // All threads share LibTorch's cache of casts, and the first thread that leaves autocast clears it: with the cache
  // the ranks would record different autograd graphs.
  at::autocast::set_autocast_cache_enabled(false);
  try {
    body(world);
  } catch (...) {
    const std::string text = current_error_text();
    errors.add(world->rank(), text);
    world->fail("the body of run_in_process", text);
  }
  world->retire();  // something outside may still hold it
}

}  // namespace

std::vector<std::shared_ptr<World>> make_in_process_worlds(int64_t size, const InProcessOptions& options) {
  if (size < 1) {
    throw std::invalid_argument(fmt::format("an in-process world of {} ranks is impossible; give at least 1", size));
  }
  set_up_mkl();
  const auto hub = std::make_shared<ThreadHub>();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const EnvironmentVariables variables = process_environment();
  const bool checked = checked_by(variables);
  const std::string records_folder = records_folder_by(variables);
  std::vector<std::shared_ptr<World>> worlds;
  for (int64_t rank = 0; rank < size; ++rank) {
    WorldOptions one;
    one.rank = one.local_rank = rank;
    one.size = one.local_size = size;
    one.store = store;
    one.timeout = options.timeout;
    one.device_index = options.device_index;
    one.checked = checked;
    one.records_folder = records_folder;
    const auto seat = std::make_shared<Seat>(hub, rank);
    one.make_group = [seat](const GroupRequest& request) { return seat->make(request); };
    one.on_retire = [seat] { seat->leave(); };
    worlds.push_back(World::create(std::move(one)));
  }
  return worlds;
}

void run_in_process(int64_t size, const std::function<void(const std::shared_ptr<World>&)>& body,
                    const InProcessOptions& options) {
  std::vector<std::shared_ptr<World>> worlds = make_in_process_worlds(size, options);
  const c10::intrusive_ptr<c10d::Store> store = worlds.front()->store();
  Errors errors;
  {
    std::vector<std::jthread> threads;
    for (std::shared_ptr<World>& world : worlds) {
      const int64_t rank = world->rank();
      try {
        threads.emplace_back([&, mine = world] { run_rank(mine, body, errors); });
      } catch (const std::exception& error) {
        errors.add(rank, fmt::format("its thread could not be started: {}", error.what()));
        world->fail("run_in_process", error.what());
        break;
      }
    }
  }
  if (errors.empty()) return;
  std::optional<Failure> recorded;
  if (store->check({kFailureKey})) recorded = decode_failure(store->get_to_str(kFailureKey));
  errors.rethrow_first(size, recorded);
}

}  // namespace tessera
