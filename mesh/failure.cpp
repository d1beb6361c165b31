#include "tessera/mesh/failure.h"

#include <algorithm>
#include <array>
#include <exception>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace tessera {
namespace {

constexpr const char* kKnownKey = "tessera/failure_known";
constexpr auto kLook = std::chrono::milliseconds(20);
// A launcher needs some time to write down how a rank has ended.
constexpr auto kLauncherNeeds = std::chrono::milliseconds(400);

std::string process_key(int64_t rank) { return fmt::format("tessera/process/{}", rank); }
std::string came_key(int64_t rank) { return fmt::format("tessera/came/{}", rank); }

// Returns the state letter and the start time of a process, from /proc/PID/stat, or nullopt if there is no such
// process.
std::optional<std::pair<char, std::string>> process_state(int64_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  // The command's name stands in parentheses and may itself contain some, so the fields start after the last ')'.
  std::istringstream fields(line.substr(line.rfind(')') + 1));
  char state = '?';
  fields >> state;
  std::string field;
  for (int i = 4; i <= 22; ++i) fields >> field;
  return std::make_pair(state, field);
}

// Returns text that is equal for two processes if they can see each other under /proc.
std::string process_space() {
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(boot, id);
  std::array<char, 128> link{};
  const ssize_t length = readlink("/proc/self/ns/pid", link.data(), link.size() - 1);
  return id + ":" + std::string(link.data(), length > 0 ? static_cast<std::size_t>(length) : 0);
}

std::string describe_this_process() {
  const auto state = process_state(getpid());
  return fmt::format("{} {} {}", getpid(), state.has_value() ? state->second : "?", process_space());
}

bool process_has_ended(const std::string& description) {
  std::istringstream in(description);
  int64_t pid = 0;
  std::string start;
  std::string space;
  in >> pid >> start >> space;
  if (!in || space != process_space()) return false;
  const auto state = process_state(pid);
  return !state.has_value() || state->first == 'Z' || state->first == 'X' || state->second != start;
}

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

FailureBoard::FailureBoard(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t size, std::string lost_file)
    : store_(std::move(store)), rank_(rank), size_(size), lost_file_(std::move(lost_file)) {
  if (store_) store_->set(process_key(rank_), describe_this_process());
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
  try {
    if (store_) store_->add(kKnownKey, 1);
  } catch (const std::exception& error) {
    spdlog::debug("rank {}: the store did not take notice of the failure: {}", rank_, error.what());
  }
}

void FailureBoard::publish(const Failure& failure) noexcept {
  try {
    if (store_) store_->compareSet(kFailureKey, std::string(), encode(failure));
  } catch (const std::exception& error) {
    spdlog::debug("rank {}: the failure could not be written to the store: {}", rank_, error.what());
  }
}

std::optional<Failure> FailureBoard::find() noexcept {
  try {
    if (auto found = find_in_store()) return found;
  } catch (const std::exception& error) {
    spdlog::debug("rank {}: the store did not answer: {}", rank_, error.what());
  }
  try {
    return find_in_file();
  } catch (const std::exception& error) {
    spdlog::debug("rank {}: {} could not be read: {}", rank_, lost_file_, error.what());
  }
  return std::nullopt;
}

std::optional<Failure> FailureBoard::find_in_store() {
  if (!store_ || !store_->check({kFailureKey})) return std::nullopt;
  return decode_failure(store_->get_to_str(kFailureKey));
}

std::optional<Failure> FailureBoard::find_in_file() const {
  if (lost_file_.empty()) return std::nullopt;
  std::ifstream file(lost_file_);
  std::string line;
  if (!std::getline(file, line) || line.empty()) return std::nullopt;
  Failure failure{.kind = Failure::Kind::kLost, .rank = -1, .where = {}, .text = line};
  // The line has the form "rank 2 was killed by signal 9".
  std::istringstream words(line);
  std::string word;
  if (!(words >> word >> failure.rank) || word != "rank") failure.rank = -1;
  return failure;
}

std::optional<Failure> FailureBoard::find_ended_process(const std::vector<int64_t>& ranks) {
  if (!store_) return std::nullopt;
  for (const int64_t rank : ranks) {
    if (rank == rank_) continue;
    const std::string text = how_it_ended(rank);
    if (!text.empty()) return Failure{.kind = Failure::Kind::kLost, .rank = rank, .where = {}, .text = text};
  }
  return std::nullopt;
}

// Returns how the process of `rank` has ended, or "" if this rank cannot see that it has.
std::string FailureBoard::how_it_ended(int64_t rank) {
  if (store_->check({process_key(rank)})) {
    if (!process_has_ended(store_->get_to_str(process_key(rank)))) return {};
    return fmt::format("the process of rank {} has ended", rank);
  }
  if (lost_file_.empty()) return {};
  std::ifstream file(fmt::format("{}.{}", lost_file_, rank));
  std::string line;
  if (!std::getline(file, line) || line.empty()) return {};
  return line + " before it joined the others";
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
      spdlog::debug("rank {}: the store did not answer: {}", rank_, error.what());
    }
    if (std::chrono::steady_clock::now() >= deadline) return ended;
    std::this_thread::sleep_for(kLook);
  }
}

void FailureBoard::announce_arrival() noexcept {
  try {
    if (store_) store_->set(came_key(rank_), std::string("1"));
  } catch (const std::exception& error) {
    spdlog::debug("rank {}: the store did not take notice that this rank came: {}", rank_, error.what());
  }
}

std::vector<int64_t> FailureBoard::absent(const std::vector<int64_t>& ranks,
                                          std::chrono::milliseconds patience) noexcept {
  std::vector<int64_t> left;
  try {
    std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(left), [&](int64_t r) { return r != rank_; });
    const auto deadline = std::chrono::steady_clock::now() + patience;
    while (store_) {
      std::erase_if(left, [&](int64_t r) { return store_->check({came_key(r)}); });
      if (left.empty() || std::chrono::steady_clock::now() >= deadline) return left;
      std::this_thread::sleep_for(kLook);
    }
  } catch (const std::exception& error) {
    spdlog::debug("rank {}: the store did not say who came: {}", rank_, error.what());
  }
  return {};
}

void FailureBoard::wait_until_acknowledged(std::chrono::milliseconds patience) noexcept {
  if (!store_ || rank_ != 0) return;
  try {
    c10d::Store* base = store_.get();
    if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(base)) {
      base = prefixed->getUnderlyingNonPrefixStore().get();
    }
    if (dynamic_cast<c10d::TCPStore*>(base) == nullptr) return;
    const auto deadline = std::chrono::steady_clock::now() + patience;
    while (std::chrono::steady_clock::now() < deadline && store_->add(kKnownKey, 0) < size_) {
      std::this_thread::sleep_for(kLook);
    }
  } catch (const std::exception& error) {
    spdlog::debug("rank {}: the store ended early: {}", rank_, error.what());
  }
}

}  // namespace tessera
