#include "tessera/dtensor/io/named_tensors.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include "tessera/dtensor/agreement.h"
#include "tessera/dtensor/assigned_weight.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/checkpoint_writer.h"
#include "tessera/dtensor/io/strict_json.h"
#include "tessera/dtensor/redistribute/region.h"
#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/failing.h"
#include "tessera/mesh/world.h"

namespace tessera {
namespace {

void check_storable(const std::string& name, const at::Tensor& tensor) {
  if (is_dtensor(tensor)) return;
  detail::refuse_deferred("tensor " + in_quotes(name), tensor);
  if (tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_meta()) return;
  throw std::invalid_argument(
      fmt::format("tensor {}: a {} tensor{} on {} cannot be in a safetensors file; make it dense, with data",
                  in_quotes(name), c10::toString(tensor.scalar_type()),
                  tensor.layout() == at::kStrided ? "" : " that is not strided", tensor.device().str()));
}

// Returns the rank that writes: the first of the first mesh that is in every mesh. If there is none, it is the first of
// the first mesh, to which the values of other meshes are sent.
int64_t writing_rank(const std::vector<DeviceMesh>& meshes) {
  for (const int64_t rank : meshes.front().mesh().ranks()) {
    const bool everywhere = std::ranges::all_of(
        meshes, [&](const DeviceMesh& mesh) { return std::ranges::count(mesh.mesh().ranks(), rank) > 0; });
    if (everywhere) return rank;
  }
  return meshes.front().mesh().ranks().front();
}

// Returns the whole value on the rank `writer`, and on the others of its mesh if that has the writer. An error of this
// rank alone fails the job, since the others gather on.
at::Tensor whole_on(int64_t writer, const at::Tensor& tensor, const char* op) {
  if (!is_dtensor(tensor)) return tensor;
  const DeviceMesh& mesh = mesh_of(tensor);
  return failing_unless_refused(mesh.world(), op, [&] {
    if (std::ranges::count(mesh.mesh().ranks(), writer) > 0) return full_tensor(tensor);
    const DeviceMesh alone(mesh.world_ptr(), mesh.device_type(), Mesh({1}, {"writer"}, {writer}));
    return to_local(redistribute_to(tensor, alone, {Replicate()}));
  });
}

std::string fingerprint_of(const std::vector<SafetensorsHeader>& plan, const std::string& path) {
  std::string all = path;
  for (const SafetensorsHeader& header : plan) all += serialize_safetensors_header(header);
  return all;
}

// Gathers and appends one tensor after the other. After an error the writing rank goes on gathering, since the other
// ranks wait for it; the error is returned.
std::exception_ptr write_in_turn(const std::vector<SafetensorsHeader>& plan, const std::vector<SavedTensor>& tensors,
                                 int64_t writing_rank, std::optional<CheckpointWriter>& writer, const char* op) {
  std::unordered_map<std::string, const at::Tensor*> by_name;
  for (const SavedTensor& item : tensors) by_name.emplace(item.name, &item.tensor);
  std::exception_ptr failure;
  for (const SafetensorsHeader& header : plan) {
    for (const TensorEntry& entry : header.tensors) {
      const at::Tensor whole = whole_on(writing_rank, *by_name.at(entry.name), op);
      if (!writer || failure) continue;
      try {
        writer->append(whole);
      } catch (...) {
        failure = std::current_exception();
      }
    }
  }
  return failure;
}

// Returns what module_tensors does, with tensors that a file cannot hold.
std::vector<ModuleTensor> any_tensors(const torch::nn::Module& module) {
  std::vector<ModuleTensor> result;
  std::unordered_map<const c10::TensorImpl*, std::size_t> seen;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto [place, is_new] = seen.emplace(tensor.unsafeGetTensorImpl(), result.size());
    if (is_new) result.push_back({{}, tensor});
    result[place->second].names.push_back(name);
  };
  for (const auto& [name, tensor] : used_parameters(module)) add(name, tensor);
  for (const auto& item : module.named_buffers()) add(item.key(), item.value());
  return result;
}

}  // namespace

std::vector<ModuleTensor> module_tensors(const torch::nn::Module& module) {
  std::vector<ModuleTensor> result = any_tensors(module);
  for (const ModuleTensor& item : result) check_storable(item.names.front(), item.tensor);
  return result;
}

std::vector<DeviceMesh> module_meshes(const torch::nn::Module& module) {
  std::vector<at::Tensor> values;
  for (const ModuleTensor& item : any_tensors(module)) values.push_back(item.tensor);
  return meshes_of(values);
}

std::vector<SavedTensor> saved_weights(const torch::nn::Module& module) {
  std::vector<SavedTensor> tensors;
  for (const ModuleTensor& item : module_tensors(module)) tensors.push_back({item.names.front(), item.tensor});
  return tensors;
}

