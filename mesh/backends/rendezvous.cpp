#include "tessera/mesh/backends/rendezvous.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <stdexcept>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/backends/backend_group.h"
#include "tessera/mesh/core/error_text.h"
#include "tessera/mesh/core/mismatch.h"

namespace tessera {
namespace {

// A wait yields this many times before it sleeps: if the other ranks join soon, that is cheaper than being woken.
constexpr int kYields = 20;

// Throws the error that ended an event. Each thread that waited throws its own copy.
using Raise = std::function<void()>;

void closed() { throw std::runtime_error("the group was closed"); }

Raise has_left(const std::vector<int64_t>& ranks) {
  const std::string text =
      fmt::format("ranks [{}] have left the group: the body of such a rank has returned, or its World is gone",
                  fmt::join(ranks, ", "));
  return [text, ranks] { throw WaitError(WaitError::Cause::kLeft, text, ranks); };
}

// A rank whose wait failed may drop its tensors before the work on them is done.
void keep(const std::vector<CollectiveArguments>& arguments, const std::vector<StreamPoint>& joined) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    for (const auto* buffers : {&arguments[i].give, &arguments[i].take}) {
      for (const Buffer& buffer : *buffers) joined[i].keep(buffer.tensor);
    }
  }
}

// Runs `body` and returns a function that throws its error again, or nullptr. All that may throw once an event is
// running belongs into `body`: ranks wait for the end of that event without a limit.
template <typename Body>
Raise error_of(const Body& body) {
  try {
    body();
    return nullptr;
  } catch (const MismatchError& error) {
    return [text = std::string(error.what())] { throw MismatchError(text); };
  } catch (const std::exception& error) {
    return [text = error_text(error)] { throw std::runtime_error(text); };
  }
}

}  // namespace

class Rendezvous::Event {
 public:
  virtual ~Event() = default;
  std::atomic<bool> done{false};
  // The members below are accessed under the mutex of the rendezvous.
  bool running = false;         // all ranks have joined, so it ends soon in any case
  std::function<void()> raise;  // throws its error; nullptr if it has none
  StreamPoint moved;            // where the work that moves its data has been queued
  std::condition_variable finished;
};

struct Rendezvous::Round : Rendezvous::Event {
  std::vector<CollectiveArguments> arguments;
  std::vector<StreamPoint> joined;  // what each rank had queued before
  std::vector<bool> came;
  std::size_t count = 0;
  uint64_t number = 0;
};

struct Rendezvous::Message : Rendezvous::Event {
  Buffer buffer;
  StreamPoint joined;
  Address address;
  Half half = Half::kSend;
};

Rendezvous::Rendezvous(std::vector<int64_t> ranks, c10::Device device)
    : ranks_(std::move(ranks)), device_(device), next_(ranks_.size(), 0), left_(ranks_.size(), false) {}

Rendezvous::EventPtr Rendezvous::join(int rank, CollectiveArguments arguments) {
  const auto place = static_cast<std::size_t>(rank);
  const StreamPoint joined = StreamPoint::here(device_);
  std::shared_ptr<Round> round;
  {
    const std::lock_guard lock(mutex_);
    const uint64_t number = next_[place]++;
    while (first_ + rounds_.size() <= number) {
      rounds_.push_back(std::make_shared<Round>());
      rounds_.back()->arguments.resize(ranks_.size());
      rounds_.back()->joined.resize(ranks_.size());
      rounds_.back()->came.resize(ranks_.size());
      rounds_.back()->number = first_ + rounds_.size() - 1;
    }
    round = rounds_[static_cast<std::size_t>(number - first_)];
    round->arguments[place] = std::move(arguments);
    round->joined[place] = joined;
    round->came[place] = true;
    if (++round->count == ranks_.size()) {
      // Each rank joins the rounds in order, so this complete round is the first one.
      rounds_.pop_front();
      ++first_;
    }
    if (closed_) finish(*round, closed);
    end_if_left(*round);
    if (round->count < ranks_.size() || round->done) return round;
    round->running = true;
  }
  run(*round);
  return round;
}

void Rendezvous::run(Round& round) {
  StreamPoint moved;
  const Raise raise = error_of([&] {
    if (const std::string difference = mismatch(round.arguments, ranks_); !difference.empty()) {
      throw MismatchError(
          fmt::format("the ranks disagree on collective {} of their group: {}", round.number, difference));
    }
    for (const StreamPoint& joined : round.joined) joined.wait();
    keep(round.arguments, round.joined);
    carry_out(round.arguments);
    moved = StreamPoint::here(device_);
  });
  const std::lock_guard lock(mutex_);
  round.arguments.clear();
  round.moved = moved;
  finish(round, raise);
}

Rendezvous::EventPtr Rendezvous::send(int from, int to, int tag, Buffer buffer) {
  return post({from, to, tag}, Half::kSend, std::move(buffer));
}

Rendezvous::EventPtr Rendezvous::receive(int at, int from, int tag, Buffer buffer) {
  return post({from, at, tag}, Half::kReceive, std::move(buffer));
}

