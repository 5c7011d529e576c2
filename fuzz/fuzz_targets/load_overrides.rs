//! Load requests that contain the model's files. Input: the model's name, a zero byte, then either an HTTP body or, as in gRPC, the
//! configuration and names and contents of files, separated by zero bytes. No file may remain after the model is unloaded.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use fuzz::{Target, expand, within};
use libfuzzer_sys::fuzz_target;
use serving::LoadOverrides;

thread_local!(static TARGET: LazyLock<Target> = LazyLock::new(Target::default));

/// Folders above that for temporary files, so that a path with `..` is detected before it leaves the fuzzer's folder.
const ABOVE: &str = "a/b/c/d/e";

static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
    let root = fuzz::scratch("load");
    let temporary = root.join(ABOVE).join("tmp");
    fs::create_dir_all(&temporary).expect("/dev/shm can be written");
    // SAFETY: no other thread of this program reads the environment yet.
    unsafe { std::env::set_var("TMPDIR", temporary) };
    root
});

fuzz_target!(|input: &[u8]| {
    let root = ROOT.to_str().expect("it is ASCII");
    let Some(end) = input.iter().position(|&byte| byte == 0) else { return };
    // `%` is replaced by the fuzzer's folder, so that absolute names stay inside it.
    let name = String::from_utf8_lossy(&input[..end]).replace('%', root);
    let (body, what) = (expand(&input[end + 1..]), String::from_utf8_lossy(&input[end + 1..]));
    let is_outside = |name: &str| name.starts_with('/') && !name.starts_with(root) || name.matches("..").count() > 4;
    if is_outside(&name) || what.split('\0').any(is_outside) {
        return;
    }
    TARGET.with(|target| {
        let _ = &target.config;
        within(body.len(), 8 << 20, 64, || match body.starts_with(b"{") {
            true if name.bytes().all(|byte| byte.is_ascii_graphic()) => {
                if target.post(&format!("/v2/repository/models/{name}/load"), &body).0 == 200 {
                    target.post(&format!("/v2/repository/models/{name}/unload"), b"");
                }
            }
            true => {}
            false => {
                let mut parts = what.split('\0').map(str::to_owned);
                let mut overrides = LoadOverrides {
                    config: parts.next().filter(|config| !config.is_empty()),
                    ..LoadOverrides::default()
                };
                while let (Some(path), Some(contents)) = (parts.next(), parts.next()) {
                    overrides.files.insert(path, contents.into());
                }
                target.load(&name, overrides);
            }
        });
    });
    let mut folder = ROOT.clone();
    for part in ABOVE.split('/').chain(["tmp"]).map(Some).chain([None]) {
        let entries: Vec<_> =
            fs::read_dir(&folder).expect("it is there").flatten().map(|entry| entry.file_name()).collect();
        assert!(entries.iter().eq(part.iter()), "{} holds {entries:?}", folder.display());
        folder.push(part.unwrap_or_default());
    }
});
