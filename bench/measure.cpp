#include "tessera/bench/measure.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <fstream>
#include <stdexcept>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tessera/tools/launcher/child_process.h"

namespace tessera::bench {
namespace {

nlohmann::json json_of(const Row& row) {
  nlohmann::json out = {{"name", row.name}};
  const auto put = [&](const char* key, const std::optional<Figure>& f) {
    if (!f) return;
    out[std::string(key) + "_us"] = f->median;
    out[std::string(key) + "_quartiles_us"] = {f->low, f->high};
  };
  put("ours", row.ours);
  put("plain", row.plain);
  put("peer", row.peer);
  put("peer_plain", row.peer_plain);
  return out;
}

}  // namespace

Figure figure_of(std::vector<double> samples) {
  if (samples.empty()) return {};
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double share) {
    return samples[static_cast<std::size_t>(share * static_cast<double>(samples.size() - 1))];
  };
  return {.median = at(0.5), .low = at(0.25), .high = at(0.75)};
}

double time_calls(const std::function<void()>& body, int calls) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) body();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / calls;
}

double time_cold_calls(const std::function<void()>& body, int calls) {
  static std::vector<char> memory(std::size_t{4} << 20);
  constexpr std::size_t kLine = 64;
  double sum = 0;
  for (int i = 0; i < calls; ++i) {
    for (std::size_t at = 0; at < memory.size(); at += kLine) ++memory[at];
    asm volatile(".rept 65536\n nop\n .endr" ::: "memory");
    sum += time_calls(body, 1);
  }
  return sum / calls;
}

Peer::Peer(const std::vector<std::string>& command) {
  std::signal(SIGPIPE, SIG_IGN);  // a peer that has ended is an error of ask()
  int down[2];
  int up[2];
  if (pipe(down) != 0 || pipe(up) != 0) throw std::runtime_error("peer: no pipe");
  const Program program(command);
  pid_ = start_child([&]() -> int {
    dup2(down[0], STDIN_FILENO);
    dup2(up[1], STDOUT_FILENO);
    for (const int fd : {down[0], down[1], up[0], up[1]}) close(fd);
    program.exec();
  });
  close(down[0]);
  close(up[1]);
  to_ = down[1];
  from_ = up[0];
}

Peer::~Peer() {
  close(to_);
  close(from_);
  wait_for(pid_);
}

double Peer::ask(const std::string& name, int calls) {
  const std::string line = fmt::format("{} {}\n", name, calls);
  if (write(to_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    throw std::runtime_error("peer: it has ended; its own error is above");
  }
  while (pending_.find('\n') == std::string::npos) {
    char buffer[256];
    const ssize_t got = read(from_, buffer, sizeof buffer);
    if (got <= 0) throw std::runtime_error(fmt::format("peer: no answer to {}; its own error is above", name));
    pending_.append(buffer, static_cast<std::size_t>(got));
  }
  const std::string answer = pending_.substr(0, pending_.find('\n'));
  pending_.erase(0, pending_.find('\n') + 1);
  try {
    return std::stod(answer);
  } catch (const std::exception&) {
    throw std::runtime_error(fmt::format("peer: {}: {}", name, answer));
  }
}

std::vector<Row> measure(const std::vector<Subject>& subjects, Peer& peer, int rounds, int calls,
                         const std::function<void()>& settle, TimeCalls& time) {
  const auto timed = [&](const std::function<void()>& body, int count) {
    const double took = time(body, count);
    settle();
    return took;
  };
  std::vector<Row> rows;
  for (const Subject& subject : subjects) {
    std::vector<double> ours, plain, theirs, their_plain;
    const int count = std::max(1, calls / subject.fewer);
    for (int round = -1; round < rounds; ++round) {  // the first one warms up
      const double a = timed(subject.ours, count);
      const double b = subject.plain ? timed(subject.plain, count) : 0;
      const std::optional<double> c = subject.peer ? std::optional(peer.ask(subject.name, count)) : std::nullopt;
      const bool asks_plain = subject.peer && subject.peer_plain;
      const std::optional<double> d =
          asks_plain ? std::optional(peer.ask("plain_" + subject.name, count)) : std::nullopt;
      if (round < 0) continue;
      ours.push_back(a);
      plain.push_back(b);
      if (c) theirs.push_back(*c);
      if (d) their_plain.push_back(*d);
    }
    const auto asked = [](const std::vector<double>& samples) {
      return samples.empty() ? std::nullopt : std::optional(figure_of(samples));
    };
    rows.push_back({subject.name, figure_of(ours), figure_of(plain), asked(theirs), asked(their_plain)});
  }
  return rows;
}

bool print_goals(const std::vector<Goal>& goals) {
  fmt::print("\n");
  for (const Goal& goal : goals) fmt::print("{:<8}{}\n", goal.met ? "met" : "missed", goal.text);
  return std::ranges::all_of(goals, [](const Goal& goal) { return goal.met; });
}

void write_json(const std::string& path, const std::string& benchmark, const std::vector<Row>& rows) {
  nlohmann::json out = nlohmann::json::array();
  for (const Row& row : rows) out.push_back(json_of(row));
  write_json(path, benchmark, out);
}

void write_json(const std::string& path, const std::string& benchmark, const nlohmann::json& rows) {
  std::ofstream file(path);
  file << nlohmann::json({{"benchmark", benchmark}, {"rows", rows}}).dump(2) << "\n";
  if (!file) throw std::runtime_error(fmt::format("--json: cannot write {}", path));
}

}  // namespace tessera::bench
