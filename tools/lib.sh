# Sourced by the scripts beside it, in the repository's root.

# The folder of built programs, for the flags that they were built with.
tessera_bin() {
  bazel info "$@" bazel-bin 2>/dev/null
}
