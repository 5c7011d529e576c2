//! The stack machine that runs a pickle's instructions.

use std::collections::HashMap;

use super::value::{GLOBALS, Global, Id, MAX_NAME, TensorRecord, Value, short};

/// Maximum number of dimensions of a tensor.
const MAX_DIMS: usize = 16;

/// Maximum number of values, memo entries and stack entries: many times what the largest state dict needs.
pub(super) const MAX_VALUES: usize = 4 << 20;

/// The stack machine.
pub(super) struct Machine<'a> {
    data: &'a [u8],
    pub(super) at: usize,
    pub(super) values: Vec<Value<'a>>,
    stack: Vec<Id>,
    marks: Vec<usize>, // stack heights at the marks
    memo: HashMap<u32, Id>,
}

impl<'a> Machine<'a> {
    pub(super) fn new(data: &'a [u8]) -> Self {
        Self { data, at: 0, values: Vec::new(), stack: Vec::new(), marks: Vec::new(), memo: HashMap::new() }
    }

    /// Runs the pickle to its end and returns the last value.
    pub(super) fn run(&mut self) -> Result<Id, String> {
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
