#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/world.h"

namespace tessera {

// Is the base class of a module whose forward can be hooked: Hooked<BlockImpl> (hooks.h) derives from it and from
// BlockImpl.
//
// A hook sees all tensors among the arguments (or results) in order: an at::Tensor, an optional one (where it is
// absent, an undefined tensor), those of a vector, and of a pair or tuple of these. It does not see tensors in other
// types, such as a struct of your own. It may replace tensors, but must not change their number. Hooks run in the order
// of registration. A hook may remove hooks, itself too, and add some: the next call runs those that are there then. A
// hook that throws fails the whole job with its text (World::guard), because the other ranks may not have thrown.
class Hookable {
 public:
  using PreHook = std::function<void(std::vector<at::Tensor>& inputs)>;
  using Hook = std::function<void(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs)>;

  virtual ~Hookable() = default;

  // Both return the id that remove_hook takes. A hook that changes the number of tensors makes the call throw
  // std::invalid_argument. `throws_alike` says that the hook throws on all ranks or on none; an exception in it then
  // does not fail the job.
  int64_t register_forward_pre_hook(PreHook hook, bool throws_alike = false);
  int64_t register_forward_hook(Hook hook, bool throws_alike = false);
  // Throws std::invalid_argument when there is no such hook.
  void remove_hook(int64_t id);
  std::size_t hooks() const { return pre_hooks_.entries.size() + hooks_.entries.size(); }
  bool has_pre_hooks() const { return !pre_hooks_.entries.empty(); }

  // Returns the module's path under the root of parallelize_module, "the root module" for the root itself, and ""
  // before that call.
  const std::string& hook_path() const { return path_; }

  // Is called by the library: sets the path that CommCounter names for collectives inside forward, and the World.
  void set_place(std::string path, std::shared_ptr<World> world);

 protected:
  World* hook_world() const { return world_.get(); }
  // Returns hook_path(), or "(root)" before parallelize_module.
  std::string_view recorded_name() const { return path_.empty() ? "(root)" : std::string_view(path_); }
  void run_pre_hooks(std::vector<at::Tensor>& inputs) const;
  void run_hooks(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs) const;

 private:
  template <class F>
  struct Entry {
    int64_t id;
    bool throws_alike;
    F hook;
  };
  // Holds entries that stay where they are while hooks are added and removed. A copy has entries of its own, as the
  // clone of a module has hooks of its own.
  template <class F>
  struct List {
    List() = default;
    List(const List& other) {
      for (const auto& entry : other.entries) entries.push_back(std::make_shared<Entry<F>>(*entry));
    }
    List(List&&) noexcept = default;
    List& operator=(List other) noexcept {
      entries.swap(other.entries);
      return *this;
    }
    ~List() = default;

    std::vector<std::shared_ptr<Entry<F>>> entries;
  };

  void guard(bool throws_alike, const char* what, const std::function<void()>& call) const;
  void check_count(const char* what, std::size_t before, std::size_t after) const;

  int64_t next_ = 0;
  List<PreHook> pre_hooks_;
  List<Hook> hooks_;
  std::string path_;
  std::shared_ptr<World> world_;
};

}  // namespace tessera
