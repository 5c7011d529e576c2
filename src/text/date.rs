//! Dates for chat templates.

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// Formats `seconds` since 1970 in UTC like C's `strftime`.
///
/// # Errors
/// The first directive that is not supported.
pub(crate) fn strftime(seconds: u64, format: &str) -> Result<String, char> {
    let (days, in_day) = (seconds / 86400, seconds % 86400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (in_day / 3600, in_day / 60 % 60, in_day % 60);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        match chars.next().unwrap_or('%') {
            'Y' => text += &year.to_string(),
            'y' => text += &format!("{:02}", year % 100),
            'm' => text += &format!("{month:02}"),
            'd' => text += &format!("{day:02}"),
            'H' => text += &format!("{hour:02}"),
            'M' => text += &format!("{minute:02}"),
            'S' => text += &format!("{second:02}"),
            'B' => text += month_name,
            'b' => text += &month_name[..3],
            'A' => text += day_name,
            'a' => text += &day_name[..3],
            '%' => text.push('%'),
            other => return Err(other),
        }
    }
    Ok(text)
}

/// Year, month and day of a day that is counted from 1 January 1970.
fn civil(mut days: u64) -> (u64, u64, u64) {
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let mut month = 1;
    loop {
        let length = match month {
            2 => 28 + u64::from(is_leap(year)),
            4 | 6 | 9 | 11 => 30,
            _ => 31,
        };
        if days < length {
            return (year, month, days + 1);
        }
        days -= length;
        month += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(strftime(0, "%A %d %B %Y %H:%M:%S").unwrap(), "Thursday 01 January 1970 00:00:00");
        assert_eq!(strftime(951_782_400, "%a, %d %b %y").unwrap(), "Tue, 29 Feb 00");
        assert_eq!(strftime(1_735_689_599, "%Y-%m-%d %%").unwrap(), "2024-12-31 %");
        assert_eq!(strftime(0, "%Q"), Err('Q'));
    }
}
