#include "tessera/mesh/collectives/checked.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <string_view>

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/check_state.h"
#include "tessera/mesh/core/mismatch.h"

namespace tessera {
namespace {

// Returns text such as "aten::mm: all_reduce sum of Float (2, 3) on mesh dimension tp, step P(sum) -> R, for mlp.up,
// collective 3 of the group".
std::string describe(const char* kind, const DeviceMesh& mesh, int64_t mesh_dim, const Intent& intent, int64_t serial) {
  const char* const op = mesh.world().current_op();
  std::string text = fmt::format("{}{}{}", op, *op == '\0' ? "" : ": ", kind);
  if (intent.op) text += fmt::format(" {}", to_string(*intent.op));
  if (intent.source >= 0) text += fmt::format(" from coordinate {}", intent.source);
  if (intent.tensor != nullptr) text += fmt::format(" of {}", c10::toString(intent.tensor->scalar_type()));
  // The shapes of an all_to_all may differ between ranks, and so may its splits: check_splits() compares those.
  if (intent.counts != nullptr) {
    text += fmt::format(" in pieces of [{}]", fmt::join(*intent.counts, ", "));
  } else if (intent.tensor != nullptr && intent.send == nullptr) {
    text += fmt::format(" ({})", fmt::join(intent.tensor->sizes(), ", "));
  }
  text += fmt::format(" on mesh dimension {}", mesh.mesh_dim_name(mesh_dim));
  const std::string& step = mesh.world().check_state().step;
  if (!step.empty()) text += fmt::format(", step {}", step);
  const std::string& path = mesh.world().current_path();
  if (path != "-") text += fmt::format(", for {}", path);
  return text + fmt::format(", collective {} of the group", serial);
}

// Throws MismatchError unless each rank sends to each other rank as many elements as that one expects. Row i of what is
// gathered has rank i's send counts, then its receive counts.
void check_splits(const char* kind, const std::vector<int64_t>& ranks, const Intent& intent, const GatherRows& gather) {
  std::vector<int64_t> row = *intent.send;
  row.insert(row.end(), intent.receive->begin(), intent.receive->end());
  const at::Tensor rows = gather(at::tensor(row, at::kLong));
  const int64_t* const counts = rows.const_data_ptr<int64_t>();
  const std::size_t n = ranks.size();
  for (std::size_t from = 0; from < n; ++from) {
    for (std::size_t to = 0; to < n; ++to) {
      const int64_t sent = counts[from * 2 * n + to];
      const int64_t expected = counts[to * 2 * n + n + from];
      if (sent == expected) continue;
      throw MismatchError(fmt::format("{}: rank {} would send {} elements to rank {}, which expects {}", kind,
                                      ranks[from], sent, ranks[to], expected));
    }
  }
}

std::string text_of_row(const at::Tensor& rows, int64_t row, int64_t size) {
  const auto* const start = reinterpret_cast<const char*>(rows.const_data_ptr<uint8_t>()) + row * rows.size(1);
  return {start, static_cast<std::size_t>(size)};
}

}  // namespace

Checked::Checked(const DeviceMesh& mesh, bool enabled) : Checked(mesh.world(), enabled) {}
Checked::Checked(World& world, bool enabled)
    : world_(world), previous_(world.check_state().enabled.exchange(enabled)) {}
Checked::~Checked() { world_.check_state().enabled = previous_; }

bool Checked::enabled(World& world) {
  const CheckState& state = world.check_state();
  return state.enabled && !state.inside && !world.is_fake();
}

void check_alike(const std::string& headline, const std::string& text, int64_t rank, const GatherRows& gather) {
  const auto hash = static_cast<int64_t>(std::hash<std::string_view>{}(text));
  const at::Tensor keys = gather(at::tensor({hash, static_cast<int64_t>(text.size())}, at::kLong));
  const int64_t* const key = keys.const_data_ptr<int64_t>();
  int64_t longest = 0;
  bool alike = true;
  for (int64_t i = 0; i < keys.size(0); ++i) {
    alike = alike && key[2 * i] == hash;
    longest = std::max(longest, key[2 * i + 1]);
  }
  if (alike) return;
  const at::Tensor mine = at::zeros({longest}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), text.data(), text.size());
  const at::Tensor texts = gather(mine);
  const at::Tensor ranks = gather(at::tensor({rank}, at::kLong));
  std::map<std::string, std::vector<int64_t>> by_text;
  for (int64_t i = 0; i < keys.size(0); ++i) {
    by_text[text_of_row(texts, i, key[2 * i + 1])].push_back(ranks.const_data_ptr<int64_t>()[i]);
  }
  std::string message = headline;
  for (const auto& [what, who] : by_text) {
    message +=
        fmt::format("{} ranks [{}]: {}", message.size() == headline.size() ? ":" : ";", fmt::join(who, ", "), what);
  }
  throw MismatchError(message);
}

void check_collective(const char* kind, const DeviceMesh& mesh, int64_t mesh_dim, const Intent& intent,
                      const GatherRows& gather) {
  CheckState& state = mesh.world().check_state();
  const std::vector<int64_t>& ranks = mesh.group_ranks(mesh_dim);
  const std::string text = describe(kind, mesh, mesh_dim, intent, ++state.serials[ranks]);
  check_alike("Checked: the ranks are about to issue different collectives", text, mesh.world().rank(), gather);
  if (intent.send != nullptr) check_splits(kind, ranks, intent, gather);
}

}  // namespace tessera
