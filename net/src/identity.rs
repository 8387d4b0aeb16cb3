//! Who a certificate says its bearer is. Three roles, told apart by DNS-shaped names in the subject alternative
//! names: `n1.node.CLUSTER.stage`, `coordinator.CLUSTER.stage`, `alice.operator.CLUSTER.stage`.

use std::fmt;

use stage_core::id::NodeName;

use crate::NetError;

/// A role and, where the role has many bearers, the name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// The coordinator.
    Coordinator,
    /// A node's agent.
    Node(NodeName),
    /// A person.
    Operator(String),
}

/// A role in a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// What it may be.
    pub role: Role,
    /// Which cluster: one DNS label.
    pub cluster: String,
}

impl Identity {
    /// The identity that a DNS name of a certificate says.
    ///
    /// # Errors
    /// [`NetError::Identity`] for any other name.
    pub fn parse(name: &str) -> Result<Self, NetError> {
        let fault = || NetError::Identity(name.to_owned());
        let rest = name.strip_suffix(".stage").ok_or_else(fault)?;
        let (rest, cluster) = rest.rsplit_once('.').ok_or_else(fault)?;
        let cluster = cluster.to_owned();
        if cluster.is_empty() {
            return Err(fault());
        }
        let role = match rest.rsplit_once('.') {
            None if rest == "coordinator" => Role::Coordinator,
            Some((name, "node")) => Role::Node(name.parse().map_err(|_| fault())?),
            Some((name, "operator")) if !name.is_empty() => Role::Operator(name.to_owned()),
            _ => return Err(fault()),
        };
        Ok(Self { role, cluster })
    }

    /// This identity's node, if it is one's agent.
    pub fn node(&self) -> Option<&NodeName> {
        match &self.role {
            Role::Node(name) => Some(name),
            Role::Coordinator | Role::Operator(_) => None,
        }
    }
}

/// The DNS name.
impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.role {
            Role::Coordinator => f.write_str("coordinator")?,
            Role::Node(name) => write!(f, "{name}.node")?,
            Role::Operator(name) => write!(f, "{name}.operator")?,
        }
        write!(f, ".{}.stage", self.cluster)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_survive_their_name() {
        for name in [
            "coordinator.c1.stage",
            "n1.node.c1.stage",
            "a.b.node.c1.stage",
            "alice.operator.c1.stage",
        ] {
            assert_eq!(Identity::parse(name).unwrap().to_string(), name);
        }
        for name in [
            "",
            "stage",
            "c1.stage",
            "n1.node.stage",
            "x.coordinator.c1.stage",
            "n1.robot.c1.stage",
            ".node.c1.stage",
            "n1.node.c1.example",
        ] {
            assert!(Identity::parse(name).is_err(), "{name}");
        }
    }
}
