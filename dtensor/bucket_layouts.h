#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "tessera/dtensor/bucket_memory.h"
#include "tessera/dtensor/bucket_plan.h"
#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/redistribute/route.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"
#include "tessera/placement/planner/cost_model.h"

namespace tessera {

// Says in which layouts and by which routes buckets send the gradients of parameters, which lie on one mesh and are
// called by their indexes. It holds no tensor and does not communicate.
class BucketLayouts {
 public:
  struct Parameter {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    Placements layout;  // of its gradient in the end, without Partial
  };
  // Says which ranks have a gradient: a column of flags per gradient of a bucket, and empty columns, laid out so that
  // the bucket's own collectives reduce it.
  struct Flags {
    SpecPtr from;
    Placements to;
  };

  // `dtype` is that in which gradients are sent (nullopt: their own), and `model` the one that bucket_route takes.
  BucketLayouts(DeviceMesh mesh, std::vector<Parameter> parameters, std::optional<at::ScalarType> dtype,
                CostModel model);

  const DeviceMesh& mesh() const { return mesh_; }
  const Parameter& parameter(std::size_t index) const { return parameters_[index]; }
  void set_dtype(std::size_t index, at::ScalarType dtype) { parameters_[index].dtype = dtype; }

  // Returns the gradient before its bucket reduces it, in the dtype in which it is sent.
  SpecPtr before(const ArrivingGradient& gradient) const;
  // Returns the gradient in the end, in the parameter's dtype.
  SpecPtr after(std::size_t index) const;
  RoutePtr route(const ArrivingGradient& gradient) const;
  RoutePtr route(const Flags& flags) const;

  // Puts the gradients of `order` into buckets; see plan_buckets.
  BucketPlan plan(const ArrivalOrder& order, int64_t bucket_bytes) const;
  Flags flags(const ArrivalOrder& bucket) const;
  // Returns memory for each gradient of the bucket and last its flags; nullopt unless the bucket is all-reduced as it
  // is.
  std::optional<BucketMemory> memory(const ArrivalOrder& bucket, const Flags& flags) const;

 private:
  at::ScalarType sent_dtype(const Parameter& parameter) const;
  // Names the collectives that reduce the gradient, and its dtype; "" where it needs none.
  std::string kind_of(const ArrivingGradient& gradient) const;
  int64_t bytes_of(const ArrivingGradient& gradient) const;

  const DeviceMesh mesh_;
  std::vector<Parameter> parameters_;
  const std::optional<at::ScalarType> dtype_;
  const CostModel model_;
};

}  // namespace tessera
