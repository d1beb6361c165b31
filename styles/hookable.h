#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/world.h"

namespace tessera {

// A module whose forward can be hooked: what Hooked<BlockImpl> (hooks.h) derives from beside BlockImpl.
//
// A hook sees the tensors among the arguments (or results) in order, an absent one as an undefined tensor, and may
// replace them; it must not change their number. Hooks run in the order of registration. One that throws fails the
// whole job with its text (World::guard), because the other ranks may not have thrown.
class Hookable {
 public:
  using PreHook = std::function<void(std::vector<at::Tensor>& inputs)>;
  using Hook = std::function<void(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs)>;

  virtual ~Hookable() = default;

  // Return a number by which remove_hook takes it out again. `throws_alike`: an exception in it comes on every rank or
  // on none, so that it need not fail the job.
  int64_t register_forward_pre_hook(PreHook hook, bool throws_alike = false);
  int64_t register_forward_hook(Hook hook, bool throws_alike = false);
  // Throws std::invalid_argument when there is no such hook.
  void remove_hook(int64_t id);
  std::size_t hooks() const { return pre_hooks_.size() + hooks_.size(); }

  // Where the module stands under the root that was parallelized, and its World; before that, "" and none.
  const std::string& hook_path() const { return path_; }

  // For the library: the path that collectives inside forward are charged to.
  void set_place(std::string path, std::shared_ptr<World> world);

 protected:
  World* hook_world() const { return world_.get(); }
  void run_pre_hooks(std::vector<at::Tensor>& inputs) const;
  void run_hooks(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs) const;

 private:
  template <class F>
  struct Entry {
    int64_t id;
    bool throws_alike;
    F hook;
  };

  void guard(bool throws_alike, const char* what, const std::function<void()>& call) const;
  void check_count(const char* what, std::size_t before, std::size_t after) const;

  int64_t next_ = 0;
  std::vector<Entry<PreHook>> pre_hooks_;
  std::vector<Entry<Hook>> hooks_;
  std::string path_;
  std::shared_ptr<World> world_;
};

}  // namespace tessera
