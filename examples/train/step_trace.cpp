#include "tessera/examples/train/step_trace.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include <ATen/ops/tensor.h>

#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/world.h"

namespace train {

using Clock = std::chrono::steady_clock;

struct StepTrace::Notes {
  Clock::time_point start = Clock::now();
  std::vector<std::pair<double, tessera::CollectiveRecord>> records;
};

StepTrace::StepTrace(const tessera::DeviceMesh& mesh) : notes_(std::make_shared<Notes>()) {
  token_ = mesh.world().observe([notes = notes_](const tessera::CollectiveRecord& record) {
    notes->records.emplace_back(std::chrono::duration<double>(Clock::now() - notes->start).count(), record);
  });
}

std::vector<CollectiveMoment> StepTrace::moments() const {
  std::vector<CollectiveMoment> out;
  for (const auto& [second, record] : notes_->records) {
    out.push_back({.second = second, .kind = record.kind, .mesh_dim = record.mesh_dim});
  }
  return out;
}

std::vector<CollectiveCount> StepTrace::counts() const {
  std::vector<CollectiveCount> out;
  for (const auto& [second, record] : notes_->records) {
    auto it = std::find_if(out.begin(), out.end(), [&record = record](const CollectiveCount& each) {
      return each.kind == record.kind && each.mesh_dim == record.mesh_dim;
    });
    if (it == out.end()) it = out.insert(out.end(), {.kind = record.kind, .mesh_dim = record.mesh_dim});
    ++it->count;
    it->bytes += record.bytes;
  }
  return out;
}

std::vector<StepTimes> times_of_all_ranks(const StepTimes& here, const tessera::DeviceMesh& mesh) {
  at::Tensor all = at::tensor({here.forward, here.backward, here.optimizer}, at::kDouble);
  for (int64_t mesh_dim = mesh.ndim() - 1; mesh_dim >= 0; --mesh_dim) all = tessera::all_gather(all, mesh, mesh_dim);
  const at::Tensor rows = all.contiguous();
  std::vector<StepTimes> out;
  for (int64_t i = 0; i < rows.numel(); i += 3) {
    const double* const row = rows.const_data_ptr<double>() + i;
    out.push_back({.forward = row[0], .backward = row[1], .optimizer = row[2]});
  }
  return out;
}

}  // namespace train
