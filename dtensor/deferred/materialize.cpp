#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <string>

#include <ATen/ops/empty.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/core/implicit_communication.h"
#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/core/tensor_lists.h"
#include "tessera/dtensor/deferred/deferred.h"
#include "tessera/dtensor/random/draw_guard.h"
#include "tessera/dtensor/redistribute/route_execution.h"
#include "tessera/mesh/core/in_memory.h"

namespace tessera::detail {
namespace {

// Returns the calls that the values in `memory` depend on, in order.
std::vector<const Recorded*> calls_for(const Tape& tape, const void* memory) {
  std::set<const void*> needed = {memory};
  std::vector<const Recorded*> out;
  for (auto call = tape.calls.rbegin(); call != tape.calls.rend(); ++call) {
    if (std::ranges::none_of(call->touched, [&](const void* touched) { return needed.contains(touched); })) continue;
    for (const Recorded::Input& input : call->inputs) needed.insert(input.elements.memory());
    out.push_back(&*call);
  }
  std::ranges::reverse(out);
  return out;
}

// While it is alive, the world's next random operator draws with `key`.
class DrawAs {
 public:
  DrawAs(World& world, const std::optional<DrawKey>& key) : state_(world.random_state()), saved_(state_) {
    if (key) state_ = {.seed = key->seed, .counter = key->draw};
  }
  ~DrawAs() { state_ = saved_; }
  DrawAs(const DrawAs&) = delete;
  DrawAs& operator=(const DrawAs&) = delete;

 private:
  RandomState& state_;
  const RandomState saved_;
};

// Repeats recorded calls on DTensors laid out as the wanted tensor.
class Replay {
 public:
  explicit Replay(const Spec& wanted) : wanted_(wanted), mesh_(wanted.mesh) {}

  void repeat(const Recorded& call) {
    for (const auto& [tensor, version] : call.plain) {
      if (tensor._version() == version) continue;
      throw std::invalid_argument(
          fmt::format("a plain tensor [{}] among its arguments has been written since; give it a clone",
                      fmt::join(tensor.sizes(), ", ")));
    }
    const DrawAs draw(mesh_.world(), call.draw);
    torch::jit::Stack stack = call.args;
    bring_inputs(call, stack);
    if (call.inputs.empty()) {
      stack = {made(call, stack)};
    } else {
      call.op.callBoxed(stack);
    }
    keep_results(call, stack);
  }

  const at::Tensor& value(const Elements& elements) const {
    const auto found = values_.find(elements);
    if (found == values_.end()) throw std::invalid_argument("it views memory that no recorded operator has given it");
    if (found->second.sizes() != at::IntArrayRef(elements.sizes)) {
      throw std::invalid_argument("another tensor of the same elements has been given another shape in place");
    }
    return found->second;
  }

 private:
  // Puts the values of the call's inputs in their places, and the mesh's device, also where the call named none.
  void bring_inputs(const Recorded& call, torch::jit::Stack& stack) const {
    auto next = call.inputs.begin();
    for (std::size_t i = 0; i < stack.size(); ++i) {
      if (stack[i].isDevice() || call.op.schema().arguments()[i].name() == "device") stack[i] = mesh_.device();
      replace_tensors(stack[i], [&](const at::Tensor& t, std::size_t index) {
        if (next == call.inputs.end() || next->arg != i || next->index != index) return t;
        const at::Tensor& found = value((next++)->elements);
        // Other tensors of these elements keep their shape.
        return call.op.hasTag(at::Tag::inplace_view) ? found.detach() : found;
      });
    }
  }

