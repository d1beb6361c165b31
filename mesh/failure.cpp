#include "tessera/mesh/failure.h"

#include <algorithm>
#include <array>
#include <exception>
#include <iterator>
#include <new>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/mesh/core/error_text.h"
#include "tessera/mesh/core/logger.h"
#include "tessera/mesh/core/poll.h"
#include "tessera/mesh/core/within.h"
#include "tessera/mesh/process_state.h"
#include "tessera/mesh/timed_store.h"

namespace tessera {
namespace {

constexpr const char* kSizeKey = "tessera/size";
constexpr const char* kSettingsKey = "tessera/settings";
// A store that does not answer within this time is taken as gone, for this call.
constexpr auto kStoreAnswers = std::chrono::milliseconds(1000);
constexpr auto kLook = std::chrono::milliseconds(20);
// A launcher needs some time to write down how a rank has ended.
constexpr auto kLauncherNeeds = std::chrono::milliseconds(400);
// Ranks whose collective failed at the same time look for who is missing at most so much later than rank 0.
constexpr auto kOthersLook = std::chrono::milliseconds(500);

std::string process_key(int64_t rank) { return fmt::format("tessera/process/{}", rank); }
std::string known_key(int64_t rank) { return fmt::format("tessera/failure_known/{}", rank); }
std::string came_key(int64_t rank) { return fmt::format("tessera/failure_came/{}", rank); }
std::string looked_key(int64_t rank) { return fmt::format("tessera/failure_looked/{}", rank); }

}  // namespace

std::string to_string(const Failure& failure) {
  switch (failure.kind) {
    case Failure::Kind::kError:
      return fmt::format("rank {} failed in {}: {}", failure.rank, failure.where, failure.text);
    case Failure::Kind::kLost: return fmt::format("a peer was lost: {}", failure.text);
    case Failure::Kind::kTimeout:
      return fmt::format("rank {} waited in vain in {}: {}", failure.rank, failure.where, failure.text);
  }
  throw std::logic_error("to_string(Failure): not a kind of failure");
}

std::string encode(const Failure& failure) {
  return fmt::format("{} {} {} {}{}", static_cast<int>(failure.kind), failure.rank, failure.where.size(), failure.where,
                     failure.text);
}

std::optional<Failure> decode_failure(const std::string& text) {
  std::istringstream in(text);
  int kind = -1;
  int64_t rank = -1;
  std::size_t where = 0;
  in >> kind >> rank >> where;
  if (!in || kind < 0 || kind > 2 || in.get() != ' ') return std::nullopt;
  const std::string rest = text.substr(static_cast<std::size_t>(in.tellg()));
  if (where > rest.size()) return std::nullopt;
  return Failure{.kind = static_cast<Failure::Kind>(kind),
                 .rank = rank,
                 .where = rest.substr(0, where),
                 .text = rest.substr(where)};
}

bool is_failure_key(const std::string& key) { return key.find("tessera/failure") != std::string::npos; }

bool is_own_error(const std::string& text) {
  // The texts of the errno values that say what this process or its host lacks, of the standard library's error for
  // want of memory, of CUDA's errors, and of a message of another size than expected.
  static constexpr std::array<std::string_view, 18> kOwn = {
      "Too many open files",
      "Cannot allocate memory",
      "std::bad_alloc",
      "Cannot assign requested address",
      "No space left on device",
      "Disk quota exceeded",
      "Resource temporarily unavailable",
      "Permission denied",
      "Operation not permitted",
      "Address already in use",
      "No such device",
      "CUDA error",
      "CUDA out of memory",
      "Cuda failure",
      "unhandled cuda error",
      "the store's folder",
      "Unable to find address",
      "the ranks called different collectives",
  };
  return std::ranges::any_of(kOwn, [&](std::string_view own) { return text.find(own) != std::string::npos; });
}

bool is_own_error(const std::exception& error) {
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr || is_own_error(error_text(error));
}

std::string job_name(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    const auto timed = timed_store(store, kStoreAnswers);
    return timed->check({process_key(0)}) ? timed->get_to_str(process_key(0)) : "";
  } catch (const std::exception& error) {
    logger().debug("the store did not name the job: {}", error.what());
    return "";
  }
}

