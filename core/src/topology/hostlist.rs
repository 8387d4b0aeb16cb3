//! Hostlists as Slurm and ClusterShell write them: "compute[001-032,040],dtn".

use std::collections::BTreeMap;

use nodeset::{IdRangeList, NodeSet, Parser};

/// The most names that one hostlist may stand for: a slip of the finger such as "n[1-999999999]" must not
/// take the memory of the machine.
pub const MAX_NAMES: usize = 100_000;

/// Why a text is not a hostlist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a hostlist: {why}")]
pub struct HostlistError {
    text: String,
    why: String,
}

fn error(text: &str, why: impl Into<String>) -> HostlistError {
    HostlistError {
        text: text.to_owned(),
        why: why.into(),
    }
}

/// The terms of a hostlist, in order: what stands between commas and white space outside of brackets.
///
/// # Errors
/// Brackets that do not match, or that are nested.
pub fn terms(text: &str) -> Result<Vec<&str>, HostlistError> {
    let mut terms = Vec::new();
    let mut start = 0;
    let mut inside = false;
    for (at, c) in text.char_indices() {
        match c {
            '[' if inside => return Err(error(text, "a bracket stands inside another: write n[1-4,7]")),
            '[' => inside = true,
            ']' if !inside => return Err(error(text, "a ']' has no '[' before it")),
            ']' => inside = false,
            c if !inside && (c == ',' || c.is_whitespace()) => {
                terms.push(&text[start..at]);
                start = at + c.len_utf8();
            }
            _ => {}
        }
    }
    if inside {
        return Err(error(text, "a '[' has no ']' after it"));
    }
    terms.push(&text[start..]);
    terms.retain(|term| !term.is_empty());
    Ok(terms)
}

/// The names that a hostlist stands for: terms in the order of the text, each term's numbers ascending and with
/// their zeros kept, the first bracket changing slowest. A name that comes twice is given twice.
///
/// # Errors
/// What [`terms`] refuses, a malformed range, or more than [`MAX_NAMES`] names.
pub fn expand(text: &str) -> Result<Vec<String>, HostlistError> {
    let mut names = Vec::new();
    for term in terms(text)? {
        expand_term(text, term, &mut names)?;
    }
    Ok(names)
}

/// `nodeset` expands what stands in a bracket, but not the whole term: it reads every number of a name into 32
/// bits (so "x20240101[1-2]" would fail), computes a number that a bracket continues ("n1[0-9]") with unchecked
/// arithmetic, and divides by a step of zero. The text between brackets is none of its business here.
fn expand_term(text: &str, term: &str, names: &mut Vec<String>) -> Result<(), HostlistError> {
    let mut grown = vec![String::new()];
    let mut rest = term;
    while let Some((literal, after)) = rest.split_once('[') {
        let (ranges, after) = after
            .split_once(']')
            .ok_or_else(|| error(text, "a '[' has no ']' after it"))?;
        let count = count_of(text, ranges)?;
        if grown.len().saturating_mul(count).saturating_add(names.len()) > MAX_NAMES {
            return Err(error(text, format!("it stands for more than {MAX_NAMES} names")));
        }
        let ids: NodeSet<IdRangeList> = Parser::default()
            .parse(&format!("[{ranges}]"))
            .map_err(|why| error(text, why.to_string()))?;
        let ids: Vec<String> = ids.iter().collect();
        grown = grown
            .iter()
            .flat_map(|name| ids.iter().map(move |id| format!("{name}{literal}{id}")))
            .collect();
        rest = after;
    }
    if grown.len() + names.len() > MAX_NAMES {
        return Err(error(text, format!("it stands for more than {MAX_NAMES} names")));
    }
    names.extend(grown.into_iter().map(|name| name + rest));
    Ok(())
}

/// How many numbers "1-4,7,10-20/2" stands for at most, and whether `nodeset` may be given it.
fn count_of(text: &str, ranges: &str) -> Result<usize, HostlistError> {
    // Eight digits: `nodeset` keeps number and padding together in 32 bits.
    let number = |digits: &str| {
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            Err(error(
                text,
                format!("{ranges:?} is not a list of ranges: write for example [1-4,7]"),
            ))
        } else if digits.len() > 8 {
            Err(error(text, "a number in brackets has more than 8 digits"))
        } else {
            Ok(digits.parse::<usize>().expect("at most 8 digits"))
        }
    };
    let mut count = 0usize;
    for range in ranges.split(',') {
        let Some((first, last)) = range.split_once('-') else {
            number(range)?;
            count += 1;
            continue;
        };
        let (last, step) = match last.split_once('/') {
            Some((last, step)) => (last, number(step)?),
            None => (last, 1),
        };
        let (from, to) = (number(first)?, number(last)?);
        if step == 0 {
            return Err(error(text, "a step of 0 leads nowhere"));
        }
        if from > to {
            return Err(error(
                text,
                format!("{range:?} runs backwards: write {last}-{first}"),
            ));
        }
        let padded = |digits: &str| digits.len() > 1 && digits.starts_with('0');
        if (padded(first) || padded(last)) && first.len() != last.len() {
            return Err(error(
                text,
                format!("{range:?} mixes widths: give both ends as many digits"),
            ));
        }
        count = count.saturating_add((to - from) / step + 1);
    }
    Ok(count)
}

