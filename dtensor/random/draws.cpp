#include "tessera/dtensor/random/draws.h"

#include <limits>
#include <numbers>
#include <optional>
#include <stdexcept>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/FunctionRef.h>
#include <fmt/format.h>

#include "tessera/dtensor/random/stretches.h"
#include "tessera/gpu_kernels/draw_functions.h"
#include "tessera/gpu_kernels/interface.h"
#include "tessera/mesh/core/gpu_kernels.h"
#include "tessera/mesh/core/in_memory.h"

namespace tessera::detail {
namespace {

thread_local DrawLog* log_of_this_thread = nullptr;  // the innermost

// Is the draw number of keys that a caller's generator gives; no world's counter reaches it.
constexpr uint64_t kOfGenerator = std::numeric_limits<uint64_t>::max();

// ---- on the host

// Fills the piece with the numbers of `make`, a distribution of gpu_kernels/draw_functions.h.
template <class Make>
void fill(const at::Tensor& host, const DrawnPart& part, DrawKey key, int64_t width, const Make& make) {
  constexpr int64_t kGrain = 1 << 14;
  constexpr uint64_t kPerBlock = Make::kPerBlock;
  auto* const out = host.data_ptr<typename Make::Value>();
  each_stretch(part.sizes, part.tile, width, [&](int64_t global, int64_t local, int64_t count) {
    at::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end;) {
        const auto at = static_cast<uint64_t>(global + i);
        const PhiloxWords words = gpu::words_of(key.seed, key.draw, at / kPerBlock);
        for (uint64_t lane = at % kPerBlock; lane < kPerBlock && i < end; ++lane, ++i) {
          out[local + i] = make(words, lane, local + i);
        }
      }
    });
  });
}

void refuse_captured(DrawKey key) {
  if (key.base == nullptr) return;
  throw std::runtime_error(
      "CapturedDraws: this draw would be made on the host, which a CUDA graph cannot repeat; it needs "
      "libtessera_gpu.so, and an operator and a dtype that it draws");
}

// Says whether the memory of `t` has its values in their order.
bool is_row_major(const at::Tensor& t) { return t.is_contiguous() && is_in_memory(t); }

// Calls make_all with a row-major tensor in host memory, and copies the result to `out` where that is not `out` itself.
// The draws below look at the dtype before that, so that a rank which draws nothing throws as the others do.
void on_host(const at::Tensor& out, DrawKey key, c10::function_ref<void(const at::Tensor&)> make_all) {
  if (out.numel() == 0) return;
  refuse_captured(key);
  const bool direct = out.is_cpu() && is_row_major(out);
  const at::Tensor host = direct ? out : at::empty(out.sizes(), at::TensorOptions(out.scalar_type()));
  make_all(host);
  if (!direct) out.copy_(host);
}

// Does the same for floating-point dtypes; a complex number is passed as two real ones.
void on_host_real(const at::Tensor& out, DrawKey key,
                  c10::function_ref<void(const at::Tensor&, int64_t width)> make_all) {
  on_host(out, key, [&](const at::Tensor& host) {
    if (host.is_complex()) {
      make_all(at::view_as_real(host), 2);
    } else {
      make_all(host, 1);
    }
  });
}

// ---- on a GPU

// Returns the kernels' name of a dtype, or nullopt where they cannot draw it.
std::optional<gpu::Number> drawn_number(at::ScalarType dtype, gpu::Kind kind) {
  const bool any = kind == gpu::Kind::kIntegers || kind == gpu::Kind::kBernoulli;
  return any ? number_of(dtype) : floating_number_of(dtype);
}

