#include "tessera/mesh/core/logger.h"

#include <memory>
#include <mutex>
#include <utility>

#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

namespace tessera {
namespace {

using Receiver = std::function<void(spdlog::level::level_enum, const std::string&)>;

// Passes messages to a receiver if there is one, else to the standard error stream.
class Outlet : public spdlog::sinks::base_sink<std::mutex> {
 public:
  void set_receiver(Receiver receiver) {
    const std::lock_guard lock(mutex_);
    receiver_ = std::move(receiver);
  }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    if (!receiver_) return console_.log(message);
    try {
      receiver_(message.level, std::string(message.payload.data(), message.payload.size()));
    } catch (...) {
      console_.log(message);  // destructors log too
    }
  }
  void flush_() override { console_.flush(); }
  void set_formatter_(std::unique_ptr<spdlog::formatter> formatter) override {
    console_.set_formatter(std::move(formatter));
  }

 private:
  Receiver receiver_;
  spdlog::sinks::stderr_color_sink_mt console_;
};

struct Log {
  Log() : outlet(std::make_shared<Outlet>()), logger(std::make_shared<spdlog::logger>("tessera", outlet)) {
    try {
      spdlog::initialize_logger(logger);
    } catch (const spdlog::spdlog_ex&) {
      // The program has a logger of this name; this one is ready all the same.
    }
  }

  std::shared_ptr<Outlet> outlet;
  std::shared_ptr<spdlog::logger> logger;
};

const Log& the_log() {
  static const Log& log = *new Log;
  return log;
}

}  // namespace

spdlog::logger& logger() { return *the_log().logger; }

void pass_messages_to(Receiver to) { the_log().outlet->set_receiver(std::move(to)); }

}  // namespace tessera
