#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/mesh/backends/collective_arguments.h"
#include "tessera/mesh/core/stream_point.h"

namespace tessera {

// Lets the ranks of one group, which are threads, run collectives and exchange messages. Each rank's n-th collective
// joins the n-th round; the rank that joins last executes the round for all and wakes them, so that a rank sleeps at
// most once per collective. A send waits for its receive, or a receive for its send, in the same way.
//
// Work on a GPU is queued, so "done" means that it has been queued: the thread that executes a round makes its stream
// wait for what each rank had queued when it joined, and wait() makes a rank's stream wait for the round.
//
// Invariants:
//   - All shared state is accessed under the mutex, or by the one thread that executes a round between two acquisitions
//     of it.
//   - A rank is a position in the group, 0 to size - 1; global ranks occur only in texts.
class Rendezvous {
 public:
  // An Event is a round or a message, done or not.
  class Event;
  using EventPtr = std::shared_ptr<Event>;

  // All buffers are on `device`.
  Rendezvous(std::vector<int64_t> ranks, c10::Device device);

  // None of these waits for another rank. wait() throws the errors: bad arguments, a closed rendezvous, a rank that has
  // left.
  EventPtr join(int rank, CollectiveArguments arguments);
  EventPtr send(int from, int to, int tag, Buffer buffer);
  EventPtr receive(int at, int from, int tag, Buffer buffer);

  bool is_done(const Event& event) const;
  bool is_failed(const Event& event) const;
  // Waits until the event is done. Throws MismatchError when ranks disagree, WaitError after `timeout` and when a rank
  // that must join has left, std::runtime_error on a reduction that ATen refuses and in a closed rendezvous. A rank
  // whose wait times out ends the event for the other ranks too.
  void wait(const EventPtr& event, std::chrono::milliseconds timeout);

  // Ends every event that waits for a rank, and every later event, with an error.
  void close();
  // Ends every event that waits for `rank` to join, with an error.
  void leave(int rank);

 private:
  struct Round;
  struct Message;
  struct Box {  // at most one of the two is not empty
    std::deque<std::shared_ptr<Message>> sent;
    std::deque<std::shared_ptr<Message>> expected;
  };
  enum class Half { kSend, kReceive };
  using Address = std::tuple<int, int, int>;  // from, to, tag

  EventPtr post(const Address& address, Half half, Buffer buffer);
  void run(Round& round);
  void deliver(Message& sent, Message& expected);
  void give_up(Event& event, std::chrono::milliseconds after);
  void end_if_left(Round& round);
  // Call it with the mutex held. `raise` throws the error that wait() shall throw; nullptr means success.
  void finish(Event& event, std::function<void()> raise);
  std::vector<int64_t> missing(const Round& round) const;
  int64_t job_rank(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  std::string text_of(const Address& address, Half half) const;

  const std::vector<int64_t> ranks_;
  const c10::Device device_;
  mutable std::mutex mutex_;
  std::vector<uint64_t> next_;  // the number of the round that each rank joins next
  std::deque<std::shared_ptr<Round>> rounds_;
  uint64_t first_ = 0;  // the number of rounds_.front()
  std::map<Address, Box> boxes_;
  std::vector<bool> left_;
  bool closed_ = false;
};

}  // namespace tessera