/// Names as a hostlist, as short as may be: "compute[001-032],dtn". Each once, sorted, but names without any letter
/// last.
pub fn fold<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let mut names: Vec<&str> = names.into_iter().collect();
    names.sort_unstable();
    names.dedup();
    // What `nodeset` cannot hold, or would take for a range of numbers ("1-3"), stays as it is.
    let (numbered, plain): (Vec<&str>, Vec<&str>) = names.into_iter().partition(|name| {
        name.bytes().any(|b| b.is_ascii_alphabetic())
            && name
                .split(|c: char| !c.is_ascii_digit())
                .all(|digits| digits.len() <= 8)
            && name
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
    });
    // It folds a padded number onto an unpadded one ("n[0-01]"), which nothing reads back: in that case names whose
    // numbers are equally wide are folded apart from the others.
    let mut parts = fold_alike(&numbered).map_or_else(
        || {
            let mut widths: BTreeMap<Vec<usize>, Vec<&str>> = BTreeMap::new();
            for name in &numbered {
                let key = name
                    .split(|c: char| !c.is_ascii_digit())
                    .map(str::len)
                    .filter(|len| *len > 0)
                    .collect();
                widths.entry(key).or_default().push(name);
            }
            widths
                .values()
                .map(|alike| fold_alike(alike).unwrap_or_else(|| alike.join(",")))
                .collect()
        },
        |folded| vec![folded],
    );
    parts.extend(plain.into_iter().map(str::to_owned));
    parts.retain(|part| !part.is_empty());
    parts.join(",")
}

/// Folded by `nodeset`, if what comes out means the same again.
fn fold_alike(sorted: &[&str]) -> Option<String> {
    if sorted.is_empty() {
        return Some(String::new());
    }
    let folded = Parser::default()
        .parse::<IdRangeList>(&sorted.join(","))
        .ok()?
        .to_string();
    let mut again = expand(&folded).ok()?;
    again.sort_unstable();
    (again == sorted).then_some(folded)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn expands_in_order_with_zeros_kept() {
        let cases: [(&str, &[&str]); 12] = [
            ("n1", &["n1"]),
            ("n[08-11]", &["n08", "n09", "n10", "n11"]),
            ("n[8-11]", &["n8", "n9", "n10", "n11"]),
            ("n[3,1-2]", &["n1", "n2", "n3"]),
            ("n[001,01,1]", &["n1", "n01", "n001"]),
            ("n[0-6/3]", &["n0", "n3", "n6"]),
            ("r[1-2]n[1-2]x", &["r1n1x", "r1n2x", "r2n1x", "r2n2x"]),
            ("b[2-3],a1 c", &["b2", "b3", "a1", "c"]),
            ("10.0.1.[9-10]", &["10.0.1.9", "10.0.1.10"]),
            ("fd00::e0:[1-2]", &["fd00::e0:1", "fd00::e0:2"]),
            ("n1[0-1]", &["n10", "n11"]),
            (
                "x20240101123456-[1-2]",
                &["x20240101123456-1", "x20240101123456-2"],
            ),
        ];
        for (text, names) in cases {
            assert_eq!(expand(text).unwrap(), names, "{text}");
        }
        assert_eq!(expand(" , ").unwrap(), Vec::<String>::new());
    }

    #[test]
    fn refuses_what_is_malformed_or_too_much() {
        for (text, why) in [
            ("n[1-2", "no ']'"),
            ("n1-2]", "no '['"),
            ("n[[1]]", "inside another"),
            ("n[]", "not a list of ranges"),
            ("n[a-b]", "not a list of ranges"),
            ("n[1-2-3]", "not a list of ranges"),
            ("n[3-1]", "write 1-3"),
            ("n[1-4/0]", "step of 0"),
            ("n[01-100]", "mixes widths"),
            ("n[1-4000000000]", "more than 8 digits"),
            ("n[1-99999999]", "more than 100000 names"),
            ("a[1-1000]b[1-1000]", "more than 100000 names"),
            ("a[1-60000],b[1-60000]", "more than 100000 names"),
        ] {
            let message = expand(text).unwrap_err().to_string();
            assert!(message.contains(why), "{text}: {message}");
        }
    }

    #[test]
    fn folds_for_people() {
        let names = expand("compute[001-032],dtn,1-3,compute[9-10],r[1-2]n[1-2]").unwrap();
        assert_eq!(
            fold(names.iter().map(String::as_str)),
            "compute[9-10,001-032],dtn,r[1-2]n[1-2],1-3"
        );
        assert_eq!(fold([]), "");
        assert_eq!(fold(["7"]), "7");
        assert_eq!(fold(["c0", "c01"]), "c0,c01");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "[a-z0-9\\[\\],/! -]{0,24}") {
            drop(expand(&text));
        }

        #[test]
        fn what_is_folded_unfolds(names in prop::collection::btree_set("[a-c0-9][a-b0-3_.-]{0,9}", 0..40)) {
            let folded = fold(names.iter().map(String::as_str));
            let again: BTreeSet<String> = expand(&folded).unwrap().into_iter().collect();
            prop_assert_eq!(names, again, "{}", folded);
        }
    }
}
