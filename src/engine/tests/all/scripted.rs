//! Scripts in `scripts/` test the engine's decisions: calls, then `----`, then the expected results.
//!
//! To accept an intended change, run `UPDATE_SCRIPTS=1 cargo test -p engine --test all scripts`: it writes the present
//! results. Read the diff.
//!
//! Calls, one a line (tokens are `3` or a range `1-4`, joined by commas):
//! - `engine rows=2 tokens=8 …` creates a new engine; other settings have small defaults, see [`config`].
//!   `windows=none,8` are two KV groups, the second with a window of 8 positions. `mixed=3` is a bound of 3 seconds
//!   between tokens, `mixed_of=1:2` one of 2 seconds for priority 1; a prompt token takes a second.
//! - `submit NAME prompt=1-4,9 max=3 [end=7] [stop=4,5/6] [priority=1] [salt=9] [adapter=2]`
//! - `plan` prints the next plan; `settle TOKEN…` settles the oldest plan with these sampled tokens, in its order.
//! - `settle step=N row=R TOKEN…` does the same for another step or row; `cancel NAME`, `finish NAME`, `recover`,
//!   `ledger`, `blocks`.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use engine::{
    Adapter, AdapterId, BeamParams, Engine, EngineConfig, FinishReason, GrownTable, JoinedTable, Policy, Request,
    RowId, SampledToken, SamplingParams, SequenceId, StepCosts, StepOutput, StepPlan, TokenEvent, TokenId,
};

#[test]
fn plans_follow_the_scripts() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts");
    let mut paths: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "no script in {}", folder.display());
    for path in paths {
        let script = std::fs::read_to_string(&path).unwrap();
        let found = run(&script);
        if std::env::var_os("UPDATE_SCRIPTS").is_some() {
            std::fs::write(&path, &found).unwrap();
            continue;
        }
        let differs = script.lines().zip(found.lines()).position(|(expected, found)| expected != found);
        let line = differs.unwrap_or(script.lines().count().min(found.lines().count())) + 1;
        assert!(script == found, "{} differs from line {line} on; now it is:\n{found}", path.display());
    }
}

/// The script with the present results of its calls.
fn run(script: &str) -> String {
    let mut run = ScriptRun::default();
    let mut found = String::new();
    for block in script.trim_end().split("\n\n") {
        let calls = block.split("----").next().unwrap().trim_end();
        found += calls;
        let calls: Vec<_> = calls.lines().filter(|line| !line.starts_with('#')).collect();
        if !calls.is_empty() {
            found += "\n----\n";
            calls.iter().for_each(|line| found += &run.call(line));
        } else {
            found.push('\n');
        }
        found.push('\n');
    }
    found.truncate(found.trim_end().len());
    found.push('\n');
    found
}

#[derive(Default)]
struct ScriptRun {
    engine: Option<Engine>,
    names: BTreeMap<SequenceId, String>,
    rows: BTreeMap<RowId, String>,
    in_flight: VecDeque<StepPlan>,
}

impl ScriptRun {
    fn call(&mut self, line: &str) -> String {
        let mut words = line.split_whitespace();
        let verb = words.next().unwrap();
        let (settings, plain): (Vec<&str>, Vec<&str>) = words.partition(|word| word.contains('='));
        let settings: BTreeMap<&str, &str> = settings.iter().map(|word| word.split_once('=').unwrap()).collect();
        if verb == "engine" {
            *self = ScriptRun::default();
            return match Engine::new(config(&settings)) {
                Ok(mut engine) => {
                    engine.set_costs(StepCosts { prompt_token: 1.0, ..StepCosts::default() });
                    self.engine = Some(engine);
                    String::new()
                }
                Err(error) => format!("{error}\n"),
            };
        }
        let engine = self.engine.as_mut().expect("a script starts with `engine`");
        match verb {
            "submit" => match engine.submit(request(&settings)) {
                Ok(id) => {
                    self.names.insert(id, plain[0].to_owned());
                    String::new()
                }
                Err(refused) => format!("{} refused: {refused}\n", plain[0]),
            },
            "plan" => match engine.plan() {
                Some(plan) => {
                    let filled = engine.take_filled();
                    assert!(plan.adapters.iter().map(|it| it.adapter).eq(filled.iter().map(|(_, it)| it.id)));
                    let text = self.plan_text(&plan);
                    self.in_flight.push_back(plan);
                    text
                }
                None => "no plan\n".to_owned(),
            },
            "settle" => self.settle(&settings, &plain),
            "cancel" | "finish" => {
                let id = *self.names.iter().find(|(_, name)| *name == plain[0]).expect("a submitted name").0;
                let live = if verb == "cancel" { engine.cancel(id) } else { engine.finish(id) };
                let mut events = Vec::new();
                engine.drain_events(&mut events);
                if live { self.events_text(events) } else { format!("{} has ended\n", plain[0]) }
            }
            "recover" => {
                engine.recover();
                self.in_flight.clear();
                String::new()
            }
            "ledger" => {
                let ledger = engine.ledger();
                format!(
                    "queued {}, rows {}, blocks {}, reserved {}, in flight {}\n",
                    ledger.num_queued,
                    ledger.num_rows,
                    ledger.num_blocks,
                    ledger.num_reserved_blocks,
                    ledger.num_in_flight
                )
            }
            "blocks" => {
                let stats = engine.stats();
                let (used, cached, unused) = (stats.num_blocks_used, stats.num_blocks_cached, stats.num_blocks_unused);
                format!("used {used}, cached {cached}, unused {unused}\n")
            }
            other => panic!("unknown call `{other}`"),
        }
    }

