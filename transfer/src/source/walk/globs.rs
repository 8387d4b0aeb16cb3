//! Which entries of a directory are sent: `--include` and `--exclude`.
//!
//! A pattern without a slash is held against the name of each entry, one with a slash against the path below the unit;
//! a slash at its begin (or `./`) ties it to the unit's top, one at its end to directories. `*` and `?` stay within a name, `**`
//! spans directories. What an exclude matches is left out, a directory with all it holds. Where there are includes, only
//! what one of them matches is sent, a directory with all it holds, and the directories on the way to it.

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use stage_core::failure::{Code, Failure, show_path};
use stage_core::payload::Walk;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

/// More patterns than anybody writes; each costs memory on the source.
const MAX_GLOBS: usize = 1000;

/// The patterns of one push.
#[derive(Debug, Default)]
pub(in crate::source) struct Globs {
    include: Option<Patterns>,
    exclude: Option<Patterns>,
}

/// What is to be done with an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::source) enum Wanted {
    /// Left out, with all it holds.
    No,
    /// Sent; of a directory all that is not excluded.
    Yes,
    /// A directory that is sent if it holds something that is.
    Perhaps,
}

#[derive(Debug)]
struct Patterns {
    any: GlobSet,
    directories: GlobSet,
}

impl Globs {
    /// # Errors
    /// One is no pattern, or there are too many.
    pub(in crate::source) fn new(walk: &Walk) -> Result<Self, Failure> {
        Ok(Self {
            include: Patterns::new("--include", &walk.include)?,
            exclude: Patterns::new("--exclude", &walk.exclude)?,
        })
    }

    /// Whether an entry is sent, by its path below the unit. `whole` says that a directory that it lies in was included
    /// with all it holds.
    pub(in crate::source) fn wanted(&self, below: &[u8], is_dir: bool, whole: bool) -> Wanted {
        if self
            .exclude
            .as_ref()
            .is_some_and(|globs| globs.matches(below, is_dir))
        {
            return Wanted::No;
        }
        match &self.include {
            Some(globs) if !whole && !globs.matches(below, is_dir) => match is_dir {
                true => Wanted::Perhaps,
                false => Wanted::No,
            },
            _ => Wanted::Yes,
        }
    }

    /// Whether all that a directory holds is included, by its path below the unit (empty for the unit itself).
    pub(in crate::source) fn is_whole(&self, below: &[u8]) -> bool {
        let Some(globs) = &self.include else { return true };
        let ends = below.iter().enumerate().filter(|(_, byte)| **byte == b'/');
        let mut above = ends.map(|(end, _)| &below[..end]).chain([below]);
        !below.is_empty() && above.any(|dir| globs.matches(dir, true))
    }

    /// Whether only what is named is sent.
    pub(in crate::source) fn includes(&self) -> bool {
        self.include.is_some()
    }
}

impl Patterns {
    fn new(flag: &str, texts: &[String]) -> Result<Option<Self>, Failure> {
        if texts.is_empty() {
            return Ok(None);
        }
        if texts.len() > MAX_GLOBS {
            return Err(Failure::new(
                Code::Usage,
                format!("{} patterns of {flag} are too many", texts.len()),
                format!("use {MAX_GLOBS} at most; one with braces, {{a,b}}, stands for several"),
            ));
        }
        let refused = |text: &str, why: &dyn std::fmt::Display| {
            Failure::new(
                Code::Usage,
                format!("{flag} {} is no pattern: {why}", show_path(text.as_bytes())),
                "write for example '*.fa', 'old/**' or 'tmp/'",
            )
        };
        let (mut any, mut directories) = (GlobSetBuilder::new(), GlobSetBuilder::new());
        for text in texts {
            let (pattern, only_dirs) = match text.strip_suffix('/') {
                Some(rest) => (rest, true),
                None => (text.as_str(), false),
            };
            let from_the_top = match pattern.strip_prefix("./") {
                Some(rest) => Some(rest.trim_start_matches("./")),
                None => pattern.strip_prefix('/'),
            };
            let pattern = match from_the_top {
                Some(anchored) => anchored.to_owned(),
                None if pattern.contains('/') => pattern.to_owned(),
                None => format!("**/{pattern}"),
            };
            if matches!(pattern.as_str(), "" | "." | "**/" | "**/." | "**/..") {
                return Err(refused(text, &"it names nothing"));
            }
            let glob = GlobBuilder::new(&pattern)
                .literal_separator(true)
                .backslash_escape(true)
                .build()
                .map_err(|error| refused(text, &error.kind()))?;
            if !only_dirs {
                any.add(glob.clone());
            }
            directories.add(glob);
        }
        let built = |builder: GlobSetBuilder| {
            builder
                .build()
                .map_err(|error| refused(&texts.join(" "), &error.kind()))
        };
        Ok(Some(Self {
            any: built(any)?,
            directories: built(directories)?,
        }))
    }

