# The scripts beside it source this file, in the repository's root.

# Prints the folder of built programs, for the flags that they were built with.
tessera_bin() {
  bazel info "$@" bazel-bin 2>/dev/null
}
