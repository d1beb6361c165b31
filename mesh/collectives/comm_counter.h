#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"

namespace tessera {

// Counts the collectives of this rank while it lives:
//   CommCounter counter(mesh);
//   forward();
//   CHECK(counter.count("all_reduce") == 1);
// It counts those of the whole World of `mesh`, on every mesh of it. Collectives over one rank communicate nothing and
// are not counted. Bytes are the size of this rank's input, as in CollectiveRecord. Read it between collectives.
class CommCounter {
 public:
  explicit CommCounter(const DeviceMesh& mesh);
  explicit CommCounter(World& world);

  int64_t total() const;
  int64_t total_bytes() const;
  // These count one kind: "all_reduce", "all_gather", ...
  int64_t count(std::string_view kind) const;
  int64_t bytes(std::string_view kind) const;
  // These count all kinds: on one mesh dimension (its name, or its index as text), of one operator, with one path.
  int64_t count_on(std::string_view mesh_dim) const;
  int64_t count_by_op(std::string_view op) const;
  int64_t count_by_path(std::string_view path) const;

  const std::vector<CollectiveRecord>& records() const;
  void reset();

  // Returns one line for each different (kind, mesh dimension, operator, path), in the order of first appearance:
  //   kind        mesh dim  count      bytes  operator   path
  //   all_reduce  tp            2       4096  aten::mm   layers.0.mlp.w2.weight
  std::string to_string() const;

 private:
  std::shared_ptr<std::vector<CollectiveRecord>> records_;
  std::shared_ptr<void> token_;
};

}  // namespace tessera
