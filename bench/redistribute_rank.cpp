#include "tessera/bench/redistribute_rank.h"

#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include "tessera/bench/measure.h"
#include "tessera/bench/ranks.h"
#include "tessera/bench/raw_route.h"
#include "tessera/bench/redistribute_cases.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/route.h"
#include "tessera/mesh/collectives.h"

namespace tessera::bench {
namespace {

// Of values and their places: another order gives another one. As in redistribute_peer.py; exact, these being whole numbers.
int64_t checksum(const at::Tensor& local) {
  const at::Tensor places = at::arange(local.numel(), at::kLong);
  return local.flatten().to(at::kLong).mul(places.mul(2654435761).remainder(1009)).sum().item<int64_t>();
}

// One case on this rank: the DTensor, and the same by raw calls.
class Subject {
 public:
  Subject(const RedistributeCase& wanted, const DeviceMesh& mesh) : to_(wanted.to), tensor_(make(wanted, mesh)) {
    const SpecPtr source = intern_spec(mesh, wanted.from, wanted.shape, at::kFloat);
    const RoutePtr route = route_between(*source, wanted.to);
    communicates_ = route->communicates();
    raw_.emplace(route->plan(), mesh);
  }

  at::Tensor ours() const { return redistribute(tensor_, to_); }
  at::Tensor raw() const { return raw_->run(local_); }

  std::string check() const {
    const at::Tensor result = to_local(ours());
    if (!at::equal(result, raw())) throw std::logic_error("raw calls give other elements");
    return fmt::format("{} {} {}", result.numel(), checksum(result), communicates_ ? 1 : 0);
  }

 private:
  // The pieces of a Partial are the whole on every rank.
  at::Tensor make(const RedistributeCase& wanted, const DeviceMesh& mesh) {
    const at::Tensor whole = at::arange(wanted.bytes() / 4, at::kLong).remainder_(251).to(at::kFloat).view(wanted.shape);
    Placements cut = wanted.from;
    for (Placement& each : cut) each = each.is_partial() ? Replicate() : each;
    local_ = to_local(distribute_tensor(whole, mesh, cut, kNoSource)).clone();
    return from_local(local_, mesh, wanted.from, {.shape = wanted.shape});
  }

  const Placements to_;
  at::Tensor local_;
  const at::Tensor tensor_;
  bool communicates_ = false;
  std::optional<RawRoute> raw_;
};

class Server {
 public:
  explicit Server(const std::string& socket)
      : world_(World::from_environment()),
        line_(socket, world_->rank()),
        all_(init_device_mesh("cpu", {world_->size()}, {}, world_)) {}

  void run() {
    for (std::string line; line_.next(line);) line_.answer(done(line));
  }

 private:
  std::string done(const std::string& line) {
    const std::size_t blank = line.find(' ');
    const std::string what = line.substr(0, blank);
    const std::string rest = blank == std::string::npos ? "" : line.substr(blank + 1);
    try {
      if (what == "case") return begin(rest);
      barrier(all_, 0);
      const auto body = [&] { what == "ours" ? subject_->ours() : subject_->raw(); };
      return fmt::format("{}", time_calls(body, std::stoi(rest)));
    } catch (const std::exception& error) {
      const std::string text = error.what();
      return "error " + text.substr(0, text.find('\n'));
    }
  }

  std::string begin(const std::string& text) {
    subject_.reset();
    const RedistributeCase wanted = RedistributeCase::parse(text);
    const auto made = meshes_.try_emplace(wanted.mesh, init_device_mesh("cpu", wanted.mesh, {}, world_)).first;
    subject_ = std::make_unique<Subject>(wanted, made->second);
    return subject_->check();
  }

  const std::shared_ptr<World> world_;
  RankLine line_;
  const DeviceMesh all_;
  std::map<std::vector<int64_t>, DeviceMesh> meshes_;
  std::unique_ptr<Subject> subject_;
};

}  // namespace

void serve_redistribute(const std::string& socket) {
  at::set_num_threads(1);
  const c10::AutoGradMode no_gradients(false);
  Server(socket).run();
}

}  // namespace tessera::bench