Rendezvous::EventPtr Rendezvous::post(const Address& address, Half half, Buffer buffer) {
  auto message = std::make_shared<Message>();
  message->buffer = std::move(buffer);
  message->joined = StreamPoint::here(device_);
  message->address = address;
  message->half = half;
  std::shared_ptr<Message> other;
  {
    const std::lock_guard lock(mutex_);
    Box& box = boxes_[address];
    auto& waiting = half == Half::kSend ? box.expected : box.sent;
    const int peer = half == Half::kSend ? std::get<1>(address) : std::get<0>(address);
    if (closed_) {
      finish(*message, closed);
    } else if (!waiting.empty()) {
      other = waiting.front();
      waiting.pop_front();
      message->running = other->running = true;
    } else if (left_[static_cast<std::size_t>(peer)]) {
      finish(*message, has_left({job_rank(peer)}));
    } else {
      (half == Half::kSend ? box.sent : box.expected).push_back(message);
    }
  }
  if (other) half == Half::kSend ? deliver(*message, *other) : deliver(*other, *message);
  return message;
}

void Rendezvous::deliver(Message& sent, Message& expected) {
  StreamPoint moved;
  const Raise raise = error_of([&] {
    if (const std::string difference = misfit(sent.buffer, expected.buffer); !difference.empty()) {
      const auto [from, to, tag] = sent.address;
      throw MismatchError(
          fmt::format("rank {} sends rank {} with tag {} {}", job_rank(from), job_rank(to), tag, difference));
    }
    for (const Message* message : {&sent, &expected}) message->joined.wait();
    for (const Message* message : {&sent, &expected}) message->joined.keep(message->buffer.tensor);
    copy_buffer(sent.buffer, expected.buffer);
    moved = StreamPoint::here(device_);
  });
  const std::lock_guard lock(mutex_);
  for (Message* message : {&sent, &expected}) {
    message->buffer = {};
    message->moved = moved;
    finish(*message, raise);
  }
}

bool Rendezvous::is_done(const Event& event) const { return event.done.load(std::memory_order_acquire); }

bool Rendezvous::is_failed(const Event& event) const {
  const std::lock_guard lock(mutex_);
  return event.raise != nullptr;
}

void Rendezvous::wait(const EventPtr& event, std::chrono::milliseconds timeout) {
  for (int i = 0; i < kYields && !is_done(*event); ++i) std::this_thread::yield();
  std::unique_lock lock(mutex_);
  const auto done = [&] { return event->done.load(); };
  if (!event->finished.wait_for(lock, timeout, done)) {
    if (!event->running) give_up(*event, timeout);
    event->finished.wait(lock, done);
  }
  if (event->raise != nullptr) event->raise();
  lock.unlock();
  event->moved.wait();
}

void Rendezvous::give_up(Event& event, std::chrono::milliseconds after) {
  if (const auto* const round = dynamic_cast<const Round*>(&event)) {
    const auto here = std::find(round->came.begin(), round->came.end(), true) - round->came.begin();
    const std::vector<int64_t> ranks = missing(*round);
    const std::string text =
        fmt::format("timed out after {} ms in {}: ranks [{}] did not come", after.count(),
                    to_string(round->arguments[static_cast<std::size_t>(here)]), fmt::join(ranks, ", "));
    finish(event, [text, ranks] { throw WaitError(WaitError::Cause::kTimeout, text, ranks); });
    return;
  }
  auto& message = dynamic_cast<Message&>(event);
  Box& box = boxes_[message.address];
  for (auto* queue : {&box.sent, &box.expected}) {
    std::erase_if(*queue, [&](const auto& held) { return held.get() == &message; });
  }
  const auto [from, to, tag] = message.address;
  const std::string text = fmt::format("timed out after {} ms in {}: the other rank did not come", after.count(),
                                       text_of(message.address, message.half));
  const int64_t other = job_rank(message.half == Half::kSend ? to : from);
  finish(event, [text, other] { throw WaitError(WaitError::Cause::kTimeout, text, {other}); });
}

void Rendezvous::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (const auto& round : rounds_) finish(*round, closed);
  for (const auto& [address, box] : boxes_) {
    for (const auto* queue : {&box.sent, &box.expected}) {
      for (const auto& message : *queue) finish(*message, closed);
    }
  }
  boxes_.clear();
}

void Rendezvous::leave(int rank) {
  const std::lock_guard lock(mutex_);
  left_[static_cast<std::size_t>(rank)] = true;
  for (const auto& round : rounds_) end_if_left(*round);
  for (auto& [address, box] : boxes_) {
    const auto [from, to, tag] = address;
    if (to == rank) {
      for (const auto& message : std::exchange(box.sent, {})) finish(*message, has_left({job_rank(rank)}));
    }
    if (from == rank) {
      for (const auto& message : std::exchange(box.expected, {})) finish(*message, has_left({job_rank(rank)}));
    }
  }
}

void Rendezvous::end_if_left(Round& round) {
  std::vector<int64_t> gone;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (left_[i] && !round.came[i]) gone.push_back(ranks_[i]);
  }
  if (!gone.empty()) finish(round, has_left(gone));
}

void Rendezvous::finish(Event& event, std::function<void()> raise) {
  if (event.done) return;
  event.raise = std::move(raise);
  event.done.store(true, std::memory_order_release);
  event.finished.notify_all();
}

std::vector<int64_t> Rendezvous::missing(const Round& round) const {
  std::vector<int64_t> ranks;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (!round.came[i]) ranks.push_back(ranks_[i]);
  }
  return ranks;
}

std::string Rendezvous::text_of(const Address& address, Half half) const {
  const auto [from, to, tag] = address;
  if (half == Half::kSend) return fmt::format("a send to rank {} with tag {}", job_rank(to), tag);
  return fmt::format("a receive from rank {} with tag {}", job_rank(from), tag);
}

}  // namespace tessera
