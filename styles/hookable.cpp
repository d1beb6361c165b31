#include "tessera/styles/hookable.h"

#include <stdexcept>

#include <fmt/format.h>

namespace tessera {

int64_t Hookable::register_forward_pre_hook(PreHook hook, bool throws_alike) {
  pre_hooks_.entries.push_back(std::make_shared<Entry<PreHook>>(Entry<PreHook>{next_, throws_alike, std::move(hook)}));
  return next_++;
}

int64_t Hookable::register_forward_hook(Hook hook, bool throws_alike) {
  hooks_.entries.push_back(std::make_shared<Entry<Hook>>(Entry<Hook>{next_, throws_alike, std::move(hook)}));
  return next_++;
}

void Hookable::remove_hook(int64_t id) {
  const auto has_id = [id](const auto& entry) { return entry->id == id; };
  if (std::erase_if(pre_hooks_.entries, has_id) + std::erase_if(hooks_.entries, has_id) == 0) {
    throw std::invalid_argument(
        fmt::format("remove_hook: there is no hook {}; give a number that register_forward_pre_hook or "
                    "register_forward_hook returned",
                    id));
  }
}

void Hookable::set_place(std::string path, std::shared_ptr<World> world) {
  path_ = std::move(path);
  world_ = std::move(world);
}

void Hookable::run_pre_hooks(std::vector<at::Tensor>& inputs) const {
  const std::size_t count = inputs.size();
  const auto running = pre_hooks_.entries;
  for (const auto& entry : running) {
    guard(entry->throws_alike, "forward pre-hook", [&] {
      entry->hook(inputs);
      check_count("arguments", count, inputs.size());
    });
  }
}

void Hookable::run_hooks(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs) const {
  const std::size_t count = outputs.size();
  const auto running = hooks_.entries;
  for (const auto& entry : running) {
    guard(entry->throws_alike, "forward hook", [&] {
      entry->hook(inputs, outputs);
      check_count("results", count, outputs.size());
    });
  }
}

void Hookable::guard(bool throws_alike, const char* what, const std::function<void()>& call) const {
  if (throws_alike || world_ == nullptr) return call();
  world_->guard(fmt::format("{} of {}", what, path_.empty() ? "the root module" : path_), call);
}

void Hookable::check_count(const char* what, std::size_t before, std::size_t after) const {
  if (before == after) return;
  throw std::invalid_argument(fmt::format(
      "hook of {}: it was given {} tensors among forward's {} and left {}; replace tensors, but keep their number",
      path_.empty() ? "the root module" : path_, before, what, after));
}

}  // namespace tessera
