#include "tessera/layers/broadcast_data.h"

#include <cstdint>
#include <set>
#include <stdexcept>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/agreement.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/mesh_checks.h"
#include "tessera/mesh/values_on_host.h"

namespace tessera {
namespace {

using Data = std::map<std::string, at::Tensor>;

void check_arguments(const std::vector<std::string>& keys, const DeviceMesh& mesh) {
  check_one_dimension(mesh, "broadcast_data");
  if (std::set<std::string>(keys.begin(), keys.end()).size() != keys.size()) {
    throw std::invalid_argument(fmt::format("broadcast_data: a key is given twice: {}", fmt::join(keys, ", ")));
  }
}

void check_data(const std::vector<std::string>& keys, const Data& data, at::ScalarType datatype) {
  for (const std::string& key : keys) {
    const auto found = data.find(key);
    if (found == data.end() || !found->second.defined()) {
      throw std::invalid_argument(fmt::format(
          "broadcast_data: there is no tensor \"{}\" in the data of the first rank; add it, or leave the key out",
          key));
    }
    if (is_dtensor(found->second)) {
      throw std::invalid_argument(
          fmt::format("broadcast_data: \"{}\" is a DTensor; give the plain full_tensor(t)", key));
    }
    if (found->second.layout() != at::kStrided || found->second.is_meta()) {
      throw std::invalid_argument(fmt::format("broadcast_data: \"{}\" is {}; give a dense tensor with values", key,
                                              found->second.is_meta() ? "on the meta device" : "sparse"));
    }
    if (found->second.scalar_type() != datatype) {
      throw std::invalid_argument(fmt::format("broadcast_data: {} has data type {} which is different than {}", key,
                                              c10::toString(found->second.scalar_type()), c10::toString(datatype)));
    }
  }
}

// Broadcasts numbers that only the first rank has.
std::vector<int64_t> numbers_of_first(const std::vector<int64_t>& mine, std::size_t count, const DeviceMesh& mesh) {
  const at::Tensor given =
      mine.empty() ? at::empty({static_cast<int64_t>(count)}, at::kLong) : at::tensor(mine, at::kLong);
  const at::Tensor got = values_on_host(broadcast(given.to(mesh.device()), mesh, 0, 0), mesh.world());
  return {got.const_data_ptr<int64_t>(), got.const_data_ptr<int64_t>() + count};
}

std::vector<std::vector<int64_t>> shapes_of_first(const std::vector<at::Tensor>& mine, std::size_t count,
                                                  const DeviceMesh& mesh) {
  std::vector<int64_t> ndims, sizes;
  for (const at::Tensor& t : mine) {
    ndims.push_back(t.dim());
    sizes.insert(sizes.end(), t.sizes().begin(), t.sizes().end());
  }
  ndims = numbers_of_first(ndims, count, mesh);
  std::size_t total = 0;
  for (const int64_t n : ndims) total += static_cast<std::size_t>(n);
  sizes = numbers_of_first(sizes, total, mesh);
  std::vector<std::vector<int64_t>> shapes;
  auto next = sizes.begin();
  for (const int64_t n : ndims) {
    shapes.emplace_back(next, next + n);
    next += n;
  }
  return shapes;
}

}  // namespace

Data broadcast_data(const std::vector<std::string>& keys, const Data& data, at::ScalarType datatype,
                    const DeviceMesh& mesh) {
  check_arguments(keys, mesh);
  const bool first = mesh.local_rank(0) == 0;
  std::vector<at::Tensor> mine;
  at::Tensor given;
  Agreement({mesh}, "broadcast_data")
      .run(
          [&] {
            if (!first) return;
            check_data(keys, data, datatype);
            std::vector<at::Tensor> flat;
            flat.reserve(keys.size());
            for (const std::string& key : keys) mine.push_back(data.at(key).detach().to(mesh.device()));
            for (const at::Tensor& t : mine) flat.push_back(t.reshape({-1}));
            if (!flat.empty()) given = at::cat(flat);
          },
          [&] { return fmt::format("{} {}", c10::toString(datatype), fmt::join(keys, "\n")); });
  if (keys.empty()) return {};
  const World::Scope scope(mesh.world(), "broadcast_data");
  const auto shapes = shapes_of_first(mine, keys.size(), mesh);
  std::vector<int64_t> numels;
  int64_t total = 0;
  for (const auto& shape : shapes) total += numels.emplace_back(c10::multiply_integers(shape));
  // Only this rank may be out of memory: the guard tells the other ranks.
  mesh.world().guard("broadcast_data", [&] {
    if (!first) given = at::empty({total}, at::TensorOptions(datatype).device(mesh.device()));
  });
  const at::Tensor all = broadcast(given, mesh, 0, 0);
  Data out;
  int64_t begin = 0;
  for (std::size_t i = 0; i < keys.size(); begin += numels[i++]) {
    out.emplace(keys[i], all.narrow(0, begin, numels[i]).view(shapes[i]));
  }
  return out;
}

}  // namespace tessera
