#include "tessera/tests/faults/trials.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <optional>
#include <stdexcept>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tessera/mesh/core/stable_hash.h"
#include "tessera/tests/faults/launcher_trial.h"
#include "tessera/tests/faults/remains.h"
#include "tessera/tests/faults/system_calls.h"
#include "tessera/tools/launcher/private_folder.h"

namespace tessera::faults {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kDataSeed = 1;
constexpr int64_t kOtherDataSeed = 2;

// Holds a port of this host that is taken while it lives, by somebody who answers nothing.
class TakenPort {
 public:
  TakenPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    if (::bind(socket_, reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(socket_, 16) != 0 ||
        ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
      throw std::runtime_error("no port can be taken for a trial");
    }
    number_ = std::to_string(ntohs(address.sin_port));
  }
  ~TakenPort() { ::close(socket_); }
  TakenPort(const TakenPort&) = delete;
  TakenPort& operator=(const TakenPort&) = delete;
  const std::string& number() const { return number_; }

 private:
  const int socket_;
  std::string number_;
};

int64_t draw_victim(Victims victims, int64_t size, Draw& draw) {
  if (victims == Victims::kNone) return FaultPlan::kNobody;
  return victims == Victims::kAny ? draw.below(size) : draw.below(2) * (size - 1);
}

// Returns how often a rank comes to the planned place in a job without a fault.
int64_t visits_of(const FaultPlan& plan, const std::map<std::string, int64_t>& visits) {
  if (plan.point != "call") {
    const auto found = visits.find(plan.point);
    return found == visits.end() ? 1 : found->second;  // a point after the job's last line
  }
  int64_t sum = 0;
  for (const auto place : kPlaces) {
    for (const auto call : kCalls) {
      if ((plan.place != "any" && plan.place != place) || (plan.call != "any" && plan.call != call)) continue;
      const auto found = visits.find(fmt::format("call:{}:{}", place, call));
      if (found != visits.end()) sum += found->second;
    }
  }
  return sum;
}

// Returns the entries of a folder whose names do not begin with one of `allowed`.
void add_strangers(const std::string& folder, const std::vector<std::string>& allowed, std::vector<std::string>& left) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename();
    const bool known = std::ranges::any_of(allowed, [&](const std::string& each) { return name.starts_with(each); });
    if (!known) left.push_back(fmt::format("{} in {}", name, folder));
  }
}

}  // namespace

Draw::Draw(const std::string& row, uint64_t seed) : engine_(stable_hash(fmt::format("{} {}", row, seed))) {}

int64_t Draw::below(int64_t limit) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(limit)); }

struct Trials::Trial {
  const Row& row;
  Draw draw;
  int64_t limit_s = 2;
  int64_t size = 2;
  FaultPlan plan = {};
  PrivateFolder folder = {};
  Outcome outcome = {};
  std::string output = {};

  std::string path(const std::string& name) const { return folder.path() + "/" + name; }

  RanksOptions ranks(const std::string& backend) const {
    RanksOptions options = {.arguments = {"train", folder.path(), std::to_string(kDataSeed)},
                            .size = size,
                            .store = path("store"),
                            .backend = backend,
                            .environment = {{"TESSERA_TIMEOUT", std::to_string(limit_s)},
                                            {"TESSERA_CHECKED", row.checked ? "1" : "0"},
                                            {kPlanVariable, to_string(plan)}}};
    if (backend != "mpi") options.environment["TMPDIR"] = path("tmp");
    options.stopped_limit = std::chrono::seconds(limit_s + 2);  // tools/launch has the same
    return options;
  }
  void take(const RanksRun& run) {
    output += run.output();
    outcome.timed_out = outcome.timed_out || run.result.timed_out;
    for (const auto& [rank, lines] : run.lines) {
      for (const std::string& step : run.after(rank, "saved ")) {
        outcome.newest_reported = std::max<int64_t>(outcome.newest_reported, std::stoll(step));
      }
    }
  }
};

