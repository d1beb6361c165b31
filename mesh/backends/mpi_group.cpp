#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/mesh/backends/backend_group.h"
#include "tessera/mesh/backends/mpi_exchange.h"
#include "tessera/mesh/backends/mpi_reduction.h"
#include "tessera/mesh/backends/mpi_transport.h"
#include "tessera/mesh/backends/mpi_work.h"
#include "tessera/mesh/core/reused_memory.h"

namespace tessera {
namespace {

using Channel = MpiTransport::Channel;
using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;
using Transport = std::shared_ptr<MpiTransport>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Tensors of up to this many bytes are reduced or broadcast in one step, in which whole tensors are sent to every rank,
// instead of two.
constexpr int64_t kSendAtOnce = 16 << 10;
// A rank reduces blocks of this many bytes, over the rows of all ranks.
constexpr int64_t kReduceBlock = 4 << 20;

// Makes the stage that sends on reduced columns: `mine` are this rank's, `columns` is where each rank's columns belong.
using Spread = std::function<MpiStage(const MpiSpan& mine, const MpiSpans& columns)>;

template <typename T>
const T& only(const std::vector<T>& list, const char* op) {
  if (list.size() != 1) refuse_over_mpi(op, fmt::format("{} tensors (or lists) were given; give one", list.size()));
  return list.front();
}

// Returns how many of `elements` each rank reduces: equal numbers, but the first ranks may have one more.
std::vector<int64_t> shares(int64_t elements, int size) {
  std::vector<int64_t> counts;
  counts.reserve(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) counts.push_back(elements / size + (rank < elements % size ? 1 : 0));
  return counts;
}

std::vector<int64_t> times(std::vector<int64_t> counts, int64_t factor) {
  for (int64_t& count : counts) count *= factor;
  return counts;
}

MpiStage compute(std::function<void()> body) {
  return [body = std::move(body)](MpiRequests&) { body(); };
}

// Implements c10d::Backend over MPI. MPI only moves bytes; reductions are computed here, in the order of ranks. So
// every dtype can be sent, a result is the same on every rank, and no count is too large. In an exchange every rank
// sends to all others at once.
class MpiBackend : public c10d::Backend {
 public:
  explicit MpiBackend(const Transport& transport)
      : Backend(transport->rank(), transport->size()), transport_(transport) {}

