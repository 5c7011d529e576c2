//! Checks that the checkpoints of a model repository are readable and complete, and how fast they can be read.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use super::finding::{Finding, size};

/// Number of bytes that are read to measure the rate.
const SAMPLE_BYTES: u64 = 256 << 20;
/// Slower than this, a large model takes minutes to load.
const SLOW_BYTES_PER_S: f64 = 300e6;
/// The longest plausible header of a safetensors file.
const MAX_HEADER_BYTES: u64 = 100 << 20;

/// Checks every checkpoint below `repository`, and the read rate of its disk.
pub(super) fn check(repository: &Path) -> Vec<Finding> {
    let entries = fs::read_dir(repository).into_iter().flatten().flatten();
    let models: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    let mut findings = Vec::new();
    let files: Vec<PathBuf> = models.iter().flat_map(|model| weights(model)).collect();
    let broken: Vec<_> = files.iter().filter_map(|file| check_complete(file).err().map(|why| (file, why))).collect();
    for (file, why) in &broken {
        let found = format!("{}: {why}", file.display());
        findings.push(Finding::fail("checkpoint", found, "fetch the file again, or let this user read it"));
    }
    let bytes: u64 = files.iter().filter_map(|file| fs::metadata(file).ok()).map(|meta| meta.len()).sum();
    if broken.is_empty() && !files.is_empty() {
        findings.push(Finding::ok("checkpoint", format!("{} files, {}, whole", files.len(), size(bytes))));
    }
    let largest = files.iter().max_by_key(|file| fs::metadata(file).map_or(0, |meta| meta.len()));
    findings.extend(largest.map(|file| rate(file, bytes)));
    findings
}

/// Weight files of a model: in its version folders, and in the folder that its configuration names.
fn weights(model: &Path) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> =
        fs::read_dir(model).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    let config = fs::read_to_string(model.join("config.pbtxt")).unwrap_or_default();
    folders.extend(configured(&config).map(|dir| model.join(dir)));
    folders.extend(folders.iter().map(|folder| folder.join("weights")).collect::<Vec<_>>());
    let is_weights = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "safetensors");
    let inside = |folder: PathBuf| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> = folders.into_iter().flat_map(inside).filter(is_weights).collect();
    files.sort();
    files.dedup();
    files
}

/// The folder in the parameter `gpt_model_path`, unless that is an unfilled template.
fn configured(config: &str) -> Option<&str> {
    let (_, rest) = config.split_once("gpt_model_path")?;
    let (_, rest) = rest.split_once("string_value")?;
    let value = rest.split('"').nth(1)?;
    (!value.is_empty() && !value.contains("${")).then_some(value)
}

/// Returns an error if a safetensors file cannot be read or is shorter than its header requires.
fn check_complete(path: &Path) -> Result<(), String> {
    let file = File::open(path).map_err(|error| format!("cannot be opened: {error}"))?;
    let len = file.metadata().map_err(|error| error.to_string())?.len();
    let mut header_len = [0; 8];
    file.read_exact_at(&mut header_len, 0).map_err(|_| "is too short to be a safetensors file".to_owned())?;
    let header_len = u64::from_le_bytes(header_len);
    if header_len > MAX_HEADER_BYTES.min(len.saturating_sub(8)) {
        return Err("does not begin as a safetensors file does".to_owned());
    }
    let mut header = vec![0; header_len as usize];
    file.read_exact_at(&mut header, 8).map_err(|error| format!("cannot be read: {error}"))?;
    let header: serde_json::Value =
        serde_json::from_slice(&header).map_err(|error| format!("has a broken header: {error}"))?;
    let tensors = header.as_object().into_iter().flatten().filter_map(|(_, tensor)| tensor["data_offsets"][1].as_u64());
    let needed = 8 + header_len + tensors.max().unwrap_or(0);
    match needed > len {
        true => Err(format!("is cut off: {} of {} are there", size(len), size(needed))),
        false => Ok(()),
    }
}

/// Measures the read rate of the disk without the page cache. `bytes` is the total size of all weights.
fn rate(path: &Path, bytes: u64) -> Finding {
    let begun = Instant::now();
    let read = match read_uncached(path) {
        Ok(read) if read > 0 => read,
        Ok(_) => return Finding::fail("disk", format!("{} is empty", path.display()), "fetch the file again"),
        Err(error) => return Finding::fail("disk", format!("{}: {error}", path.display()), "see `dmesg` for the disk"),
    };
    let rate = read as f64 / begun.elapsed().as_secs_f64().max(1e-6);
    let found = format!("{:.1} GB/s of {} read; all weights in {:.1} s", rate / 1e9, size(read), bytes as f64 / rate);
    // Reading a small file measures latency, not rate.
    match rate < SLOW_BYTES_PER_S && read >= SAMPLE_BYTES / 4 {
        true => Finding::warn("disk", found, "copy the checkpoint to a local disk (NVMe) before starting"),
        false => Finding::ok("disk", found),
    }
}

fn read_uncached(path: &Path) -> std::io::Result<u64> {
    let mut file = File::open(path)?;
    // Pages that other processes have mapped stay cached; the model would read them from memory too.
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
    let (mut buffer, mut read) = (vec![0; 4 << 20], 0);
    while read < SAMPLE_BYTES {
        match file.read(&mut buffer)? {
            0 => break,
            got => read += got as u64,
        }
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn safetensors(data: usize, promised: usize) -> Vec<u8> {
        let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{promised}],"data_offsets":[0,{promised}]}}}}"#);
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(vec![0; data]);
        bytes
    }

    #[test]
    fn a_truncated_file_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let version = dir.path().join("llama/1");
        fs::create_dir_all(&version).unwrap();
        fs::write(version.join("a.safetensors"), safetensors(100, 100)).unwrap();
        let levels = |findings: &[Finding]| findings.iter().map(|finding| finding.level).collect::<Vec<_>>();
        assert_eq!(levels(&check(dir.path())), [super::super::finding::Level::Ok; 2]);

        fs::write(version.join("b.safetensors"), safetensors(99, 100)).unwrap();
        fs::write(version.join("c.safetensors"), "hello").unwrap();
        let findings = check(dir.path());
        let found: Vec<_> = findings.iter().map(|finding| finding.found.as_str()).collect();
        assert!(found[0].contains("b.safetensors: is cut off"), "{found:?}");
        assert!(found[1].contains("c.safetensors: is too short"), "{found:?}");
    }

    #[test]
    fn a_checkpoint_outside_the_repository_is_found_by_its_parameter() {
        let config = "parameters: { key: \"gpt_model_path\" value: { string_value: \"/models/x\" } }";
        assert_eq!(configured(config), Some("/models/x"));
        assert_eq!(configured(&config.replace("/models/x", "${engine_dir}")), None);
        assert_eq!(configured("name: \"m\""), None);
    }
}
