//! `pytorch_model.bin`. Input: after `z` a whole archive, otherwise a pickle that is put into a valid archive.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use fuzz::within;
use libfuzzer_sys::fuzz_target;
use models::Checkpoint;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = fuzz::scratch("torch");
    std::fs::write(folder.join("config.json"), "{}").expect("/dev/shm can be written");
    folder
});

fuzz_target!(|input: &[u8]| {
    let Some((kind, rest)) = input.split_first() else { return };
    let file = match kind {
        b'z' => rest.to_vec(),
        _ => archive(&[("archive/data.pkl", rest), ("archive/data/0", &[0; 64]), ("archive/version", b"3\n")]),
    };
    let path = FOLDER.join("pytorch_model.bin");
    let _ = std::fs::remove_file(&path); // A checkpoint that was opened may still be mapped.
    std::fs::write(&path, &file).expect("/dev/shm can be written");
    within(file.len(), 4 << 20, 64, || {
        if let Ok(checkpoint) = Checkpoint::open(&FOLDER) {
            let _ = checkpoint.contains("a");
            let _ = checkpoint.vector("a", 4, 0..4).map(drop);
            let _ = checkpoint.vector("a", 4, 1..3).map(drop);
            let _ = checkpoint.matrix("a", [2, 2], 0..2, 0..1).map(drop);
        }
    });
});

/// A zip archive of uncompressed files.
fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut zip, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in files {
        let offset = zip.len() as u32;
        // What both headers have: version, flags, method, time, date, checksum, sizes, lengths of name and extra field.
        let mut shared = [0; 26];
        for (at, value) in [(14, data.len() as u32), (18, data.len() as u32), (22, name.len() as u32)] {
            shared[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        zip.extend([b"PK\x03\x04", &shared[..], name.as_bytes(), data].concat());
        directory.extend([b"PK\x01\x02\0\0", &shared[..], &[0; 10], &offset.to_le_bytes(), name.as_bytes()].concat());
    }
    let (count, start) = (files.len() as u16, zip.len() as u32);
    zip.extend(&directory);
    zip.extend(b"PK\x05\x06\0\0\0\0");
    zip.extend([count.to_le_bytes(), count.to_le_bytes()].concat());
    zip.extend([(directory.len() as u32).to_le_bytes(), start.to_le_bytes()].concat());
    zip.extend([0; 2]);
    zip
}
