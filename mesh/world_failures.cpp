// Implements how a World fails, and what its ranks say about it.
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/backends/backend_group.h"
#include "tessera/mesh/core/error_text.h"
#include "tessera/mesh/core/logger.h"
#include "tessera/mesh/core/mismatch.h"
#include "tessera/mesh/record_file.h"
#include "tessera/mesh/recorder.h"
#include "tessera/mesh/world.h"
#include "tessera/mesh/world_state.h"

namespace tessera {
namespace {

// A rank whose collective failed searches for the reason for at most one of the first two times. Then it waits for at
// most the third: for the ranks that are alive to say so, or in keep_store_for_others(). Together they are below the 5
// seconds within which every rank must report a failure.
constexpr auto kSearchPatience = std::chrono::milliseconds(2000);
constexpr auto kShortPatience = std::chrono::milliseconds(100);
constexpr auto kPublishPatience = std::chrono::milliseconds(2000);
constexpr auto kLastPatience = std::chrono::milliseconds(1000);

// Gloo and NCCL have no exception type for timeouts.
bool says_timeout(const std::string& text) {
  return text.find("imed out") != std::string::npos || text.find("timeout") != std::string::npos;
}

}  // namespace

void World::fail(const std::string& where, const std::string& text) noexcept {
  if (!impl_->has_peers() || impl_->is_forked()) return;
  try {
    // The thread that has seen the failure may not come to this before the process ends.
    if (impl_->board->failed()) return keep_records(where + ": " + text);
    const Failure failure{.kind = Failure::Kind::kError, .rank = rank(), .where = where, .text = text};
    impl_->board->publish(failure, kPublishPatience);
    impl_->board->acknowledge(failure);
    keep_records(to_string(failure));
  } catch (...) {
    // If there is no memory for the text, the groups are closed nevertheless; the other ranks then report a lost peer.
  }
  impl_->groups.close_all();
  impl_->board->keep_store_for_others(kStartPatience);
}

void World::check_alive() const {
  if (!impl_->board->failed()) [[likely]] {
    const std::optional<WaitError> aborted = impl_->groups.aborted();
    if (!aborted.has_value()) [[likely]]
      return;
    rethrow_collective_failure("a collective on a GPU", aborted->awaited, *aborted);
  }
  const std::string text = impl_->failed_text();
  keep_records(text);
  throw std::runtime_error(text);
}

std::string World::Impl::failed_text() const {
  return fmt::format("rank {}: the job has failed: {}", options.rank, to_string(board->failure()));
}

bool World::has_lost(const std::vector<int64_t>& ranks) const {
  return impl_->has_peers() && impl_->board->has_lost(ranks);
}

void World::note_mismatch(const std::string& text) const noexcept {
  impl_->keep_records(*recorder_, text, /*may_change=*/true);
}

void World::keep_records(const std::string& failure) const noexcept {
  impl_->keep_records(*recorder_, failure, /*may_change=*/false);
}

void World::Impl::keep_records(const Recorder& recorder, const std::string& failure, bool may_change) noexcept {
  if (options.records_folder.empty()) return;
  const std::lock_guard lock(records_mutex);
  if (records_kept) return;
  records_kept = !may_change;
  const SpareDescriptor::Loan loan = board->lend_descriptor();
  try {
    // The counts come first: a collective that begins meanwhile has a record, and must not seem to have lost it.
    std::vector<CollectiveCount> counts = recorder.collective_counts();
    write_records(
        options.records_folder,
        {.rank = options.rank, .failure = failure, .counts = std::move(counts), .records = recorder.records()});
  } catch (const std::exception& error) {
    logger().warn("{}", error.what());  // the failure itself matters more
  }
}

void World::rethrow_collective_failure(const std::string& where, const std::vector<int64_t>& ranks,
                                       const std::exception& error) const {
  if (impl_->is_forked()) throw std::runtime_error(error_text(error));
  impl_->progress = std::chrono::steady_clock::time_point::max();
  FailureBoard& board = *impl_->board;
  const std::string own_text = error_text(error), shortage = board.what_is_lacking();
  const std::string library_text = own_text + (shortage.empty() ? "" : "; " + shortage);
  bool in_vain = false;
  if (!board.failed()) {
    // After a timeout no rank is taken as lost, and of a WaitError only the awaited ones: other ranks may have ended
    // because they had finished their part.
    const auto* wait = dynamic_cast<const WaitError*>(&error);
    // The backend that has aborted a group knows why better than what its collectives then throw.
    const std::optional<WaitError> aborted =
        wait == nullptr && !is_own_error(error) ? impl_->groups.aborted() : std::nullopt;
    if (aborted.has_value()) wait = &*aborted;
    const bool known = wait != nullptr && wait->cause == WaitError::Cause::kLeft;
    // A rank that lacks something may nevertheless have lost a peer: what it lacks is the reason only where the library
    // says so, or where nobody else is found to have failed.
    const bool own = wait == nullptr && is_own_error(error);
    const bool is_short = wait == nullptr && !shortage.empty();
    const bool timeout = !own && (wait != nullptr ? wait->cause == WaitError::Cause::kTimeout : says_timeout(own_text));
    const std::vector<int64_t> awaited = timeout ? std::vector<int64_t>() : wait != nullptr ? wait->awaited : ranks;
    std::optional<Failure> found = board.search(awaited, timeout || known || own ? kShortPatience : kSearchPatience);
    if (!found.has_value()) {
      const std::string text = timeout || known || own || is_short ? library_text : "which one is not known";
      const auto kind = own || is_short ? Failure::Kind::kError
                        : timeout       ? Failure::Kind::kTimeout
                                        : Failure::Kind::kLost;
      found = Failure{kind, kind == Failure::Kind::kLost ? -1 : rank(), where, text};
      in_vain = timeout;  // also where this rank lacks something: others may be stopped
    }
    if (found->where.empty()) found->where = where;
    board.publish(*found, std::chrono::milliseconds::zero());
    board.acknowledge(*found);
  }
  board.announce_arrival();
  impl_->groups.close_all();
  const Failure failure = board.failure();
  std::string text = to_string(failure);
  const bool unknown = failure.kind == Failure::Kind::kLost && failure.rank < 0;
  if (failure.kind == Failure::Kind::kTimeout || unknown || in_vain) {
    text += board.who_is_missing(ranks, kLastPatience);
  } else {
    board.keep_store_for_others(kLastPatience);
  }
  const bool told = text.find(library_text) != std::string::npos || library_text.find(text) != std::string::npos;
  const std::string whole = fmt::format("rank {}, {} over ranks [{}]: {}{}", rank(), where, fmt::join(ranks, ", "),
                                        text, told ? "" : fmt::format(" ({})", library_text));
  keep_records(whole);
  throw std::runtime_error(whole);
}

void World::guard(const std::string& where, const std::function<void()>& callback) {
  try {
    callback();
  } catch (const MismatchError&) {
    throw;  // every rank of the group throws it, and no data was sent
  } catch (...) {
    fail(where, current_error_text());
    throw;
  }
}

}  // namespace tessera
