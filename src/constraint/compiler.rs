use std::collections::HashSet;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use llguidance::api::{StopReason, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use rustix::process::nice;

use crate::cache::Cache;
use crate::error::readable;
use crate::grammar::grammar_of;
use crate::limits::Limits;
use crate::{Constraint, ConstraintError, ConstraintSpec, Vocabulary};

/// Intersecting schemas recurses up to 128 levels of some KiB each.
const STACK_BYTES: usize = 16 << 20;
/// The niceness of threads that compile. On a core that a generating thread needs, too, they get a quarter of the time, so that a
/// compilation still ends within its limit.
const NICENESS: i32 = 5;

/// Compiles constraints over one vocabulary. Share it in an [`Arc`].
pub struct Compiler {
    factory: Arc<ParserFactory>,
    vocabulary: Vocabulary,
    limits: Limits,
    cache: Arc<Cache>,
    compilations: Arc<Compilations>,
}

impl Compiler {
    /// Prepares the vocabulary, which takes tenths of a second for a large one.
    ///
    /// # Errors
    /// When the vocabulary cannot be prepared.
    pub fn new(vocabulary: Vocabulary, limits: Limits) -> Result<Self, ConstraintError> {
        let mut factory = ParserFactory::new_simple(&vocabulary.env)
            .map_err(|error| ConstraintError::Vocabulary(readable(&error.to_string())))?;
        factory.quiet();
        let bounds = factory.limits_mut();
        bounds.max_grammar_size = limits.max_grammar_size;
        bounds.max_lexer_states = limits.max_lexer_states;
        bounds.step_lexer_fuel = limits.mask_lexer_steps;
        bounds.step_max_items = limits.mask_parser_items;
        bounds.verbose_errors = false;
        let cache = Arc::new(Cache::new(limits.cache_bytes));
        Ok(Self { factory: Arc::new(factory), vocabulary, limits, cache, compilations: Arc::default() })
    }

    /// The vocabulary of all its constraints.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// A constraint at its start. Blocks until the description is compiled, at most [`Limits::compile_time`]; a description that was
    /// compiled before is ready at once.
    ///
    /// # Errors
    /// When the description is too large, not valid, not supported or too slow to compile, or too many are being compiled.
    pub fn compile(&self, spec: &ConstraintSpec) -> Result<Constraint, ConstraintError> {
        let grammar = grammar_of(spec, &self.limits)?;
        // Its `Debug` form leaves the content out.
        let key = serde_json::to_string(&grammar).map_err(|error| ConstraintError::Stuck(error.to_string()))?;
        let deadline = Instant::now() + self.limits.compile_time;
        loop {
            if let Some(matcher) = self.cache.get(&key) {
                return Ok(Constraint::new(matcher, self.vocabulary.clone(), &self.limits));
            }
            if let Some(compilation) = self.compilations.begin(&key, self.limits.max_compiling, deadline)? {
                let matcher = self.build(grammar, key, spec, compilation)?;
                return Ok(Constraint::new(matcher, self.vocabulary.clone(), &self.limits));
            }
        }
    }

    /// Compiles on a thread of its own, which has a large stack and may outlive the request.
    fn build(
        &self,
        grammar: TopLevelGrammar,
        key: String,
        spec: &ConstraintSpec,
        compilation: Compilation,
    ) -> Result<Matcher, ConstraintError> {
        let what = spec.what();
        // Warnings about the server's own grammars are expected.
        let takes_warnings = matches!(spec, ConstraintSpec::Lark(_));
        let (sender, receiver) = sync_channel(1);
        let (factory, cache) = (Arc::clone(&self.factory), Arc::clone(&self.cache));
        let build = move || {
            let _compilation = compilation;
            // On Linux this is the niceness of the thread alone: the threads of a step come first. A failure changes no result.
            let _ = nice(NICENESS);
            let built = compile(&factory, grammar, takes_warnings);
            if let Ok(matcher) = &built {
                cache.insert(key, matcher);
            }
            // The receiver is gone when the time is over.
            let _ = sender.send(built);
        };
        let invalid = |reason: String| ConstraintError::Invalid { what, reason };
        thread::Builder::new()
            .name("constraint".into())
            .stack_size(STACK_BYTES)
            .spawn(build)
            .map_err(|error| ConstraintError::Stuck(format!("no thread to compile it: {error}")))?;
        match receiver.recv_timeout(self.limits.compile_time) {
            Ok(built) => built.map_err(invalid),
            Err(RecvTimeoutError::Timeout) => {
                Err(ConstraintError::TooSlow { what, limit_ms: self.limits.compile_time.as_millis() as u64 })
            }
            Err(RecvTimeoutError::Disconnected) => Err(invalid("its compilation failed".into())),
        }
    }

    #[cfg(test)]
    fn num_cached(&self) -> usize {
        self.cache.len()
    }
}

fn compile(factory: &ParserFactory, grammar: TopLevelGrammar, takes_warnings: bool) -> Result<Matcher, String> {
    let mut matcher = Matcher::new(factory.create_parser(grammar));
    if let Some(error) = matcher.get_error() {
        return Err(readable(&error));
    }
    // A constraint without a first token is refused here, before the response begins.
    if let Err(error) = matcher.compute_mask() {
        let is_empty =
            matcher.stop_reason() == StopReason::NoExtensionBias || error.to_string().contains("NoExtensionBias");
        return Err(if is_empty { "no text can satisfy it".into() } else { readable(&error.to_string()) });
    }
    // A warning says that a part of the description was not taken as it is written.
    match matcher.grammar_warnings().first() {
        Some(warning) if !takes_warnings => Err(readable(warning)),
        _ => Ok(matcher),
    }
}

/// The compilations that run.
#[derive(Default)]
struct Compilations {
    running: Mutex<HashSet<String>>,
    /// Notified when one ends.
    ended: Condvar,
}

/// One compilation. It counts against the limit until it ends.
struct Compilation {
    all: Arc<Compilations>,
    key: String,
}

impl Compilations {
    /// Begins a compilation. Waits while `max` others run, or one of the same description, but not beyond `deadline`.
    /// `None` when the same description was compiled meanwhile, so that the cache may have it.
    fn begin(
        self: &Arc<Self>,
        key: &str,
        max: usize,
        deadline: Instant,
    ) -> Result<Option<Compilation>, ConstraintError> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut has_waited_for_same = false;
        loop {
            let is_same = running.contains(key);
            if has_waited_for_same && !is_same {
                return Ok(None);
            }
            if !is_same && running.len() < max {
                running.insert(key.to_owned());
                return Ok(Some(Compilation { all: Arc::clone(self), key: key.to_owned() }));
            }
            has_waited_for_same |= is_same;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ConstraintError::Busy { running: running.len() });
            }
            running = self.ended.wait_timeout(running, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Compilation {
    fn drop(&mut self) {
        self.all.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
        self.all.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mask, Token};

    fn compiler(limits: Limits) -> Compiler {
        let tokens = (0..=255).map(|byte| Token::Text(vec![byte])).chain([Token::Special("</s>".into())]).collect();
        Compiler::new(Vocabulary::new(tokens, &[256]).unwrap(), limits).unwrap()
    }

    fn first_bytes(compiler: &Compiler, spec: &ConstraintSpec) -> Vec<u32> {
        let mut mask = Mask::default();
        compiler.compile(spec).unwrap().mask(&mut mask).unwrap();
        mask.allowed().collect()
    }

    #[test]
    fn a_cached_description_is_used_for_equal_ones_only() {
        let compiler = compiler(Limits::default());
        for _ in 0..2 {
            for (byte, regex) in [(b'a', "a+"), (b'b', "b+"), (b'c', "c")] {
                assert_eq!(first_bytes(&compiler, &ConstraintSpec::Regex(regex.into())), [u32::from(byte)]);
            }
            assert_eq!(first_bytes(&compiler, &ConstraintSpec::Lark("start: \"d\"".into())), [u32::from(b'd')]);
        }
        assert_eq!(compiler.num_cached(), 4);
    }

    #[test]
    fn many_callers_of_one_description_wait_for_one_compilation() {
        let compiler = compiler(Limits { max_compiling: 2, ..Limits::default() });
        std::thread::scope(|scope| {
            let compile = |number: usize| {
                let compiler = &compiler;
                scope.spawn(move || first_bytes(compiler, &ConstraintSpec::Regex(format!("a{{1,{}}}", 1 + number % 3))))
            };
            let callers: Vec<_> = (0..48).map(compile).collect();
            for caller in callers {
                assert_eq!(caller.join().unwrap(), [u32::from(b'a')]);
            }
        });
        assert_eq!(compiler.num_cached(), 3);
    }

    #[test]
    fn a_caller_does_not_wait_beyond_its_time() {
        let compilations = Arc::<Compilations>::default();
        let first = compilations.begin("a", 1, Instant::now()).unwrap().unwrap();
        let busy = |key| compilations.begin(key, 1, Instant::now()).err();
        assert_eq!(busy("a"), Some(ConstraintError::Busy { running: 1 }));
        assert_eq!(busy("b"), Some(ConstraintError::Busy { running: 1 }));
        drop(first);
        assert_eq!(busy("b"), None);
    }

    #[test]
    fn a_cache_that_is_full_starts_anew() {
        let compiler = compiler(Limits { cache_bytes: 200 << 10, ..Limits::default() });
        for number in 0..10 {
            first_bytes(&compiler, &ConstraintSpec::Regex(format!("x{number}")));
            assert!((1..=3).contains(&compiler.num_cached()));
        }
    }
}
