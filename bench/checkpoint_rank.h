#pragma once

#include <string>

namespace tessera::bench {

// Executes the commands of checkpoint.cpp on one of our ranks:
//   case LAYOUT MEGABYTES   ->   BYTES of the state that this rank writes
//   save FOLDER             ->   microseconds of a save that ends when the state is in its folder
//   load FOLDER             ->   microseconds of a load of the newest state
//   start FOLDER            ->   microseconds until an asynchronous save returns; the same saver for all starts
//   fresh FOLDER            ->   the same with a new saver
//   wait -                  ->   microseconds until the asynchronous save has ended
//   copy touched|fresh      ->   microseconds of memcpy of as many bytes, tensor by tensor, into memory of that kind
//   steps N                 ->   microseconds of N steps of the optimizer
//   held -                  ->   bytes of tensors that the rank holds
//   peak FOLDER             ->   the most bytes that it holds during an asynchronous save
// All ranks begin each of them together.
void serve_checkpoint(const std::string& socket);

}  // namespace tessera::bench
