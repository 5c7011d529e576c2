//! Pictures of a recording: latencies of requests, and the steps of language models over time.

use std::fmt::Write as _;
use std::time::Duration;

use record::{Recording, Request, Step};

use crate::percentiles::{Histogram, Percentiles};
use crate::report_chart::{Bar, bars, escape, timeline};

/// Phases of a step in the order of their times, with colours.
const PHASES: [(&str, &str); 5] =
    [("plan", "#d1662a"), ("send", "#8a4fa3"), ("workers", "#1f5fa8"), ("settle", "#2f7d4f"), ("deliver", "#a33b3b")];
/// Steps around the slowest that are drawn.
const NUM_STEPS: usize = 16;

/// The section of a recording.
pub(crate) fn section(recording: &Recording) -> String {
    let mut text = format!(
        "<h2>Recording {}</h2>\n<p>{} requests, {} steps",
        escape(&recording.path.display().to_string()),
        recording.requests.len(),
        recording.steps.len()
    );
    match &recording.end {
        Some(end) => {
            let (requests, steps) = (end.dropped_requests, end.dropped_steps);
            let _ =
                writeln!(text, "; its end: {}; not kept: {requests} requests, {steps} steps.</p>", escape(&end.reason));
        }
        None => text += "; the server was killed.</p>\n",
    }
    let micros = |read: fn(&Request) -> Option<u64>| {
        recording.requests.iter().filter_map(read).map(Duration::from_micros).collect::<Vec<_>>()
    };
    text += &distribution("first part of a reply", micros(|request| request.first_us));
    text += &distribution("whole reply", micros(|request| Some(request.last_us)));
    text += &distribution("step", recording.steps.iter().map(|step| Duration::from_micros(duration(step))).collect());
    text + &steps(&recording.steps)
}

fn distribution(name: &str, mut values: Vec<Duration>) -> String {
    bars(&format!("{name}, ms; {}", short(&Percentiles::of(&mut values))), &Histogram::of(&values))
}

fn short(percentiles: &Percentiles) -> String {
    format!("p50 {:.1}, p99 {:.1}", percentiles.p50, percentiles.p99)
}

/// Length of each phase in microseconds.
fn phases(step: &Step) -> [u64; 5] {
    [step.plan_us, step.send_us, step.wait_us, step.settle_us, step.deliver_us]
}

fn duration(step: &Step) -> u64 {
    phases(step).iter().sum()
}

/// The timeline of the slowest step and its neighbours, and what it computed.
fn steps(steps: &[Step]) -> String {
    let Some(slowest) = (0..steps.len()).max_by_key(|&index| duration(&steps[index])) else { return String::new() };
    let first = slowest.saturating_sub(NUM_STEPS / 2);
    let shown = &steps[first..steps.len().min(first + NUM_STEPS)];
    let begin = shown.iter().map(|step| step.at_us).min().unwrap_or(0);
    let bars_of = |step: &Step| {
        let mut at = step.at_us - begin;
        let of = |(length, (_, colour)): (u64, (&str, &'static str))| {
            let bar = Bar { from: at as f64 / 1e3, length: length as f64 / 1e3, colour };
            at += length;
            bar
        };
        phases(step).into_iter().zip(PHASES).map(of).collect::<Vec<_>>()
    };
    let rows: Vec<(String, Vec<Bar>)> = shown.iter().map(|step| (step.step.to_string(), bars_of(step))).collect();
    let names: Vec<String> =
        PHASES.iter().map(|(name, colour)| format!("<span style=\"color:{colour}\">■</span> {name}")).collect();
    let step = &steps[slowest];
    let tokens: u32 = step.rows.iter().map(|row| row[2]).sum();
    format!(
        "<p>The slowest step, {} of `{}`, took {:.2} ms for {} rows with {tokens} tokens; {} joined. {}; steps overlap, because one is \
         planned while another runs.</p>\n{}",
        step.step,
        escape(&step.model),
        duration(step) as f64 / 1e3,
        step.rows.len(),
        step.joined.len(),
        names.join(" "),
        timeline("ms", "step", &rows)
    )
}

#[cfg(test)]
mod tests {
    use record::{Options, Recorder, RequestItem};

    use super::*;

    #[test]
    fn the_slowest_step_is_drawn_with_its_phases() {
        let dir = tempfile::tempdir().unwrap();
        let recorder = Recorder::start(&Options::new(dir.path())).unwrap();
        recorder.request(RequestItem::new(recorder.arrival().unwrap()));
        recorder.finish();
        let mut recording = Recording::open(dir.path()).unwrap();
        let step = |number: u64, wait_us: u64| {
            let rows = vec![[0, 0, 5], [1, 9, 1]];
            Step { model: "a<b".into(), step: number, at_us: number * 1000, wait_us, rows, ..Step::default() }
        };
        recording.steps = (0..40).map(|number| step(number, if number == 30 { 2500 } else { 100 })).collect();
        let text = section(&recording);
        assert!(text.contains("The slowest step, 30 of `a&lt;b`, took 2.50 ms for 2 rows with 6 tokens"), "{text}");
        assert!(text.contains(">22</text>") && text.contains(">37</text>") && !text.contains(">21</text>"), "{text}");
    }
}
