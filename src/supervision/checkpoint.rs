//! Compares the checkpoint of different nodes: weights from different checkpoints would give meaningless output.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Bytes read at the start of a weights file, mostly its header.
const START_BYTES: u64 = 64 << 10;
/// Number of samples of the rest, evenly spread.
const NUM_SAMPLES: u64 = 64;
const SAMPLE_BYTES: u64 = 4 << 10;

/// One file: its length, and a checksum of its start and of samples of the rest. A checksum of the whole file would take minutes.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FilePrint {
    file: String,
    len: u64,
    checksum: u32,
}

/// A fingerprint of the checkpoint in `dir`, which workers on other nodes compare with their own.
///
/// # Errors
/// When the directory or a file in it cannot be read.
pub fn fingerprint(dir: &Path) -> std::io::Result<Vec<u8>> {
    let mut prints = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let counts =
            name == "config.json" || [".safetensors", ".bin", ".index.json"].iter().any(|end| name.ends_with(end));
        if counts && entry.path().is_file() {
            prints.push(print(&entry.path(), name)?);
        }
    }
    prints.sort_by(|one, other| one.file.cmp(&other.file));
    Ok(serde_json::to_vec(&prints).expect("names and numbers can be written"))
}

fn print(path: &Path, name: String) -> std::io::Result<FilePrint> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut hasher = crc32fast::Hasher::new();
    let mut bytes = vec![0; START_BYTES as usize];
    let mut add = |at: u64, count: u64| -> std::io::Result<()> {
        let bytes = &mut bytes[..count.min(len - at) as usize];
        file.read_exact_at(bytes, at)?;
        hasher.update(bytes);
        Ok(())
    };
    add(0, START_BYTES)?;
    for sample in 0..NUM_SAMPLES {
        add(len / NUM_SAMPLES * sample, SAMPLE_BYTES)?;
    }
    // The end differs when a copy was interrupted and padded.
    add(len.saturating_sub(SAMPLE_BYTES), SAMPLE_BYTES)?;
    Ok(FilePrint { file: name, len, checksum: hasher.finalize() })
}

/// A description of how two fingerprints differ; `None` when they are equal.
pub fn difference(one: &[u8], other: &[u8]) -> Option<String> {
    let read = |bytes: &[u8]| serde_json::from_slice::<Vec<FilePrint>>(bytes).unwrap_or_default();
    let (one, other) = (read(one), read(other));
    let lacks = |has: &[FilePrint], of: &[FilePrint]| -> Option<String> {
        let file = has.iter().find(|print| of.iter().all(|its| its.file != print.file))?;
        Some(format!("`{}` is on one of them alone", file.file))
    };
    let differs = |print: &FilePrint| -> Option<String> {
        let its = other.iter().find(|its| its.file == print.file && *its != print)?;
        Some(match print.len == its.len {
            true => format!("`{}` has other bytes", print.file),
            false => format!("`{}` has {} and {} bytes", print.file, print.len, its.len),
        })
    };
    lacks(&one, &other).or_else(|| lacks(&other, &one)).or_else(|| one.iter().find_map(differs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_other_bytes_is_named() {
        let dirs = ["a", "b"].map(|name| std::env::temp_dir().join(format!("prints-{}-{name}", std::process::id())));
        for dir in &dirs {
            fs::create_dir_all(dir).unwrap();
            fs::write(dir.join("config.json"), "{}").unwrap();
            fs::write(dir.join("model.safetensors"), vec![7; 300_000]).unwrap();
            fs::write(dir.join("notes.txt"), dir.to_string_lossy().as_bytes()).unwrap();
        }
        let prints = || dirs.each_ref().map(|dir| fingerprint(dir).unwrap());
        let [one, other] = prints();
        assert_eq!(difference(&one, &other), None);

        let mut bytes = vec![7; 300_000];
        *bytes.last_mut().unwrap() = 8;
        fs::write(dirs[1].join("model.safetensors"), bytes).unwrap();
        let [one, other] = prints();
        assert_eq!(difference(&one, &other).unwrap(), "`model.safetensors` has other bytes");

        fs::remove_file(dirs[0].join("config.json")).unwrap();
        let [one, other] = prints();
        assert_eq!(difference(&one, &other).unwrap(), "`config.json` is on one of them alone");
        dirs.iter().for_each(|dir| drop(fs::remove_dir_all(dir)));
    }
}
