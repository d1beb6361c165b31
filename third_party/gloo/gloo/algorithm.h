#pragma once

// LibTorch's wheel holds Gloo but not its headers, and ProcessGroupGloo.hpp names a few of its types. These
// declarations of our own are what that header needs to be read; nothing here is defined, and no object of these types
// is made by us.