const CleanJob& Trials::clean_job(int64_t size, int64_t data_seed) {
  const auto [found, is_new] = clean_jobs_.try_emplace({size, data_seed});
  if (!is_new) return found->second;
  const PrivateFolder folder;
  const RanksRun run = run_ranks({.arguments = {"train", folder.path(), std::to_string(data_seed)},
                                  .size = size,
                                  .store = folder.path() + "/store",
                                  .backend = backend_,
                                  .environment = {{"TESSERA_TIMEOUT", "20"}}});
  CleanJob& job = found->second;
  job.states = run.after(0, "state ");
  for (int64_t rank = 0; rank < size; ++rank) {
    if (!run.outcome_of(rank).done || run.after(rank, "state ") != job.states) {
      throw std::runtime_error(fmt::format("the job fails on {} ranks without a fault:\n{}", size, run.output()));
    }
    for (const std::string& line : run.after(rank, "visits ")) {
      const std::size_t space = line.find(' ');
      job.visits[rank][line.substr(0, space)] = std::stoll(line.substr(space + 1));
    }
  }
  return job;
}

FaultPlan Trials::draw_plan(const Row& row, int64_t size, Draw& draw) {
  FaultPlan plan = {.rank = draw_victim(row.victims, size, draw)};
  if (row.points.empty()) return plan;
  // Some pairs of a call and a place do not occur.
  for (int tries = 0; tries < 1000; ++tries) {
    plan.fault = draw.one_of(row.faults);
    plan.point = draw.one_of(row.points);
    plan.call = draw.one_of(row.calls);
    plan.place = draw.one_of(row.places);
    plan.error = draw.one_of(row.errors);
    plan.lasting = draw.one_of(row.lasting);
    if (row.kind == Kind::kLauncherSignal || row.kind == Kind::kLauncherOutput) {
      plan.count = 1 + draw.below(3);
      return plan;
    }
    const auto& visits = clean_job(size, kDataSeed).visits.at(std::max<int64_t>(plan.rank, 0));
    const int64_t times = visits_of(plan, visits);
    if (times == 0) continue;
    plan.count = 1 + draw.below(times);
    return plan;
  }
  throw std::runtime_error(fmt::format("no fault can be drawn for row {}: its calls do not occur", row.name));
}

// A second run loads the newest state and saves another, which sweeps what a killed save has left.
void Trials::load_states(Trial& trial, int64_t size) {
  RanksOptions options = {.arguments = {"verify", trial.folder.path(), std::to_string(kDataSeed)},
                          .size = size,
                          .store = trial.path("store_of_check"),
                          .environment = {{"TESSERA_TIMEOUT", "20"}}};
  const RanksRun run = run_ranks(options);
  for (int64_t rank = 0; rank < size; ++rank) {
    const std::vector<std::string> found = run.after(rank, "newest ");
    const std::vector<std::string> errors = run.after(rank, "error: ");
    trial.outcome.loaded.push_back(!errors.empty() ? errors.front() : found.empty() ? "nothing" : found.front());
  }
  trial.output += "the check of the states:\n" + run.output();
  add_strangers(trial.path("states"), {"step_"}, trial.outcome.left);
}

void Trials::run_job_trial(Trial& trial) {
  const RanksRun run = run_ranks(trial.ranks(backend_));
  trial.take(run);
  Outcome& outcome = trial.outcome;
  outcome.fault_time = run.fault_time();
  if (trial.plan.rank >= 0) outcome.victims = {trial.plan.rank};
  // Over MPI a rank that calls exit() waits there for the others, and these leave without ending MPI.
  const bool waits_at_exit = backend_ == "mpi" && trial.plan.fault == "exit";
  if (outcome.fault_time && trial.row.expected != Expected::kEndsWell && !waits_at_exit) {
    outcome.all_ended = run.all_ended;
  }
  for (int64_t rank = 0; rank < trial.size; ++rank) outcome.ranks[rank] = run.outcome_of(rank);
  const bool says = trial.row.says_own_error ||
                    (trial.row.name == "no_descriptor" && trial.plan.lasting && trial.plan.place != "other");
  const bool is_library = trial.row.name == "no_descriptor" && trial.plan.place == "other";
  if (is_library) outcome.any_values = true;
  if (is_library) outcome.names_victim = false;
  if (says) outcome.own_error = std::strerror(trial.plan.error);
  outcome.makes_no_key = trial.plan.place == "store" && trial.plan.lasting && trial.plan.call == "create";
  load_states(trial, trial.size);
}

