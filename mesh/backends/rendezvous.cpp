#include "tessera/mesh/backends/rendezvous.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/core/mismatch.h"

namespace tessera {
namespace {

// To let others run is cheaper than to sleep and be woken, as long as they come soon.
constexpr int kYields = 20;

const char* const kClosed = "the group was closed";

std::string has_left(const std::vector<int64_t>& ranks) {
  return fmt::format("ranks [{}] have left the group: the body of such a rank has returned, or its World is gone",
                     fmt::join(ranks, ", "));
}

// Runs `body`; what it throws, as text, else nothing.
template <typename Body>
std::string error_of(const Body& body) {
  try {
    body();
    return {};
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

class Rendezvous::Event {
 public:
  virtual ~Event() = default;
  std::atomic<bool> done{false};
  // Under the mutex of the rendezvous.
  bool running = false;  // everyone has come; it ends soon whatever happens
  bool is_mismatch = false;
  std::string error;
  std::condition_variable finished;
};

struct Rendezvous::Round : Rendezvous::Event {
  std::vector<CollectiveArguments> arguments;
  std::vector<bool> came;
  std::size_t count = 0;
  uint64_t number = 0;
};

struct Rendezvous::Message : Rendezvous::Event {
  Buffer buffer;
  Address address;
  Half half = Half::kSend;
};

Rendezvous::Rendezvous(std::vector<int64_t> ranks)
    : ranks_(std::move(ranks)), next_(ranks_.size(), 0), left_(ranks_.size(), false) {}

Rendezvous::EventPtr Rendezvous::join(int rank, CollectiveArguments arguments) {
  const auto place = static_cast<std::size_t>(rank);
  std::shared_ptr<Round> round;
  {
    const std::lock_guard lock(mutex_);
    const uint64_t number = next_[place]++;
    while (first_ + rounds_.size() <= number) {
      rounds_.push_back(std::make_shared<Round>());
      rounds_.back()->arguments.resize(ranks_.size());
      rounds_.back()->came.resize(ranks_.size());
      rounds_.back()->number = first_ + rounds_.size() - 1;
    }
    round = rounds_[static_cast<std::size_t>(number - first_)];
    round->arguments[place] = std::move(arguments);
    round->came[place] = true;
    if (++round->count == ranks_.size()) {
      // Ranks issue their rounds in order, so that the first is complete first.
      rounds_.pop_front();
      ++first_;
    }
    if (closed_) finish(*round, kClosed, false);
    end_if_left(*round);
    if (round->count < ranks_.size() || round->done) return round;
    round->running = true;
  }
  run(*round);
  return round;
}

void Rendezvous::run(Round& round) {
  std::string error = mismatch(round.arguments, ranks_);
  const bool is_mismatch = !error.empty();
  if (is_mismatch) {
    error = fmt::format("the ranks disagree on collective {} of their group: {}", round.number, error);
  } else {
    error = error_of([&] { carry_out(round.arguments); });
  }
  const std::lock_guard lock(mutex_);
  round.arguments.clear();
  finish(round, error, is_mismatch);
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
  message->address = address;
  message->half = half;
  std::shared_ptr<Message> other;
  {
    const std::lock_guard lock(mutex_);
    Box& box = boxes_[address];
    auto& waiting = half == Half::kSend ? box.awaited : box.sent;
    const int peer = half == Half::kSend ? std::get<1>(address) : std::get<0>(address);
    if (closed_) {
      finish(*message, kClosed, false);
    } else if (!waiting.empty()) {
      other = waiting.front();
      waiting.pop_front();
      message->running = other->running = true;
    } else if (left_[static_cast<std::size_t>(peer)]) {
      finish(*message, has_left({job_rank(peer)}), false);
    } else {
      (half == Half::kSend ? box.sent : box.awaited).push_back(message);
    }
  }
  if (other) half == Half::kSend ? deliver(*message, *other) : deliver(*other, *message);
  return message;
}

void Rendezvous::deliver(Message& sent, Message& awaited) {
  std::string error = misfit(sent.buffer, awaited.buffer);
  const bool is_mismatch = !error.empty();
  if (is_mismatch) {
    const auto [from, to, tag] = sent.address;
    error = fmt::format("rank {} sends rank {} with tag {} {}", job_rank(from), job_rank(to), tag, error);
  } else {
    error = error_of([&] { copy_buffer(sent.buffer, awaited.buffer); });
  }
  const std::lock_guard lock(mutex_);
  for (Message* message : {&sent, &awaited}) {
    message->buffer = {};
    finish(*message, error, is_mismatch);
  }
}

bool Rendezvous::is_done(const Event& event) const { return event.done.load(std::memory_order_acquire); }

bool Rendezvous::is_failed(const Event& event) const {
  const std::lock_guard lock(mutex_);
  return !event.error.empty();
}

void Rendezvous::wait(const EventPtr& event, std::chrono::milliseconds timeout) {
  for (int i = 0; i < kYields && !is_done(*event); ++i) std::this_thread::yield();
  std::unique_lock lock(mutex_);
  const auto done = [&] { return event->done.load(); };
  if (!event->finished.wait_for(lock, timeout, done)) {
    if (!event->running) give_up(*event, timeout);
    event->finished.wait(lock, done);
  }
  if (event->error.empty()) return;
  if (event->is_mismatch) throw MismatchError(event->error);
  throw std::runtime_error(event->error);
}

void Rendezvous::give_up(Event& event, std::chrono::milliseconds after) {
  if (const auto* const round = dynamic_cast<const Round*>(&event)) {
    const auto here = std::find(round->came.begin(), round->came.end(), true) - round->came.begin();
    finish(event,
           fmt::format("timed out after {} ms in {}: ranks [{}] did not come", after.count(),
                       to_string(round->arguments[static_cast<std::size_t>(here)]), fmt::join(missing(*round), ", ")),
           false);
    return;
  }
  auto& message = dynamic_cast<Message&>(event);
  Box& box = boxes_[message.address];
  for (auto* queue : {&box.sent, &box.awaited}) {
    std::erase_if(*queue, [&](const auto& held) { return held.get() == &message; });
  }
  finish(event,
         fmt::format("timed out after {} ms in {}: the other did not come", after.count(),
                     text_of(message.address, message.half)),
         false);
}

void Rendezvous::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (const auto& round : rounds_) finish(*round, kClosed, false);
  for (const auto& [address, box] : boxes_) {
    for (const auto* queue : {&box.sent, &box.awaited}) {
      for (const auto& message : *queue) finish(*message, kClosed, false);
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
      for (const auto& message : std::exchange(box.sent, {})) finish(*message, has_left({job_rank(rank)}), false);
    }
    if (from == rank) {
      for (const auto& message : std::exchange(box.awaited, {})) finish(*message, has_left({job_rank(rank)}), false);
    }
  }
}

void Rendezvous::end_if_left(Round& round) {
  std::vector<int64_t> gone;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (left_[i] && !round.came[i]) gone.push_back(ranks_[i]);
  }
  if (!gone.empty()) finish(round, has_left(gone), false);
}

void Rendezvous::finish(Event& event, const std::string& error, bool is_mismatch) {
  if (event.done) return;
  event.error = error;
  event.is_mismatch = is_mismatch;
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
