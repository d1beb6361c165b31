// Measures which algorithm of a collective is fastest over Gloo, by size; mesh/collectives/gloo_choice.h rests on these
// figures. The program starts its own ranks, and measures the algorithms of each row in turn.

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/bench/measure.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/collectives/gloo_choice.h"
#include "tessera/mesh/device_mesh.h"

namespace {

using tessera::DeviceMesh;
using Backend = c10::intrusive_ptr<c10d::Backend>;
using Work = c10::intrusive_ptr<c10d::Work>;

struct WayOf {
  std::string name;
  std::function<void()> run;
};

// Holds the tensors for collectives of `bytes` from each rank.
struct Tensors {
  Tensors(int64_t ranks, int64_t bytes)
      : piece(at::ones({std::max<int64_t>(bytes / 4, 1)}, at::kFloat)),
        rows(at::ones({ranks, piece.numel()}, at::kFloat)),
        received(at::empty_like(rows)),
        counts(static_cast<std::size_t>(ranks), piece.numel()) {}
  at::Tensor piece, rows, received;
  std::vector<int64_t> counts;
};

class Collectives {
 public:
  explicit Collectives(const DeviceMesh& mesh)
      : mesh_(mesh), group_(mesh.group(0)), n_(mesh.size()), me_(mesh.local_rank(0)) {}

  // The backend's own collective comes first.
  std::vector<WayOf> all_gather(Tensors& t) const {
    return {{"own",
             [&] {
               at::Tensor flat = t.received.view({-1});
               group_->_allgather_base(flat, t.piece)->wait();
             }},
            {"all-to-all",
             [&] {
               t.rows.copy_(t.piece.expand_as(t.rows));
               exchange(t);
             }},
            {"messages", [&] { by_messages(t); }}};
  }
  std::vector<WayOf> all_reduce(Tensors& t) const {
    return {{"own",
             [&] {
               std::vector<at::Tensor> tensors = {t.piece};
               group_->allreduce(tensors)->wait();
             }},
            {"all-to-all", [&] {
               t.rows.copy_(t.piece.expand_as(t.rows));
               exchange(t);
               at::sum_out(t.piece, t.received, 0);
               t.piece.fill_(1);
             }}};
  }
  // Here `piece` is a rank's result.
  std::vector<WayOf> reduce_scatter(Tensors& t) const {
    return {{"own",
             [&] {
               at::Tensor flat = t.rows.view({-1});
               group_->_reduce_scatter_base(t.piece, flat)->wait();
             }},
            {"all-to-all", [&] {
               exchange(t);
               at::sum_out(t.piece, t.received, 0);
             }}};
  }
  double slowest(double microseconds) const {
    return tessera::all_reduce(at::full({1}, microseconds, at::kDouble), mesh_, 0, tessera::ReduceOp::kMax)
        .item<double>();
  }
  void meet() const { tessera::barrier(mesh_, 0); }

 private:
  void exchange(Tensors& t) const {
    at::Tensor to = t.received.view({-1}), from = t.rows.view({-1});
    group_->alltoall_base(to, from, t.counts, t.counts)->wait();
  }
  void by_messages(Tensors& t) const {
    std::vector<Work> works;
    for (int64_t i = 1; i < n_; ++i) {
      std::vector<at::Tensor> slot = {t.received[(me_ + n_ - i) % n_]};
      works.push_back(group_->recv(slot, static_cast<int>((me_ + n_ - i) % n_), 0));
    }
    std::vector<at::Tensor> piece = {t.piece};
    for (int64_t i = 1; i < n_; ++i) works.push_back(group_->send(piece, static_cast<int>((me_ + i) % n_), 0));
    t.received[me_].copy_(t.piece);
    for (const Work& work : works) work->wait();
  }

  const DeviceMesh mesh_;
  const Backend group_;
  const int64_t n_;
  const int64_t me_;
};

std::string gather_choice(int64_t ranks, int64_t bytes) {
  return tessera::gloo_gathers_at_once(ranks, ranks * bytes) ? "all-to-all" : "messages";
}
std::string reduce_choice(int64_t ranks, int64_t bytes) {
  return tessera::gloo_reduces_at_once(ranks, bytes) ? "all-to-all" : "own";
}

// Prints one row: the time of each algorithm, and which one mesh/collectives/gloo_choice.h chooses.
void measure(const Collectives& collectives, const std::string& what, int64_t bytes, const std::vector<WayOf>& ways,
             const std::string& choice, bool speaks, int rounds) {
  std::vector<std::vector<double>> times(ways.size());
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t w = 0; w < ways.size(); ++w) {
      collectives.meet();
      const int calls = bytes > (1 << 20) ? 3 : 20;
      times[w].push_back(collectives.slowest(tessera::bench::time_calls(ways[w].run, calls)));
    }
  }
  if (!speaks) return;
  std::string text;
  double best = 0, chosen = 0;
  for (std::size_t w = 0; w < ways.size(); ++w) {
    const double median = tessera::bench::figure_of(times[w]).median;
    best = w == 0 ? median : std::min(best, median);
    if (ways[w].name == choice) chosen = median;
    text += fmt::format("  {} {:.0f} us", ways[w].name, median);
  }
  fmt::print("{:<15}{:>9} B{:<54}{} ({:.2f} of the best)\n", what, bytes, text, choice, chosen / best);
  std::fflush(stdout);
}

void serve(int rounds) {
  at::set_num_threads(1);
  const auto world = tessera::World::from_environment();
  const int64_t n = world->size();
  const Collectives collectives(tessera::init_device_mesh("cpu", {n}, {}, world));
  const bool speaks = world->rank() == 0;
  if (speaks)
    fmt::print("\n{} ranks: medians, and what mesh/collectives/gloo_choice.h chooses; bytes of each rank\n", n);
  for (int64_t bytes = 256; bytes <= 4 << 20; bytes *= 4) {
    Tensors t(n, bytes);
    measure(collectives, "all_gather", bytes, collectives.all_gather(t), gather_choice(n, bytes), speaks, rounds);
    measure(collectives, "all_reduce", bytes, collectives.all_reduce(t), reduce_choice(n, bytes), speaks, rounds);
    measure(collectives, "reduce_scatter", bytes, collectives.reduce_scatter(t), "all-to-all", speaks, rounds);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Which algorithm of a collective is fastest over Gloo");
  std::vector<int64_t> ranks = {2, 4};
  int rounds = 15;
  std::string launch;
  bool is_rank = false;
  app.add_option("--ranks", ranks, "numbers of ranks, one after the other")->delimiter(',');
  app.add_option("--rounds", rounds, "rounds, in each of which every algorithm is measured")
      ->check(CLI::PositiveNumber);
  app.add_option("--launch", launch, "the launcher's program")->envname("TESSERA_LAUNCH");
  app.add_flag("--as-rank", is_rank, "be one of the ranks")->group("");
  CLI11_PARSE(app, argc, argv);
  try {
    if (is_rank) {
      serve(rounds);
      return 0;
    }
    const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
    for (const int64_t n : ranks) {
      const std::string command =
          fmt::format("'{}' --no-prefix -n {} --backend gloo '{}' --as-rank --rounds {}", launch, n, self, rounds);
      if (std::system(command.c_str()) != 0) return 1;
    }
  } catch (const std::exception& error) {
    std::cerr << "gloo_choice: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
