//! `trireme bench report`: one self-contained HTML page from the figures of `bench serving --json`.

use std::path::{Path, PathBuf};

use clap::Args;
use client::ClientError;
use record::Recording;

use crate::figures::Figures;
use crate::percentiles::Histogram;
use crate::report_chart::{Line, bars, escape, lines};
use crate::report_recording;
use crate::serving::Runs;

/// One HTML page: throughput against concurrency and latency, histograms, share of the roofline, beside a stored baseline; and the
/// steps of a recording
#[derive(Debug, Clone, Args)]
pub struct ReportArgs {
    /// Files of `bench serving --json` (or `bench core --json`)
    #[arg(required_unless_present = "recording")]
    figures: Vec<PathBuf>,
    /// A recording of `launch --record=DIR`, or the directory of one: latencies, and the timeline of its slowest step
    #[arg(long, value_name = "RECORDING")]
    recording: Option<PathBuf>,
    /// Path of the page
    #[arg(short, long, default_value = "report.html")]
    output: PathBuf,
    /// Earlier figures to compare with, in the same format
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// Directory of the checkpoint; a decode step reads its weights once
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Memory bandwidth of one device in GB/s
    #[arg(long, value_name = "GB/S", requires = "checkpoint")]
    bandwidth: Option<f64>,
    /// Devices that share the weights
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    devices: u32,
    /// Title of the page
    #[arg(long, default_value = "Serving benchmark")]
    title: String,
}

/// Writes the page.
pub(crate) fn run(args: &ReportArgs) -> Result<(), ClientError> {
    let runs = args.figures.iter().map(|path| read(path)).collect::<Result<Vec<_>, _>>()?;
    let baseline = args.baseline.as_deref().map(read).transpose()?;
    let roof = roof_ms(args)?;
    let recording = args.recording.as_deref().map(Recording::open).transpose();
    let recording = recording.map_err(|error| ClientError::Usage(error.to_string()))?;
    let page = page(args, &joined(runs), baseline.as_ref(), roof, recording.as_ref());
    crate::files::write(&args.output, &page)?;
    println!("wrote {}", args.output.display());
    Ok(())
}

fn read(path: &Path) -> Result<Runs, ClientError> {
    let text = crate::files::read(path)?;
    let wrong = |error: serde_json::Error| {
        ClientError::Usage(format!("`{}` holds no figures of `bench serving --json`: {error}", path.display()))
    };
    let value: serde_json::Value = serde_json::from_str(&text).map_err(wrong)?;
    if value.get("runs").is_some() {
        return serde_json::from_value(value).map_err(wrong);
    }
    if value.get("output_tokens_per_second").is_none() {
        return Err(ClientError::Usage(format!("`{}` holds no figures of `bench serving --json`", path.display())));
    }
    let run: Figures = serde_json::from_value(value).map_err(wrong)?;
    Ok(Runs { address: path.display().to_string(), runs: vec![run] })
}

/// The runs of each server together, by their load.
fn joined(runs: Vec<Runs>) -> Vec<Runs> {
    let mut servers: Vec<Runs> = Vec::new();
    for Runs { address, runs } in runs {
        match servers.iter_mut().find(|server| server.address == address) {
            Some(server) => server.runs.extend(runs),
            None => servers.push(Runs { address, runs }),
        }
    }
    let load = |run: &Figures| (run.request_rate.unwrap_or(0.0), run.concurrency.unwrap_or(usize::MAX));
    for server in &mut servers {
        server.runs.sort_by(|a, b| load(a).partial_cmp(&load(b)).unwrap_or(std::cmp::Ordering::Equal));
    }
    servers
}