  void keep_results(const Recorded& call, torch::jit::Stack& stack) {
    std::size_t next = 0;
    const auto keep = [&](const at::Tensor& given) {
      const std::optional<Elements>& elements = call.results.at(next++);
      if (!elements) return;
      // `plain.to(other)` and type_as give a plain tensor, which may be `plain` itself.
      const at::Tensor t =
          is_dtensor(given) ? given : wrap(given.to(mesh_.device()).clone(), replicated_spec(mesh_, given));
      refuse_whole(*elements, meta(t).spec->sharded);
      if (t.scalar_type() != elements->dtype) {
        throw std::invalid_argument(fmt::format(
            "the constructor has made {} and the same call makes {} now: the default dtype has changed; call "
            "torch::set_default_dtype before the constructor, or after parallelize_module",
            c10::toString(elements->dtype), c10::toString(t.scalar_type())));
      }
      if (t.sizes() != at::IntArrayRef(elements->sizes)) {
        throw std::invalid_argument(fmt::format(
            "the constructor has made the sizes [{}] without values, and the same call makes [{}] now: they "
            "depend on values; compute the tensor before the guard",
            fmt::join(elements->sizes, ", "), fmt::join(t.sizes(), ", ")));
      }
      values_.insert_or_assign(*elements, t);
    };
    for (at::IValue& result : stack) {
      replace_tensors(result, [&](const at::Tensor& t, std::size_t) {
        keep(t);
        return t;
      });
    }
  }

  bool is_cut() const {
    for (std::size_t i = 0; i < wanted_.placements.size(); ++i) {
      if (wanted_.placements[i].is_shard() && mesh_.size(static_cast<int64_t>(i)) > 1) return true;
    }
    return false;
  }

  // Throws where every rank would hold as many elements as the whole wanted tensor, which is sharded.
  void refuse_whole(const Elements& elements, bool sharded) const {
    if (sharded || !is_cut() || elements.numel() < wanted_.numel()) return;
    throw std::invalid_argument(
        fmt::format("every rank would hold a whole tensor [{}]", fmt::join(elements.sizes, ", ")));
  }

  // Returns the wanted tensor's layout for a tensor of its shape; another tensor of at least as many elements is
  // sharded along its longest dimension.
  Placements layout_for(const Elements& made) const {
    if (made.sizes == wanted_.sizes) return without_partial(wanted_.placements);
    Placements out(wanted_.placements.size(), Replicate());
    if (made.numel() < wanted_.numel() || made.sizes.empty()) return out;
    const auto longest = std::ranges::max_element(made.sizes) - made.sizes.begin();
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (wanted_.placements[i].is_shard()) out[i] = Shard(longest);
    }
    return out;
  }

  // Returns what a call without tensors among its arguments makes.
  at::Tensor made(const Recorded& call, torch::jit::Stack& stack) const {
    const Elements& result = call.results.at(0).value();
    const bool is_dense =
        at::empty_strided(result.sizes, result.strides, at::TensorOptions(c10::kMeta)).is_non_overlapping_and_dense();
    const SpecPtr spec = intern_spec(mesh_, layout_for(result), result.sizes,
                                     is_dense ? result.strides : contiguous_strides(result.sizes), result.dtype);
    const at::TensorOptions options = at::TensorOptions(result.dtype).device(mesh_.device());
    const auto number = [&](const char* name) {
      return stack[static_cast<std::size_t>(call.op.schema().argumentIndexWithName(name).value())].toScalar();
    };
    const auto of = [&](const at::Scalar& value) { return wrap(at::full(spec->local_sizes, value, options), spec); };
    const auto blank = [&] { return wrap(at::empty_strided(spec->local_sizes, dense_strides(*spec), options), spec); };
    const std::string& name = call.op.schema().name();
    if (name == "aten::zeros") return of(0);
    if (name == "aten::ones") return of(1);
    if (name == "aten::full") return of(number("fill_value"));
    if (name == "aten::scalar_tensor") return of(number("s"));
    if (name.starts_with("aten::empty")) return blank();
    if (name == "aten::eye") {
      at::Tensor out = blank();
      return at::eye_out(out, result.sizes[0], result.sizes[1]);
    }
    if (name == "aten::rand") return blank().uniform_(0, 1);
    if (name == "aten::randn") return blank().normal_(0, 1);
    if (name == "aten::normal") return blank().normal_(number("mean").toDouble(), number("std").toDouble());
    if (name == "aten::randint") {
      const bool low = call.op.schema().argumentIndexWithName("low").has_value();
      return blank().random_(low ? number("low").toLong() : 0, number("high").toLong());
    }
    refuse_whole(result, false);
    std::optional<DrawGuard> draw;
    if (call.draw) draw.emplace(mesh_.device(), *call.draw);
    call.op.callBoxed(stack);
    const at::Tensor local = stack.at(0).toTensor();
    return wrap(local, replicated_spec(mesh_, local));
  }

