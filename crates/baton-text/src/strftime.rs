use std::fmt::Write as _;

const MONTHS: [&str; 12] =
    ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A UTC moment, taken apart.
struct Civil {
    year: i64,
    month: usize,
    day: u32,
    weekday: usize,
    day_of_year: u32,
    hour: u32,
    minute: u32,
    second: u32,
}

/// Python's `strftime` in UTC, for the codes that chat templates use; any other code stays as written.
pub(crate) fn strftime(format: &str, unix_seconds: u64) -> String {
    let civil = Civil::new(unix_seconds);
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            text.push(char);
            continue;
        }
        match chars.next() {
            Some('-') => civil.write(&mut text, chars.next(), true),
            code => civil.write(&mut text, code, false),
        }
    }
    text
}

impl Civil {
    /// Days to a civil date as in Howard Hinnant's "chrono-Compatible Low-Level Date Algorithms".
    fn new(unix_seconds: u64) -> Self {
        let days = (unix_seconds / 86_400).cast_signed();
        let second_of_day = (unix_seconds % 86_400) as u32;
        let shifted = days + 719_468;
        let era = shifted / 146_097;
        let day_of_era = shifted % 146_097;
        let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_from_march + 2) / 153;
        let day = (day_from_march - (153 * month_from_march + 2) / 5 + 1) as u32;
        let month = (month_from_march + 2) % 12 + 1;
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let day_of_year = match month {
            1 | 2 => day_from_march - 306,
            _ => day_from_march + 59 + i64::from(leap),
        } as u32
            + 1;
        Self {
            year,
            month: month as usize,
            day,
            weekday: (days + 4).rem_euclid(7) as usize,
            day_of_year,
            hour: second_of_day / 3_600,
            minute: second_of_day / 60 % 60,
            second: second_of_day % 60,
        }
    }

    fn write(&self, text: &mut String, code: Option<char>, unpadded: bool) {
        let two = |value: u32| if unpadded { value.to_string() } else { format!("{value:02}") };
        let hour12 = (self.hour + 11) % 12 + 1;
        let piece = match code {
            Some('Y') => self.year.to_string(),
            Some('y') => two((self.year % 100) as u32),
            Some('m') => two(self.month as u32),
            Some('d') => two(self.day),
            Some('H') => two(self.hour),
            Some('I') => two(hour12),
            Some('M') => two(self.minute),
            Some('S') => two(self.second),
            Some('p') => if self.hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('j') => format!("{:03}", self.day_of_year),
            Some('B') => MONTHS[self.month - 1].to_owned(),
            Some('b' | 'h') => MONTHS[self.month - 1][..3].to_owned(),
            Some('A') => DAYS[self.weekday].to_owned(),
            Some('a') => DAYS[self.weekday][..3].to_owned(),
            Some('F') => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
            Some('T') => format!("{:02}:{:02}:{:02}", self.hour, self.minute, self.second),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') | None => "%".to_owned(),
            Some(other) => {
                write!(text, "%{other}").expect("writing to a string succeeds");
                return;
            }
        };
        text.push_str(&piece);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        // Expected values from GNU date.
        assert_eq!(strftime("%d %b %Y", 1_795_962_758), "29 Nov 2026");
        assert_eq!(strftime("%A %a %B %-d %j %H:%M:%S %I%p", 1_795_962_758), "Sunday Sun November 29 333 14:32:38 02PM");
        assert_eq!(strftime("%F %T %y %Z%z 100%%", 0), "1970-01-01 00:00:00 70 UTC+0000 100%");
        assert_eq!(strftime("%F %j", 951_782_400), "2000-02-29 060");
        assert_eq!(strftime("%F %j", 951_868_800), "2000-03-01 061");
        assert_eq!(strftime("%F %j", 4_107_542_400), "2100-03-01 060");
        assert_eq!(strftime("%Q", 0), "%Q");
    }
}