/// Shortest possible time of a decode step in ms: it reads every weight once. `None` without the bandwidth; a message says so.
fn roof_ms(args: &ReportArgs) -> Result<Option<f64>, ClientError> {
    let Some(dir) = &args.checkpoint else { return Ok(None) };
    let bandwidth = args.bandwidth.unwrap_or(1.0);
    let what = || format!("reading the checkpoint `{}`", dir.display());
    let files = std::fs::read_dir(dir).map_err(|source| ClientError::Io { what: what(), source })?;
    let is_weights = |path: &PathBuf| path.extension().is_some_and(|end| end == "safetensors" || end == "bin");
    let paths = files.flatten().map(|file| file.path()).filter(is_weights);
    let bytes: u64 = paths.filter_map(|path| std::fs::metadata(path).ok()).map(|file| file.len()).sum();
    if bytes == 0 || bandwidth.is_nan() || bandwidth <= 0.0 {
        return Err(ClientError::Usage(format!(
            "`{}` holds no weights, or --bandwidth is not positive",
            dir.display()
        )));
    }
    if args.bandwidth.is_none() {
        eprintln!(
            "a decode step reads {:.3} GB of weights; for the share of the roofline give the memory bandwidth of a device with --bandwidth=GB/S",
            bytes as f64 / 1e9
        );
        return Ok(None);
    }
    Ok(Some(bytes as f64 / f64::from(args.devices) / bandwidth / 1e6))
}

fn page(
    args: &ReportArgs,
    runs: &[Runs],
    baseline: Option<&Runs>,
    roof: Option<f64>,
    recording: Option<&Recording>,
) -> String {
    let title = escape(&args.title);
    let mut body = format!("<h1>{title}</h1>\n");
    if !runs.is_empty() {
        body += &of_runs(args, runs, baseline, roof);
    }
    body.extend(recording.map(report_recording::section));
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title><style>{STYLE}</style></head>\n<body>\n{body}</body></html>\n"
    )
}

/// Table and charts of benchmarks.
fn of_runs(args: &ReportArgs, runs: &[Runs], baseline: Option<&Runs>, roof: Option<f64>) -> String {
    let mut body = section("Figures", &table(runs, baseline, roof));
    if let Some(roof) = roof {
        body += &format!(
            "<p>Roofline: a decode step reads every weight once, which takes {roof:.3} ms on {} device(s) of {:.0} GB/s. Share of it = that \
             time over the mean request latency divided by the tokens of a request, so prefill and waiting lower it.</p>\n",
            args.devices,
            args.bandwidth.unwrap_or(0.0)
        );
    }
    let named = runs.iter().map(|runs| (runs.address.as_str(), runs)).chain(baseline.map(|runs| ("baseline", runs)));
    let curve = |x: fn(&Figures) -> Option<f64>, y: fn(&Figures) -> f64| {
        let line = |(name, runs): (&str, &Runs)| Line {
            name: name.to_owned(),
            points: runs.runs.iter().filter_map(|run| Some((x(run)?, y(run)))).collect(),
        };
        named.clone().map(line).filter(|line| !line.points.is_empty()).collect::<Vec<_>>()
    };
    let tokens = "output tokens/s";
    let by_tokens = |y: fn(&Figures) -> f64| curve(|run| Some(run.output_tokens_per_second), y);
    let loads: [Load; 2] = [
        ("requests in flight", |run| run.concurrency.filter(|_| run.request_rate.is_none()).map(|count| count as f64)),
        ("requests sent per second", |run| run.request_rate),
    ];
    let by_load: String = loads
        .into_iter()
        .map(|(name, x)| (name, curve(x, |run| run.output_tokens_per_second)))
        .filter(|(_, curves)| !curves.is_empty())
        .map(|(name, curves)| lines(name, tokens, &curves))
        .collect();
    body += &section("Load and throughput", &by_load);
    body += &section(
        "Throughput and latency",
        &(lines(tokens, "time to first token, p50 ms", &by_tokens(|run| run.time_to_first_token_ms.p50))
            + &lines(tokens, "inter-token latency, p50 ms", &by_tokens(|run| run.inter_token_latency_ms.p50))
            + &lines(tokens, "request latency, p99 ms", &by_tokens(|run| run.request_latency_ms.p99))),
    );
    let gaps = named.clone().map(|(name, runs)| {
        let point = |run: &Figures| (run.prompt_tokens as f64 / run.seconds, run.inter_token_latency_ms.p99);
        Line { name: name.to_owned(), points: runs.runs.iter().filter(|run| run.seconds > 0.0).map(point).collect() }
    });
    body += &section(
        "Gap between tokens and rate of prompts",
        &lines("prompt tokens/s", "inter-token latency, p99 ms", &gaps.collect::<Vec<_>>()),
    );
    let histograms: [Reading; 3] = [
        ("time to first token", |run| &run.time_to_first_token_histogram),
        ("inter-token latency", |run| &run.inter_token_latency_histogram),
        ("request latency", |run| &run.request_latency_histogram),
    ];
    let several = runs.len() > 1;
    for (server, run) in runs.iter().flat_map(|runs| runs.runs.iter().map(move |run| (&runs.address, run))) {
        let charts = histograms.iter().map(|(name, read)| bars(&format!("{name}, ms"), read(run)));
        let heading = if several { format!("{}, {}", escape(server), load(run)) } else { load(run) };
        body += &section(&heading, &charts.collect::<String>());
    }
    body
}

