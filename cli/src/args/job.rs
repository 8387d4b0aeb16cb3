//! How a job is named on the command line.

use std::fmt;
use std::str::FromStr;

use stage_core::id::JobId;

/// The fewest letters: fewer are a slip.
const FEWEST: usize = 4;
/// Letters of a whole id.
const WHOLE: usize = 36;

/// A job, by its id or by as many of its first letters as tell it from the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct JobName(String);

impl JobName {
    /// The id, if it is whole.
    pub(crate) fn whole(&self) -> Option<JobId> {
        (self.0.len() == WHOLE).then(|| self.0.parse().ok()).flatten()
    }

    /// Whether it may mean this job.
    pub(crate) fn fits(&self, job: JobId) -> bool {
        job.to_string().starts_with(&self.0)
    }
}

impl FromStr for JobName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.to_ascii_lowercase();
        let is_dashed = |at: usize| matches!(at, 8 | 13 | 18 | 23);
        let is_good = (FEWEST..=WHOLE).contains(&text.len())
            && text.bytes().enumerate().all(|(at, b)| {
                if is_dashed(at) {
                    b == b'-'
                } else {
                    b.is_ascii_hexdigit()
                }
            });
        if is_good {
            Ok(Self(text))
        } else {
            Err(format!(
                "{text:?} is no job: write its id, or its first {FEWEST} letters or more"
            ))
        }
    }
}

impl fmt::Display for JobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_or_its_beginning_names_a_job() {
        let id = JobId::from_random([0xab; 16]);
        let text = id.to_string();
        let name = |text: &str| text.parse::<JobName>();
        assert_eq!(name(&text).unwrap().whole(), Some(id));
        for beginning in [&text[..4], &text[..8], &text[..9], &text[..35]] {
            let name = name(beginning).unwrap();
            assert!(name.fits(id) && name.whole().is_none(), "{beginning}");
        }
        assert!(name(&text.to_uppercase()).unwrap().fits(id));
        assert!(!name("0123").unwrap().fits(id));
        for wrong in [
            "",
            "abc",
            "genome.db",
            "abababab_",
            "ababababa",
            &format!("{text}0"),
        ] {
            assert!(name(wrong).unwrap_err().contains("is no job"), "{wrong}");
        }
    }
}