  const Spec& wanted_;
  const DeviceMesh& mesh_;
  std::map<Elements, at::Tensor> values_;
};

// Returns the piece in a row-major storage of its own, not as part of a larger one.
at::Tensor own(const at::Tensor& local) {
  const at::Tensor dense = in_memory(local).contiguous();
  const auto bytes = static_cast<std::size_t>(dense.numel()) * dense.element_size();
  return dense.storage().nbytes() == bytes ? dense : dense.clone();
}

bool has_failed(const World& world) {
  try {
    world.check_alive();
    return false;
  } catch (const std::runtime_error&) {
    return true;
  }
}

// Describes the tensor being made, and turns the errors of its calls into errors that name it.
class Making {
 public:
  Making(const at::Tensor& t, const Spec& spec, const std::string& path)
      : name_(path.empty() ? "a tensor" : path), sizes_(t.sizes().vec()), spec_(spec) {}

  // Runs `part`, the repetition of `op`. What LibTorch or Strict refuses there is the caller's mistake, alike on every
  // rank, unless the job has failed.
  template <class Part>
  void run(const std::string& op, const Part& part) const {
    try {
      part();
    } catch (const c10::Error& error) {
      refuse(op, error.what_without_backtrace());
    } catch (const ImplicitCommunication& error) {
      refuse(op, error.what());
    } catch (const std::invalid_argument& error) {
      refuse(op, error.what());
    } catch (const std::exception& error) {
      throw std::runtime_error(text(op, error.what()));
    }
  }

 private:
  std::string text(const std::string& op, const char* why) const {
    return fmt::format("ShardedInit: {} cannot be carried out for {} [{}] as {} on {}: {}", op, name_,
                       fmt::join(sizes_, ", "), to_string(spec_.placements), spec_.mesh.to_string(), why);
  }

  [[noreturn]] void refuse(const std::string& op, const char* why) const {
    if (has_failed(spec_.mesh.world())) throw std::runtime_error(text(op, why));
    throw std::invalid_argument(
        text(op, why) +
        ". Initialize it by operators that work on pieces (uniform_, normal_, fill_, pointwise ones; "
        "tessera::orthogonal_ and tessera::sparse_ of tessera/dtensor/init.h), leave it Replicate, or initialize it "
        "after parallelize_module");
  }

  const std::string name_;
  const std::vector<int64_t> sizes_;
  const Spec& spec_;
};

}  // namespace

void materialize(const at::Tensor& t, const SpecPtr& spec, const std::string& path) {
  const NotDeferred own_tensors;
  const World::Scope scope(spec->mesh.world(), "ShardedInit", path.empty() ? nullptr : &path);
  const at::NoGradGuard no_grad;
  const Strict strict;
  const ImplicitReplication plain_counts_as_replicated;
  const Elements wanted(t);
  const Making making(t, *spec, path);
  Replay replay(*spec);
  for (const Recorded* call : calls_for(tape_of(t), wanted.memory())) {
    making.run(call->op.schema().name(), [&] { replay.repeat(*call); });
  }
  making.run("a view", [&] {
    const Meta& value = meta(replay.value(wanted));
    convert_in_place(t, own(redistribute_local(value.local(), *value.spec, spec->placements)), spec);
  });
}

}  // namespace tessera::detail