FailureBoard::FailureBoard(Options options)
    : options_(std::move(options)),
      store_(!options_.store || never_blocks(*options_.store) ? options_.store
                                                              : timed_store(options_.store, kStoreAnswers)) {
  if (store_) join();
}

// Claims this rank's place, and compares settings. Two jobs that use one store by mistake are found here: they have a
// rank in common, or different sizes. Other ranks of both may have places that do not clash, and would make one job of
// the two.
void FailureBoard::join() {
  const std::string mine = describe_this_process(), size = std::to_string(options_.size);
  const auto claim = [store = options_.store, key = process_key(options_.rank), mine, size,
                      settings = options_.settings] {
    return std::make_tuple(store->compareSet(key, "", mine), store->compareSet(kSizeKey, "", size),
                           settings.empty() ? settings : store->compareSet(kSettingsKey, "", settings));
  };
  const auto [there, agreed, settings] = [&] {
    try {
      return never_blocks(*store_) ? claim() : within(options_.timeout, "joining the other ranks in the store", claim);
    } catch (const std::exception& error) {
      // Others would wait for this rank, if they are of its job.
      if (is_own_error(error) && !is_old_job(size) && publish_joining(error_text(error))) {
        keep_store_for_others(std::min<std::chrono::milliseconds>(kStartPatience, options_.timeout));
      }
      throw;
    }
  }();
  if (there == mine && agreed == size && settings == options_.settings) return;
  if (there == mine && agreed == size) {
    const std::string text = fmt::format(
        "rank {} has other settings than the ranks before it: {} here, {} there; give every rank the same "
        "WorldOptions, or TESSERA_BACKEND, TESSERA_CUDA_BACKEND and TESSERA_CHECKED",
        options_.rank, options_.settings, settings);
    publish_joining(text);
    throw std::runtime_error(text);
  }
  const std::string what = there != mine
                               ? fmt::format("rank {} of this store has been taken by {}, and {} came as this rank too",
                                             options_.rank, named_process(there), named_process(mine))
                               : fmt::format("rank {} belongs to a world of {} ranks, and the store to one of {}",
                                             options_.rank, size, agreed);
  const std::string text =
      what + ", so two jobs use one store; give each job its own TESSERA_STORE, MASTER_PORT or TESSERA_JOB";
  if (!is_old_job(agreed)) publish_joining(text);
  throw std::runtime_error(text);
}

bool FailureBoard::publish_joining(const std::string& text) noexcept {
  return publish(
      {.kind = Failure::Kind::kError, .rank = options_.rank, .where = "joining the other ranks", .text = text},
      kStoreAnswers);
}

// Says whether a world of `size` ranks, all of which have joined, did so longer ago than a rank of this job would have
// waited for this one: then it has none of this job's ranks, and goes on.
bool FailureBoard::is_old_job(const std::string& size) noexcept {
  bool is_old = false;
  try_in_store("looking at the ranks that have joined", [&] {
    for (int64_t rank = 0; rank < std::stoll(size); ++rank) {
      if (!store_->check({process_key(rank)}) || age_of(store_->get_to_str(process_key(rank))) <= options_.timeout)
        return;
    }
    is_old = true;
  });
  return is_old;
}

// Returns whether it succeeded, or there is no store.
bool FailureBoard::try_in_store(const char* what, const std::function<void()>& body) noexcept {
  const SpareDescriptor::Loan loan = lend_descriptor();
  try {
    if (store_) body();
    return true;
  } catch (const std::exception& error) {
    logger().debug("rank {}: {}: {}", options_.rank, what, error.what());
    return false;
  }
}

