//! Builds the MPI plugin apart from this crate and leaves it, or an empty file, at `$OUT_DIR/plugin.so`.

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

fn main() {
    for path in ["abi.rs", "plugin/lib.rs", "plugin/Cargo.toml", "plugin/Cargo.lock"] {
        println!("cargo:rerun-if-changed={path}");
    }
    for variable in ["MPICC", "PATH", "LIBCLANG_PATH", "CC"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    let out_dir = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let plugin = build(Path::new(&out_dir)).unwrap_or_else(|reason| {
        println!("cargo:warning=built without MPI, so a world has one rank: {reason}");
        println!(
            "cargo:warning=install libopenmpi-dev and libclang-dev, then `touch src/comm/build.rs` and build again"
        );
        Vec::new()
    });
    fs::write(Path::new(&out_dir).join("plugin.so"), plugin).expect("OUT_DIR is writable");
}

fn build(out_dir: &Path) -> Result<Vec<u8>, String> {
    let target_dir = out_dir.join("plugin");
    let output = Command::new(env::var("CARGO").expect("cargo sets CARGO"))
        .args(["build", "--release", "--locked", "--quiet", "--manifest-path", "plugin/Cargo.toml", "--target-dir"])
        .arg(&target_dir)
        // The outer build's flags, target and clippy are not the plugin's.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("CARGO_BUILD_TARGET")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .output()
        .map_err(|error| format!("cannot run cargo: {error}"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let reason = text.lines().rev().find(|line| line.contains("error") || line.contains("panicked"));
        return Err(reason.unwrap_or("no reason given").trim().to_owned());
    }
    let library = target_dir.join("release/libmpi_plugin.so");
    fs::read(&library).map_err(|error| format!("cannot read {}: {error}", library.display()))
}
