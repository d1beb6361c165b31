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

namespace tessera {

// Where the threads of one group come together. Each rank's n-th collective joins the n-th round; the rank that comes
// last carries the round out for all and wakes them, so that a rank sleeps at most once. A message waits for its other
// half in the same way.
//
// All that ranks share is written and read under the mutex, or by the one thread that carries a round out between two
// acquisitions of it. A rank is a place in the group, 0 to size - 1; ranks of the job are in texts alone.
class Rendezvous {
 public:
  // A round or a message that is not done yet.
  class Event;
  using EventPtr = std::shared_ptr<Event>;

  explicit Rendezvous(std::vector<int64_t> ranks);

  // None of these waits for another rank; bad arguments, a closed rendezvous and the like are told by wait().
  EventPtr join(int rank, CollectiveArguments arguments);
  EventPtr send(int from, int to, int tag, Buffer buffer);
  EventPtr receive(int at, int from, int tag, Buffer buffer);

  bool is_done(const Event& event) const;
  bool is_failed(const Event& event) const;
  // Returns when the event is done. Throws MismatchError when ranks disagree, WaitError after `timeout` and when a rank
  // that must come has left, std::runtime_error on a reduction that ATen refuses and in a closed rendezvous. A rank
  // that gives up waiting ends the event for the others too.
  void wait(const EventPtr& event, std::chrono::milliseconds timeout);

  // Ends every event that waits for a rank, and all later ones.
  void close();
  // Ends every event that waits for this rank to come.
  void leave(int rank);

 private:
  struct Round;
  struct Message;
  struct Box {  // at most one of the two holds messages
    std::deque<std::shared_ptr<Message>> sent;
    std::deque<std::shared_ptr<Message>> awaited;
  };
  enum class Half { kSend, kReceive };
  using Address = std::tuple<int, int, int>;  // from, to, tag

  EventPtr post(const Address& address, Half half, Buffer buffer);
  void run(Round& round);
  void deliver(Message& sent, Message& awaited);
  void give_up(Event& event, std::chrono::milliseconds after);
  void end_if_left(Round& round);
  // With the mutex held. `raise` throws what wait() is to throw; nullptr: the event went well.
  void finish(Event& event, std::function<void()> raise);
  std::vector<int64_t> missing(const Round& round) const;
  int64_t job_rank(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  std::string text_of(const Address& address, Half half) const;

  const std::vector<int64_t> ranks_;
  mutable std::mutex mutex_;
  std::vector<uint64_t> next_;  // round of each rank
  std::deque<std::shared_ptr<Round>> rounds_;
  uint64_t first_ = 0;  // number of rounds_.front()
  std::map<Address, Box> boxes_;
  std::vector<bool> left_;
  bool closed_ = false;
};

}  // namespace tessera
