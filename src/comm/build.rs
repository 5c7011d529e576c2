//! Builds the MPI plugin separately from this crate, once for each installed MPI. Writes the plugins, or empty files where an MPI is
//! missing, to `$OUT_DIR/plugin_openmpi.so` and `$OUT_DIR/plugin_mpich.so`.

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;

/// The two binary interfaces of MPI. Intel MPI, MVAPICH and others share MPICH's.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    OpenMpi,
    Mpich,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::OpenMpi => "openmpi",
            Kind::Mpich => "mpich",
        }
    }

    /// The kind of MPI that `compiler` belongs to; `None` when there is no such compiler.
    fn of(compiler: &str) -> Option<Self> {
        let version = Command::new(compiler).arg("--showme:version").output().ok()?;
        if version.status.success()
            && [version.stdout, version.stderr].concat().windows(8).any(|word| word == b"Open MPI")
        {
            return Some(Kind::OpenMpi);
        }
        let shown = Command::new(compiler).arg("-show").output().ok()?;
        shown.status.success().then_some(Kind::Mpich)
    }
}

fn main() {
    for path in ["abi.rs", "plugin/lib.rs", "plugin/Cargo.toml", "plugin/Cargo.lock"] {
        println!("cargo:rerun-if-changed={path}");
    }
    for variable in ["MPICC", "PATH", "LIBCLANG_PATH", "CC"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    let out_dir = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let out_dir = Path::new(&out_dir);
    let first = env::var("MPICC").unwrap_or_else(|_| "mpicc".to_owned());
    // Debian's names, for machines with several MPIs.
    let compilers: Vec<(String, Kind)> = [first, "mpicc.openmpi".to_owned(), "mpicc.mpich".to_owned()]
        .into_iter()
        .filter_map(|compiler| Kind::of(&compiler).map(|kind| (compiler, kind)))
        .collect();
    let built: Vec<_> = thread::scope(|scope| {
        let build = |kind| {
            let compiler = compilers.iter().find(|(_, its)| *its == kind).map(|(compiler, _)| compiler);
            (kind, compiler.map(|compiler| scope.spawn(move || build(compiler, kind, out_dir))))
        };
        let builds = [Kind::OpenMpi, Kind::Mpich].map(build);
        builds.into_iter().map(|(kind, build)| (kind, build.map(|build| build.join().expect("a build ends")))).collect()
    });
    if built.iter().all(|(_, plugin)| plugin.is_none()) {
        println!("cargo:warning=built without MPI, so a world has one rank: no `mpicc` is in PATH");
        println!(
            "cargo:warning=install libopenmpi-dev and libclang-dev, then `touch src/comm/build.rs` and build again"
        );
    }
    for (kind, plugin) in built {
        let plugin = plugin.unwrap_or(Ok(Vec::new())).unwrap_or_else(|reason| {
            println!("cargo:warning=built without {}: {reason}", kind.name());
            println!("cargo:warning=is libclang-dev installed? Then `touch src/comm/build.rs` and build again");
            Vec::new()
        });
        let path = out_dir.join(format!("plugin_{}.so", kind.name()));
        fs::write(path, plugin).expect("OUT_DIR is writable");
    }
}

fn build(compiler: &str, kind: Kind, out_dir: &Path) -> Result<Vec<u8>, String> {
    let target_dir = out_dir.join(format!("plugin_{}", kind.name()));
    let output = Command::new(env::var("CARGO").expect("cargo sets CARGO"))
        .args(["build", "--release", "--locked", "--quiet", "--manifest-path", "plugin/Cargo.toml", "--target-dir"])
        .arg(&target_dir)
        .env("MPICC", compiler)
        // Flags, target and clippy of the outer build must not apply to the plugin.
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
