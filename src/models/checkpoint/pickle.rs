//! Reads the pickles that `torch.save` writes for a state dict, without executing any code.
//!
//! A pickle is a program for a stack machine; Python's `pickletools` lists its instructions. This reader runs only the
//! instructions that build plain values. A name must be one of [`GLOBALS`]; any other call is refused with an error
//! that names it. Values are stored in one list and refer to each other by index, so deep nesting does not use the call
//! stack. A pickle can create at most one value per byte, and there are limits for the numbers of values and tensors.
//! The cost of an instruction does not depend on earlier instructions.

use std::collections::HashMap;

/// Maximum number of dimensions of a tensor.
const MAX_DIMS: usize = 16;

/// Maximum number of values, memo entries and stack entries: many times what the largest state dict needs.
const MAX_VALUES: usize = 4 << 20;
/// Maximum number of entries in a dict of tensors.
const MAX_TENSORS: usize = 1 << 20;
/// Maximum length of the name of a tensor or storage, in bytes.
const MAX_NAME: usize = 4096;

/// Index of a value in the list.
type Id = usize;

/// A global name that a pickle may refer to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Global {
    /// Builds a dict.
    OrderedDict,
    /// Builds a tensor from its storage.
    RebuildTensor,
    /// Returns its first argument.
    RebuildParameter,
    /// Builds a tuple.
    Size,
    /// The element type of a storage, as a safetensors name.
    Storage(&'static str),
}

/// All names that are allowed: module, name, meaning.
const GLOBALS: &[(&str, &str, Global)] = &[
    ("collections", "OrderedDict", Global::OrderedDict),
    ("torch._utils", "_rebuild_tensor_v2", Global::RebuildTensor),
    ("torch._utils", "_rebuild_parameter", Global::RebuildParameter),
    ("torch", "Size", Global::Size),
    ("torch", "BFloat16Storage", Global::Storage("BF16")),
    ("torch", "HalfStorage", Global::Storage("F16")),
    ("torch", "FloatStorage", Global::Storage("F32")),
    ("torch", "DoubleStorage", Global::Storage("F64")),
    ("torch", "LongStorage", Global::Storage("I64")),
    ("torch", "IntStorage", Global::Storage("I32")),
    ("torch", "ShortStorage", Global::Storage("I16")),
    ("torch", "CharStorage", Global::Storage("I8")),
    ("torch", "ByteStorage", Global::Storage("U8")),
    ("torch", "BoolStorage", Global::Storage("BOOL")),
];

/// The description of a tensor in a pickle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TensorRecord {
    /// Key of its storage.
    pub(super) key: String,
    /// The safetensors name.
    pub(super) dtype: &'static str,
    /// Number of elements in its storage.
    pub(super) storage_len: usize,
    /// Index of its first element in the storage.
    pub(super) offset: usize,
    pub(super) shape: Vec<usize>,
    /// Distance in elements from one index to the next, for each dimension.
    pub(super) strides: Vec<usize>,
}

/// A value built by a pickle.
#[derive(Debug, Clone)]
enum Value<'a> {
    Nothing, // None, a fractional number, bytes: values that no tensor needs
    Bool,
    Int(i64),
    Text(&'a str),
    Tuple(Vec<Id>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Global(Global),
    Storage { key: &'a str, dtype: &'static str, len: usize },
    Tensor(TensorRecord),
}

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
        let mut machine =
            Machine { data, at: 0, values: Vec::new(), stack: Vec::new(), marks: Vec::new(), memo: HashMap::new() };
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

/// The stack machine.
struct Machine<'a> {
    data: &'a [u8],
    at: usize,
    values: Vec<Value<'a>>,
    stack: Vec<Id>,
    marks: Vec<usize>, // stack heights at the marks
    memo: HashMap<u32, Id>,
}

