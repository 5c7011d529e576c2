//! Damaged files of `torch.save`: each is either refused or read, and none crashes the process. `golden_tokens` reads
//! intact files: a zip archive, shards with an index, and the older format.

use std::path::Path;

use models::{Checkpoint, ModelError};

fn golden(case: &str) -> Vec<u8> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens").join(case);
    std::fs::read(dir.join("pytorch_model.bin")).unwrap()
}

/// Opens a checkpoint whose only file of weights contains `bytes`.
fn open(bytes: &[u8]) -> Result<Checkpoint, ModelError> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("pytorch_model.bin"), bytes).unwrap();
    Checkpoint::open(dir.path())
}

#[test]
fn a_file_cut_short_is_refused_with_its_name() {
    for case in ["internlm", "gpt2"] {
        let whole = golden(case);
        assert!(open(&whole).is_ok());
        for part in 0..60 {
            let error = open(&whole[..whole.len() * part / 60]).unwrap_err().to_string();
            assert!(error.contains("pytorch_model.bin is not a usable file of `torch.save`"), "{case}: {error}");
        }
    }
}

#[test]
fn a_file_with_wrong_bytes_never_panics() {
    for case in ["internlm", "gpt2"] {
        let whole = golden(case);
        // The descriptions of tensors are at both ends of the file; most of the middle is tensor data.
        let interesting = (0..4000).step_by(21).chain(whole.len() - 4000..whole.len()).step_by(7);
        for at in interesting {
            let mut damaged = whole.clone();
            damaged[at] = damaged[at].wrapping_add(0x55);
            if let Ok(checkpoint) = open(&damaged) {
                let _ = checkpoint.vector("model.norm.weight", 64, 0..64);
            }
        }
    }
}

#[test]
fn a_tensor_that_is_no_contiguous_matrix_is_refused_when_it_is_asked_for() {
    // {"w": a [2, 3] view whose columns are contiguous} in the older format, as written by `torch.save(w.T)`.
    let mut file = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}.".to_vec();
    file.extend_from_slice(
        b"\x80\x02}X\x01\0\0\0wctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n\
          X\x01\0\0\0kX\x03\0\0\0cpuK\x06NtQK\0K\x02K\x03\x86K\x01K\x02\x86\x89}tRs.",
    );
    file.extend_from_slice(b"\x80\x02]X\x01\0\0\0ka.");
    file.extend_from_slice(&6u64.to_le_bytes());
    file.extend_from_slice(&[0; 24]);
    let error = open(&file).unwrap().matrix("w", [2, 3], 0..2, 0..3).unwrap_err().to_string();
    assert!(error.contains("tensor `w` has strides [1, 2] for shape [2, 3]"), "{error}");
}
