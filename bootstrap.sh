#!/usr/bin/env bash
# Sets up, builds, tests and shows mergex on Debian bookworm: ./bootstrap.sh help
set -euo pipefail

torch_dir=${MERGEX_TORCH_DIR:-}
if [[ -n $torch_dir ]]; then torch_dir=$(realpath -m -- "$torch_dir"); fi
cd -- "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")"

deps=.deps
build=build/release

usage() {
  cat <<'END'
usage: ./bootstrap.sh COMMAND        each is enough by itself on a fresh Debian bookworm

  deps [--gpu]   Debian packages, and LibTorch in .deps/ (1.3 GB; --gpu: 4.6 GB, for NVIDIA GPUs)
  build          deps, then build/release/mergex
  test           build, then all tests
  quickstart     build, then pre-train and fine-tune a small T5; ends in a table of methods (about 10 minutes)
  help           this page

environment
  MERGEX_TORCH_DIR=DIR   use the LibTorch in DIR (it holds include/ and lib/) and fetch none
  MERGEX_WERROR=1        compiler warnings are errors
  MERGEX_SLOW=1          test: the slow tests too
  MERGEX_JOBS=N          compile N sources at a time (default: one per core, as far as the memory goes)
END
}

# fail STATUS LINE...
fail() {
  printf 'bootstrap: %s\n' "$2" >&2
  if (($# > 2)); then printf '%s\n' "${@:3}" >&2; fi
  exit "$1"
}

# step NAME LOG COMMAND...: runs the command with its output in .deps/LOG; prints "NAME ... 12 s". Status of the command.
step() {
  local name=$1 log=$deps/$2 start=$SECONDS status=0
  shift 2
  printf '%s ... ' "$name"
  "$@" >"$log" 2>&1 </dev/null || status=$?
  if ((status == 0)); then
    printf '%d s\n' $((SECONDS - start))
  else
    printf 'failed after %d s\n' $((SECONDS - start))
  fi
  return "$status"
}

# fail_with_log LOG LINE...: the end of the log, then what to do
fail_with_log() {
  local log=$deps/$1
  shift
  printf -- '--- end of %s\n' "$log" >&2
  tail -n 15 -- "$log" >&2
  printf -- '---\n' >&2
  fail 1 "$@"
}

# --- Debian packages

install_packages() {
  # Cached lists may name versions that the mirror no longer has, so they are renewed first.
  "$@" apt-get update -q || return
  "$@" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
    -o DPkg::Lock::Timeout=120 -o Dpkg::Use-Pty=0 "${missing[@]}"
}

debian_packages() {
  local packages=(g++ cmake ninja-build ccache pkg-config git zlib1g-dev libssl-dev nlohmann-json3-dev libspdlog-dev
    libfmt-dev libcli11-dev catch2 libsentencepiece-dev libyaml-cpp-dev libxxhash-dev libeigen3-dev)
  if [[ -z $torch_dir ]]; then packages+=(python3-venv ca-certificates); fi

  if ! command -v dpkg-query >/dev/null; then
    printf 'packages ... not Debian: this system must have what Debian calls %s\n' "${packages[*]}"
    return
  fi
  local installed package
  installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "${packages[@]}" 2>/dev/null || true)
  missing=()
  for package in "${packages[@]}"; do
    if ! grep -qxF "installed $package" <<<"$installed"; then missing+=("$package"); fi
  done
  if ((${#missing[@]} == 0)); then
    printf 'packages ... there\n'
    return
  fi

  local as_root=()
  if ((EUID != 0)); then
    if ! sudo -n true 2>/dev/null; then
      fail 2 "${#missing[@]} Debian packages are missing and this user may not install them. Ask an administrator for this line, then run again:" \
        "  apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
    fi
    as_root=(sudo -n)
  fi
  step "packages: installing ${#missing[@]} with apt-get" apt.log install_packages "${as_root[@]}" ||
    fail_with_log apt.log "apt-get failed. Check the network and that the Debian mirror works (apt-get update), then run again."
}

# --- LibTorch

find_python() {
  local python
  for python in /usr/bin/python3 python3.11 python3; do
    if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      printf '%s\n' "$python"
      return
    fi
  done
  fail 2 "no Python 3.11 found, which LibTorch's package is made for: install it, or set MERGEX_TORCH_DIR to a LibTorch of your own"
}

# The stamp names what is in the virtual environment: "cpu HASH" or "gpu HASH" of the requirements file.
stamp_of() {
  printf '%s %s\n' "$1" "$(sha256sum <"cmake/libtorch-$1.txt" | cut -d ' ' -f 1)"
}

install_libtorch() {
  local variant=$1 python=$2
  # Nothing tells how far an interrupted installation came, so it starts anew.
  rm -rf -- "$deps/venv" "$deps/tmp"
  mkdir -p -- "$deps/tmp"
  "$python" -m venv "$deps/venv" || return
  # Unpacked inside the tree: /tmp is small on many machines.
  TMPDIR=$PWD/$deps/tmp PIP_USER=0 "$deps/venv/bin/python" -m pip install --no-input --disable-pip-version-check \
    --progress-bar off --no-deps --require-hashes --only-binary :all: -r "cmake/libtorch-$variant.txt" || return
  rm -rf -- "$deps/tmp"
}

libtorch() {
  local variant=$1 stamp=$deps/libtorch.stamp found='' python
  if [[ -n $torch_dir ]]; then
    if [[ ! -e $torch_dir/lib/libtorch_cpu.so || ! -d $torch_dir/include ]]; then
      fail 2 "MERGEX_TORCH_DIR: $torch_dir holds no include/ and lib/libtorch_cpu.so; name the folder of a LibTorch, or unset it to have one fetched"
    fi
    printf 'LibTorch ... %s\n' "$torch_dir"
    return
  fi
  if compgen -G "$deps/venv/lib/python3*/site-packages/torch/lib/libtorch_cpu.so" >/dev/null && [[ -r $stamp ]]; then
    found=$(<"$stamp")
  fi
  # The installation for GPUs also serves CPUs.
  if [[ $found == "$(stamp_of gpu)" || $found == "$(stamp_of "$variant")" ]]; then
    printf 'LibTorch ... there\n'
    return
  fi
  python=$(find_python)
  rm -f -- "$stamp"
  step "LibTorch: fetching it for $variant" libtorch.log install_libtorch "$variant" "$python" ||
    fail_with_log libtorch.log "LibTorch could not be installed. Check the network to PyPI and the free disk space (cpu 3 GB, gpu 8 GB), then run again." \
      "A LibTorch that is already on this machine can be used instead: MERGEX_TORCH_DIR=/path/to/torch ./bootstrap.sh ..."
  stamp_of "$variant" >"$stamp.part"
  mv -- "$stamp.part" "$stamp"
}

run_deps() {
  mkdir -p -- "$deps"
  debian_packages
  libtorch "${1:-cpu}"
}

# --- build

# A source that includes LibTorch takes about 1.4 GB to compile.
jobs() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/^MemAvailable:/ {print int($2 / 1400000)}' /proc/meminfo 2>/dev/null || true)
  if [[ -n $memory ]] && ((memory < cores)); then cores=$((memory > 1 ? memory : 1)); fi
  printf '%s\n' "${MERGEX_JOBS:-$cores}"
}

# The first thing that went wrong, without the compiler's command line
first_error() {
  awk '/^FAILED: / {print; getline; on = 1; next}
       on && /^(\[[0-9]+\/[0-9]+\]|ninja: )/ {exit}
       on && ++n <= 25 {print}' "$1"
}

run_build() {
  run_deps
  local werror=OFF start error
  if [[ ${MERGEX_WERROR:-0} == 1 ]]; then werror=ON; fi
  if ! step "configuring $build" configure.log cmake --preset release "-DMERGEX_WERROR=$werror" "-DMERGEX_TORCH_DIR=$torch_dir"; then
    sed -n '/^CMake Error/,$p' "$deps/configure.log" | head -n 15 >&2
    fail 1 "CMake failed; its whole output is in $deps/configure.log. If it speaks of another folder, remove $build and run again"
  fi

  local compile=(cmake --build "$build" --parallel "$(jobs)")
  if (($# > 0)); then compile+=(--target "$@"); fi
  start=$SECONDS
  if [[ -t 1 ]]; then
    # ninja shows progress on one line, and a failed compilation as it is.
    "${compile[@]}" || fail 1 "the build failed; the first error is the one to read"
    printf 'building ... %d s\n' $((SECONDS - start))
  elif ! step "building" build.log "${compile[@]}"; then
    error=$(first_error "$deps/build.log")
    if [[ -z $error ]]; then fail_with_log build.log "the build failed"; fi
    printf '%s\n' "$error" >&2
    fail 1 "the build failed; the whole output is in $deps/build.log. \"Killed\" means too little memory: set MERGEX_JOBS=1"
  fi
  printf 'built %s/mergex\n' "$build"
}

# --- commands

run_test() {
  run_build
  local labels=(--label-exclude '^slow$')
  if [[ ${MERGEX_SLOW:-0} == 1 ]]; then labels=(); fi
  exec ctest --test-dir "$build" --output-on-failure --no-tests=error "${labels[@]}"
}

run_quickstart() {
  run_build mergex mergex_engine
  local recipe
  for recipe in recipes/quickstart/pretrain.json recipes/quickstart/testament.json; do
    printf '\n$ %s/mergex finetune %s --resume\n' "$build" "$recipe"
    "$build/mergex" finetune "$recipe" --resume
  done
  cat <<END

Everything is in runs/quickstart-testament. Next, the same comparison with other seeds, in about the same time:
  $build/mergex finetune recipes/quickstart/testament.json --set '/sweep/~1seed=[4,5,6]' --out runs/other-seeds
END
}

command=${1:-help}
if (($# > 0)); then shift; fi
case $command in
  deps)
    if [[ ${1:-} == --gpu ]]; then
      shift
      set -- gpu "$@"
    else
      set -- cpu "$@"
    fi
    if (($# > 1)); then fail 2 "deps: unknown argument \"$2\"; the only one is --gpu"; fi
    run_deps "$1"
    ;;
  build | test | quickstart)
    if (($# > 0)); then fail 2 "$command takes no arguments, got \"$1\" (./bootstrap.sh help)"; fi
    "run_$command"
    ;;
  help | -h | --help) usage ;;
  *) fail 2 "unknown command \"$command\"; there are deps, build, test, quickstart and help" ;;
esac
