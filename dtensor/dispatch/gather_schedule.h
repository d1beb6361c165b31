#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "tessera/dtensor/core/contract.h"
#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/redistribute/async_redistributions.h"
#include "tessera/mesh/core/stream_point.h"
#include "tessera/mesh/device_type.h"

namespace tessera {

struct GatherScheduleOptions {
  // Is the most that is gathered ahead of its use, in bytes of whole parameters, unless the next one alone is larger;
  // 0: nothing is.
  int64_t ahead_bytes = int64_t{16} << 20;
  // Says whether a gathered parameter is kept until the parameter is written. Otherwise it is freed after its use.
  bool keeps = false;
};

// Gathers the parameters of one module that are cut over data dimensions (Contract::gather_dims), and learns in which
// order operators use them: after four parameters it expects what came after the same four the last time. So forward
// and backward, which use the same parameters in opposite orders, are told apart, also where an operator uses two. When
// the last parameter that was gathered ahead is used, the next ones are started, as one collective, while the operator
// computes.
//
// Parameters are known by their paths. What is started follows from the sequence of uses and from counts of writes
// alone, so that ranks that run the same program start the same.
class GatherSchedule {
 public:
  explicit GatherSchedule(const GatherScheduleOptions& options) : options_(options) {}

  // Adds a parameter, which must be a DTensor, under its contract's path.
  void add(const at::Tensor& parameter);

  // From now on parameters may be written without a count, by the replays of a CUDA graph: none is gathered ahead, and
  // none is kept. A parameter that is used or written while a graph is captured does the same.
  void expect_unseen_writes() { unseen_writes_ = true; }

  // Any thread may call it; where it communicates, as collectives do, one at a time. Returns `view`, a parameter of
  // this schedule with the contract's path `path` or its transpose, redistributed to the placements of `whole`: a piece
  // of any strides. Returns an undefined tensor, without communication, for any other tensor, such as a part or a clone
  // of the parameter.
  at::Tensor gather(const std::string& path, const detail::Meta& view, const Spec& whole);

  // Call it before `parameter`, which has a contract, becomes a tensor like `next`, of the same layout, by set_data().
  void follow(const detail::Meta& parameter, const detail::Meta& next);

 private:
  // Tells the values of a parameter from earlier ones: set_data() gives it another memory, or another view of a memory
  // whose views have one count of writes.
  struct Values {
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> memory;
    int64_t offset = 0;  // of the piece in it, in elements
    at::DimVector strides;
    bool conjugate = false;
    bool negative = false;
    uint32_t writes = 0;
    int64_t replacements = 0;  // since counts of writes may begin anew with other values
    friend bool operator==(const Values&, const Values&) = default;
  };

  // Is a parameter as it was last seen. It refers to no TensorImpl and no Meta: a Meta has a contract, which has the
  // schedule, so that the module's parameters would never be freed.
  struct Seen {
    SpecPtr spec;
    at::Tensor piece;
    detail::WriteCounters counters;
    int64_t replacements = 0;  // how often follow() has replaced the values
    Values values() const;
    // Says whether every write to the piece is counted. Those to an inference tensor are, where operators on DTensors
    // do them, and not otherwise; so it is gathered for each use.
    bool counts_writes() const { return !piece.is_inference(); }
  };

  struct Slot {
    Seen seen;
    Placements whole;   // of the gathered parameter; empty until its first use
    int64_t step = -1;  // the step of its last use, and its values then:
    Values used;
    // The gathered piece, where it was made, and the values that it was started with:
    at::Tensor piece;
    StreamPoint made;
    Values values;

    void mark(const at::Tensor& gathered);
  };
  struct Ahead {
    std::shared_ptr<AsyncRedistributions> running;
    std::vector<std::size_t> slots;  // in the order of its items
  };

  void learn(std::size_t index);
  void drop_old_pieces();
  at::Tensor use(std::size_t index);
  at::Tensor use_alone(const Slot& slot, bool captured);
  void wait_for_ahead();
  void start_ahead();
  std::vector<std::size_t> expected_next() const;

  const GatherScheduleOptions options_;
  std::atomic<bool> unseen_writes_{false};
  std::mutex mutex_;
  std::vector<Slot> slots_;
  std::map<std::string, std::size_t, std::less<>> by_path_;
  using Last = std::array<std::size_t, 4>;  // the slots that were used last, the latest one at the end
  static constexpr Last kNothing{SIZE_MAX, SIZE_MAX, SIZE_MAX, SIZE_MAX};
  int64_t step_ = 0;
  Last last_ = kNothing;
  std::map<Last, std::size_t> next_;
  std::optional<Ahead> ahead_;  // what was started and not yet waited for
  // With `keeps`: all that is expected was held at the last look, and nothing has changed since, so nobody looks again.
  bool all_held_ = false;
};

namespace detail {

// Counts an operator's write to the tensor, and lets the schedule of a parameter know of a graph that will repeat it.
inline void note_write(Meta& meta) {
  meta.count_write();
  if (!meta.contract || !meta.contract->gather_schedule) [[likely]]
    return;
  if (is_captured(meta.spec->mesh.device())) meta.contract->gather_schedule->expect_unseen_writes();
}

}  // namespace detail
}  // namespace tessera