Failure FailureBoard::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void FailureBoard::acknowledge(const Failure& failure) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (failed()) return;
    failure_ = failure;
    failed_.store(true);
  }
  try_in_store("the store did not take notice that this rank knows of the failure",
               [&] { store_->set(known_key(options_.rank), std::string("1")); });
}

bool FailureBoard::publish(const Failure& failure, std::chrono::milliseconds patience) noexcept {
  return poll_until(std::chrono::steady_clock::now() + patience, [&] {
    return try_in_store("the failure could not be written to the store",
                        [&] { store_->compareSet(kFailureKey, std::string(), encode(failure)); });
  });
}

std::optional<Failure> FailureBoard::find() noexcept {
  const SpareDescriptor::Loan loan = lend_descriptor();
  try {
    if (auto found = find_in_store()) return found;
  } catch (const std::exception& error) {
    logger().debug("rank {}: the store did not answer: {}", options_.rank, error.what());
  }
  try {
    return find_in_file();
  } catch (const std::exception& error) {
    logger().debug("rank {}: {} could not be read: {}", options_.rank, options_.lost_file, error.what());
  }
  return std::nullopt;
}

std::optional<Failure> FailureBoard::find_in_store() {
  if (!store_ || !store_->check({kFailureKey})) return std::nullopt;
  return decode_failure(store_->get_to_str(kFailureKey));
}

std::optional<Failure> FailureBoard::find_in_file() const {
  if (options_.lost_file.empty()) return std::nullopt;
  const std::string line = read_note(options_.lost_file);
  if (line.empty()) return std::nullopt;
  Failure failure{.kind = Failure::Kind::kLost, .rank = -1, .where = {}, .text = line};
  // The line has the form "rank 2 was killed by signal 9".
  std::istringstream words(line);
  std::string word;
  if (!(words >> word >> failure.rank) || word != "rank") failure.rank = -1;
  return failure;
}

std::optional<Failure> FailureBoard::find_ended_process(const std::vector<int64_t>& ranks) {
  if (!store_) return std::nullopt;
  const SpareDescriptor::Loan loan = lend_descriptor();
  for (const int64_t rank : ranks) {
    if (rank == options_.rank) continue;
    const std::string text = how_it_ended(rank);
    if (!text.empty()) return Failure{.kind = Failure::Kind::kLost, .rank = rank, .where = {}, .text = text};
  }
  return std::nullopt;
}

std::string FailureBoard::process_of(int64_t rank) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto known = processes_.find(rank); known != processes_.end()) return known->second;
  }
  if (!store_->check({process_key(rank)})) return {};
  const std::string description = store_->get_to_str(process_key(rank));
  const std::lock_guard lock(mutex_);
  return processes_[rank] = description;
}

void FailureBoard::remember(const std::vector<int64_t>& ranks) noexcept {
  try_in_store("the store did not say which processes the ranks are", [&] {
    for (const int64_t rank : ranks) process_of(rank);
  });
}

// Returns how the process of `rank` has ended, or "" if this rank cannot see that it has.
std::string FailureBoard::how_it_ended(int64_t rank) {
  if (const std::string description = process_of(rank); !description.empty()) {
    return process_has_ended(description) ? fmt::format("the process of rank {} has ended", rank) : "";
  }
  if (options_.lost_file.empty()) return {};
  const std::string line = read_note(fmt::format("{}.{}", options_.lost_file, rank));
  return line.empty() ? "" : line + " before it joined the others";
}

std::optional<Failure> FailureBoard::search(const std::vector<int64_t>& ranks,
                                            std::chrono::milliseconds patience) noexcept {
  auto deadline = std::chrono::steady_clock::now() + patience;
  std::optional<Failure> ended;
  while (true) {
    if (auto found = find()) return found;
    try {
      if (!ended.has_value() && (ended = find_ended_process(ranks))) {
        deadline = std::min(deadline, std::chrono::steady_clock::now() + kLauncherNeeds);
      }
    } catch (const std::exception& error) {
      logger().debug("rank {}: the store did not answer: {}", options_.rank, error.what());
    }
    if (std::chrono::steady_clock::now() >= deadline) return ended;
    std::this_thread::sleep_for(kLook);
  }
}