// Gives the draw to the GPU that has `out`, to the current stream, and returns true. Returns false, and does nothing,
// where the host must draw: on other devices, without the kernels, and where they cannot draw the dtype or the piece.
bool on_gpu(const at::Tensor& out, const DrawnPart& part, DrawKey key, gpu::Draw request) {
  if (!out.is_cuda() || out.numel() == 0) return false;
  const bool complex = out.is_complex();
  if (complex && request.kind != gpu::Kind::kUniform && request.kind != gpu::Kind::kNormal) return false;
  const gpu::Kernels* const kernels = kernels_for(out);
  const std::optional<gpu::Number> number = drawn_number(c10::toRealValueType(out.scalar_type()), request.kind);
  const int64_t width = complex ? 2 : 1;
  if (kernels == nullptr || !number || !describe_piece(part.sizes, part.tile, width, request.piece)) return false;
  const bool direct = is_row_major(out);
  const at::Tensor drawn = direct ? out : at::empty(out.sizes(), out.options());
  request.number = *number;
  request.out = drawn.data_ptr();
  request.count = out.numel() * width;
  request.seed = key.seed;
  request.draw = key.draw;
  request.base = key.base;
  start_kernel("draw", drawn, [&](void* stream) { return kernels->draw(&request, stream); });
  if (!direct) out.copy_(drawn);
  return true;
}

}  // namespace

DrawLog::DrawLog() : outer_(log_of_this_thread) { log_of_this_thread = this; }
DrawLog::~DrawLog() { log_of_this_thread = outer_; }

void DrawLog::note(World& world) {
  const bool known = std::ranges::any_of(entries_, [&](const Entry& each) { return each.world.get() == &world; });
  if (!known) entries_.push_back({.world = world.shared_from_this(), .before = world.random_state()});
  if (outer_ != nullptr) outer_->note(world);
}

DrawKey next_draw(World& world, const std::optional<at::Generator>& user) {
  if (log_of_this_thread != nullptr) log_of_this_thread->note(world);
  RandomState& state = world.random_state();
  if (!user || !user->defined()) return {.seed = state.seed, .draw = state.counter++, .base = state.base};
  if (state.base != nullptr) {
    throw std::runtime_error(
        "CapturedDraws: a draw from a caller's generator would be the same in every replay; leave the generator out");
  }
  const at::Tensor word = at::empty({}, at::TensorOptions(at::kLong).device(user->device()));
  word.random_(std::numeric_limits<int64_t>::min(), std::nullopt, user);
  return {.seed = static_cast<uint64_t>(word.item<int64_t>()), .draw = kOfGenerator};
}

// Uses a block that no element has.
uint64_t seed_of(DrawKey key) {
  refuse_captured(key);
  return gpu::word64(gpu::words_of(key.seed, key.draw, std::numeric_limits<uint64_t>::max()), 0);
}

void draw_uniform(const at::Tensor& out, const Spec& spec, DrawKey key, double from, double to) {
  if (on_gpu(out, spec, key, {.kind = gpu::Kind::kUniform, .a = from, .b = to})) return;
  const at::ScalarType real = c10::toRealValueType(out.scalar_type());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, real, "draw_uniform", [&] {
    on_host_real(out, key, [&](const at::Tensor& host, int64_t width) {
      fill(host, spec, key, width, gpu::Uniform<scalar_t>(from, to));
    });
  });
}

void draw_normal(const at::Tensor& out, const Spec& spec, DrawKey key, double mean, double deviation) {
  // The real and the imaginary part share the variance.
  const double scale = out.is_complex() ? deviation / std::numbers::sqrt2 : deviation;
  if (on_gpu(out, spec, key, {.kind = gpu::Kind::kNormal, .a = mean, .b = scale})) return;
  const at::ScalarType real = c10::toRealValueType(out.scalar_type());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, real, "draw_normal", [&] {
    on_host_real(out, key, [&](const at::Tensor& host, int64_t width) {
      fill(host, spec, key, width, gpu::Normal<scalar_t>(mean, scale));
    });
  });
}

