//! What is wrong with hosts: sentences for people, lines for scripts.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::{Value, json};
use stage_core::failure::{Code, Failure};
use stage_core::topology::hostlist;
use stage_proto::v1;

use super::{Form, human, json};

/// What is wrong with hosts, as it is heard of.
pub(crate) struct Findings {
    form: Form,
    nodes: usize,
    /// Check, message and what mends it, with the nodes where that is so.
    found: BTreeMap<(String, String, String), Vec<String>>,
    silent: Vec<(String, Failure)>,
}

impl Findings {
    pub(crate) fn new(form: Form) -> Self {
        Self {
            form,
            nodes: 0,
            found: BTreeMap::new(),
            silent: Vec::new(),
        }
    }

    /// Takes what is said of a node.
    ///
    /// # Errors
    /// The output is gone.
    pub(crate) fn heard(&mut self, told: &v1::NodeFindings) -> io::Result<()> {
        self.nodes += 1;
        let failure = told.failure.as_ref().map(Failure::from);
        if self.form == Form::Json {
            let findings: Vec<Value> = told
                .findings
                .iter()
                .map(|found| json!({"check": found.check, "message": found.message, "mend": found.mend}))
                .collect();
            json::write(
                &mut io::stdout().lock(),
                &json!({
                    "event": "node",
                    "node": told.node,
                    "findings": findings,
                    "error": failure.as_ref().map(json::Cause::from),
                }),
            )?;
        }
        for found in &told.findings {
            let key = (found.check.clone(), found.message.clone(), found.mend.clone());
            self.found.entry(key).or_default().push(told.node.clone());
        }
        if let Some(failure) = failure {
            self.silent.push((told.node.clone(), failure));
        }
        Ok(())
    }

    /// Whether nothing was found, and all answered that should: one that is drained need not.
    pub(crate) fn is_sound(&self) -> bool {
        self.found.is_empty()
            && self
                .silent
                .iter()
                .all(|(_, failure)| failure.code == Code::Drained)
    }

    /// Shows what is left to show.
    ///
    /// # Errors
    /// The output is gone.
    pub(crate) fn finish(self, exit: u8) -> io::Result<()> {
        let mut out = io::stdout().lock();
        let findings: usize = self.found.values().map(Vec::len).sum();
        match self.form {
            Form::Quiet => {}
            Form::Json => json::write(
                &mut out,
                &json!({
                    "event": "finished", "exit": exit, "nodes": self.nodes, "findings": findings,
                    "unanswered": self.silent.len(),
                }),
            )?,
            Form::Human => {
                people(&mut out, &self.found)?;
                let answered = self.nodes - self.silent.len();
                if findings == 0 {
                    writeln!(out, "nothing found on {}", human::count(answered, "node"))?;
                }
            }
        }
        let mut err = io::stderr().lock();
        for (node, failure) in &self.silent {
            drop(writeln!(
                err,
                "stage: {node} did not answer: {}",
                human::cause(failure)
            ));
        }
        Ok(())
    }
}

fn people(out: &mut impl Write, found: &BTreeMap<(String, String, String), Vec<String>>) -> io::Result<()> {
    for ((_, message, mend), nodes) in found {
        writeln!(
            out,
            "{}: {message}",
            hostlist::fold(nodes.iter().map(String::as_str))
        )?;
        writeln!(out, "  {mend}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_findings_are_folded() {
        let mut findings = Findings::new(Form::Quiet);
        for node in ["n1", "n2", "n3"] {
            let told = v1::NodeFindings {
                node: node.to_owned(),
                failure: None,
                findings: vec![v1::Finding {
                    check: "backlog".to_owned(),
                    message: "1000 packets".to_owned(),
                    mend: "sysctl -w x=1".to_owned(),
                }],
            };
            findings.heard(&told).unwrap();
        }
        assert!(!findings.is_sound());
        let mut out = Vec::new();
        people(&mut out, &findings.found).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "n[1-3]: 1000 packets\n  sysctl -w x=1\n"
        );
    }
}
