//! What a template may take: steps, and the length of its prompt.

use minijinja::{Error, ErrorKind};

/// Instructions that a template of a checkpoint may execute for one conversation; a few hundred are usual. The engine counts 64
/// bytes of data as one. The limit takes a second at most.
pub(super) const FUEL: u64 = 20_000_000;
/// Instructions of a template that a client sends: together they write 256 MiB of data at most.
pub(super) const CLIENT_FUEL: u64 = 4 << 20;
/// Instructions in addition for each message.
pub(super) const FUEL_PER_MESSAGE: u64 = 1000;

/// Longest prompt that a template may write.
const MAX_PROMPT_BYTES: usize = 128 << 20;

/// The prompt while the template writes it.
#[derive(Default)]
pub(super) struct Output(Vec<u8>);

impl Output {
    pub(super) fn into_text(self) -> String {
        String::from_utf8(self.0).expect("templates write strings")
    }
}

impl std::io::Write for Output {
    fn write(&mut self, piece: &[u8]) -> std::io::Result<usize> {
        if piece.len() > MAX_PROMPT_BYTES - self.0.len() {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Why a template failed, in words.
pub(super) fn reason(error: &Error) -> String {
    match error.kind() {
        ErrorKind::OutOfFuel => "it takes too many steps for this conversation".to_owned(),
        ErrorKind::WriteFailure => format!("the prompt has more than {MAX_PROMPT_BYTES} bytes"),
        kind => {
            let place = error.line().map(|line| format!(" in its line {line}")).unwrap_or_default();
            let words = error.detail().map_or_else(|| kind.to_string(), str::to_owned);
            format!("{words}{place}")
        }
    }
}