void FailureBoard::announce_arrival() noexcept {
  try_in_store("the store did not take notice that this rank came",
               [&] { store_->set(came_key(options_.rank), std::string("1")); });
}

// Returns those of `ranks` whose key is not in the store within `patience`, without this rank, in ascending order.
std::vector<int64_t> FailureBoard::without_key(const std::vector<int64_t>& ranks, std::string (*key)(int64_t),
                                               std::chrono::milliseconds patience) {
  std::vector<int64_t> left;
  std::ranges::copy_if(ranks, std::back_inserter(left), [&](int64_t rank) { return rank != options_.rank; });
  std::ranges::sort(left);
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (store_) {
    std::erase_if(left, [&](int64_t rank) { return store_->check({key(rank)}); });
    if (left.empty() || std::chrono::steady_clock::now() >= deadline) return left;
    std::this_thread::sleep_for(kLook);
  }
  return {};
}

FailureBoard::Missing FailureBoard::look_who_is_missing(const std::vector<int64_t>& ranks) {
  const std::vector<int64_t> absent = without_key(ranks, came_key, std::chrono::milliseconds::zero());
  Missing missing{.silent = without_key(absent, known_key, std::chrono::milliseconds::zero()), .busy = {}};
  std::ranges::set_difference(absent, missing.silent, std::back_inserter(missing.busy));
  return missing;
}

std::vector<int64_t> FailureBoard::everyone() const {
  std::vector<int64_t> ranks(static_cast<std::size_t>(options_.size));
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  return ranks;
}

// The rank that serves the store ends after the others have looked: else those would find that it does not answer.
void FailureBoard::let_others_look() {
  store_->set(looked_key(options_.rank), std::string("1"));
  if (!options_.rank_0_serves_store || options_.rank != 0) return;
  const std::vector<int64_t> all = everyone();
  const std::vector<int64_t> absent = without_key(all, came_key, std::chrono::milliseconds::zero());
  std::vector<int64_t> came;
  std::ranges::set_difference(all, absent, std::back_inserter(came));
  without_key(came, looked_key, kOthersLook);
}

std::string FailureBoard::who_is_missing(const std::vector<int64_t>& ranks,
                                         std::chrono::milliseconds patience) noexcept {
  std::optional<Missing> missing;
  const SpareDescriptor::Loan loan = lend_descriptor();
  try {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    while (store_) {
      missing = look_who_is_missing(ranks);
      if (missing->everyone_came() || std::chrono::steady_clock::now() >= deadline) break;
      std::this_thread::sleep_for(kLook);
    }
    if (store_) let_others_look();
  } catch (const std::exception& error) {
    logger().debug("rank {}: the store did not say who came: {}", options_.rank, error.what());
  }
  if (!missing.has_value() && options_.rank_0_serves_store && options_.rank != 0) {
    return "; rank 0, which serves the store, does not answer";
  }
  std::string text;
  if (missing.has_value() && !missing->silent.empty()) {
    text += fmt::format("; ranks [{}] do not answer", fmt::join(missing->silent, ", "));
  }
  // The collective that timed out first may be one of other ranks: one of these waits with this rank for a busy one.
  const int64_t whose = failure().rank;
  const bool is_theirs = whose < 0 || whose == options_.rank || std::ranges::find(ranks, whose) != ranks.end();
  if (missing.has_value() && !missing->busy.empty()) {
    text += fmt::format("; ranks [{}] did not come to {}", fmt::join(missing->busy, ", "),
                        is_theirs ? "it" : "the collective of this rank");
  }
  return text;
}

void FailureBoard::keep_store_for_others(std::chrono::milliseconds patience) noexcept {
  if (options_.rank_0_serves_store && options_.rank != 0) return;
  try_in_store("the store ended early",
               [&] { without_key(everyone(), options_.rank_0_serves_store ? known_key : process_key, patience); });
}

}  // namespace tessera