impl<'a> Machine<'a> {
    fn run(&mut self) -> Result<Id, String> {
        loop {
            let at = self.at;
            let op = self.take(1)?[0];
            if op == b'.' {
                return self.pop();
            }
            self.step(op).map_err(|reason| format!("{reason} (byte {at} of its pickle)"))?;
            let sizes = [self.values.len(), self.stack.len(), self.marks.len(), self.memo.len()];
            if sizes.iter().any(|&size| size > MAX_VALUES) {
                return Err(format!("its pickle makes more than {MAX_VALUES} values, which no state dict needs"));
            }
        }
    }

    /// Executes one instruction. The instructions are grouped: values, names and calls, stack and memo.
    fn step(&mut self, op: u8) -> Result<(), String> {
        match op {
            0x80 => self.take(1).map(drop), // PROTO
            0x95 => self.take(8).map(drop), // FRAME
            b'(' => {
                self.marks.push(self.stack.len()); // MARK
                Ok(())
            }
            b'0' => self.pop().map(drop), // POP
            b'N' | b'\x88' | b'\x89' | b'K' | b'M' | b'J' | b'\x8a' | b'G' | b'X' | b'\x8c' | b'\x8d' | b'U' | b'T'
            | b'C' | b'B' => self.scalar(op),
            b'}' | b']' | b')' | b'\x85' | b'\x86' | b'\x87' | b't' | b'l' | b'd' => self.collection(op),
            b's' | b'u' | b'a' | b'e' => self.extend(op),
            b'q' | b'r' | b'\x94' | b'h' | b'j' => self.remember(op),
            b'c' | b'\x93' => self.global(op),
            b'Q' => self.persistent(),
            b'R' => self.call(),
            b'b' => self.build(),
            other => Err(format!("it uses the instruction {other:#04x}, which no state dict needs")),
        }
    }

    fn scalar(&mut self, op: u8) -> Result<(), String> {
        let value = match op {
            b'N' => Value::Nothing,
            0x88 | 0x89 => Value::Bool,
            b'K' => Value::Int(self.unsigned(1)? as i64),
            b'M' => Value::Int(self.unsigned(2)? as i64),
            b'J' => Value::Int((self.unsigned(4)? as u32).cast_signed().into()),
            0x8a => {
                let len = self.unsigned(1)?;
                self.long(len)?
            }
            b'G' => {
                self.take(8)?;
                Value::Nothing
            }
            b'X' => self.text(4)?,
            0x8c => self.text(1)?,
            0x8d => self.text(8)?,
            b'U' | b'C' => self.opaque(1)?,
            _ => self.opaque(4)?, // T, B
        };
        self.push(value);
        Ok(())
    }

