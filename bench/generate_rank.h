#pragma once

#include <string>

namespace tessera::bench {

// Runs one rank, or the one process without Tessera: executes the commands that tools/bench generate sends over
// `socket`, until that ends. The model's values are the same everywhere.
//
//   case HIDDEN LAYERS HEADS SEQUENCE   ->   ok
//   text WAY                            ->   the first likeliest tokens after a prompt
//   ranks CALLS, plain CALLS            ->   microseconds per token. Positions run from the middle of SEQUENCE to its
//                                            end, again and again, so the cache is three quarters full in the mean
void serve_generate(const std::string& socket);

}  // namespace tessera::bench