    fn settle(&mut self, settings: &BTreeMap<&str, &str>, tokens: &[&str]) -> String {
        let plan = self.in_flight.front().cloned().unwrap_or_default();
        let step = settings.get("step").map_or(plan.step, |step| step.parse().unwrap());
        let sampling = plan.work.iter().filter(|work| work.samples).map(|work| work.row);
        let rows = sampling.chain(std::iter::repeat(RowId(99)));
        let sampled = |(row, token): (RowId, &&str)| SampledToken {
            row: settings.get("row").map_or(row, |row| RowId(row.parse().unwrap())),
            token: TokenId(token.parse().unwrap()),
            logprob: None,
            top: vec![],
        };
        let output = StepOutput { step, tokens: rows.zip(tokens).map(sampled).collect(), guesses: vec![] };
        let mut events = Vec::new();
        match self.engine.as_mut().unwrap().settle(output, &mut events) {
            Ok(()) => {
                self.in_flight.pop_front();
                self.events_text(events)
            }
            Err(error) => format!("{error}\n"),
        }
    }

    fn plan_text(&mut self, plan: &StepPlan) -> String {
        let mut text = format!("step {}\n", plan.step);
        for row in &plan.left {
            writeln!(text, "  {} leaves row {}", self.rows.remove(row).unwrap(), row.0).unwrap();
        }
        for filled in &plan.adapters {
            writeln!(text, "  slot {} gets adapter {}", filled.slot.0, filled.adapter.0).unwrap();
        }
        for joined in &plan.joined {
            let name = &self.names[&joined.sequence];
            let (len, computed) = (joined.tokens.len(), joined.num_computed);
            let table = |table: &JoinedTable| {
                let blocks = table.blocks.iter().map(|block| block.0.to_string());
                let released = std::iter::repeat_n("-".to_owned(), table.first as usize);
                released.chain(blocks).collect::<Vec<_>>().join(" ")
            };
            let blocks = joined.tables.iter().map(table).collect::<Vec<_>>().join(" | ");
            let slot = joined.adapter.map_or(String::new(), |slot| format!(", slot {}", slot.0));
            writeln!(text, "  {name} joins row {}: {computed} of {len} computed, blocks {blocks}{slot}", joined.row.0)
                .unwrap();
            self.rows.insert(joined.row, name.clone());
        }
        for GrownTable { row, group, block } in &plan.grown {
            let group = if *group > 0 { format!(" in group {group}") } else { String::new() };
            writeln!(text, "  {} grows by block {}{group}", self.rows[row], block.0).unwrap();
        }
        for work in &plan.work {
            let end = work.start + work.num_tokens;
            let samples = if work.samples { " samples" } else { "" };
            writeln!(text, "  {} {}..{end}{samples}", self.rows[&work.row], work.start).unwrap();
        }
        text
    }

    fn events_text(&self, events: Vec<TokenEvent>) -> String {
        let line = |event: TokenEvent| {
            let tokens: String = event.tokens.iter().map(|token| format!(" {}", token.token.0)).collect();
            let blocks = event.blocks;
            let finished = event.finished.map_or(String::new(), |reason| {
                let reason = match reason {
                    FinishReason::EndId(_) => "EndId".to_owned(),
                    other => format!("{other:?}"),
                };
                format!(" {reason}, blocks {} new {} reused", blocks.num_allocated, blocks.num_reused)
            });
            format!("{}:{tokens}{finished}\n", self.names[&event.sequence])
        };
        events.into_iter().map(line).collect()
    }
}