    fn matches(&self, below: &[u8], is_dir: bool) -> bool {
        match is_dir {
            true => &self.directories,
            false => &self.any,
        }
        .is_match(OsStr::from_bytes(below))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn globs(include: &[&str], exclude: &[&str]) -> Result<Globs, Failure> {
        let texts = |all: &[&str]| all.iter().map(|text| (*text).to_owned()).collect();
        Globs::new(&Walk {
            include: texts(include),
            exclude: texts(exclude),
            ..Walk::default()
        })
    }

    fn out(exclude: &str, below: &[u8], is_dir: bool) -> bool {
        globs(&[], &[exclude]).unwrap().wanted(below, is_dir, true) == Wanted::No
    }

    #[test]
    fn a_name_matches_anywhere_and_a_path_from_the_top() {
        for below in [
            &b"x.tmp"[..],
            b"a/b/x.tmp",
            b"\xff.tmp",
            b".tmp",
            b"a/two\nlines.tmp",
        ] {
            assert!(out("*.tmp", below, false), "{below:?}");
        }
        assert!(!out("*.tmp", b"a.tmp/x", false), "its directory is what matches");
        assert!(out("a/*.fa", b"a/x.fa", false));
        assert!(!out("a/*.fa", b"b/a/x.fa", false));
        assert!(!out("a/*.fa", b"a/b/x.fa", false), "a star stays within a name");
        assert!(out("a/**", b"a/b/x.fa", false));
        assert!(out("**/a/*.fa", b"b/a/x.fa", false));
        assert!(out("/x", b"x", false));
        assert!(!out("/x", b"a/x", false));
        assert!(out("./x", b"x", false), "as tab completion writes it");
        assert!(!out("./x", b"a/x", false));
        assert!(out("././a/*.fa", b"a/x.fa", false));
        assert!(out("./old/", b"old", true) && !out("./old/", b"old", false));
        assert!(out("old/", b"a/old", true));
        assert!(!out("old/", b"a/old", false));
        assert!(out("{x,y}.[fg]a", b"y.ga", false));
        assert!(out("\\*", b"*", false));
        assert!(!out("\\*", b"x", false));
        assert!(!out("X", b"x", false));
    }

    #[test]
    fn includes_take_directories_whole_and_excludes_win() {
        let globs = globs(&["*.fa", "vol1", "docs/"], &["*.old.fa"]).unwrap();
        let wanted = |below: &[u8], is_dir| globs.wanted(below, is_dir, globs.is_whole(parent(below)));
        assert_eq!(wanted(b"a/x.fa", false), Wanted::Yes);
        assert_eq!(wanted(b"a/x.txt", false), Wanted::No);
        assert_eq!(wanted(b"a", true), Wanted::Perhaps);
        assert_eq!(wanted(b"vol1", true), Wanted::Yes);
        assert_eq!(wanted(b"vol1/deep/er/x.txt", false), Wanted::Yes);
        assert_eq!(wanted(b"vol1/x.old.fa", false), Wanted::No);
        assert_eq!(wanted(b"docs", false), Wanted::No);
        assert_eq!(wanted(b"docs", true), Wanted::Yes);
    }

    fn parent(below: &[u8]) -> &[u8] {
        below
            .iter()
            .rposition(|byte| *byte == b'/')
            .map_or(b"", |end| &below[..end])
    }

    #[test]
    fn what_is_no_pattern_is_refused() {
        for bad in ["[", "a{b", "", "/", "//", ".", "./", "././", ".."] {
            let failure = globs(&[], &[bad]).unwrap_err();
            assert_eq!(failure.code, Code::Usage, "{bad}");
            assert!(failure.message.contains("--exclude"), "{failure}");
        }
        let many = vec!["x"; MAX_GLOBS + 1];
        assert_eq!(globs(&many, &[]).unwrap_err().code, Code::Usage);
        assert!(globs(&many[1..], &[]).is_ok());
    }
}
