# The scripts beside it source this file, in the repository's root.

# A service or a container may have no HOME, in which caches are.
if [[ -z ${HOME:-} ]]; then
  HOME=$(getent passwd "$EUID" | cut -d: -f6) || true
  export HOME
fi

# print_head SCRIPT: prints the comment at the head of a script, which is its help.
print_head() {
  sed -n '2,${/^#/!q;s/^# \{0,1\}//p}' "$1"
}

# answer_help SCRIPT ARGUMENTS: where one of the arguments asks for help, prints the script's, and ends the script.
answer_help() {
  local script=$1 argument
  shift
  for argument in "$@"; do
    if [[ $argument == -h || $argument == --help ]]; then print_head "$script" && exit 0; fi
  done
}

# Prints the folder of built programs, for the flags that they were built with.
tessera_bin() {
  bazel info "$@" bazel-bin 2>/dev/null
}

# build_example NAME ARGUMENTS: builds examples/NAME, for CUDA where the arguments ask for such a device, and sets
# `program` to the path of what it has built. For CUDA it builds the kernels too, and lets the program find them.
build_example() {
  local name=$1 config=() kernels=() before='' argument
  shift
  for argument in "$@"; do
    if [[ $argument == --device=cuda* || ($before == --device && $argument == cuda*) ]]; then
      config=(--config=cuda) kernels=(//gpu_kernels:tessera_gpu)
    fi
    before=$argument
  done
  # The build uses the mode of tools/test, so that both share what is built.
  bazel build "${config[@]}" "//examples/$name" "${kernels[@]}" || return
  local built
  built=$(tessera_bin "${config[@]}")
  program=$built/examples/$name/$name
  if [[ ${#kernels[@]} -gt 0 && -e $built/gpu_kernels/libtessera_gpu.so ]]; then
    export TESSERA_GPU_KERNELS=${TESSERA_GPU_KERNELS-$built/gpu_kernels/libtessera_gpu.so}
  fi
}