fn config(settings: &BTreeMap<&str, &str>) -> EngineConfig {
    let number = |key: &str, default: usize| settings.get(key).map_or(default, |value| value.parse().unwrap());
    let known = [
        "rows",
        "tokens",
        "mixed",
        "mixed_of",
        "min_prompt",
        "tile",
        "len",
        "block",
        "blocks",
        "windows",
        "queue",
        "in_flight",
        "joined",
        "policy",
        "cache",
        "drafts",
        "adapters",
        "stages",
    ];
    assert!(settings.keys().all(|key| known.contains(key)), "unknown setting in {settings:?}");
    EngineConfig {
        max_rows: number("rows", 4),
        max_step_tokens: number("tokens", 16),
        // With the costs of the scripts, a prompt token takes a second and decodes no time.
        max_inter_token: Some(Duration::from_secs(number("mixed", 16) as u64)),
        max_inter_token_of: settings.get("mixed_of").map_or([].into(), |list| bounds(list)),
        min_prompt_tokens: number("min_prompt", 1),
        num_experts: 0,
        num_active_experts: 0,
        token_tile: number("tile", 1),
        prompt_tile: 1,
        max_sequence_len: number("len", 32),
        block_size: number("block", 4),
        num_blocks: number("blocks", 16),
        windows: settings.get("windows").map_or(vec![None], |list| list.split(',').map(|w| w.parse().ok()).collect()),
        num_states: 0,
        state_interval: 1,
        message_ends: vec![],
        num_host_blocks: 0,
        num_host_states: 0,
        num_disk_blocks: 0,
        num_disk_states: 0,
        max_queue: number("queue", 8),
        max_queue_each: i32::MAX as usize,
        max_queue_of: [].into(),
        max_in_flight: number("in_flight", 2),
        max_joined_tokens: number("joined", 64),
        policy: match settings.get("policy") {
            Some(&"guaranteed_no_evict") => Policy::GuaranteedNoEvict,
            Some(&"max_utilization") | None => Policy::MaxUtilization,
            Some(other) => panic!("unknown policy `{other}`"),
        },
        prefix_cache: settings.get("cache") == Some(&"on"),
        shares_output: true,
        max_drafts: number("drafts", 0),
        guesses_on_device: false,
        forced_acceptance: None,
        max_adapters: number("adapters", 0),
        num_stages: number("stages", 1),
    }
}

/// Bounds of priorities, such as `1:3,2:5`.
fn bounds(list: &str) -> BTreeMap<u32, Duration> {
    let one = |item: &str| {
        let (priority, seconds) = item.split_once(':').unwrap();
        (priority.parse().unwrap(), Duration::from_secs(seconds.parse().unwrap()))
    };
    list.split(',').map(one).collect()
}

fn request(settings: &BTreeMap<&str, &str>) -> Request {
    let list = |key: &str| settings.get(key).map_or(vec![], |value| tokens(value));
    Request {
        prompt: list("prompt"),
        max_tokens: settings["max"].parse().unwrap(),
        sampling: SamplingParams { end_ids: list("end"), ..SamplingParams::default() },
        beams: settings.get("beams").map(|width| BeamParams {
            width: width.parse().unwrap(),
            len_penalty: 0.0,
            early_stopping: true,
            diversity_rate: 0.0,
        }),
        max_drafts: settings.get("drafts").map_or(0, |value| value.parse().unwrap()),
        stop_words: settings.get("stop").map_or(vec![], |words| words.split('/').map(tokens).collect()),
        priority: settings.get("priority").map_or(0, |value| value.parse().unwrap()),
        cache_salt: settings.get("salt").map(|salt| salt.parse().unwrap()),
        constraint: None,
        adapter: settings.get("adapter").map(|id| {
            let id = AdapterId(id.parse().unwrap());
            Arc::new(Adapter { id, weights: Vec::new() })
        }),
    }
}

fn tokens(list: &str) -> Vec<TokenId> {
    let items = list.split(',').filter(|item| !item.is_empty());
    let range = |item: &str| {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        first.parse().unwrap()..=last.parse().unwrap()
    };
    items.flat_map(range).map(TokenId).collect()
}
