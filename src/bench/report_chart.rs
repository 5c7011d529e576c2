//! Charts as SVG.
//!
//! Own code: the same charts take as many lines with plotters, and three more crates.

use crate::percentiles::Histogram;

/// A named line through points.
pub(crate) struct Line {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// A part of a row of a timeline.
pub(crate) struct Bar {
    pub from: f64,
    pub length: f64,
    pub colour: &'static str,
}

const WIDTH: f64 = 440.0;
const HEIGHT: f64 = 280.0;
/// Margins for the labels of the axes.
const LEFT: f64 = 64.0;
const BOTTOM: f64 = 44.0;
const TOP: f64 = 16.0;
const COLOURS: [&str; 6] = ["#1f5fa8", "#d1662a", "#2f7d4f", "#8a4fa3", "#a33b3b", "#5c6670"];
/// Number of labels on an axis, without the one at 0.
const MARKS: usize = 4;

/// Escapes a text for HTML.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A line chart; both axes start at 0.
pub(crate) fn lines(x_name: &str, y_name: &str, lines: &[Line]) -> String {
    let all = || lines.iter().flat_map(|line| &line.points);
    let (x_max, y_max) = (axis_end(all().map(|point| point.0)), axis_end(all().map(|point| point.1)));
    let place = |&(x, y): &(f64, f64)| (x_position(x / x_max), y_position(y / y_max));
    let mut svg = frame(x_name, y_name);
    for mark in 0..=MARKS {
        let share = mark as f64 / MARKS as f64;
        svg += &x_mark(share, &short(share * x_max));
        svg += &y_mark(share, &short(share * y_max));
    }
    for (index, line) in lines.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let mut points = line.points.clone();
        points.sort_by(|left, right| left.0.total_cmp(&right.0));
        let places: Vec<(f64, f64)> = points.iter().map(place).collect();
        let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        svg +=
            &format!("<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>", path.join(" "));
        svg.extend(
            places.iter().map(|(x, y)| format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>")),
        );
        let y = TOP + 4.0 + 15.0 * index as f64;
        svg += &format!("<text x=\"{:.0}\" y=\"{y:.0}\" fill=\"{colour}\">{}</text>", LEFT + 8.0, escape(&line.name));
    }
    svg + "</svg>\n"
}

/// A bar chart of a histogram; empty if the histogram is.
pub(crate) fn bars(name: &str, histogram: &Histogram) -> String {
    let count = histogram.counts.len();
    if count == 0 {
        return String::new();
    }
    let most = axis_end(histogram.counts.iter().map(|&count| count as f64));
    let mut svg = frame(name, "count");
    for mark in 0..=MARKS {
        let share = mark as f64 / MARKS as f64;
        svg += &y_mark(share, &short(share * most));
    }
    let width = (WIDTH - LEFT - 16.0) / count as f64;
    for (index, &value) in histogram.counts.iter().enumerate() {
        let (x, y) = (LEFT + index as f64 * width, y_position(value as f64 / most));
        let (bar, height) = ((width - 1.0).max(0.5), HEIGHT - BOTTOM - y);
        svg += &format!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{bar:.1}\" height=\"{height:.1}\" fill=\"{}\"/>",
            COLOURS[0]
        );
        if index % count.div_ceil(MARKS) == 0 || index + 1 == count {
            svg += &x_mark((index as f64 + 1.0) / count as f64, &short(histogram.edges_ms[index]));
        }
    }
    svg + "</svg>\n"
}

/// A timeline: one row of bars for each name, from the top.
pub(crate) fn timeline(x_name: &str, y_name: &str, rows: &[(String, Vec<Bar>)]) -> String {
    let end = axis_end(rows.iter().flat_map(|(_, bars)| bars).map(|bar| bar.from + bar.length));
    let mut svg = frame(x_name, y_name);
    for mark in 0..=MARKS {
        let share = mark as f64 / MARKS as f64;
        svg += &x_mark(share, &short(share * end));
    }
    let height = (HEIGHT - BOTTOM - TOP) / rows.len().max(1) as f64;
    for (index, (name, bars)) in rows.iter().enumerate() {
        let y = TOP + index as f64 * height;
        svg += &format!(
            "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 6.0,
            y + height / 2.0 + 4.0,
            escape(name)
        );
        for Bar { from, length, colour } in bars {
            let (x, width) = (x_position(from / end), x_position((from + length) / end) - x_position(from / end));
            svg += &format!(
                "<rect x=\"{x:.2}\" y=\"{:.1}\" width=\"{width:.2}\" height=\"{:.1}\" fill=\"{colour}\"/>",
                y + 1.0,
                (height - 2.0).max(1.0)
            );
        }
    }
    svg + "</svg>\n"
}

fn x_position(share: f64) -> f64 {
    LEFT + share * (WIDTH - LEFT - 16.0)
}

fn y_position(share: f64) -> f64 {
    HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)
}

fn frame(x_name: &str, y_name: &str) -> String {
    let (right, bottom) = (WIDTH - 16.0, HEIGHT - BOTTOM);
    format!(
        "<svg width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\" font-size=\"11\" fill=\"#445\">\
         <path d=\"M{LEFT} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"#8894a0\"/>\
         <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\">{}</text>\
         <text transform=\"translate(14 {:.0}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        (LEFT + right) / 2.0,
        HEIGHT - 8.0,
        escape(x_name),
        bottom / 2.0,
        escape(y_name)
    )
}

fn x_mark(share: f64, text: &str) -> String {
    format!(
        "<text x=\"{:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{text}</text>",
        x_position(share),
        HEIGHT - BOTTOM + 15.0
    )
}

fn y_mark(share: f64, text: &str) -> String {
    format!("<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>", LEFT - 6.0, y_position(share) + 4.0)
}

/// The end of an axis: 1, 2 or 5 times a power of ten, and not less than the largest value.
fn axis_end(values: impl Iterator<Item = f64>) -> f64 {
    let largest = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
    if largest <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(largest.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|step| step * power).find(|&end| end >= largest).unwrap_or(largest)
}

fn short(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        value if value >= 100.0 => format!("{value:.0}"),
        value => format!("{value:.3}").trim_end_matches('0').trim_end_matches('.').to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers() {
        assert_eq!(
            [0.0, 0.7, 120.0, 480.0, 1000.0].map(|value| axis_end([value].into_iter())),
            [1.0, 1.0, 200.0, 500.0, 1000.0]
        );
        assert_eq!([0.0, 0.25, 12.5, 1500.0].map(short), ["0", "0.25", "12.5", "1500"]);
    }

    #[test]
    fn every_point_and_bin_is_drawn() {
        let line = Line { name: "a<b".into(), points: vec![(1.0, 2.0), (3.0, 4.0)] };
        let svg = lines("x", "y", &[line]);
        assert_eq!((svg.matches("<circle").count(), svg.contains("a&lt;b")), (2, true));
        let histogram = Histogram { edges_ms: vec![1.0, 10.0], counts: vec![3, 4] };
        assert_eq!(bars("x", &histogram).matches("<rect").count(), 2);
        assert_eq!(bars("x", &Histogram::default()), "");
    }
}
