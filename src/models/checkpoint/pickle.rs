//! Reads the pickles that `torch.save` writes for a state dict, without executing any code.
//!
//! A pickle is a program for a stack machine; Python's `pickletools` lists its instructions. This reader runs only the
//! instructions that build plain values. A name must be one of [`value::GLOBALS`]; any other call is refused with an
//! error that names it. Values are stored in one list and refer to each other by index, so deep nesting does not use
//! the call stack. A pickle can create at most one value per byte, and there are limits for the numbers of values and
//! tensors. The cost of an instruction does not depend on earlier instructions.

mod machine;
mod value;

use machine::Machine;
pub(super) use value::TensorRecord;
use value::{Id, Value, short};

/// Maximum number of entries in a dict of tensors.
const MAX_TENSORS: usize = 1 << 20;
/// A pickle after reading.
pub(super) struct Pickle<'a> {
    values: Vec<Value<'a>>,
    root: Id,
    /// Number of bytes that it occupies.
    pub(super) len: usize,
}

impl Pickle<'_> {
    /// Reads the pickle at the start of `data`.
    ///
    /// # Errors
    /// Returns a message if the pickle is damaged, or contains more than plain values and tensors.
    pub(super) fn read(data: &[u8]) -> Result<Pickle<'_>, String> {
        let mut machine = Machine::new(data);
        let root = machine.run()?;
        Ok(Pickle { values: machine.values, root, len: machine.at })
    }

    /// The tensors of a dict that maps names to tensors; other entries are ignored.
    pub(super) fn tensors(&self) -> Result<Vec<(String, TensorRecord)>, String> {
        let Value::Dict(entries) = &self.values[self.root] else {
            return Err("it does not hold a dict of tensors".into());
        };
        if entries.len() > MAX_TENSORS {
            return Err(format!("it holds {} entries; at most {MAX_TENSORS} are read", entries.len()));
        }
        let entry = |(key, value): &(Id, Id)| match (&self.values[*key], &self.values[*value]) {
            (Value::Text(name), Value::Tensor(tensor)) => {
                Some(short(name).map(|name| (name.to_owned(), tensor.clone())))
            }
            _ => None,
        };
        entries.iter().filter_map(entry).collect()
    }

    /// The strings in a list.
    pub(super) fn texts(&self) -> Result<Vec<String>, String> {
        let Value::List(items) = &self.values[self.root] else { return Err("it does not hold a list".into()) };
        if items.len() > MAX_TENSORS {
            return Err(format!("it holds {} strings; at most {MAX_TENSORS} are read", items.len()));
        }
        let text = |item: &Id| match &self.values[*item] {
            Value::Text(text) => short(text).map(str::to_owned),
            _ => Err("its list holds more than strings".to_owned()),
        };
        items.iter().map(text).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::machine::MAX_VALUES;
    use super::value::MAX_NAME;
    use super::*;

    fn refusal(pickle: &[u8]) -> String {
        Pickle::read(pickle).map(|_| ()).unwrap_err()
    }

    #[test]
    fn whatever_is_no_part_of_a_state_dict_is_refused_by_name() {
        for (pickle, expected) in [
            (&b"\x80\x02cos\nsystem\nX\x02\0\0\0ls\x85R."[..], "`os.system`"),
            (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.", "`builtins.eval`"),
            (b"cposix\nsystem\n(S'ls'\ntR.", "`posix.system`"),
            (b"(S'ls'\nios\nsystem\n.", "instruction 0x53"),
            (b"\x80\x02ctorch\nload\nX\x01\0\0\0a\x85R.", "`torch.load`"),
            (b"\x80\x02ctorch.storage\n_load_from_bytes\n.", "`torch.storage._load_from_bytes`"),
            (b"\x80\x02}\x81.", "instruction 0x81"), // NEWOBJ
            (b"\x80\x02}X\x01\0\0\0a\x85R.", "no function"),
            (b"\x80\x02K\x01K\x02b.", "sets attributes"),
        ] {
            let reason = refusal(pickle);
            assert!(reason.contains(expected), "{reason}");
        }
    }

    #[test]
    fn damage_is_an_error() {
        for pickle in [
            &b""[..],
            b"\x80",
            b"\x80\x02}",
            b".",
            b"0.",
            b"\x85.",
            b"(\x86.",
            b"K\x01(0.",
            b"t.",
            b"]u.",
            b"}(K\x01u.",
            b"h\x05.",
            b"\x80\x02X\xff\xff\xff\xff.",
            b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff.",
            b"X\x01\0\0\0\xff.",
            b"cos",
            b"NQ.",
            b"Na.",
        ] {
            assert!(Pickle::read(pickle).is_err(), "{pickle:?}");
        }
    }

    #[test]
    fn deep_nesting_uses_no_call_stack() {
        let deep = [vec![b']'; 1_000_000], vec![b'a'; 999_999], vec![b'.']].concat();
        assert!(Pickle::read(&deep).unwrap().tensors().is_err());
        // A list that contains itself.
        assert!(Pickle::read(b"]q\0h\0a.").unwrap().texts().is_err());
    }

    #[test]
    fn a_long_tuple_costs_its_length_once_however_often_it_is_used() {
        // One function is called many times with the same long tuple. It used to take minutes when the tuple was copied
        // each time.
        const LEN: usize = 300_000;
        let mut pickle = b"\x80\x02ctorch._utils\n_rebuild_parameter\nq\x01(".to_vec();
        pickle.extend(vec![b'N'; LEN]);
        pickle.extend(b"tq\0");
        pickle.extend(b"h\x01h\0R0".repeat(LEN));
        pickle.extend(b"}.");
        let began = std::time::Instant::now();
        assert!(Pickle::read(&pickle).unwrap().tensors().unwrap().is_empty());
        assert!(began.elapsed().as_secs() < 30, "{:?}", began.elapsed());
    }

    #[test]
    fn what_no_state_dict_needs_is_refused_before_it_takes_memory() {
        let repeated = |part: &[u8]| [part.repeat(MAX_VALUES + 2), b".".to_vec()].concat();
        for part in [&b"N"[..], b"(", b"N0]", b"N\x94"] {
            let reason = refusal(&repeated(part));
            assert!(reason.contains("more than 4194304 values"), "{part:?}: {reason}");
        }
        let name = "k".repeat(MAX_NAME + 1);
        let text = |text: &str| [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
        let storage = |key: &str| {
            [b"(", &text("storage")[..], b"ctorch\nFloatStorage\n", &text(key), &text("cpu"), b"K\x06tQ."].concat()
        };
        assert!(Pickle::read(&storage("k")).is_ok());
        assert!(refusal(&storage(&name)).contains("a name of 4097 bytes"));
        let keys = [b"]", &text(&name)[..], b"a."].concat();
        assert!(Pickle::read(&keys).unwrap().texts().unwrap_err().contains("a name of 4097 bytes"));
        let global = format!("c{}\nx\n.", "m".repeat(1 << 20));
        assert!(refusal(global.as_bytes()).len() < 1024);
    }

    #[test]
    fn random_bytes_never_panic() {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        const OPS: &[u8] = b"\x80\x95(0N\x88K\x8aX\x8c}])\x85\x86\x87tldsuaeqhrj\x94c\x93QRb.";
        for _ in 0..50_000 {
            let len = usize::from(next() % 40);
            let bytes: Vec<u8> = (0..len)
                .map(|_| if next() < 180 { OPS[usize::from(next()) % OPS.len()] } else { next() % 8 })
                .collect();
            let _ = Pickle::read(&bytes).map(|pickle| (pickle.tensors().is_ok(), pickle.texts().is_ok()));
        }
    }
}
