// Compiles spdlog into the installed library, in the place of Debian's libspdlog.so. A program cannot reach this
// spdlog's registry, so the level of the library's logger is read from the environment too: SPDLOG_LEVEL=debug.

#include <spdlog/async.h>

#include <spdlog/async_logger-inl.h>
#include <spdlog/cfg/env.h>
#include <spdlog/cfg/helpers-inl.h>
#include <spdlog/common-inl.h>
#include <spdlog/details/backtracer-inl.h>
#include <spdlog/details/log_msg-inl.h>
#include <spdlog/details/log_msg_buffer-inl.h>
#include <spdlog/details/os-inl.h>
#include <spdlog/details/periodic_worker-inl.h>
#include <spdlog/details/registry-inl.h>
#include <spdlog/details/thread_pool-inl.h>
#include <spdlog/logger-inl.h>
#include <spdlog/pattern_formatter-inl.h>
#include <spdlog/sinks/ansicolor_sink-inl.h>
#include <spdlog/sinks/base_sink-inl.h>
#include <spdlog/sinks/sink-inl.h>
#include <spdlog/sinks/stdout_color_sinks-inl.h>
#include <spdlog/spdlog-inl.h>

// spdlog's default logger writes to the standard output, and the library's own to the standard error stream.
template class spdlog::sinks::ansicolor_sink<spdlog::details::console_mutex>;
template class spdlog::sinks::ansicolor_stdout_sink<spdlog::details::console_mutex>;
template class spdlog::sinks::ansicolor_stderr_sink<spdlog::details::console_mutex>;
template class spdlog::sinks::base_sink<std::mutex>;

namespace {

[[maybe_unused]] const bool level_is_read = (spdlog::cfg::load_env_levels(), true);

}  // namespace
