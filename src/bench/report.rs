//! `trireme bench report`: one self-contained HTML page from the figures of `bench serving --json`.

use std::path::{Path, PathBuf};

use clap::Args;
use client::ClientError;

use crate::figures::Figures;
use crate::percentiles::Histogram;
use crate::report_chart::{Line, bars, escape, lines};
use crate::serving::Runs;

/// One HTML page: throughput against latency, histograms, share of the roofline, beside a stored baseline
#[derive(Debug, Clone, Args)]
pub struct ReportArgs {
    /// Files of `bench serving --json` (or `bench core --json`)
    #[arg(required = true)]
    figures: Vec<PathBuf>,
    /// Path of the page
    #[arg(short, long, default_value = "report.html")]
    output: PathBuf,
    /// Earlier figures to compare with, in the same format
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// Directory of the checkpoint; a decode step reads its weights once
    #[arg(long, value_name = "DIR", requires = "bandwidth")]
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
    crate::files::write(&args.output, &page(args, &runs, baseline.as_ref(), roof))?;
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

/// Shortest possible time of a decode step in ms: it reads every weight once.
fn roof_ms(args: &ReportArgs) -> Result<Option<f64>, ClientError> {
    let (Some(dir), Some(bandwidth)) = (&args.checkpoint, args.bandwidth) else { return Ok(None) };
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
    Ok(Some(bytes as f64 / f64::from(args.devices) / bandwidth / 1e6))
}

fn page(args: &ReportArgs, runs: &[Runs], baseline: Option<&Runs>, roof: Option<f64>) -> String {
    let title = escape(&args.title);
    let mut body = format!("<h1>{title}</h1>\n");
    body += &section("Figures", &table(runs, baseline, roof));
    if let Some(roof) = roof {
        body += &format!(
            "<p>Roofline: a decode step reads every weight once, which takes {roof:.3} ms on {} device(s) of {:.0} GB/s. Share of it = that \
             time over the mean request latency divided by the tokens of a request, so prefill and waiting lower it.</p>\n",
            args.devices,
            args.bandwidth.unwrap_or(0.0)
        );
    }
    let named = runs.iter().map(|runs| (runs.address.as_str(), runs)).chain(baseline.map(|runs| ("baseline", runs)));
    let curve = |read: fn(&Figures) -> f64| {
        let line = |(name, runs): (&str, &Runs)| Line {
            name: name.to_owned(),
            points: runs.runs.iter().map(|run| (run.output_tokens_per_second, read(run))).collect(),
        };
        named.clone().map(line).collect::<Vec<_>>()
    };
    let tokens = "output tokens/s";
    body += &section(
        "Throughput and latency",
        &(lines(tokens, "time to first token, p50 ms", &curve(|run| run.time_to_first_token_ms.p50))
            + &lines(tokens, "inter-token latency, p50 ms", &curve(|run| run.inter_token_latency_ms.p50))
            + &lines(tokens, "request latency, p99 ms", &curve(|run| run.request_latency_ms.p99))),
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
    for run in runs.iter().flat_map(|runs| &runs.runs) {
        let charts = histograms.iter().map(|(name, read)| bars(&format!("{name}, ms"), read(run)));
        body += &section(&load(run), &charts.collect::<String>());
    }
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title><style>{STYLE}</style></head>\n<body>\n{body}</body></html>\n"
    )
}

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
            output: output.clone(),
            baseline: Some(baseline),
            checkpoint: Some(dir.path().to_owned()),
            bandwidth: Some(1.0),
            devices: 1,
            title: "T".into(),
        };
        super::run(&args).unwrap();
        let page = std::fs::read_to_string(output).unwrap();
        // 1 MB at 1 GB/s is 1 ms, a quarter of 400 ms for 100 tokens; twice the tokens of the baseline.
        assert!(page.contains("<td>25 %</td>") && page.contains("<td class=\"better\">2.000</td>"), "{page}");
        assert!(page.contains("<h2>8 in flight</h2>"), "{page}");
        assert!(page.contains("a&lt;b") && !page.contains("a<b"), "names are escaped");
        assert!(!page.contains("src=") && !page.contains("href="), "nothing is loaded from elsewhere");
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
