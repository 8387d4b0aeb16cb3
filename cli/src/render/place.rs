//! Where a payload lies on this node: one path, for scripts.

use std::io::{self, IsTerminal as _, Write};

use serde::Serialize;
use stage_core::failure::{Failure, show_path};
use stage_core::id::NodeName;

use super::{Form, human, json};

/// One path to print.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    /// The node that was asked, if it answered.
    pub node: Option<&'a NodeName>,
    /// "file", "tree" or "fallback".
    pub kind: &'static str,
    /// The path.
    pub path: &'a [u8],
    /// Of a file, its size in bytes.
    pub bytes: Option<u64>,
    /// Of a fallback, why there is nothing else.
    pub reason: Option<&'a Failure>,
}

#[derive(Serialize)]
struct Line<'a> {
    event: &'static str,
    exit: u8,
    node: Option<&'a NodeName>,
    kind: &'static str,
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<json::Cause<'a>>,
}

/// Prints it: to a terminal in a form that cannot play with it, else byte for byte.
///
/// # Errors
/// The output is gone.
pub(crate) fn place(form: Form, place: Place<'_>) -> io::Result<()> {
    let out = io::stdout();
    let terminal = out.is_terminal();
    if let Some(reason) = place.reason {
        // Where standard error is gone the path is still of use.
        drop(writeln!(io::stderr().lock(), "{}", because(place.path, reason)));
    }
    write(&mut out.lock(), form, terminal, place)
}

fn because(path: &[u8], reason: &Failure) -> String {
    format!(
        "stage: {}: the fallback {} is used",
        human::cause(reason),
        show_path(path)
    )
}

fn write(out: &mut impl Write, form: Form, terminal: bool, place: Place<'_>) -> io::Result<()> {
    match form {
        Form::Quiet => Ok(()),
        Form::Json => json::write(
            out,
            &Line {
                event: "path",
                exit: 0,
                node: place.node,
                kind: place.kind,
                path: show_path(place.path),
                bytes: place.bytes,
                reason: place.reason.map(Into::into),
            },
        ),
        Form::Human if terminal => writeln!(out, "{}", show_path(place.path)),
        Form::Human => {
            let mut line = place.path.to_vec();
            line.push(b'\n');
            out.write_all(&line)
        }
    }
}

#[cfg(test)]
mod tests {
    use stage_core::failure::Code;

    use super::*;

    fn shown(form: Form, terminal: bool, place: Place<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        write(&mut out, form, terminal, place).unwrap();
        out
    }

    #[test]
    fn a_script_gets_the_bytes_and_a_terminal_what_it_can_bear() {
        let place = Place {
            node: None,
            kind: "file",
            path: b"/r/\xff\x1b[2J.fa",
            bytes: Some(4),
            reason: None,
        };
        assert_eq!(shown(Form::Human, false, place), b"/r/\xff\x1b[2J.fa\n");
        assert_eq!(shown(Form::Human, true, place), b"/r/\\xff\\x1b[2J.fa\n");
    }

    #[test]
    fn json_says_what_it_is_and_why() {
        let node: NodeName = "n1".parse().unwrap();
        let reason = Failure::new(Code::NotHere, "k2 is not here", "push it").at("/r/k2");
        let place = Place {
            node: Some(&node),
            kind: "fallback",
            path: b"/lustre/k2",
            bytes: None,
            reason: Some(&reason),
        };
        insta::assert_snapshot!(String::from_utf8(shown(Form::Json, false, place)).unwrap(), @r#"{"event":"path","exit":0,"node":"n1","kind":"fallback","path":"/lustre/k2","reason":{"code":"not_here","node":null,"path":"/r/k2","message":"k2 is not here","hint":"push it"}}"#);
        insta::assert_snapshot!(because(place.path, &reason), @r#"stage: /r/k2: k2 is not here: the fallback /lustre/k2 is used"#);
    }
}