// Job A, of ranks 0 and 1, has the fault. Job B, of the processes 2 and 3, saves other values into the same folder.
void Trials::run_two_savers(Trial& trial) {
  RanksOptions options = trial.ranks("gloo");
  options.size = 4;
  options.environment["TESSERA_FAULTS_SHARED"] = "1";
  options.environment.erase(kPlanVariable);
  options.rank_variables = [&](int64_t rank) {
    Variables all = {{"RANK", std::to_string(rank % 2)}, {"LOCAL_RANK", std::to_string(rank % 2)}};
    for (const char* const name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) all[name] = "2";
    if (rank < 2) all[kPlanVariable] = to_string(trial.plan);
    if (rank >= 2) all["TESSERA_STORE"] = trial.path("store_of_other");
    if (rank >= 2) all["TESSERA_FAULTS_DATA"] = std::to_string(kOtherDataSeed);
    return all;
  };
  const RanksRun run = run_ranks(options);
  trial.take(run);
  Outcome& outcome = trial.outcome;
  outcome.fault_time = run.fault_time();
  outcome.victims = {trial.plan.rank};
  for (int64_t rank : {0, 1}) outcome.ranks[rank] = run.outcome_of(rank);
  for (int64_t rank : {2, 3}) {
    const RankOutcome seen = run.outcome_of(rank);
    if (seen.done) continue;
    outcome.found.emplace("in time", fmt::format("rank {} of the job without a fault did not do its work: {}", rank - 2,
                                                 seen.errors.empty() ? "it said nothing" : seen.errors.front()));
  }
  for (const std::string& state : clean_job(2, kOtherDataSeed).states) outcome.whole_states.insert(state);
  load_states(trial, 2);
}

void Trials::run_second_job(Trial& trial) {
  constexpr double kStartsAfter = 1;  // seconds
  RanksOptions options = trial.ranks("gloo");
  options.size = 4;
  options.store = trial.path("store_of_launcher");
  options.rank_variables = [&](int64_t rank) {
    Variables all = {{"RANK", std::to_string(rank % 2)}, {"LOCAL_RANK", std::to_string(rank % 2)}};
    for (const char* const name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) all[name] = "2";
    all["TESSERA_STORE"] = trial.path("store");
    all[rank < 2 ? "TESSERA_FAULTS_SLOW" : "TESSERA_FAULTS_NAP"] =
        rank < 2 ? "2500" : fmt::format("{:.0f}", 1000 * kStartsAfter);
    return all;
  };
  trial.outcome.fault_time = now_seconds() + kStartsAfter;
  const RanksRun run = run_ranks(options);
  trial.take(run);
  trial.outcome.all_ended = run.all_ended;
  // Ranks of both jobs end: those of the second one find their places taken, and fail the first one.
  for (int64_t rank : {0, 1, 2, 3}) {
    const RankOutcome seen = trial.outcome.ranks[rank] = run.outcome_of(rank);
    if (!seen.errors.empty() && seen.errors.front().find("has been taken by process") != std::string::npos) continue;
    trial.outcome.found.emplace(
        "named", fmt::format("rank {} of the {} job does not say that a place has been taken: {}", rank % 2,
                             rank < 2 ? "first" : "second", seen.errors.empty() ? "no error" : seen.errors.front()));
  }
  load_states(trial, 2);
}