  const std::string getBackendName() const override { return "mpi"; }
  void setTimeout(Milliseconds timeout) override { timeout_ = timeout; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const at::Tensor& tensor = only(tensors, "broadcast");
    const MpiSpan span = mpi_span(tensor, "broadcast");
    const int root = checked_rank(options.rootRank, "broadcast");
    const bool has_it = getRank() == root;
    const MpiSpans nothing = repeat_span({}, getSize());
    if (span.bytes <= kSendAtOnce || getSize() <= 2) {
      const MpiSpans from = has_it ? repeat_span(span, getSize()) : nothing;
      return start(options, {exchange_spans(*transport_, next_tag(), from, span_only_at(root, span, getSize()))},
                   {tensor});
    }
    // The root sends a piece to each rank, which sends it to the others. With two ranks this would only add a step,
    // since all pieces come from the root.
    const MpiSpans pieces = cut_span(span, shares(span.bytes, getSize()));
    const MpiSpan& mine = pieces[index()];
    MpiSpans to_others = repeat_span(mine, getSize());
    if (!has_it) to_others[static_cast<std::size_t>(root)] = {};
    const MpiSpans only_mine = span_only_at(root, mine, getSize());
    return start(options,
                 {exchange_spans(*transport_, next_tag(), has_it ? pieces : nothing, only_mine),
                  exchange_spans(*transport_, next_tag(), to_others, has_it ? only_mine : pieces)},
                 {tensor});
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const at::Tensor& tensor = only(tensors, "allreduce");
    const MpiSpan span = mpi_span(tensor, "allreduce");
    const MpiReduction reduction(options.reduceOp, tensor.scalar_type(), "allreduce");
    const at::Tensor flat = tensor.view({-1});
    if (span.bytes > kSendAtOnce) {
      const std::vector<int64_t> counts = shares(flat.numel(), getSize());
      const MpiSpans pieces = cut_span(span, times(counts, flat.element_size()));
      Tensors memory = {flat};
      const auto spread = [&](const MpiSpan& mine, const MpiSpans& columns) {
        return exchange_spans(*transport_, next_tag(), repeat_span(mine, getSize()), columns);
      };
      // The reduction is in place, since this rank does not send its own piece before it is reduced.
      const int64_t first = std::accumulate(counts.begin(), counts.begin() + getRank(), int64_t{0});
      const at::Tensor own = flat.narrow(0, first, counts[index()]);
      std::vector<MpiStage> stages = reduce_pieces(reduction, pieces, own, spread, memory);
      return start(options, std::move(stages), std::move(memory));
    }
    const at::Tensor rows = reused_empty({getSize(), flat.numel()}, flat.options());
    return start(options,
                 {exchange_spans(*transport_, next_tag(), repeat_span(span, getSize()), rows_of(rows)),
                  compute([=] { reduction.apply(rows, flat); })},
                 {flat, rows});
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const at::Tensor& tensor = only(tensors, "reduce");
    const MpiSpan span = mpi_span(tensor, "reduce");
    const int root = checked_rank(options.rootRank, "reduce");
    const MpiReduction reduction(options.reduceOp, tensor.scalar_type(), "reduce");
    const std::vector<int64_t> counts = shares(tensor.numel(), getSize());
    const MpiSpans pieces = cut_span(span, times(counts, tensor.element_size()));
    // The result is not reduced in place, since `tensor` must not change on ranks other than the root.
    const at::Tensor own = reused_empty({counts[index()]}, tensor.options());
    Tensors memory = {tensor, own};
    const auto spread = [&](const MpiSpan& mine, const MpiSpans& columns) {
      return exchange_spans(*transport_, next_tag(), span_only_at(root, mine, getSize()),
                            getRank() == root ? columns : repeat_span({}, getSize()));
    };
    std::vector<MpiStage> stages = reduce_pieces(reduction, pieces, own, spread, memory);
    return start(options, std::move(stages), std::move(memory));
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    const MpiSpan to = mpi_span(output, "_allgather_base");
    const MpiSpan from = mpi_span(input, "_allgather_base");
    check_parts("_allgather_base", output, input);
    return start(
        options,
        {exchange_spans(*transport_, next_tag(), repeat_span(from, getSize()), cut_span_evenly(to, getSize()))},
        {output, input});
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    const at::Tensor& input = only(inputs, "allgather");
    const MpiSpans to = mpi_spans(only(outputs, "allgather"), getSize(), "allgather");
    return start(options, {checked_exchange(repeat_span(mpi_span(input, "allgather"), getSize()), to, "allgather")},
                 with(outputs.front(), input));
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const at::Tensor& input = only(inputs, "gather");
    const int root = checked_rank(options.rootRank, "gather");
    const Tensors to = getRank() == root ? only(outputs, "gather") : Tensors();
    const MpiSpans spans = getRank() == root ? mpi_spans(to, getSize(), "gather") : repeat_span({}, getSize());
    return start(options, {checked_exchange(span_only_at(root, mpi_span(input, "gather"), getSize()), spans, "gather")},
                 with(to, input));
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const at::Tensor& output = only(outputs, "scatter");
    const int root = checked_rank(options.rootRank, "scatter");
    const Tensors from = getRank() == root ? only(inputs, "scatter") : Tensors();
    const MpiSpans spans = getRank() == root ? mpi_spans(from, getSize(), "scatter") : repeat_span({}, getSize());
    return start(options,
                 {checked_exchange(spans, span_only_at(root, mpi_span(output, "scatter"), getSize()), "scatter")},
                 with(from, output));
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    const MpiSpan from = mpi_span(input, "_reduce_scatter_base");
    check_parts("_reduce_scatter_base", input, output);
    return reduce_rows(options, cut_span_evenly(from, getSize()), output, {input}, "_reduce_scatter_base");
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    const Tensors& list = only(inputs, "reduce_scatter");
    return reduce_rows(options, mpi_spans(list, getSize(), "reduce_scatter"), only(outputs, "reduce_scatter"), list,
                       "reduce_scatter");
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& receive,
                        std::vector<int64_t>& send, const c10d::AllToAllOptions& options) override {
    const MpiSpans from = spans_of(input, send);
    const MpiSpans to = spans_of(output, receive);
    return start(options, {checked_exchange(from, to, "alltoall_base")}, {output, input});
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    Tensors memory = outputs;
    memory.insert(memory.end(), inputs.begin(), inputs.end());
    return start(options,
                 {checked_exchange(mpi_spans(inputs, getSize(), "alltoall"), mpi_spans(outputs, getSize(), "alltoall"),
                                   "alltoall")},
                 memory);
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    const at::Tensor& tensor = only(tensors, "send");
    const MpiSpan span = mpi_span(tensor, "send");
    check_message(to, tag, "send");
    const auto stage = [=, transport = transport_.get()](MpiRequests& requests) {
      transport->send(requests, span.data, span.bytes, to, tag, Channel::kMessage);
    };
    return c10::make_intrusive<MpiWork>(transport_, timeout(), std::vector<MpiStage>{stage}, Tensors{tensor});
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    const at::Tensor& tensor = only(tensors, "recv");
    const MpiSpan span = mpi_span(tensor, "recv");
    check_message(from, tag, "recv");
    const auto stage = [=, transport = transport_.get()](MpiRequests& requests) {
      transport->receive(requests, span.data, span.bytes, from, tag, Channel::kMessage);
    };
    return c10::make_intrusive<MpiWork>(transport_, timeout(), std::vector<MpiStage>{stage}, Tensors{tensor}, from);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    // Each rank sends one byte to each.
    const at::Tensor here = reused_empty({1}, at::kByte);
    const at::Tensor all = reused_empty({getSize()}, at::kByte);
    return start(
        options,
        {exchange_spans(*transport_, next_tag(), repeat_span(mpi_span(here, "barrier"), getSize()), rows_of(all))},
        {here, all});
  }

