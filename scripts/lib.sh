# What the scripts here share. Sourced, not run; leaves the working directory at the top of the project.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# What a build needs: a C compiler, MPI, and clang's library, through which its header is read.
readonly BUILD_PACKAGES=(build-essential ca-certificates curl libclang-dev libopenmpi-dev openmpi-bin pkg-config)

readonly TARGET=${CARGO_TARGET_DIR:-target}

section() { printf '\n== %s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# await SECONDS WHAT COMMAND...: until the command returns 0; 1 with a line about it when it never does.
await() {
    local deadline=$((SECONDS + $1)) what=$2
    shift 2
    until "$@"; do
        if ((SECONDS >= deadline)); then
            echo "not in time: $what" >&2
            return 1
        fi
        sleep 0.1
    done
}

as_root() {
    if [[ $(id -u) == 0 ]]; then "$@"; else sudo "$@"; fi
}

# Installs those of the given Debian packages that are missing.
install_packages() {
    local package missing=()
    command -v dpkg-query >/dev/null || die "this needs Debian or Ubuntu; elsewhere install by hand: $*"
    for package; do
        dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    if ((${#missing[@]} == 0)); then
        echo "all there: $*"
        return
    fi
    echo "installing: ${missing[*]}"
    as_root apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

rust_is_new_enough() {
    local wanted=$1 found
    found=$(rustc --version 2>/dev/null | cut -d' ' -f2) && [[ -n $found ]] || return 1
    [[ $(printf '%s\n%s\n' "$wanted" "$found" | sort -V | head -n 1) == "$wanted" ]] && command -v cargo >/dev/null
}

# Finds a Rust toolchain that is new enough, or installs one for this user through rustup.
ensure_rust() {
    local wanted channel
    wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    channel=$(sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml)
    [[ -d ${CARGO_HOME:-$HOME/.cargo}/bin ]] && PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
    if rust_is_new_enough "$wanted"; then
        rustc --version
        return
    fi
    # A toolchain of another name will do, where it is new enough: the one that is pinned may be out of reach.
    local toolchain
    for toolchain in $(rustup toolchain list 2>/dev/null | cut -d ' ' -f 1); do
        if RUSTUP_TOOLCHAIN=$toolchain rust_is_new_enough "$wanted"; then
            export RUSTUP_TOOLCHAIN=$toolchain
            rustc --version
            return
        fi
    done
    echo "installing Rust $channel for this user"
    if command -v rustup >/dev/null; then
        rustup toolchain install "$channel" --profile minimal --component clippy,rustfmt
    else
        curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs |
            sh -s -- -y --quiet --profile minimal --default-toolchain "$channel" --component clippy,rustfmt
        PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
    fi
    rust_is_new_enough "$wanted" || die "rustc $wanted or newer is needed, found $(rustc --version 2>&1 | head -n 1); run \`rustup update\`"
}

# The CUDA compiler library, for the GPU kernels. Without it the build is for CPUs only.
ensure_nvrtc() {
    if [[ $(uname -m) != x86_64 ]]; then
        echo "not an x86-64 machine: built for the CPU only"
    elif ! scripts/install_nvrtc; then
        echo "warning: NVRTC could not be fetched, so this build is for the CPU only" >&2
    fi
}
