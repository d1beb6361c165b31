#pragma once

// States Tessera's version by the rules of semantic versioning. tools/install and CHANGELOG.md have it from here.
#define TESSERA_VERSION_MAJOR 0
#define TESSERA_VERSION_MINOR 1
#define TESSERA_VERSION_PATCH 0

#define TESSERA_VERSION_TEXT_(number) #number
#define TESSERA_VERSION_JOIN_(major, minor, patch) \
  TESSERA_VERSION_TEXT_(major) "." TESSERA_VERSION_TEXT_(minor) "." TESSERA_VERSION_TEXT_(patch)
// This is the literal "0.1.0".
#define TESSERA_VERSION TESSERA_VERSION_JOIN_(TESSERA_VERSION_MAJOR, TESSERA_VERSION_MINOR, TESSERA_VERSION_PATCH)

namespace tessera {

// Has the version of the headers that a program is compiled with.
inline constexpr const char* kVersion = TESSERA_VERSION;

// Returns the version of the library that the program runs with, such as "0.1.0".
const char* library_version();

// Returns the version of LibTorch that the library was compiled with, such as "2.11.0". When the library is loaded with
// another one, the process ends with a message that has both; or, where that one lacks a symbol that the loader needs,
// with the loader's message, which names the symbol.
const char* libtorch_version();

}  // namespace tessera
