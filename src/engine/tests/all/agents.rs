//! What the cache of a model with recurrent states has of conversations of agents, by simulation. The sizes are those of
//! Qwen3.6 35B-A3B, divided by four: a state is as large as 51 KV blocks. `docs/decisions/0023-useful-snapshots.md` has the figures of
//! other rules.

use std::collections::{HashMap, VecDeque};

use engine::{Engine, EngineConfig, Policy, Request, RowWork, SampledToken, SequenceId, StepOutput, TokenId};

use crate::support::Random;

const BLOCK_SIZE: usize = 16;
const SYSTEM_LEN: usize = 500;
/// Ends a message.
const END: TokenId = TokenId(0);
/// Requests in flight.
const CONCURRENCY: usize = 4;

pub fn config(num_states: usize, num_blocks: usize) -> EngineConfig {
    EngineConfig {
        max_rows: 8,
        max_step_tokens: 2048,
        max_sequence_len: 24_000,
        max_joined_tokens: 100_000,
        block_size: BLOCK_SIZE,
        num_blocks,
        num_states,
        state_interval: 51,
        message_ends: vec![END],
        policy: Policy::MaxUtilization,
        ..EngineConfig::default()
    }
}

/// Tokens of full blocks that the cache had, and those that requests repeated.
#[derive(Debug, Default, Clone, Copy)]
pub struct Hits {
    cached: usize,
    repeated: usize,
}

impl Hits {
    pub fn rate(&self) -> f64 {
        self.cached as f64 / self.repeated as f64
    }
}

/// A conversation so far.
#[derive(Debug, Clone)]
struct Conversation {
    text: Vec<TokenId>,
    /// How many of its tokens were computed before.
    num_repeated: usize,
    /// The same after each turn.
    ends: Vec<usize>,
}

impl Conversation {
    fn new(system: &[TokenId]) -> Self {
        Self { text: system.to_vec(), num_repeated: 0, ends: Vec::new() }
    }

    /// The next message, after which the text has `len` tokens.
    fn say(&mut self, len: usize, random: &mut Random) {
        self.text.extend(message(len - self.text.len(), random));
    }

    fn take(&mut self, answer: &[TokenId]) {
        self.num_repeated = self.text.len() + answer.len() - 1;
        self.ends.push(self.num_repeated);
        self.text.extend(answer);
    }
}

fn message(len: usize, random: &mut Random) -> Vec<TokenId> {
    (1..len).map(|_| TokenId(1 + random.below(1 << 20))).chain([END]).collect()
}

/// An engine whose device samples random tokens.
struct Server {
    engine: Engine,
    random: Random,
    /// The number of each request in flight in its list, and its answer so far.
    live: HashMap<SequenceId, (usize, Vec<TokenId>)>,
}

impl Server {
    fn new(config: EngineConfig) -> Self {
        Self { engine: Engine::new(config).unwrap(), random: Random(5), live: HashMap::new() }
    }

    /// Serves prompts with the numbers of tokens that each repeats. Returns the answers.
    fn serve(&mut self, asked: Vec<(Vec<TokenId>, usize)>) -> (Vec<Vec<TokenId>>, Hits) {
        let (mut answers, mut hits) = (vec![Vec::new(); asked.len()], Hits::default());
        for (index, (prompt, repeated)) in asked.into_iter().enumerate() {
            hits.repeated += repeated / BLOCK_SIZE * BLOCK_SIZE;
            let id = self.engine.submit(Request { prompt, max_tokens: 16, ..Request::default() }).unwrap();
            self.live.insert(id, (index, Vec::new()));
            self.run(CONCURRENCY - 1, &mut answers, &mut hits);
        }
        self.run(0, &mut answers, &mut hits);
        (answers, hits)
    }

    /// Runs until this number of requests are left.
    fn run(&mut self, num_left: usize, answers: &mut [Vec<TokenId>], hits: &mut Hits) {
        let (mut plans, mut events) = (VecDeque::new(), Vec::new());
        while self.live.len() > num_left || !plans.is_empty() {
            while let Some(plan) = self.engine.plan() {
                plans.push_back(plan);
            }
            for copy in self.engine.take_disk_copies() {
                self.engine.finish_disk_copy(copy, true);
            }
            let Some(plan) = plans.pop_front() else { continue };
            let mut token = |work: &RowWork| {
                let token = TokenId(1 + self.random.below(1 << 20));
                SampledToken { row: work.row, token, logprob: None, top: vec![] }
            };
            let tokens = plan.work.iter().filter(|work| work.samples).map(&mut token).collect();
            self.engine.settle(StepOutput { step: plan.step, tokens, guesses: vec![] }, &mut events).unwrap();
            for event in events.drain(..) {
                let (index, answer) = self.live.get_mut(&event.sequence).expect("a live request");
                answer.extend(event.tokens.iter().map(|token| token.token));
                if event.finished.is_some() {
                    hits.cached += event.blocks.num_reused as usize * BLOCK_SIZE;
                    answers[*index] = std::mem::take(answer);
                    self.live.remove(&event.sequence);
                }
            }
        }
    }
}