    /// An integer of `len` bytes in two's complement, or `Nothing` if it is too large for any tensor.
    fn long(&mut self, len: usize) -> Result<Value<'a>, String> {
        let bytes = self.take(len)?;
        if len > 8 {
            return Ok(Value::Nothing);
        }
        let negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
        let mut whole = [if negative { 0xff } else { 0 }; 8];
        whole[..len].copy_from_slice(bytes);
        Ok(Value::Int(i64::from_le_bytes(whole)))
    }

    fn text(&mut self, len_bytes: usize) -> Result<Value<'a>, String> {
        let len = self.unsigned(len_bytes)?;
        let text = std::str::from_utf8(self.take(len)?);
        text.map(Value::Text).map_err(|_| "it holds a string that is not UTF-8".into())
    }

    fn opaque(&mut self, len_bytes: usize) -> Result<Value<'a>, String> {
        let len = self.unsigned(len_bytes)?;
        self.take(len)?;
        Ok(Value::Nothing)
    }

    fn collection(&mut self, op: u8) -> Result<(), String> {
        let value = match op {
            b'}' => Value::Dict(Vec::new()),
            b']' => Value::List(Vec::new()),
            b')' => Value::Tuple(Vec::new()),
            0x85..=0x87 => {
                let len = usize::from(op - 0x84);
                let first = self.floor().max(self.stack.len().saturating_sub(len));
                if self.stack.len() - first < len {
                    return Err("its stack is empty".into());
                }
                Value::Tuple(self.stack.split_off(first))
            }
            b't' => Value::Tuple(self.pop_mark()?),
            b'l' => Value::List(self.pop_mark()?),
            _ => Value::Dict(pairs(&self.pop_mark()?)?),
        };
        self.push(value);
        Ok(())
    }

    /// Adds one value, or all values above the mark, to the list or dict below.
    fn extend(&mut self, op: u8) -> Result<(), String> {
        let items = match op {
            b'a' => vec![self.pop()?],
            b's' => {
                let value = self.pop()?;
                vec![self.pop()?, value]
            }
            _ => self.pop_mark()?,
        };
        let target = self.top()?;
        match (&mut self.values[target], op) {
            (Value::Dict(entries), b's' | b'u') => entries.extend(pairs(&items)?),
            (Value::List(list), b'a' | b'e') => list.extend(items),
            _ => return Err("it adds items to what is neither list nor dict".into()),
        }
        Ok(())
    }

    fn remember(&mut self, op: u8) -> Result<(), String> {
        let index = match op {
            b'q' | b'h' => self.unsigned(1)? as u32,
            b'r' | b'j' => self.unsigned(4)? as u32,
            _ => self.memo.len() as u32, // MEMOIZE
        };
        if matches!(op, b'h' | b'j') {
            let id = *self.memo.get(&index).ok_or_else(|| format!("it recalls value {index}, which it never kept"))?;
            self.stack.push(id);
        } else {
            let top = self.top()?;
            self.memo.insert(index, top);
        }
        Ok(())
    }

    fn global(&mut self, op: u8) -> Result<(), String> {
        let (module, name) = if op == b'c' {
            (self.line()?, self.line()?)
        } else {
            let (name, module) = (self.pop()?, self.pop()?);
            match (&self.values[module], &self.values[name]) {
                (Value::Text(module), Value::Text(name)) => (*module, *name),
                _ => return Err("it names something without a string".into()),
            }
        };
        let found = GLOBALS.iter().find(|(m, n, _)| (*m, *n) == (module, name));
        let (.., global) = found.ok_or_else(|| {
            let is_long = module.len() + name.len() > MAX_NAME;
            let (module, name) = if is_long { ("(a name", "of many bytes)") } else { (module, name) };
            format!(
                "it wants to call `{module}.{name}`, which no weights need: nothing was run; \
                 if you trust it, load it in Python and save it as safetensors"
            )
        })?;
        self.push(Value::Global(*global));
        Ok(())
    }

    /// A storage: `("storage", type, key, device, length)`.
    fn persistent(&mut self) -> Result<(), String> {
        let id = self.pop()?;
        let Value::Tuple(parts) = &self.values[id] else { return Err("it has a storage of another kind".into()) };
        let parts: Vec<&Value<'a>> = parts.iter().take(MAX_DIMS).map(|id| &self.values[*id]).collect();
        let storage = match parts[..] {
            [Value::Text("storage"), Value::Global(Global::Storage(dtype)), Value::Text(key), _, Value::Int(len)]
            | [
                Value::Text("storage"),
                Value::Global(Global::Storage(dtype)),
                Value::Text(key),
                _,
                Value::Int(len),
                Value::Nothing,
            ] => Value::Storage { key: short(key)?, dtype, len: size(*len)? },
            _ => return Err("it has a storage of another kind".into()),
        };
        self.push(storage);
        Ok(())
    }

    fn call(&mut self) -> Result<(), String> {
        let (args, function) = (self.pop()?, self.pop()?);
        let (Value::Tuple(args), Value::Global(function)) = (&self.values[args], &self.values[function]) else {
            return Err("it calls what is no function".into());
        };
        let (function, len) = (*function, args.len());
        let first: [Option<Id>; 4] = std::array::from_fn(|index| args.get(index).copied());
        match (function, first) {
            (Global::OrderedDict, [None, ..]) => self.push(Value::Dict(Vec::new())),
            (Global::RebuildParameter, [Some(tensor), ..]) => self.stack.push(tensor),
            (Global::Size, [Some(sizes), None, ..]) => self.stack.push(sizes),
            (Global::RebuildTensor, [Some(storage), Some(offset), Some(shape), Some(strides)]) => {
                let tensor = self.tensor(storage, offset, shape, strides)?;
                self.push(tensor);
            }
            _ => return Err(format!("it calls {function:?} with {len} arguments")),
        }
        Ok(())
    }

    fn tensor(&self, storage: Id, offset: Id, shape: Id, strides: Id) -> Result<Value<'a>, String> {
        let (Value::Storage { key, dtype, len }, Value::Int(offset)) = (&self.values[storage], &self.values[offset])
        else {
            return Err("it has a tensor without a storage".into());
        };
        Ok(Value::Tensor(TensorRecord {
            key: (*key).to_owned(),
            dtype,
            storage_len: *len,
            offset: size(*offset)?,
            shape: self.sizes(shape)?,
            strides: self.sizes(strides)?,
        }))
    }

    fn sizes(&self, id: Id) -> Result<Vec<usize>, String> {
        let Value::Tuple(items) = &self.values[id] else { return Err("it has a tensor without a shape".into()) };
        if items.len() > MAX_DIMS {
            return Err(format!("it has a tensor of {} dimensions", items.len()));
        }
        let item = |id: &Id| match self.values[*id] {
            Value::Int(n) => size(n),
            _ => Err("it has a tensor without a shape".to_owned()),
        };
        items.iter().map(item).collect()
    }

    /// Sets attributes of an object. A state dict has only a version, which is ignored.
    fn build(&mut self) -> Result<(), String> {
        self.pop()?;
        let target = self.top()?;
        match &self.values[target] {
            Value::Dict(_) | Value::Tensor(_) => Ok(()),
            _ => Err("it sets attributes of what has none".into()),
        }
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let bytes = self.at.checked_add(len).and_then(|end| self.data.get(self.at..end));
        let bytes = bytes.ok_or("its pickle is truncated; copy the file again")?;
        self.at += len;
        Ok(bytes)
    }

    fn unsigned(&mut self, len: usize) -> Result<usize, String> {
        let mut whole = [0; 8];
        whole[..len].copy_from_slice(self.take(len)?);
        usize::try_from(u64::from_le_bytes(whole)).map_err(|error| error.to_string())
    }

    fn line(&mut self) -> Result<&'a str, String> {
        let rest = &self.data[self.at..];
        let len = rest.iter().position(|byte| *byte == b'\n').ok_or("its pickle is truncated; copy the file again")?;
        self.at += len + 1;
        std::str::from_utf8(&rest[..len]).map_err(|_| "it holds a name that is not UTF-8".into())
    }

    fn push(&mut self, value: Value<'a>) {
        self.stack.push(self.values.len());
        self.values.push(value);
    }

    /// Height of the stack below which a single pop must not go.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Result<Id, String> {
        self.stack.last().copied().ok_or_else(|| "its stack is empty".into())
    }

    fn pop(&mut self) -> Result<Id, String> {
        if self.stack.len() == self.floor() {
            return Err("its stack is empty".into());
        }
        self.stack.pop().ok_or_else(|| "its stack is empty".into())
    }

    fn pop_mark(&mut self) -> Result<Vec<Id>, String> {
        let mark = self.marks.pop().ok_or("it ends a group that it never began")?;
        Ok(self.stack.split_off(mark))
    }
}

fn short(name: &str) -> Result<&str, String> {
    match name.len() {
        0..=MAX_NAME => Ok(name),
        len => Err(format!("it has a name of {len} bytes; at most {MAX_NAME} are read")),
    }
}

fn pairs(items: &[Id]) -> Result<Vec<(Id, Id)>, String> {
    let (pairs, rest) = items.as_chunks::<2>();
    if rest.is_empty() {
        Ok(pairs.iter().map(|[key, value]| (*key, *value)).collect())
    } else {
        Err("it has a key without a value".into())
    }
}

fn size(n: i64) -> Result<usize, String> {
    usize::try_from(n).map_err(|_| format!("it has a size of {n}"))
}

#[cfg(test)]
mod tests {
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
    fn nesting_however_deep_costs_no_stack() {
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
