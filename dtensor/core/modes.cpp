#include "tessera/dtensor/core/modes.h"

#include <fmt/format.h>

#include "tessera/dtensor/core/implicit_communication.h"
#include "tessera/mesh/core/logger.h"

namespace tessera {
namespace {

// Guards nest on one thread, as at::NoGradGuard does.
thread_local bool strict = false;
thread_local bool implicit_replication = false;
thread_local WarnImplicit* warning = nullptr;

}  // namespace

Strict::Strict(bool enabled) : previous_(strict) { strict = enabled; }
Strict::~Strict() { strict = previous_; }
bool Strict::enabled() { return strict; }

WarnImplicit::WarnImplicit(bool enabled) : previous_(warning), enabled_(enabled) { warning = this; }
WarnImplicit::~WarnImplicit() { warning = previous_; }
bool WarnImplicit::enabled() { return warning != nullptr && warning->enabled_; }
void WarnImplicit::warn(const std::string& text) {
  if (enabled() && warning->said_.insert(text).second) logger().warn(text);
}

ImplicitReplication::ImplicitReplication(bool enabled) : previous_(implicit_replication) {
  implicit_replication = enabled;
}
ImplicitReplication::~ImplicitReplication() { implicit_replication = previous_; }
bool ImplicitReplication::enabled() { return implicit_replication; }

void detail::implicit_communication(const std::string& op, const std::function<std::string()>& moves) {
  if (Strict::enabled()) {
    throw ImplicitCommunication(
        fmt::format("{}: would communicate on its own, which Strict forbids{}. Redistribute the inputs explicitly, or "
                    "change the layouts",
                    op, moves()));
  }
  if (WarnImplicit::enabled()) WarnImplicit::warn(fmt::format("{}: communicates on its own{}", op, moves()));
}

}  // namespace tessera
