// This is the only file that includes MPI's header.
#include "tessera/mesh/backends/mpi_transport.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <mpi.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/mesh/backends/mpi_members.h"
#include "tessera/mesh/core/last_words.h"
#include "tessera/mesh/core/within.h"

namespace tessera {

struct MpiRequests {
  static constexpr int kSent = -1;

  std::vector<MPI_Request> pending;
  std::vector<int> peers;     // the other rank of each
  std::vector<int> expected;  // how many bytes each brings; kSent: it sends
  std::vector<MPI_Status> statuses;

  MPI_Request* add(int peer, int bytes) {
    peers.push_back(peer);
    expected.push_back(bytes);
    return &pending.emplace_back(MPI_REQUEST_NULL);
  }
  void clear() {
    pending.clear();
    peers.clear();
    expected.clear();
  }
};

namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// MPI counts in int, so one message has at most this many bytes.
constexpr int64_t kLongestMessage = int64_t{1} << 30;
// A wait first polls kEagerLooks times without a pause, then yields to other processes between two polls, and then
// sleeps kNap between them. It starts to sleep after kYieldsFor, or when a yield took longer than kLongYield: then
// another process needs the core.
constexpr int kEagerLooks = 200;
constexpr auto kYieldsFor = std::chrono::milliseconds(1);
constexpr auto kLongYield = std::chrono::microseconds(200);
constexpr auto kNap = std::chrono::microseconds(20);
constexpr auto kLookForFailure = std::chrono::milliseconds(200);
// At its end a rank looks this often whether the others have come to theirs.
constexpr auto kLookForEnds = std::chrono::milliseconds(1);
// When all have come, MPI_Finalize has this time at least, and so has a rank without the others to write its last
// words.
constexpr auto kLastPatience = std::chrono::milliseconds(1000);

// MPI exists once per process; so does this state, which end_mpi() needs when the process ends.
struct Process {
  std::mutex mutex;  // guards abandoned
  std::vector<std::pair<std::shared_ptr<MpiRequests>, std::vector<at::Tensor>>> abandoned;
  std::atomic<bool> has_failed{false};
  bool has_begun = false;             // MPI_Init_thread has been called, and may run for ever on a thread of its own
  pid_t owner = 0;                    // the process that has called it: one that this process forks must not end MPI
  MPI_Comm ends = MPI_COMM_NULL;      // all ranks; in it each tells the others that it has come to its end
  std::atomic<Milliseconds> limit{};  // of the newest world
};

// The state is never destroyed, since other threads, and MPI itself, may use the memory until the process ends.
Process& process() {
  static Process* const only = new Process;
  return *only;
}

void check(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw std::runtime_error(
      fmt::format("MPI: {}: {}", what, std::string_view(text.data(), static_cast<std::size_t>(length))));
}

bool asked(int (*question)(int*)) {
  int answer = 0;
  question(&answer);
  return answer != 0;
}

constexpr const char* kMismatch = "the ranks called different collectives, or with other sizes";

// MPI takes a message that is shorter than its memory. It does not take a longer one.
void check_sizes(const MpiRequests& requests) {
  for (std::size_t i = 0; i < requests.pending.size(); ++i) {
    if (requests.expected[i] == MpiRequests::kSent) continue;
    int bytes = 0;
    check(MPI_Get_count(&requests.statuses[i], MPI_BYTE, &bytes), "MPI_Get_count");
    if (bytes == requests.expected[i]) continue;
    throw std::runtime_error(
        fmt::format("MPI: a message of member {} of the group has {} bytes, where {} were expected: {}",
                    requests.peers[i], bytes, requests.expected[i], kMismatch));
  }
}

bool all_done(MpiRequests& requests) {
  auto& [pending, peers, expected, statuses] = requests;
  if (pending.empty()) return true;
  statuses.resize(pending.size());
  int done = 0;
  const int code = MPI_Testall(static_cast<int>(pending.size()), pending.data(), &done, statuses.data());
  if (code == MPI_ERR_IN_STATUS) {
    for (std::size_t i = 0; i < statuses.size(); ++i) {
      const int error = statuses[i].MPI_ERROR;
      if (error == MPI_ERR_TRUNCATE) {
        throw std::runtime_error(fmt::format("MPI: a message of member {} of the group is longer than {} bytes: {}",
                                             peers[i], expected[i], kMismatch));
      }
      if (error != MPI_ERR_PENDING) check(error, "a message");
    }
  }
  check(code, "MPI_Testall");
  if (done == 0) return false;
  check_sizes(requests);
  requests.clear();
  return true;
}

// Polls kEagerLooks times; returns whether all of `requests` are complete.
bool soon_done(MpiRequests& requests) {
  for (int i = 0; i < kEagerLooks; ++i) {
    if (all_done(requests)) return true;
  }
  return false;
}

// Returns the peers of the requests that are not complete, each once, as global ranks; `ranks` maps group ranks to
// these.
std::vector<int64_t> awaited(const MpiRequests& requests, const std::vector<int64_t>& ranks) {
  std::vector<int64_t> found;
  for (std::size_t i = 0; i < requests.pending.size(); ++i) {
    int done = 0;
    check(MPI_Request_get_status(requests.pending[i], &done, MPI_STATUS_IGNORE), "MPI_Request_get_status");
    if (done == 0) found.push_back(ranks.at(static_cast<std::size_t>(requests.peers[i])));
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

// Starts MPI together with all ranks. Returns the thread level that it gives.
int begin_mpi() {
  int level = MPI_THREAD_SINGLE;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
  check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check(MPI_Comm_dup(MPI_COMM_WORLD, &process().ends), "MPI_Comm_dup");
  return level;
}

// Tells all ranks that this one, `mine`, has come to its end, and waits until they have come to theirs. Returns those
// that have not come by `deadline`. Returns early when the job has failed.
std::vector<int64_t> missing_at_end(int mine, Clock::time_point deadline) {
  const MPI_Comm ends = process().ends;
  int size = 0;
  check(MPI_Comm_size(ends, &size), "MPI_Comm_size");
  std::vector<int64_t> ranks;
  MpiRequests requests;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(rank);
    if (rank == mine) continue;
    check(MPI_Isend(nullptr, 0, MPI_BYTE, rank, 0, ends, requests.add(rank, MpiRequests::kSent)), "MPI_Isend");
    check(MPI_Irecv(nullptr, 0, MPI_BYTE, rank, 0, ends, requests.add(rank, 0)), "MPI_Irecv");
  }
  while (!soon_done(requests) && !process().has_failed) {
    if (Clock::now() >= deadline) return awaited(requests, ranks);
    std::this_thread::sleep_for(kLookForEnds);
  }
  return {};
}

// Runs at exit(), when no World may be left. MPI_Finalize waits for all ranks and cannot be interrupted. So the ranks
// first wait for each other here, which says who does not come, and MPI_Finalize has a thread of its own, in which it
// may stay. The standard wants the thread that started MPI, which has ended like every thread of within(); Open MPI
// does not insist on it.
void end_mpi() {
  Process& here = process();
  if (here.owner != ::getpid() || asked(MPI_Finalized) || here.has_failed) return;
  const Milliseconds limit = here.limit;
  const Clock::time_point deadline = Clock::now() + limit;
  int rank = 0;
  MPI_Comm_rank(here.ends, &rank);
  try {
    const std::vector<int64_t> missing = missing_at_end(rank, deadline);
    if (here.has_failed) return;
    if (!missing.empty()) {
      throw LateError(fmt::format("timed out after {} ms, waiting for ranks [{}] to end too", limit.count(),
                                  fmt::join(missing, ", ")));
    }
    const auto left = std::chrono::duration_cast<Milliseconds>(deadline - Clock::now());
    within(std::max(left, kLastPatience), "MPI_Finalize", [] { MPI_Finalize(); });
  } catch (const std::exception& error) {
    leave_at_once(
        fmt::format(
            "MPI: rank {} has come to its end, and MPI cannot be ended: {}; a rank that does not come was stopped, has "
            "left without exit(), or still works: let all ranks end within their time limit, or set a longer one with "
            "TESSERA_TIMEOUT",
            rank, error.what()),
        kLastPatience);
  }
}

// Says whether the process that is `rank` of MPI_COMM_WORLD has told this one that it has come to its end.
bool has_come_to_its_end(int rank) {
  if (process().ends == MPI_COMM_NULL) return false;  // the program has started MPI itself
  int is_told = 0;
  check(MPI_Iprobe(rank, 0, process().ends, &is_told, MPI_STATUS_IGNORE), "MPI_Iprobe");
  return is_told != 0;
}

}  // namespace

std::string_view mpi_flavor() {
#if defined(OPEN_MPI)
  return "Open MPI";
#elif defined(MPICH_VERSION)
  return "MPICH";
#else
  return "another MPI";
#endif
}

void skip_mpi_end() noexcept { process().has_failed = true; }

void start_mpi(const GroupRequest& world) {
  // MPI_Init waits for every process and cannot be interrupted, so the ranks first wait for each other in the store,
  // and a rank that is lost then is left to a thread that nobody waits for.
  const Clock::time_point begin = Clock::now();
  meet_in_store(world, "start", "here");
  const auto waited = std::chrono::duration_cast<Milliseconds>(Clock::now() - begin);
  const std::lock_guard lock(process().mutex);
  if (asked(MPI_Finalized))
    throw std::runtime_error("MPI has been ended in this process; keep it until all worlds are gone");
  int level = MPI_THREAD_SINGLE;
  if (asked(MPI_Initialized)) {
    check(MPI_Query_thread(&level), "MPI_Query_thread");
  } else {
    if (std::exchange(process().has_begun, true)) {
      throw std::runtime_error(
          "MPI has not started in this process, since another rank failed meanwhile; start all again");
    }
    level =
        within(std::max(world.timeout - waited, Milliseconds(1)),
               fmt::format("MPI_Init_thread (the ranks met after {} of {} ms)", waited.count(), world.timeout.count()),
               begin_mpi, [&] { return world.lost(world.ranks); });
    process().owner = ::getpid();
    std::atexit(end_mpi);
  }
  process().limit = world.timeout;
  if (level == MPI_THREAD_MULTIPLE) return;
  throw std::runtime_error(
      fmt::format("MPI was started with thread level {}, and {} (MPI_THREAD_MULTIPLE) is needed; start it with "
                  "MPI_Init_thread, or leave the start to Tessera",
                  level, MPI_THREAD_MULTIPLE));
}

struct MpiTransport::Communicators {
  explicit Communicators(const MpiMembers& made_of) : members(made_of.ranks) {
    MPI_Group world = MPI_GROUP_NULL;
    MPI_Group group = MPI_GROUP_NULL;
    check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
    check(MPI_Group_incl(world, static_cast<int>(members.size()), members.data(), &group), "MPI_Group_incl");
    for (std::size_t i = 0; i < all.size(); ++i) {
      check(MPI_Comm_create_group(MPI_COMM_WORLD, group, mpi_group_tag(made_of, static_cast<int>(i)), &all[i]),
            "MPI_Comm_create_group");
      check(MPI_Comm_set_errhandler(all[i], MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    }
    for (MPI_Group* each : {&group, &world}) MPI_Group_free(each);
  }

  ~Communicators() {
    if (process().has_failed || asked(MPI_Finalized)) return;
    for (MPI_Comm& communicator : all) MPI_Comm_free(&communicator);
  }

  MPI_Comm of(Channel channel) const { return all[static_cast<std::size_t>(channel)]; }

  const std::vector<int> members;  // their ranks in MPI_COMM_WORLD, in the group's order
  std::array<MPI_Comm, 2> all{MPI_COMM_NULL, MPI_COMM_NULL};
};

MpiTransport::MpiTransport(GroupRequest request) : request_(std::move(request)) {
  int mine = 0;
  check(MPI_Comm_rank(MPI_COMM_WORLD, &mine), "MPI_Comm_rank");
  communicators_ = std::make_unique<Communicators>(mpi_members_of(request_, mine));
}

MpiTransport::~MpiTransport() = default;

int MpiTransport::largest_tag() {
  int* value = nullptr;
  int found = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &value, &found);
  return found != 0 ? *value : 32767;  // the smallest limit that MPI allows
}

std::shared_ptr<MpiRequests> MpiTransport::begin() const {
  check_open();
  return std::make_shared<MpiRequests>();
}

void MpiTransport::check_open() const {
  if (closed_) throw std::runtime_error("MPI: the group has been closed, because the job has failed");
}

void MpiTransport::send(MpiRequests& requests, const char* data, int64_t bytes, int to, int tag, Channel channel) {
  for (int64_t at = 0; at < bytes; at += kLongestMessage) {
    const int count = static_cast<int>(std::min(kLongestMessage, bytes - at));
    check(MPI_Isend(data + at, count, MPI_BYTE, to, tag, communicators_->of(channel),
                    requests.add(to, MpiRequests::kSent)),
          "MPI_Isend");
  }
}

void MpiTransport::receive(MpiRequests& requests, char* data, int64_t bytes, int from, int tag, Channel channel) {
  for (int64_t at = 0; at < bytes; at += kLongestMessage) {
    const int count = static_cast<int>(std::min(kLongestMessage, bytes - at));
    check(MPI_Irecv(data + at, count, MPI_BYTE, from, tag, communicators_->of(channel), requests.add(from, count)),
          "MPI_Irecv");
  }
}

// Returns those of `awaited` (global ranks) whose processes have come to their end: they will send nothing any more.
std::vector<int64_t> MpiTransport::left_of(const std::vector<int64_t>& awaited) const {
  std::vector<int64_t> left;
  for (const int64_t rank : awaited) {
    const auto place = std::find(request_.ranks.begin(), request_.ranks.end(), rank) - request_.ranks.begin();
    if (has_come_to_its_end(communicators_->members.at(static_cast<std::size_t>(place)))) left.push_back(rank);
  }
  return left;
}

// Returns whether waiting is useless: at this check and at the one before, one of the same awaited ranks had come to
// its end or GroupRequest::lost was true for them, and the requests are still not complete. One check is not enough:
// messages that a rank sent before it ended may not have been received by then.
bool MpiTransport::is_in_vain(MpiRequests& requests, std::vector<int64_t>& lost_before) const {
  std::vector<int64_t> lost = awaited(requests, request_.ranks);
  if (lost.empty() || (left_of(lost).empty() && !request_.lost(lost))) lost.clear();
  const bool again = !lost.empty() && lost == lost_before;
  lost_before = std::move(lost);
  return again && !soon_done(requests);
}

void MpiTransport::throw_lost(const MpiRequests& requests) const {
  const std::vector<int64_t> left = left_of(awaited(requests, request_.ranks));
  if (left.empty()) throw_wait_error(requests, WaitError::Cause::kLost, "gave up");
  throw WaitError(WaitError::Cause::kLeft, fmt::format("MPI: ranks [{}] have come to their end", fmt::join(left, ", ")),
                  left);
}

void MpiTransport::throw_wait_error(const MpiRequests& requests, WaitError::Cause cause,
                                    const std::string& what) const {
  const std::vector<int64_t> ranks = awaited(requests, request_.ranks);
  throw WaitError(cause, fmt::format("MPI: {}, waiting for ranks [{}]", what, fmt::join(ranks, ", ")), ranks);
}

bool MpiTransport::test(MpiRequests& requests) {
  check_open();
  return all_done(requests);
}

void MpiTransport::wait(MpiRequests& requests, std::chrono::milliseconds timeout, Clock::time_point start) {
  check_open();
  if (soon_done(requests)) return;
  const Clock::time_point begin = Clock::now();
  Clock::time_point next_look = begin + kLookForFailure;
  Clock::time_point now = begin;
  std::vector<int64_t> lost_before;
  for (bool naps = false; !all_done(requests);) {
    check_open();
    const Clock::time_point before = std::exchange(now, Clock::now());
    naps = naps || now - before > kLongYield || now - begin > kYieldsFor;
    if (now - start >= timeout)
      throw_wait_error(requests, WaitError::Cause::kTimeout, fmt::format("timed out after {} ms", timeout.count()));
    if (now >= next_look) {
      if (is_in_vain(requests, lost_before)) throw_lost(requests);
      next_look = now + kLookForFailure;
    }
    if (naps) {
      std::this_thread::sleep_for(kNap);
    } else {
      sched_yield();
    }
  }
}

void MpiTransport::abandon(std::shared_ptr<MpiRequests> requests, std::vector<at::Tensor> memory) noexcept {
  Process& here = process();
  here.has_failed = true;
  const std::lock_guard lock(here.mutex);
  here.abandoned.emplace_back(std::move(requests), std::move(memory));
}

}  // namespace tessera