void draw_exponential(const at::Tensor& out, const Spec& spec, DrawKey key, double rate) {
  if (on_gpu(out, spec, key, {.kind = gpu::Kind::kExponential, .a = rate})) return;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "draw_exponential", [&] {
    on_host(out, key, [&](const at::Tensor& host) { fill(host, spec, key, 1, gpu::Exponential<scalar_t>(rate)); });
  });
}

void draw_integers(const at::Tensor& out, const Spec& spec, DrawKey key, int64_t first, uint64_t count) {
  if (on_gpu(out, spec, key, {.kind = gpu::Kind::kIntegers, .first = first, .range = count})) return;
  AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, out.scalar_type(), "draw_integers", [&] {
    on_host(out, key, [&](const at::Tensor& host) { fill(host, spec, key, 1, gpu::Integers<scalar_t>(first, count)); });
  });
}

void draw_bernoulli(const at::Tensor& out, const DrawnPart& part, DrawKey key, double probability) {
  if (on_gpu(out, part, key, {.kind = gpu::Kind::kBernoulli, .a = probability})) return;
  AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, out.scalar_type(), "draw_bernoulli", [&] {
    on_host(out, key, [&](const at::Tensor& host) { fill(host, part, key, 1, gpu::Bernoulli<scalar_t>(probability)); });
  });
}

// Draws on the host, since a GPU could not say in time that a probability is none.
void draw_bernoulli(const at::Tensor& out, const Spec& spec, DrawKey key, const at::Tensor& probability) {
  AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, out.scalar_type(), "draw_bernoulli", [&] {
    on_host(out, key, [&](const at::Tensor& host) {
      const at::Tensor wanted =
          probability.expand(out.sizes()).to(at::TensorOptions(at::kDouble).device(at::kCPU)).contiguous();
      const double* const p = wanted.const_data_ptr<double>();
      for (int64_t i = 0; i < wanted.numel(); ++i) {
        if (p[i] >= 0 && p[i] <= 1) continue;
        throw std::out_of_range(fmt::format("bernoulli: {} is no probability; give numbers from 0 to 1", p[i]));
      }
      fill(host, spec, key, 1, gpu::BernoulliEach<scalar_t>(p));
    });
  });
}

double scale_of(double kept) { return kept == 0 ? 0 : 1 / kept; }

std::optional<gpu::Dropout> dropout_request(const at::Tensor& input, const Dropped& to, const Spec& spec, DrawKey key,
                                            double kept) {
  gpu::Dropout request{};
  const std::optional<gpu::Number> number = floating_number_of(input.scalar_type());
  if (!number || !is_row_major(input) || !describe_piece(spec.sizes, spec.tile, 1, request.piece)) return std::nullopt;
  request.number = *number;
  request.in = input.const_data_ptr();
  request.out = to.result.mutable_data_ptr();
  request.mask = to.mask.mutable_data_ptr<bool>();
  request.count = input.numel();
  request.seed = key.seed;
  request.draw = key.draw;
  request.base = key.base;
  request.kept = kept;
  request.scale = scale_of(kept);
  return request;
}

Dropped draw_dropout(const at::Tensor& input, const Spec& spec, DrawKey key, double kept) {
  Dropped out{.result = {}, .mask = at::empty_like(input, input.options().dtype(at::kBool))};
  const gpu::Kernels* const kernels = input.numel() > 0 ? kernels_for(input) : nullptr;
  if (kernels != nullptr && is_row_major(input)) {
    out.result = at::empty_like(input);
    if (const std::optional<gpu::Dropout> request = dropout_request(input, out, spec, key, kept)) {
      start_kernel("dropout", input, [&](void* stream) { return kernels->dropout(&*request, stream); });
      return out;
    }
  }
  draw_bernoulli(out.mask, spec, key, kept);
  // On the CPU mul_ with a number would round the number to 16 bits; a GPU does not.
  out.result = input.mul(out.mask).mul_(at::native::wrapped_scalar_tensor(scale_of(kept)));
  return out;
}

}  // namespace tessera::detail
