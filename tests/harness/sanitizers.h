#pragma once

// Says which sanitizers a test was built with: Clang names them as features, GCC by macros.

namespace tessera::testing {

#if defined(__has_feature)
constexpr bool kAddressSanitizer = __has_feature(address_sanitizer);  // with LeakSanitizer
constexpr bool kUndefinedBehaviorSanitizer = __has_feature(undefined_behavior_sanitizer);
#elif defined(__SANITIZE_ADDRESS__)
constexpr bool kAddressSanitizer = true;
constexpr bool kUndefinedBehaviorSanitizer = false;  // GCC does not say
#else
constexpr bool kAddressSanitizer = false;
constexpr bool kUndefinedBehaviorSanitizer = false;
#endif

}  // namespace tessera::testing