/// Name of a kind of load, and its accessor.
type Load = (&'static str, fn(&Figures) -> Option<f64>);

/// Name of a histogram, and its accessor.
type Reading = (&'static str, fn(&Figures) -> &Histogram);

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1c2733;background:#fff}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums}th,td{padding:.3rem .7rem;border-bottom:1px solid #d7dee5;text-align:right}\
th:first-child,td:first-child{text-align:left}svg{margin:.5rem 1rem .5rem 0}.better{color:#11734b}.worse{color:#b3261e}";

/// The load of a run: requests in flight, or requests per second.
fn load(run: &Figures) -> String {
    let pace = escape(&run.pace());
    if run.request_rate.is_some() { pace } else { format!("{pace} in flight") }
}

/// `roof`, the shortest possible time of a decode step in ms, divided by the mean request latency per token. The gaps between
/// tokens are not used, because delayed tokens arrive together.
fn roofline_share(run: &Figures, roof: f64) -> Option<f64> {
    let tokens = run.output_tokens as f64 / (run.requests - run.errors) as f64;
    Some(roof * tokens / run.request_latency_ms.mean).filter(|share| share.is_finite())
}

fn section(title: &str, content: &str) -> String {
    format!("<h2>{title}</h2>\n{content}\n")
}

fn table(runs: &[Runs], baseline: Option<&Runs>, roof: Option<f64>) -> String {
    let mut heads = vec![
        "server",
        "load",
        "requests",
        "failed",
        "output tokens/s",
        "requests/min",
        "first token p50 ms",
        "p99",
        "inter-token p50 ms",
        "p90",
        "p99",
        "request p50 ms",
        "p99",
    ];
    if roof.is_some() {
        heads.push("of the roofline");
    }
    if baseline.is_some() {
        heads.extend(["tokens/s to baseline", "inter-token to baseline"]);
    }
    let head: String = heads.iter().map(|head| format!("<th>{head}</th>")).collect();
    let rows = runs.iter().flat_map(|runs| runs.runs.iter().map(move |run| (runs, run)));
    let rows: String = rows.map(|(runs, run)| row(&runs.address, run, baseline, roof)).collect();
    format!("<table><tr>{head}</tr>\n{rows}</table>")
}

fn row(address: &str, run: &Figures, baseline: Option<&Runs>, roof: Option<f64>) -> String {
    let number = |value: f64| format!("<td>{value:.2}</td>");
    let (first, between, whole) = (&run.time_to_first_token_ms, &run.inter_token_latency_ms, &run.request_latency_ms);
    let mut cells =
        format!("<td>{}</td><td>{}</td><td>{}</td><td>{}</td>", escape(address), load(run), run.requests, run.errors);
    let values = [
        run.output_tokens_per_second,
        run.requests_per_minute(),
        first.p50,
        first.p99,
        between.p50,
        between.p90,
        between.p99,
        whole.p50,
        whole.p99,
    ];
    cells.extend(values.map(number));
    if let Some(roof) = roof {
        cells += &match roofline_share(run, roof) {
            Some(share) => format!("<td>{:.0} %</td>", share * 100.0),
            None => "<td>-</td>".into(),
        };
    }
    if let Some(baseline) = baseline {
        let same = baseline.runs.iter().find(|other| other.pace() == run.pace());
        let ratio = |read: fn(&Figures) -> f64, more_is_better: bool| match same.map(|same| read(run) / read(same)) {
            Some(ratio) if ratio.is_finite() => {
                let class = if (ratio >= 1.0) == more_is_better { "better" } else { "worse" };
                format!("<td class=\"{class}\">{ratio:.3}</td>")
            }
            _ => "<td>-</td>".to_owned(),
        };
        cells += &ratio(|run| run.output_tokens_per_second, true);
        cells += &ratio(|run| run.inter_token_latency_ms.p50, false);
    }
    format!("<tr>{cells}</tr>\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::percentiles::Percentiles;

    #[test]
    fn a_page_is_self_contained_and_has_the_share_of_the_roofline() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("model.safetensors"), vec![0; 1_000_000]).unwrap();
        let run = Figures {
            concurrency: Some(8),
            requests: 10,
            output_tokens: 1000,
            output_tokens_per_second: 200.0,
            request_latency_ms: Percentiles { mean: 400.0, ..Percentiles::default() },
            ..Figures::default()
        };
        let runs = Runs { address: "a<b".into(), runs: vec![run.clone()] };
        let before = Runs { runs: vec![Figures { output_tokens_per_second: 100.0, ..run }], ..Runs::default() };
        let (figures, baseline) = (dir.path().join("now.json"), dir.path().join("before.json"));
        std::fs::write(&figures, serde_json::to_string(&runs).unwrap()).unwrap();
        std::fs::write(&baseline, serde_json::to_string(&before).unwrap()).unwrap();
        let output = dir.path().join("report.html");
        let args = ReportArgs {
            figures: vec![figures],
            recording: None,
            output: output.clone(),
            baseline: Some(baseline),
            checkpoint: Some(dir.path().to_owned()),
            bandwidth: Some(1.0),
            devices: 1,
            title: "T".into(),
        };
        super::run(&args).unwrap();
        let page = std::fs::read_to_string(&output).unwrap();
        // 1 MB at 1 GB/s is 1 ms, a quarter of 400 ms for 100 tokens; twice the tokens of the baseline.
        assert!(page.contains("<td>25 %</td>") && page.contains("<td class=\"better\">2.000</td>"), "{page}");
        assert!(page.contains("<h2>8 in flight</h2>"), "{page}");
        assert!(page.contains("a&lt;b") && !page.contains("a<b"), "names are escaped");
        assert!(!page.contains("src=") && !page.contains("href="), "nothing is loaded from elsewhere");
        // Without the bandwidth there is no roofline, and everything else.
        super::run(&ReportArgs { bandwidth: None, ..args.clone() }).unwrap();
        let page = std::fs::read_to_string(&args.output).unwrap();
        assert!(!page.contains("oofline") && page.contains("<h2>Load and throughput</h2>"), "{page}");
    }

    #[test]
    fn runs_of_one_server_are_one_line_in_the_order_of_their_loads() {
        let run = |concurrency: usize, tokens: f64| Figures {
            concurrency: Some(concurrency),
            output_tokens_per_second: tokens,
            ..Figures::default()
        };
        let runs = |address: &str, run: Figures| Runs { address: address.to_owned(), runs: vec![run] };
        let servers = joined(vec![
            runs("a", run(16, 300.0)),
            runs("b", run(1, 10.0)),
            runs("a", run(4, 200.0)),
            runs("a", run(64, 350.0)),
        ]);
        let loads = |server: &Runs| server.runs.iter().map(|run| run.concurrency.unwrap()).collect::<Vec<_>>();
        assert_eq!(servers.iter().map(loads).collect::<Vec<_>>(), [vec![4, 16, 64], vec![1]]);
    }

    #[test]
    fn a_file_without_figures_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        std::fs::write(&path, "{}").unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("x.json` holds no figures"), "{error}");
    }
}
