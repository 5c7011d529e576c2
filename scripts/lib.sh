# Functions shared by the scripts in this folder. Source it; it changes the working directory to the project's root.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Packages that a build needs: a C compiler, MPI, and libclang, which parses MPI's header.
readonly BUILD_PACKAGES=(build-essential ca-certificates curl libclang-dev libopenmpi-dev openmpi-bin pkg-config)

readonly TARGET=${CARGO_TARGET_DIR:-target}

section() { printf '\n== %s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# await SECONDS WHAT COMMAND...: repeats the command until it succeeds. After SECONDS it prints WHAT and returns 1.
await() {
    local deadline=$((SECONDS + $1)) what=$2
    shift 2
    until "$@"; do
        if ((SECONDS >= deadline)); then
            echo "timed out after waiting for: $what" >&2
            return 1
        fi
        sleep 0.1
    done
}

as_root() {
    if [[ $(id -u) == 0 ]]; then "$@"; else sudo "$@"; fi
}

# Installs the given Debian packages if they are missing.
install_packages() {
    local package missing=()
    command -v dpkg-query >/dev/null || die "packages can be installed only on Debian or Ubuntu; on other systems install the equivalents of: $*"
    for package; do
        dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    if ((${#missing[@]} == 0)); then
        echo "already installed: $*"
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

# Ensures a recent Rust toolchain: uses the installed one, or installs one for this user through rustup.
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

# Builds the programs and examples that tests start. Because all crates and examples are selected, dependencies have the same features as in
# `cargo test --workspace`, and its builds are used. For a few packages alone, cargo would compile some dependencies and most rooms again.
build_test_programs() {
    cargo build --quiet --locked --workspace --bins --example hub_server --example test_server
}

# Fetches NVRTC, the CUDA compiler library for the GPU kernels. Without it the build supports only CPUs.
ensure_nvrtc() {
    if [[ $(uname -m) != x86_64 ]]; then
        echo "not an x86-64 machine: built for the CPU only"
    elif ! scripts/install_nvrtc; then
        echo "warning: NVRTC could not be fetched, so this build is for the CPU only" >&2
    fi
}