/// The pattern of `trireme bench agents`: 20 conversations that take 10 turns in rounds, then two branches of each. Returns the hits of
/// the first round, of the others, and of the branches.
fn rounds(num_states: usize, num_blocks: usize) -> [Hits; 3] {
    let (mut server, mut random) = (Server::new(config(num_states, num_blocks)), Random(9));
    let mut all = vec![Conversation::new(&message(SYSTEM_LEN, &mut random)); 20];
    let mut found = [Hits::default(); 3];
    let mut add = |index: usize, hits: Hits| {
        found[index].cached += hits.cached;
        found[index].repeated += hits.repeated;
    };
    for turn in 0..10 {
        let ask = |(index, it): (usize, &mut Conversation)| {
            it.say(2000 * (turn + 1), &mut random);
            (it.text.clone(), if turn == 0 && index > 0 { SYSTEM_LEN } else { it.num_repeated })
        };
        let (answers, hits) = server.serve(all.iter_mut().enumerate().map(ask).collect());
        all.iter_mut().zip(&answers).for_each(|(it, answer)| it.take(answer));
        add(usize::from(turn > 0), hits);
    }
    for turn in [2, 5] {
        let ask = |it: &Conversation| {
            let num_repeated = it.ends[turn];
            ([&it.text[..num_repeated], &message(2000, &mut random)].concat(), num_repeated)
        };
        let (_, hits) = server.serve(all.iter().map(ask).collect());
        add(2, hits);
    }
    found
}

/// Conversations at random.
#[derive(Debug, Clone, Copy)]
pub struct Pattern {
    pub num_turns: usize,
    /// Tokens of each of the system prompts.
    pub system_len: usize,
    /// How many turns a conversation of 18 000 tokens has.
    pub turns_of_each: u32,
    /// Before one of so many turns a prompt of 16 000 tokens comes that shares nothing; 0 for none.
    pub one_off_each: u32,
}

/// 20 conversations at a time with one of five system prompts, whose turns come in a random order. One turn of eight goes back to an
/// earlier one, and conversations end. Returns the hits of first turns and of the others.
pub fn mixed(config: EngineConfig, pattern: Pattern) -> [Hits; 2] {
    let Pattern { num_turns, system_len, turns_of_each, one_off_each } = pattern;
    let (mut server, mut random) = (Server::new(config), Random(11));
    let systems: Vec<_> = (0..5).map(|_| message(system_len, &mut random)).collect();
    let (mut all, mut found): (Vec<Conversation>, _) = (Vec::new(), [Hits::default(); 2]);
    for turn in 0..num_turns {
        if one_off_each > 0 && random.one_in(one_off_each) {
            server.serve(vec![(message(16_000, &mut random), 0)]);
        }
        let index = if all.len() < 20 { all.len() } else { random.below(20) as usize };
        if index == all.len() {
            let system = random.below(5) as usize;
            all.push(Conversation { num_repeated: system_len, ..Conversation::new(&systems[system]) });
        }
        let it = &mut all[index];
        let is_first = it.ends.is_empty();
        if it.ends.len() > 1 && random.one_in(8) {
            it.ends.truncate(1 + random.below(it.ends.len() as u32 - 1) as usize);
            it.num_repeated = it.ends[it.ends.len() - 1];
            it.text.truncate(it.num_repeated);
        }
        it.say(it.text.len() + 300 + random.below(36_000 / turns_of_each) as usize, &mut random);
        let (answers, hits) = server.serve(vec![(it.text.clone(), it.num_repeated)]);
        it.take(&answers[0]);
        // The cache is full by then, and has seen all system prompts.
        if turn > num_turns / 6 {
            let of = &mut found[usize::from(!is_first)];
            (of.cached, of.repeated) = (of.cached + hits.cached, of.repeated + hits.repeated);
        }
        if it.text.len() > 18_000 || it.ends.len() > turns_of_each as usize {
            all.swap_remove(index);
        }
    }
    found
}

/// Slots for states and KV blocks, as the memory of a device is divided: a state for 153 blocks, and two for each row. In the first line
/// all blocks of the rounds fit.
const SIZES: [(usize, usize); 4] = [(190, 26_000), (640, 26_000), (120, 16_000), (160, 16_000)];

#[test]
fn agents_find_their_system_prompt_their_texts_and_earlier_turns() {
    let rates = |(num_states, num_blocks)| rounds(num_states, num_blocks).map(|hits| hits.rate());
    let [fits, many, few, _] = SIZES.map(rates);
    println!("rounds: {fits:.3?}, {many:.3?}, {few:.3?}");
    assert!([fits, many, few].iter().all(|rates| rates[0] == 1.0), "the system prompt is computed once");
    assert!(fits[1] > 0.99 && many[1] > 0.99);
    // The one that was used longest ago first: 0.63.
    assert!(many[2] > 0.95, "{many:?}");
}

#[test]
fn snapshots_that_save_much_and_are_used_often_stay() {
    let pattern = Pattern { num_turns: 600, system_len: SYSTEM_LEN, turns_of_each: 12, one_off_each: 0 };
    let rates = |(num_states, num_blocks)| mixed(config(num_states, num_blocks), pattern).map(|hits| hits.rate());
    let [.., few, more] = SIZES.map(rates);
    println!("mixed: {few:.3?}, {more:.3?}");
    // The one that was used longest ago first: 0.77 and 0.43, 0.80 and 0.57.
    assert!(few[0] > 0.85 && few[1] > 0.65, "{few:?}");
    assert!(more[0] > 0.85 && more[1] > 0.8, "{more:?}");
}