 private:
  template <typename Options>
  WorkPtr start(const Options& options, std::vector<MpiStage> stages, Tensors memory) const {
    const Milliseconds limit = options.timeout == c10d::kUnsetTimeout ? timeout() : options.timeout;
    auto work = c10::make_intrusive<MpiWork>(transport_, limit, std::move(stages), std::move(memory));
    if (!options.asyncOp) work->wait(kNoTimeout);
    return work;
  }

  // Makes stages in which rank i reduces piece i of every rank into its `result`. They go through the columns in blocks
  // of kReduceBlock bytes, since memory fresh from the system costs more than the messages. For each block `spread`
  // makes the stage that follows, given the reduced columns of `result` and the same columns of each rank's piece.
  std::vector<MpiStage> reduce_pieces(const MpiReduction& reduction, const MpiSpans& pieces, const at::Tensor& result,
                                      const Spread& spread, Tensors& memory) {
    const int64_t item = result.element_size();
    int64_t longest = 0;
    for (const MpiSpan& piece : pieces) longest = std::max(longest, piece.bytes / item);
    const int64_t width = std::min(longest, std::max<int64_t>(kReduceBlock / (getSize() * item), 1));
    const at::Tensor rows = reused_empty({getSize() * width}, result.options());
    memory.push_back(rows);
    std::vector<MpiStage> stages;
    for (int64_t begin = 0; begin < longest; begin += width) {
      MpiSpans from;
      for (const MpiSpan& piece : pieces) {
        const int64_t first = std::min(begin * item, piece.bytes);
        from.push_back({piece.data + first, std::min(width * item, piece.bytes - first)});
      }
      const int64_t count = from[index()].bytes / item;
      const at::Tensor ready = result.narrow(0, std::min(begin, result.numel()), count);
      const at::Tensor block = rows.narrow(0, 0, getSize() * count).view({getSize(), count});
      stages.push_back(exchange_spans(*transport_, next_tag(), from, rows_of(block)));
      stages.push_back([=, then = spread(mpi_span(ready, "reduce"), from)](MpiRequests& requests) {
        reduction.apply(block, ready);
        if (then) then(requests);
      });
    }
    return stages;
  }

