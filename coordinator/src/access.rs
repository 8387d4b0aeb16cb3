//! Who may make which request. Each method of the services has a row; a test fails on one without.

use stage_core::failure::{Code, Failure};
use stage_core::id::NodeName;
use stage_net::Role;
use stage_net::grpc::Caller;

/// Who may make a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    /// People, by an operator's certificate.
    Operator,
    /// The agent of the node that the request names.
    Node,
}

/// Every request and who may make it, by service and method.
pub const TABLE: &[(&str, &str, Who)] = &[
    ("Operator", "Submit", Who::Operator),
    ("Operator", "Plan", Who::Operator),
    ("Operator", "Watch", Who::Operator),
    ("Operator", "Jobs", Who::Operator),
    ("Operator", "Cancel", Who::Operator),
    ("Operator", "Retry", Who::Operator),
    ("Operator", "Nodes", Who::Operator),
    ("Operator", "Drain", Who::Operator),
    ("Operator", "List", Who::Operator),
    ("Operator", "Remove", Who::Operator),
    ("Operator", "Bench", Who::Operator),
    ("Operator", "Doctor", Who::Operator),
    ("Fleet", "Session", Who::Node),
];

/// Applies the table. Without TLS nobody is known by name, and everybody may do everything.
#[derive(Debug, Clone, Copy)]
pub struct Gate {
    tls: bool,
}

impl Gate {
    /// A gate for connections with or without TLS.
    pub fn new(tls: bool) -> Self {
        Self { tls }
    }

    /// Lets a request of `method` pass, or not.
    ///
    /// # Errors
    /// [`Code::Denied`] says which role is wanted.
    pub fn pass(&self, method: &str, caller: Option<&Caller>) -> Result<(), Failure> {
        if !self.tls {
            return Ok(());
        }
        let row = TABLE.iter().find(|(_, name, _)| *name == method);
        let identity = caller.and_then(|caller| caller.0.as_ref());
        match (row, identity.map(|identity| &identity.role)) {
            (Some((_, _, Who::Operator)), Some(Role::Operator(_)))
            | (Some((_, _, Who::Node)), Some(Role::Node(_))) => Ok(()),
            (row, _) => Err(Failure::new(
                Code::Denied,
                match identity {
                    Some(identity) => format!("{identity} may not ask for {method}"),
                    None => format!("{method} needs a certificate"),
                },
                match row {
                    Some((_, _, Who::Operator)) => "use the certificate of an operator",
                    Some((_, _, Who::Node)) => "use the certificate of a node",
                    None => "nobody may: this is a fault of the coordinator, report it",
                },
            )),
        }
    }

    /// Whether the caller may speak for this node.
    ///
    /// # Errors
    /// [`Code::Denied`] where its certificate names another one.
    pub fn speaks_for(&self, node: &NodeName, caller: Option<&Caller>) -> Result<(), Failure> {
        if !self.tls {
            return Ok(());
        }
        let identity = caller.and_then(|caller| caller.0.as_ref());
        if identity.and_then(|identity| identity.node()) == Some(node) {
            return Ok(());
        }
        let bearer = identity.map_or_else(|| "nobody".to_owned(), ToString::to_string);
        Err(Failure::new(
            Code::Denied,
            format!("the certificate of {bearer} does not speak for node {node}"),
            format!("start the agent with the certificate of {node}, or with --node as its certificate says"),
        )
        .on(node))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use stage_net::Identity;

    use super::*;

    /// The methods as the protocol's own files list them.
    fn methods() -> BTreeSet<(String, String)> {
        let mut found = BTreeSet::new();
        for text in [
            include_str!("../../proto/stage/v1/operator.proto"),
            include_str!("../../proto/stage/v1/fleet.proto"),
        ] {
            let mut service = String::new();
            for line in text.lines() {
                let mut words = line.split([' ', '(', '{']).filter(|word| !word.is_empty());
                match (words.next(), words.next()) {
                    (Some("service"), Some(name)) => name.clone_into(&mut service),
                    (Some("rpc"), Some(name)) => {
                        found.insert((service.clone(), name.to_owned()));
                    }
                    _ => {}
                }
            }
        }
        found
    }

    #[test]
    fn every_request_has_one_row() {
        let rows: BTreeSet<(String, String)> = TABLE
            .iter()
            .map(|(service, method, _)| ((*service).to_owned(), (*method).to_owned()))
            .collect();
        assert_eq!(rows.len(), TABLE.len());
        assert_eq!(rows, methods());
    }

    fn caller(name: &str) -> Caller {
        Caller(Some(Identity::parse(name).unwrap()))
    }

    #[test]
    fn roles_are_told_apart() {
        let gate = Gate::new(true);
        let (alice, n1, coordinator) = (
            caller("alice.operator.c1.stage"),
            caller("n1.node.c1.stage"),
            caller("coordinator.c1.stage"),
        );
        assert!(gate.pass("Submit", Some(&alice)).is_ok());
        for other in [Some(&n1), Some(&coordinator), Some(&Caller(None)), None] {
            assert_eq!(gate.pass("Submit", other).unwrap_err().code, Code::Denied);
        }
        assert!(gate.pass("Session", Some(&n1)).is_ok());
        assert!(gate.pass("Session", Some(&alice)).is_err());
        assert!(gate.pass("Unheard", Some(&alice)).is_err());
        assert!(gate.speaks_for(&"n1".parse().unwrap(), Some(&n1)).is_ok());
        assert!(gate.speaks_for(&"n2".parse().unwrap(), Some(&n1)).is_err());
        assert!(Gate::new(false).pass("Submit", Some(&Caller(None))).is_ok());
    }
}