void refuse_fake_world(const std::vector<DeviceMesh>& meshes, const char* op) {
  for (const DeviceMesh& mesh : meshes) {
    if (!mesh.world().is_fake() || mesh.size() == 1) continue;
    throw std::invalid_argument(
        fmt::format("{}: {} is of a fake world, whose ranks have no values but this one's; save in a job of {} ranks",
                    op, mesh.mesh().to_string(), mesh.size()));
  }
}

std::vector<SafetensorsHeader> plan_files(const std::vector<SavedTensor>& tensors, int64_t max_shard_bytes,
                                          const std::map<std::string, std::string>& metadata) {
  std::vector<TensorEntry> entries;
  entries.reserve(tensors.size());
  for (const SavedTensor& item : tensors) {
    entries.push_back({item.name, item.tensor.scalar_type(), item.tensor.sizes().vec(), 0, 0});
  }
  return plan_checkpoint(std::move(entries), max_shard_bytes, metadata);
}

void save_tensors(const std::function<SavedContents()>& find, const std::vector<DeviceMesh>& meshes,
                  const std::string& path, int64_t max_shard_bytes, const char* op, const char* name) {
  const at::NoGradGuard no_grad;
  const detail::NotDeferred own_tensors;
  const Agreement agreement(meshes, op);
  const int64_t writing = meshes.empty() ? 0 : writing_rank(meshes);
  const bool writes = meshes.empty() || writing == meshes.front().world().rank();
  SavedContents contents;
  std::vector<SafetensorsHeader> plan;
  std::optional<CheckpointWriter> writer;
  agreement.run(
      [&] {
        refuse_fake_world(meshes, op);
        contents = find();
        plan = plan_files(contents.tensors, max_shard_bytes, contents.metadata);
        if (writes) writer.emplace(path, plan, kMaxIndexBytes, name);
      },
      [&] { return fingerprint_of(plan, path); });
  const std::exception_ptr failure = write_in_turn(plan, contents.tensors, writing, writer, op);
  agreement.run([&] {
    if (failure) std::rethrow_exception(failure);
    // A collective on a GPU that was aborted when a rank failed gave any bytes, which must not become the file.
    if (!meshes.empty()) meshes.front().world().check_alive();
    if (writes) writer->publish();
  });
}

TensorBox held_box(const at::Tensor& tensor, const std::string& name) {
  if (!is_dtensor(tensor)) return whole_box(tensor.sizes().vec());
  const Spec& spec = spec_of(tensor);
  if (spec.partial) {
    throw std::invalid_argument(
        fmt::format("tensor {}: it is {}; redistribute it to Shard or Replicate before loading, for a "
                    "file has no terms of a sum",
                    in_quotes(name), to_string(spec.placements)));
  }
  TensorBox box;
  for (std::size_t d = 0; d < spec.tile.size(); ++d) {
    const Intervals& part = spec.tile[d];
    box.offsets.push_back(part.empty() ? spec.sizes[d] : part.front().begin);
    box.sizes.push_back(part.empty() ? 0 : part.back().end - part.front().begin);
  }
  return box;
}

bool box_has_gaps(const at::Tensor& tensor) {
  return is_dtensor(tensor) &&
         std::ranges::any_of(spec_of(tensor).tile, [](const Intervals& part) { return part.size() > 1; });
}

at::Tensor held_part(const at::Tensor& tensor, const at::Tensor& box_values) {
  if (!is_dtensor(tensor)) return box_values;
  Tile places;
  for (const Intervals& part : spec_of(tensor).tile) {
    places.push_back(positions(part.empty() ? part : one_interval(part.front().begin, part.back().end), part));
  }
  const Region part(places, box_values.sizes().vec());
  return part.read(part.is_box() ? box_values : box_values.contiguous());
}

bool is_held(const at::Tensor& tensor) { return !is_dtensor(tensor) || mesh_of(tensor).is_member(); }

void write_piece(const at::Tensor& tensor, const at::Tensor& piece) {
  const at::NoGradGuard no_grad;
  if (!is_dtensor(tensor)) {
    tensor.detach().copy_(piece);
    return;
  }
  to_local(tensor).copy_(piece);
  // Counts the write, so that views of the DTensor see it, and raises the version, so that autograd sees that the value
  // changed, where the piece does not share it (Meta). An inference tensor has no version.
  detail::meta(tensor).count_write();
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

std::string list_texts(const std::vector<std::string>& texts, const char* separator) {
  constexpr std::size_t kShown = 10;
  const std::size_t shown = std::min(texts.size(), kShown);
  const std::string more = texts.size() > shown ? fmt::format(" and {} more", texts.size() - shown) : "";
  return fmt::format("{}{}", fmt::join(texts.data(), texts.data() + shown, separator), more);
}

std::string list_names(const std::vector<std::string>& names) {
  std::vector<std::string> quoted;
  quoted.reserve(names.size());
  for (const std::string& name : names) quoted.push_back(in_quotes(name));
  return list_texts(quoted, ", ");
}

}  // namespace tessera