  WorkPtr reduce_rows(const c10d::ReduceScatterOptions& options, const MpiSpans& pieces, const at::Tensor& output,
                      const Tensors& inputs, const char* op) {
    const MpiSpan to = mpi_span(output, op);
    if (pieces[index()].bytes != to.bytes) {
      refuse_over_mpi(op, fmt::format("this rank's part of the input has {} bytes, its output {}",
                                      pieces[index()].bytes, to.bytes));
    }
    const MpiReduction reduction(options.reduceOp, output.scalar_type(), op);
    Tensors memory = with(inputs, output);
    const auto nothing = [](const MpiSpan&, const MpiSpans&) { return MpiStage(); };
    std::vector<MpiStage> stages = reduce_pieces(reduction, pieces, output.view({-1}), nothing, memory);
    return start(options, std::move(stages), std::move(memory));
  }

  MpiStage checked_exchange(const MpiSpans& from, const MpiSpans& to, const char* op) {
    if (from[index()].bytes != to[index()].bytes) {
      refuse_over_mpi(op, fmt::format("rank {} sends itself {} bytes and expects {}", getRank(), from[index()].bytes,
                                      to[index()].bytes));
    }
    return exchange_spans(*transport_, next_tag(), from, to);
  }

  std::size_t index() const { return static_cast<std::size_t>(getRank()); }
  MpiSpans rows_of(const at::Tensor& rows) const { return cut_span_evenly(mpi_span(rows, "rows"), getSize()); }

  // Cuts a tensor along its first dimension into parts of `counts` rows, or into equal parts if `counts` is empty.
  MpiSpans spans_of(const at::Tensor& tensor, const std::vector<int64_t>& counts) const {
    const MpiSpan span = mpi_span(tensor, "alltoall_base");
    const int64_t first = tensor.dim() == 0 ? 1 : tensor.size(0);
    if (counts.empty() && first % getSize() == 0) return cut_span_evenly(span, getSize());
    int64_t total = 0;
    for (const int64_t count : counts) total += count;
    const bool negative = std::any_of(counts.begin(), counts.end(), [](int64_t count) { return count < 0; });
    if (counts.size() != static_cast<std::size_t>(getSize()) || negative || total != first) {
      refuse_over_mpi("alltoall_base", fmt::format("split sizes [{}] do not divide {} rows over {} ranks",
                                                   fmt::join(counts, ", "), first, getSize()));
    }
    return cut_span(span, times(counts, first == 0 ? 0 : span.bytes / first));
  }

  void check_parts(const char* op, const at::Tensor& whole, const at::Tensor& part) const {
    if (whole.scalar_type() == part.scalar_type() && whole.numel() == part.numel() * getSize()) return;
    refuse_over_mpi(op, fmt::format("{} elements of {} are not {} times {} elements of {}", whole.numel(),
                                    c10::toString(whole.scalar_type()), getSize(), part.numel(),
                                    c10::toString(part.scalar_type())));
  }

  int checked_rank(int64_t rank, const char* op) const {
    if (rank < 0 || rank >= getSize())
      refuse_over_mpi(op, fmt::format("rank {} is outside the group of {}", rank, getSize()));
    return static_cast<int>(rank);
  }

  void check_message(int peer, int tag, const char* op) const {
    checked_rank(peer, op);
    if (tag < 0 || tag > MpiTransport::largest_tag()) {
      refuse_over_mpi(op, fmt::format("tag {} is outside [0, {}]", tag, MpiTransport::largest_tag()));
    }
  }

  static Tensors with(Tensors list, const at::Tensor& tensor) {
    list.push_back(tensor);
    return list;
  }

  // The tag separates operations that are in progress at the same time; all ranks start them in the same order.
  int next_tag() { return tag_ = (tag_ + 1) % 32768; }
  Milliseconds timeout() const { return timeout_.value_or(transport_->timeout()); }

  const Transport transport_;
  std::optional<Milliseconds> timeout_;
  int tag_ = 0;
};

}  // namespace

BackendGroup make_mpi_group(const GroupRequest& request) {
  const auto transport = std::make_shared<MpiTransport>(request);
  return {.backend = c10::make_intrusive<MpiBackend>(transport), .close = [transport] { transport->close(); }};
}

}  // namespace tessera
