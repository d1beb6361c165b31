#include "tessera/mesh/core/deferred_tensor.h"

#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera::detail {

std::string_view deferred_way_out() {
  return c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::DeferredInit)
             ? "the guard is still alive on this thread: end its scope before anything is computed, and make the "
               "tensor after it"
             : "give the module that holds it to parallelize_module first (a tensor that is no parameter or buffer of "
               "it never gets any), or go on under the guard";
}

void refuse_deferred(std::string_view who, const at::Tensor& t) {
  if (!is_deferred(t)) return;
  throw std::invalid_argument(fmt::format("{}: a tensor [{}] that was made under ShardedInit has no values yet; {}",
                                          who, fmt::join(t.sizes(), ", "), deferred_way_out()));
}

}  // namespace tessera::detail
