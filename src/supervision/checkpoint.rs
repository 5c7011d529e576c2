//! Whether all nodes hold the same checkpoint: a model whose shares come from different ones would answer nonsense.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Bytes at the start of a weights file that are read: the header, mostly.
const START_BYTES: u64 = 64 << 10;
/// Places further on that are looked at, evenly spread.
const NUM_SAMPLES: u64 = 64;
const SAMPLE_BYTES: u64 = 4 << 10;

/// One file: its length, and a checksum of its start and of samples of the rest. All of it would take minutes to read.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Print {
    file: String,
    len: u64,
    checksum: u32,
}

/// What the checkpoint in `dir` is, for workers on other nodes to compare with theirs.
///
/// # Errors
/// When a file there cannot be read.
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

fn print(path: &Path, name: String) -> std::io::Result<Print> {
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
    // Its end, where a copy that broke off differs from one that was padded.
    add(len.saturating_sub(SAMPLE_BYTES), SAMPLE_BYTES)?;
    Ok(Print { file: name, len, checksum: hasher.finalize() })
}

/// How two fingerprints differ, in words; `None` when they do not.
pub fn difference(one: &[u8], other: &[u8]) -> Option<String> {
    let read = |bytes: &[u8]| serde_json::from_slice::<Vec<Print>>(bytes).unwrap_or_default();
    let (one, other) = (read(one), read(other));
    let lacks = |has: &[Print], of: &[Print]| -> Option<String> {
        let file = has.iter().find(|print| of.iter().all(|its| its.file != print.file))?;
        Some(format!("`{}` is on one of them alone", file.file))
    };
    let differs = |print: &Print| -> Option<String> {
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
