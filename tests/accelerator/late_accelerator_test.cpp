// Tests that the stand-in for an accelerator shows what it is made to show: work that does not wait for other work, and
// memory that is used after it was freed.

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <doctest/doctest.h>

#include "tessera/tests/accelerator/streams.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera::testing;

namespace {

c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(device().type(), 0), id); }

// Returns in how many of a hundred rounds a stream reads what another was given to write, after `between`.
template <typename Between>
int right_reads(const Between& between) {
  int right = 0;
  for (int i = 0; i < 100; ++i) {
    at::Tensor made, read;
    {
      const c10::StreamGuard guard(stream(1));
      made = late_numbers(i, 3, 4);
    }
    const c10::StreamGuard guard(stream(2));
    between();
    read = made * 1;
    right += same_values(read, numbers_at_once(i, 3, 4)) ? 1 : 0;
  }
  return right;
}

// Returns the same where the reader drops its input at once, and then waits for the writer, after `between`.
template <typename Between>
int right_after_free(const Between& between) {
  int right = 0;
  for (int i = 0; i < 100; ++i) {
    const c10::StreamGuard guard(stream(1));
    at::Tensor made = late_numbers(i, 3, 4);
    c10::Event done(made.device().type());
    done.record(stream(1));
    at::Tensor read;
    {
      const c10::StreamGuard other(stream(2));
      done.block(stream(2));
      for (int more = 0; more < 5; ++more) at::zeros({1}, on(at::kDouble));
      read = made * 1;
      between(made);
      made.reset();
      right += same_values(read, numbers_at_once(i, 3, 4)) ? 1 : 0;
    }
    c10::impl::VirtualGuardImpl(device().type()).synchronizeDevice(0);
  }
  return right;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("the accelerator computes what the CPU does, later", {1}) {
  const at::Tensor x = numbers_at_once(1, 4, 6).sin();
  const at::Tensor late = x.to(device());
  CHECK(late.device() == c10::Device(device().type(), 0));
  CHECK(same_values(at::softmax(late.matmul(late.t()), -1), at::softmax(x.matmul(x.t()), -1)));
  CHECK(same_values(late.slice(0, 1, 3).t().contiguous(), x.slice(0, 1, 3).t().contiguous()));
  CHECK(same_values(at::cat({late, late.select(1, 2).unsqueeze(1)}, 1), at::cat({x, x.select(1, 2).unsqueeze(1)}, 1)));
  CHECK(same_values(late.index({late.select(0, 0).gt(0).nonzero().flatten().remainder(4)}),
                    x.index({x.select(0, 0).gt(0).nonzero().flatten().remainder(4)})));
  CHECK(late.sum().item<double>() == x.sum().item<double>());
  at::Tensor grown = at::empty({0}, late.options());
  CHECK(same_values(at::mul_out(grown, late, late), x * x));
  CHECK_THROWS(at::mm(late, late));
  CHECK_THROWS(late.select(0, 9));
}

TESSERA_RANKS_TEST_CASE("a stream that reads without waiting for the writer reads wrong numbers", {1}) {
  CHECK(right_reads([] {}) < 50);
  CHECK(right_reads([] {
          c10::Event event(device().type());
          event.record(stream(1));
          event.block(stream(2));
        }) == 100);
}

TESSERA_RANKS_TEST_CASE("memory that is freed while another stream reads it is poisoned, unless that was said", {1}) {
  CHECK(right_after_free([](const at::Tensor&) {}) < 90);
  CHECK(right_after_free([](const at::Tensor& made) {
          c10::impl::VirtualGuardImpl(device().type()).recordDataPtrOnStream(made.storage().data_ptr(), stream(2));
        }) == 100);
}