void Trials::run_stale_store(Trial& trial) {
  trial.plan.rank = FaultPlan::kEveryone;
  const RanksRun killed = run_ranks(trial.ranks(backend_));
  trial.outcome.fault_time = killed.fault_time();
  trial.output += killed.output() + "the job again, on the same store:\n";
  trial.plan = {};
  const RanksRun run = run_ranks(trial.ranks(backend_));
  trial.take(run);
  for (int64_t rank = 0; rank < trial.size; ++rank) trial.outcome.ranks[rank] = run.outcome_of(rank);
  load_states(trial, trial.size);
}

void Trials::run_port_taken(Trial& trial) {
  const TakenPort port;
  RanksOptions options = trial.ranks("gloo");
  options.rank_variables = [&](int64_t) {
    return Variables{{"TESSERA_STORE", ""},
                     {"MASTER_ADDR", "127.0.0.1"},
                     {"MASTER_PORT", port.number()},
                     {"LOCAL_RANK", "0"},
                     {"LOCAL_WORLD_SIZE", "1"}};
  };
  trial.outcome.fault_time = now_seconds();
  const RanksRun run = run_ranks(options);
  trial.take(run);
  trial.outcome.all_ended = run.all_ended;
  for (int64_t rank = 0; rank < trial.size; ++rank) {
    const RankOutcome seen = trial.outcome.ranks[rank] = run.outcome_of(rank);
    if (!seen.errors.empty() && seen.errors.front().find(port.number()) != std::string::npos) continue;
    trial.outcome.found.emplace("named", fmt::format("rank {} does not name port {}: {}", rank, port.number(),
                                                     seen.errors.empty() ? "no error" : seen.errors.front()));
  }
}

TrialReport Trials::run(const Row& row, uint64_t seed, const std::optional<FaultPlan>& given) {
  const double start = now_seconds();
  Trial trial = {.row = row,
                 .draw = Draw(row.name, seed),
                 .limit_s = row.limits_s[static_cast<std::size_t>(seed % row.limits_s.size())]};
  const bool any_size = row.kind == Kind::kJob || row.kind == Kind::kStaleStore || row.kind == Kind::kPortTaken;
  if (any_size) trial.size = 2 + trial.draw.below(2);
  trial.plan = given ? *given : draw_plan(row, trial.size, trial.draw);
  const FaultPlan plan = trial.plan;
  for (const std::string& state : clean_job(trial.size, kDataSeed).states) trial.outcome.whole_states.insert(state);
  trial.outcome.expected = row.expected;
  trial.outcome.names_victim = row.names_victim;
  trial.outcome.limit_s = static_cast<double>(trial.limit_s);
  trial.outcome.is_noticed = row.is_noticed;
  trial.outcome.any_values = row.expected == Expected::kIsOver;
  fs::create_directory(trial.path("tmp"));
  const Before before({trial.path("tmp"), fs::temp_directory_path()});
  switch (row.kind) {
    case Kind::kJob: run_job_trial(trial); break;
    case Kind::kTwoFolderUsers: run_two_savers(trial); break;
    case Kind::kSecondJob: run_second_job(trial); break;
    case Kind::kStaleStore: run_stale_store(trial); break;
    case Kind::kPortTaken: run_port_taken(trial); break;
    case Kind::kLauncherSignal:
    case Kind::kLauncherOutput:
      trial.output = run_launcher_trial(row, plan, backend_, trial.folder.path(), trial.outcome);
      trial.outcome.fault_time = start;
      if (row.kind == Kind::kLauncherSignal) load_states(trial, 2);
      break;
  }
  std::ranges::copy(before.left(), std::back_inserter(trial.outcome.left));
  // The store lies in the launcher's folder, which a launcher removes. Forked ranks do not: they leave without the
  // destructors of static objects, one of which may hold the World.
  add_strangers(trial.folder.path(), {"tmp", "states", "store"}, trial.outcome.left);
  return {.what = fmt::format("{} ranks, limit {} s, {}", trial.size, trial.limit_s, to_string(plan)),
          .fault_came = trial.outcome.fault_time.has_value(),
          .exits_late = exits_late(trial.outcome),
          .seconds = now_seconds() - start,
          .misses = judge(trial.outcome),
          .output = trial.output};
}

}  // namespace tessera::faults
