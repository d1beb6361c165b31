#include "tessera/dtensor/modes.h"

namespace tessera {
namespace {

// Guards nest on one thread, as at::NoGradGuard does.
thread_local bool strict = false;
thread_local bool implicit_replication = false;

}  // namespace

Strict::Strict(bool enabled) : previous_(strict) { strict = enabled; }
Strict::~Strict() { strict = previous_; }
bool Strict::enabled() { return strict; }

ImplicitReplication::ImplicitReplication(bool enabled) : previous_(implicit_replication) { implicit_replication = enabled; }
ImplicitReplication::~ImplicitReplication() { implicit_replication = previous_; }
bool ImplicitReplication::enabled() { return implicit_replication; }

}  // namespace tessera
