# Sourced by the scripts beside it, in the repository's root.

# Bazel with what its version needs to read WORKSPACE.
tessera_bazel() {
  local command=$1
  shift
  local flags=()
  case $(bazel --version 2>/dev/null) in
    "bazel "[89].* | "bazel 7."*) flags=(--noenable_bzlmod --enable_workspace) ;;
  esac
  bazel "$command" "${flags[@]}" "$@"
}

# The folder of built programs, for the flags that they were built with.
tessera_bin() {
  tessera_bazel info "$@" bazel-bin 2>/dev/null
}
