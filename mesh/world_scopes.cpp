// Implements to which operator and module a collective belongs, and that one thread at a time communicates.
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include <fmt/format.h>

#include "tessera/mesh/world.h"
#include "tessera/mesh/world_state.h"

namespace tessera {
namespace {

const std::string kNoPath = "-";

// This is the start of a list: each Scope points to the one that its thread entered before it.
thread_local const World::Scope* innermost_scope = nullptr;

}  // namespace

World::Scope::Scope(World& world, const char* op, const std::string* path)
    : world_(world),
      outer_(innermost_scope),
      op_(op != nullptr ? op : world.current_op()),
      path_(path != nullptr ? path : &world.current_path()) {
  innermost_scope = this;
}

World::Scope::~Scope() { innermost_scope = outer_; }

const World::Scope* World::Scope::of(const World& world) {
  const Scope* scope = innermost_scope;
  while (scope != nullptr && &scope->world_ != &world) scope = scope->outer_;
  return scope;
}

const char* World::current_op() const {
  const Scope* const scope = Scope::of(*this);
  return scope != nullptr ? scope->op_ : "";
}

const std::string& World::current_path() const {
  const Scope* const scope = Scope::of(*this);
  return scope != nullptr ? *scope->path_ : kNoPath;
}

World::Exclusive::Exclusive(World& world) : world_(world) {
  if (world_.impl_->has_peers() && world_.impl_->is_forked()) {
    throw std::runtime_error(fmt::format(
        "rank {} has forked this process after it had made its World, and only the parent may communicate: fork before "
        "the World is made, or let the child run another program (exec)",
        world_.rank()));
  }
  const std::thread::id me = std::this_thread::get_id();
  std::thread::id nobody{};
  if (world_.impl_->owner.load(std::memory_order_relaxed) != me &&
      !world_.impl_->owner.compare_exchange_strong(nobody, me)) {
    const char* const op = world_.impl_->owner_op.load();
    const std::string text = fmt::format(
        "two threads communicate at once, one of them in {}; all ranks must issue collectives in the same order, so "
        "communicate from one thread, or give each thread a world of its own",
        *op == '\0' ? "a collective" : op);
    const char* const here = world_.current_op();
    world_.fail(*here == '\0' ? "a collective" : here, text);
    throw std::runtime_error(fmt::format("rank {}: {}", world_.rank(), text));
  }
  world_.impl_->progress = std::chrono::steady_clock::now();
  if (world_.impl_->depth++ == 0) world_.impl_->owner_op = world_.current_op();
}

// The next owner is busy before it has set `progress`, and its call must not seem to last since then.
World::Exclusive::~Exclusive() {
  if (--world_.impl_->depth > 0) return;
  world_.impl_->progress = std::chrono::steady_clock::time_point::max();
  world_.impl_->owner.store(std::thread::id{});
}

}  // namespace tessera
