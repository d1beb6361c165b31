#include "tessera/tests/harness/rank_report.h"

#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include <fmt/format.h>

#include "tessera/tests/harness/assertion_counts.h"
#include "tessera/tests/harness/report_file.h"

namespace tessera::testing {
namespace {

std::string rank_variable(const char* name) {
  const char* value = std::getenv(name);
  if (!is_rank() || value == nullptr) {
    throw std::logic_error(
        fmt::format("{} was asked for outside a rank; call it in the body of TESSERA_RANKS_TEST_CASE", name));
  }
  return value;
}

pid_t ran_body = 0;  // the process that has run the body

struct RankOfSize {
  int64_t rank, size;
};
thread_local std::optional<RankOfSize> thread_rank;

// The first word of a file of a skip.
constexpr std::string_view kMissing = "missing: ", kSkipped = "skipped: ";

std::string skip_file(const std::string& store_path, int64_t rank) {
  return fmt::format("{}.skipped.{}", store_path, rank);
}

}  // namespace

bool is_rank() { return std::getenv(kCaseVariable) != nullptr; }

int64_t rank() { return thread_rank ? thread_rank->rank : process_rank(); }
int64_t world_size() { return thread_rank ? thread_rank->size : std::stoll(rank_variable("WORLD_SIZE")); }
int64_t process_rank() { return std::stoll(rank_variable("RANK")); }

ThreadRank::ThreadRank(int64_t rank, int64_t size) { thread_rank = RankOfSize{rank, size}; }
ThreadRank::~ThreadRank() { thread_rank.reset(); }
bool ThreadRank::is_here() { return thread_rank.has_value(); }

std::string store_path() { return rank_variable("TESSERA_STORE"); }

std::string failure_file(const std::string& store_path, int64_t rank) {
  return fmt::format("{}.failed.{}", store_path, rank);
}
std::string end_file(const std::string& store_path, int64_t rank) { return fmt::format("{}.end.{}", store_path, rank); }

void report_skip(const std::string& reason, bool is_missing) {
  write_report_file(skip_file(store_path(), process_rank()), std::string(is_missing ? kMissing : kSkipped) + reason);
}

std::optional<RankSkip> skip_of(const std::string& store_path, int64_t rank) {
  const std::optional<std::string> text = read_report_file(skip_file(store_path, rank));
  if (!text) return std::nullopt;
  return RankSkip{.reason = text->substr(kMissing.size()), .is_missing = text->starts_with(kMissing)};
}

void body_begins() { ran_body = ::getpid(); }

void report_end() {
  if (!is_rank() || ran_body != ::getpid()) return;
  write_report_file(end_file(store_path(), process_rank()), to_lines(assertion_counts()));
}

}  // namespace tessera::testing
