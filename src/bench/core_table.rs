//! The table that TensorRT-LLM's `benchmark_core_model.py` prints.

use crate::figures::Figures;

fn rows(figures: &Figures) -> [(&'static str, f64); 10] {
    let answers = (figures.requests - figures.errors).max(1) as f64;
    let latency = &figures.request_latency_ms;
    [
        ("Requests/Sec", figures.requests_per_second),
        ("OP tokens/sec", figures.output_tokens_per_second),
        ("Avg. latency (ms)", latency.mean),
        ("P99 latency (ms)", latency.p99),
        ("P90 latency (ms)", latency.p90),
        ("Avg. IP tokens per request", figures.prompt_tokens as f64 / answers),
        ("Avg. OP tokens per request", figures.output_tokens as f64 / answers),
        // Little's law; the Python tool prints 0 here.
        ("Avg. InFlight requests", latency.mean / 1e3 * figures.requests_per_second),
        ("Total latency (ms)", figures.seconds * 1e3),
        ("Total requests", figures.requests as f64),
    ]
}

/// The table as text.
pub(crate) fn text(figures: &Figures) -> String {
    let rows = rows(figures).map(|(name, value)| (name.to_owned(), format!("{value:.2}")));
    let all = || rows.iter().map(|(name, value)| (name.as_str(), value.as_str())).chain([("Stat", "Value")]);
    let left = all().map(|(name, _)| name.len()).max().unwrap_or(0);
    let right = all().map(|(_, value)| value.len()).max().unwrap_or(0);
    let rule = format!("+{}+{}+", "-".repeat(left + 2), "-".repeat(right + 2));
    let line = |(name, value): (&str, &str)| format!("| {name:^left$} | {value:^right$} |\n");
    let body: String = all().take(rows.len()).map(line).collect();
    format!("{rule}\n{}{rule}\n{body}{rule}", line(("Stat", "Value")))
}

/// A line of its CSV file, after the names of the columns if the file is new.
pub(crate) fn csv(figures: &Figures, is_new: bool) -> String {
    let rows = rows(figures);
    // Some names in the file differ from those in the table.
    let long = |name: &str| name.replace(" IP ", " Input ").replace("Avg. OP ", "Avg. Output ");
    let head = rows.map(|(name, _)| long(name)).join(",") + "\n";
    let line = rows.map(|(_, value)| value.to_string()).join(",") + "\n";
    if is_new { head + &line } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_its_rows_in_a_frame() {
        let figures = Figures { requests: 4, requests_per_second: 2.0, ..Figures::default() };
        let text = text(&figures);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 14);
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
        assert!(text.contains("|        Requests/Sec        | 2.00  |"), "{text}");
        assert!(csv(&figures, true).starts_with("Requests/Sec,OP tokens/sec,"));
        assert_eq!(csv(&figures, false).lines().count(), 1);
    }
}
