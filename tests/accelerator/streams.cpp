#include "tessera/tests/accelerator/streams.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/tests/accelerator/late_stream.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

namespace tessera::testing {
namespace {

c10::Stream stream_of_rank(int64_t number) {
  const c10::Device here(device().type(), 0);
  return c10::Stream(c10::Stream::UNSAFE, here, 1 + number * world_size() + rank());
}

}  // namespace

OwnStream::OwnStream(int64_t number, std::chrono::microseconds least) : guard_(stream_of_rank(number)) {
  late_stream(guard_.current_stream()).take_at_least(least);
}

at::Tensor numbers_at_once(double first, int64_t rows, int64_t columns) {
  return at::arange(rows, at::kDouble).mul(10).unsqueeze(1) + at::arange(columns, at::kDouble) + first;
}

at::Tensor late_numbers(double first, int64_t rows, int64_t columns) {
  at::Tensor out = at::zeros({rows, columns}, on(at::kDouble));
  out.add_(numbers_at_once(0, rows, columns).to(device()));
  for (int i = 0; i < 3; ++i) out.add_(first / 4);
  return out + first / 4;
}

bool same_values(const at::Tensor& got, const at::Tensor& want) { return at::equal(got.cpu(), want); }

}  // namespace tessera::testing
