#pragma once

#include <exception>
#include <stdexcept>

#include "tessera/mesh/failure.h"
#include "tessera/mesh/world.h"

namespace tessera {

// Fails the job with the exception that is being handled, as World::guard does, and throws it on.
[[noreturn]] inline void rethrow_failing(World& world, const char* where) {
  world.guard(where, [] { throw; });  // rethrows the current exception inside guard
  throw;
}

// Throws the exception that is being handled on. Where it says what this rank or its host lacks, such as memory
// (is_own_error), it fails the job first.
[[noreturn]] inline void rethrow_failing_if_own(World& world, const char* where) {
  try {
    throw;
  } catch (const std::exception& error) {
    if (is_own_error(error)) rethrow_failing(world, where);
    throw;
  }
}

// Returns what `body` returns. An exception in it, such as a lack of memory or an error of a user's code, may be one of
// this rank alone: it fails the job, since the other ranks would wait for this one, and is thrown on. World::guard does
// that too; this function costs nothing where nothing is thrown.
template <typename Body>
auto failing(World& world, const char* where, const Body& body) {
  try {
    return body();
  } catch (...) {
    rethrow_failing(world, where);
  }
}

// Does the same for an error that says what this rank or its host lacks, and throws others on: of those the other ranks
// know, or they throw the same.
template <typename Body>
auto failing_if_own(World& world, const char* where, const Body& body) {
  try {
    return body();
  } catch (...) {
    rethrow_failing_if_own(world, where);
  }
}

// Does the same as failing() for a body that refuses what it cannot do by std::invalid_argument on every rank alike:
// that is thrown on, and fails nothing.
template <typename Body>
auto failing_unless_refused(World& world, const char* where, const Body& body) {
  try {
    return body();
  } catch (const std::invalid_argument&) {
    throw;
  } catch (...) {
    rethrow_failing(world, where);
  }
}

}  // namespace tessera
